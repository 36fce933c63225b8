"""Before a server is started: what an extraction will take, whether the disk can hold it, and by which way it goes."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from data.codecs import Codec
from data.config import write_atomically
from data.prompts import Prompt
from data.schema import Provenance

TOKEN_BYTES = 5  # of a record: int32 token, uint8 mask
RECORD_BYTES = 3072  # of a record, at most: two tar headers, their padding, JSON, the header of its safetensors file
ROOM = 1.02  # of what is needed, that must be free
SHARED_MEMORY = Path("/dev/shm")
FIRST_FORECAST_SECONDS, NEXT_FORECAST_SECONDS = 60.0, 600.0


def record_bytes(num_tokens: int, codec: str, *, num_boundaries: int, hidden_size: int) -> int:
    """On disk, at most: of one record of `num_tokens`."""
    states = Codec.parse(codec).bytes_per_token(num_boundaries=num_boundaries, hidden_size=hidden_size)
    return num_tokens * (states + TOKEN_BYTES) + RECORD_BYTES


@dataclass(frozen=True)
class Plan:
    """What is still to be captured.

    records, tokens, bytes  of it            done  records that are there already
    free_bytes              where it goes    kept_bytes  of `bytes`, that will be there at a time
    tokens_per_second       of an earlier run into this folder; None: there was none
    """

    out: Path
    records: int
    tokens: int
    bytes: int
    done: int
    free_bytes: int
    kept_bytes: int
    tokens_per_second: float | None

    @classmethod
    def of(
        cls,
        missing: Sequence[Prompt],
        provenance: Provenance,
        *,
        out: Path,
        done: int,
        shard_bytes: int,
        keep_local: bool,
    ) -> Plan:
        """keep_local: shards stay in `out`; else they are sent elsewhere, and two of them are there at a time."""
        sizes = dict(num_boundaries=len(provenance.boundaries), hidden_size=provenance.hidden_size)
        total = sum(record_bytes(len(prompt.tokens), provenance.codec, **sizes) for prompt in missing)
        largest = max((record_bytes(len(prompt.tokens), provenance.codec, **sizes) for prompt in missing), default=0)
        return cls(
            out=out,
            records=len(missing),
            tokens=sum(len(prompt.tokens) for prompt in missing),
            bytes=total,
            done=done,
            free_bytes=shutil.disk_usage(out).free,
            kept_bytes=total if keep_local else min(total, 2 * (shard_bytes + largest)),
            tokens_per_second=_earlier_rate(out),
        )

    @property
    def line(self) -> str:
        rate = self.tokens_per_second
        takes = f"about {duration(self.tokens / rate)} at {rate:,.0f} tokens/s as before" if rate else "its time shows in the first minute"
        already = f" ({self.done} are there)" if self.done else ""
        return (
            f"to capture: {self.records} records{already}, {self.tokens:,} tokens, {size(self.bytes)}; "
            f"{size(self.free_bytes)} free in {self.out}; {takes}"
        )

    def require_room(self) -> None:
        """Raises ValueError if the disk cannot hold it."""
        needed = int(self.kept_bytes * ROOM)
        if needed > self.free_bytes:
            raise ValueError(
                f"{self.out} has {size(self.free_bytes)} free and {size(needed)} are needed for {self.tokens:,} tokens: "
                f"free some, choose another out=, a smaller codec= (fp8, fp8+topk64), part=i/n on several disks, or "
                f"upload= with keep_local=false"
            )


class Forecast:
    """Tells how long an extraction will still take: after the first minute, and then every ten.

    The rate is remembered in `out`, for the plan of the next run.
    """

    def __init__(self, tokens: int, *, out: Path) -> None:
        self._left, self._done, self._out = tokens, 0, out
        self._started = self._next = time.monotonic()
        self._next += FIRST_FORECAST_SECONDS

    def add(self, tokens: int) -> None:
        """`tokens` more are written."""
        self._left, self._done = self._left - tokens, self._done + tokens
        now = time.monotonic()
        if now < self._next or self._left <= 0 or not self._done:
            return
        self._next = now + NEXT_FORECAST_SECONDS
        rate = self._remember(now)
        end = time.strftime("%H:%M", time.localtime(time.time() + self._left / rate))
        tqdm.write(
            f"extract: {rate:,.0f} tokens/s, {duration(self._left / rate)} to go, done at about {end}", file=sys.stderr
        )

    def end(self) -> None:
        if self._done:
            self._remember(time.monotonic())

    def _remember(self, now: float) -> float:
        rate = self._done / max(now - self._started, 1e-3)
        write_atomically(_rate_file(self._out), json.dumps({"tokens_per_second": rate}))
        return rate


def choose_spool(configured: str | None, *, out: Path, in_flight_bytes: int) -> Path:
    """The folder for rows on their way: as configured, on tmpfs where that has room for them, else in `out`."""
    if configured:
        return Path(configured)
    spool = SHARED_MEMORY / f"eyas-{hashlib.sha256(str(out.resolve()).encode()).hexdigest()[:12]}"
    try:
        left = sum(path.stat().st_size for path in spool.glob("*"))  # of a run that was killed; the next one removes it
        if shutil.disk_usage(SHARED_MEMORY).free + left > 1.5 * in_flight_bytes:
            return spool
    except OSError:
        pass
    return out / "spool"


def _rate_file(out: Path) -> Path:
    return out / "server" / "rate.json"


def _earlier_rate(out: Path) -> float | None:
    try:
        return json.loads(_rate_file(out).read_text())["tokens_per_second"]
    except (OSError, ValueError, KeyError):
        return None


def size(num_bytes: float) -> str:
    """12.3 GB; decimal, as disks are sold."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.0f} {unit}" if unit == "bytes" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} TB"


def duration(seconds: float) -> str:
    """3 h 12 min, 12 min, 40 s."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"
