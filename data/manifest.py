"""manifest.json and the shards' indexes: what of a dataset is complete, and where each record lies."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from data.checksums import is_checksum
from data.config import write_atomically
from data.locks import claim, claim_when_free, is_claimed
from data.schema import SPLITS, Provenance

SCHEMA_VERSION = 2
FILE = "manifest.json"
REMOTE = "remote.json"  # says where the shards of a folder are that are not in it: data/storage.py

_INDEX_COLUMNS = ("ids", "sources", "num_tokens", "num_supervised", "offsets", "sizes")


@dataclass(frozen=True)
class ShardInfo:
    """One finished shard, as the manifest lists it. checksum: of the file, see data/checksums.py"""

    name: str
    split: str
    samples: int
    tokens: int
    supervised: int
    bytes: int
    checksum: str
    index_sha256: str


@dataclass(frozen=True)
class Manifest:
    """manifest.json of a dataset: the only list of what is complete.

    shards    in the order in which they were finished; a writer only ever adds to it
    part      "i/n" of a dataset that n servers make, i = 0 .. n-1; None: there are no parts
    complete  everything that was asked for is in it; False while it grows
    """

    provenance: Provenance
    shards: tuple[ShardInfo, ...] = ()
    schema_version: int = SCHEMA_VERSION
    part: str | None = None
    complete: bool = False

    def __post_init__(self) -> None:
        if self.part is not None:
            parse_part(self.part)

    def to_json(self) -> str:
        """A shard a line: there may be thousands, and all of them are written with each."""
        content = vars(self) | {"provenance": vars(self.provenance)}
        shards = [f"\n  {json.dumps(vars(shard))}" for shard in content.pop("shards")]
        others = json.dumps(content, indent=1).removesuffix("\n}")
        return f'{others},\n "shards": [{",".join(shards)}\n ]\n}}\n'

    def save(self, folder: Path | str) -> None:
        """Complete or not at all."""
        write_atomically(Path(folder) / FILE, self.to_json())

    @classmethod
    def load(cls, folder: Path | str) -> Manifest:
        """Raises ValueError if there is none, it cannot be read, or it is of another schema version."""
        file = Path(folder) / FILE
        try:
            return cls.parse(file.read_text(), file=str(file))
        except FileNotFoundError:
            raise no_dataset(folder) from None
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{file} cannot be read ({error}): extract again") from error

    @classmethod
    def parse(cls, text: str, *, file: str) -> Manifest:
        """`text` of the file named `file`. Raises ValueError as `load` does."""
        try:
            content = json.loads(text)
            version = content["schema_version"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{file} cannot be read ({error}): extract again") from error
        if version not in (1, SCHEMA_VERSION):
            raise ValueError(f"{file} has schema version {version}, this Eyas reads 1 and {SCHEMA_VERSION}: extract again")
        try:
            found = cls(
                provenance=Provenance(**content["provenance"]),
                shards=tuple(ShardInfo(**_today(shard)) for shard in content["shards"]),
                part=content.get("part"),
                complete=content.get("complete", False),
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{file} lacks or adds a field ({error}): extract again") from error
        for shard in found.shards:
            if not is_checksum(shard.checksum):
                raise ValueError(
                    f"{file} has {shard.checksum!r} as the checksum of {shard.name}: restore it, or extract again"
                )
        return found


def _today(shard: dict[str, Any]) -> dict[str, Any]:
    """A shard's line, as it was in schema version 1 or is now."""
    old = {"checksum": f"sha256:{shard['sha256']}"} if "sha256" in shard else {}
    return {key: value for key, value in shard.items() if key != "sha256"} | old


def parse_part(part: str) -> tuple[int, int]:
    """ "i/n" as (i, n). Raises ValueError unless 0 <= i < n."""
    match = re.fullmatch(r"(\d+)/(\d+)", part)
    if match is None or int(match[1]) >= int(match[2]):
        raise ValueError(f"part={part}: expected i/n with i = 0 .. n-1, like 0/4")
    return int(match[1]), int(match[2])


class Entry(NamedTuple):
    """Where a record is: bytes [offset, offset + size) of its shard are its safetensors file."""

    id: str
    source: str
    num_tokens: int
    num_supervised: int
    offset: int
    size: int


def write_index(out: Path, shard: str, entries: list[Entry]) -> str:
    """Beside the shard of this name, complete or not at all; its sha256."""
    content = json.dumps(dict(zip(_INDEX_COLUMNS, zip(*entries)))).encode()
    write_atomically(out / index_name(shard), content)
    return hashlib.sha256(content).hexdigest()


def read_index(out: Path, shard: ShardInfo) -> list[Entry]:
    """Raises ValueError naming the file if it is missing or damaged, or the shard is not as long as it was."""
    tar, file = out / shard.name, out / index_name(shard.name)
    try:
        elsewhere = not tar.exists() and (out / REMOTE).exists()
        size, content = shard.bytes if elsewhere else tar.stat().st_size, file.read_bytes()
    except FileNotFoundError as error:
        raise ValueError(f"{error.filename} is missing, the manifest lists it: restore it, or extract again") from error
    if size != shard.bytes:
        raise ValueError(f"{tar} is truncated: {size} bytes, the manifest says {shard.bytes}; extract again")
    if hashlib.sha256(content).hexdigest() != shard.index_sha256:
        raise ValueError(f"{file} is corrupt (its sha256 changed): restore it, or extract again")
    index = json.loads(content)
    return [Entry(*row) for row in zip(*(index[name] for name in _INDEX_COLUMNS))]


def index_name(shard: str) -> str:
    return shard.removesuffix(".tar") + ".index.json"


def no_dataset(folder: Path | str) -> ValueError:
    return ValueError(f"{folder} has no {FILE}: run python extract/main.py out={folder}")


def finished_ids(out: Path | str) -> set[str]:
    """Ids of all records in finished shards, of both splits; empty if there is no dataset yet."""
    if not (Path(out) / FILE).exists():
        return set()
    return {entry.id for shard in Manifest.load(out).shards for entry in read_index(Path(out), shard)}


def mark_complete(out: Path | str) -> None:
    """Says in the manifest that everything asked for is there: who reads while it is written waits for no more."""
    with manifest_lock(Path(out)):
        replace(Manifest.load(out), complete=True).save(out)


def remove_shards(out: Path | str, names: set[str]) -> None:
    """Takes shards out of a dataset, which is not complete then; their records can be captured again."""
    out = Path(out)
    with manifest_lock(out):
        manifest = Manifest.load(out)
        kept = tuple(shard for shard in manifest.shards if shard.name not in names)
        replace(manifest, shards=kept, complete=False).save(out)
        for name in names:
            (out / name).unlink(missing_ok=True)
            (out / index_name(name)).unlink(missing_ok=True)


@contextmanager
def manifest_lock(out: Path) -> Iterator[None]:
    """Whoever reads the manifest to change it holds this meanwhile."""
    with claim_when_free(out / ".manifest.lock"):
        yield


def claim_split(out: Path, split: str) -> BinaryIO:
    """For whoever writes to that split of the dataset; closed, it is free again. Raises ValueError if it is not free."""
    taken = f"another process writes to {out}"
    return claim(_lock_of(out, split), taken=taken, cure="wait for it, or choose another out=")


def is_written(out: Path, *, without: str = "") -> bool:
    """Whether anybody writes to the dataset now. without: a split that does not count"""
    return any(is_claimed(_lock_of(out, split)) for split in SPLITS if split != without)


def _lock_of(out: Path, split: str) -> Path:
    return out / f".{split}.lock"
