"""Shards, Eyas beside WebDataset: writing and reading on tmpfs, in one run, taking turns.

    python benchmarks/shards.py [--folder /dev/shm] [--gigabytes 1.5] [--repeats 5] [--json FILE]

    write   records in memory -> finished shards; Eyas' with index, manifest and checksum, several at a time as in extraction,
            those of WebDataset's ShardWriter without
    read    shards -> every record's tensors in the process's own memory; WebDataset's through safetensors
    batch   shards -> training packs of 8192 tokens, back to back

GB/s and processor seconds for a GB of states are medians. A ratio is the median over turns: in each, both do the same
one after the other, in an order that changes, so that what disturbs the machine for longer than a turn disturbs both.
One turn before them is not counted: it brings in code and memory. Where other programs took more than CALM
processors of a turn, there are up to twice as many turns, and those that others disturbed least are counted.
`write_ratio` and `read_ratio` are those of the shape where Eyas gains less.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import argparse
import gc
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import psutil
import safetensors.torch
import torch
import webdataset

from data.packing import collate, pack
from data.schema import Provenance, Record
from data.shards import ShardReader, ShardWriter
from data.stream import PackDataset
from extract.sink import LANES

SHARD_BYTES = 500_000_000
TOKENS_PER_PACK = 8192
CALM = 0.1  # processors that others may take in the mean of a turn
TOGETHER = 8  # records that come at once, of the prompts that are asked for together
DISTINCT = 6  # records in memory; written again and again under new ids


@dataclass(frozen=True)
class Shape:
    """A target, as the shards see it: states of 3 boundaries and last, in bf16."""

    name: str
    hidden_size: int
    num_layers: int
    lengths: tuple[int, int]  # tokens of a record, from .. to

    @property
    def bytes_per_token(self) -> int:
        return 4 * self.hidden_size * 2

    def provenance(self) -> Provenance:
        return Provenance(
            target=self.name, config_hash="-", weights_fingerprint="-", tokenizer_hash="-", chat_template_hash="-",
            boundaries=(2, self.num_layers // 2, self.num_layers - 3), num_layers=self.num_layers,
            hidden_size=self.hidden_size, vocab_size=1 << 15, codec="bf16", engine="-", engine_version="-",
        )  # fmt: skip

    def records(self) -> list[Record]:
        generator = torch.Generator().manual_seed(0)
        low, high = self.lengths
        records = []
        for i in range(DISTINCT):
            T = low + (high - low) * i // (DISTINCT - 1)
            states = torch.randn(T, 4, self.hidden_size, generator=generator).bfloat16()
            records.append(
                Record(
                    id=str(i), source="benchmark", split="train", aux=states[:, :3].contiguous(),
                    tokens=torch.randint(0, 1 << 15, (T,), generator=generator, dtype=torch.int32),
                    loss_mask=torch.ones(T, dtype=torch.uint8), last=states[:, 3].contiguous(),
                )
            )  # fmt: skip
        return records


SHAPES = (Shape("kimi", 7168, 61, (500, 2000)), Shape("smollm2", 576, 30, (150, 450)))


def numbered(records: list[Record], num_bytes: int, bytes_per_token: int) -> list[Record]:
    """The records round and round under new ids, until they are so many bytes."""
    chosen, size = [], 0
    while size < num_bytes:
        record = records[len(chosen) % len(records)]
        chosen.append(replace(record, id=f"record-{len(chosen):06d}"))
        size += record.num_tokens * bytes_per_token
    return chosen


def write_eyas(folder: Path, records: list[Record], provenance: Provenance) -> None:
    """As extraction does it: records come a few together, and several shards are written at a time."""
    with ShardWriter(folder, provenance=provenance, split="train", shard_bytes=SHARD_BYTES, lanes=LANES) as writer:
        for first in range(0, len(records), TOGETHER):
            writer.submit(records[first : first + TOGETHER])


def write_webdataset(folder: Path, records: list[Record]) -> None:
    folder.mkdir()
    with webdataset.ShardWriter(f"{folder}/train-%06d.tar", maxcount=1 << 30, maxsize=SHARD_BYTES, verbose=0) as writer:
        for record in records:
            columns = {name: getattr(record, name) for name in ("tokens", "loss_mask", "aux", "last")}
            about = {name: getattr(record, name) for name in ("id", "source", "split", "num_tokens")}
            writer.write({"__key__": record.id, "json": about, "safetensors": safetensors.torch.save(columns)})


def read_eyas(folder: Path) -> int:
    """Read ahead, into buffers that are used again."""
    return sum(record.num_tokens > 0 for record in ShardReader(folder, split="train").scan())


def samples_of_webdataset(folder: Path):
    shards = sorted(str(file) for file in folder.glob("*.tar"))
    for sample in webdataset.WebDataset(shards, shardshuffle=False):
        yield json.loads(sample["json"]), safetensors.torch.load(sample["safetensors"])


def read_webdataset(folder: Path) -> int:
    return sum(1 for _ in samples_of_webdataset(folder))


def batch_eyas(folder: Path) -> int:
    reader = ShardReader(folder, split="train")
    packs = pack(reader.lengths, budget=TOKENS_PER_PACK)
    dataset = PackDataset(reader, packs, pad_to=None)
    return sum(len(dataset[i].ids) for i in range(len(dataset)))


def batch_webdataset(folder: Path) -> int:
    """In the order of the shards, whatever fits into a pack next."""
    count, records = 0, []

    def flush() -> int:
        lengths = [record.num_tokens for record in records]
        (pieces,) = pack(lengths, budget=sum(lengths))
        pieces = sorted(pieces)
        return len(collate(records, pieces, pad_to=None).ids)

    for about, columns in samples_of_webdataset(folder):
        record = Record(id=about["id"], source=about["source"], split=about["split"], **columns)
        if records and sum(r.num_tokens for r in records) + record.num_tokens > TOKENS_PER_PACK:
            count += flush()
            records = []
        records.append(record)
    return count + flush()


@dataclass(frozen=True)
class Took:
    """What one side took for one thing in one turn."""

    seconds: float
    processor_seconds: float  # of all its threads
    others: float  # processors that everything else on this machine took meanwhile


def timed(function: Callable[[], object]) -> Took:
    gc.collect()
    busy, processor, started = _busy_seconds(), time.process_time(), time.perf_counter()
    function()
    seconds, own = time.perf_counter() - started, time.process_time() - processor
    return Took(seconds, own, others=max(_busy_seconds() - busy - own, 0.0) / seconds)


def _busy_seconds() -> float:
    """Of all processors together, what the hypervisor took included."""
    times = psutil.cpu_times()
    return times.user + times.nice + times.system + times.irq + times.softirq + times.steal


@dataclass(frozen=True)
class Pair:
    """Both sides of one turn."""

    eyas: Took
    webdataset: Took

    @property
    def ratio(self) -> float:
        return self.webdataset.seconds / self.eyas.seconds

    @property
    def others(self) -> float:
        return max(self.eyas.others, self.webdataset.others)


def measure(shape: Shape, folder: Path, *, num_bytes: int, repeats: int) -> dict:
    records = numbered(shape.records(), num_bytes, shape.bytes_per_token)
    gigabytes = sum(record.num_tokens for record in records) * shape.bytes_per_token / 1e9
    ours, theirs = folder / "eyas", folder / "webdataset"
    sides: dict[str, dict[str, Callable[[], object]]] = {
        "write": {
            "eyas": lambda: write_eyas(ours, records, shape.provenance()),
            "webdataset": lambda: write_webdataset(theirs, records),
        },
        "read": {"eyas": lambda: read_eyas(ours), "webdataset": lambda: read_webdataset(theirs)},
        "batch": {"eyas": lambda: batch_eyas(ours), "webdataset": lambda: batch_webdataset(theirs)},
    }
    pairs: dict[str, list[Pair]] = {what: [] for what in sides}
    for number in range(-1, 2 * repeats):  # -1 is not counted
        for what, functions in sides.items():
            took = {side: timed(functions[side]) for side in sorted(functions, reverse=number % 2 == 1)}
            if number >= 0:
                pairs[what].append(Pair(**took))
        shutil.rmtree(ours)
        shutil.rmtree(theirs)
        if all(sum(pair.others <= CALM for pair in each) >= repeats for each in pairs.values()):
            break
    found: dict = {"records": len(records), "gigabytes": gigabytes, "bytes_per_token": shape.bytes_per_token}
    for what, each in pairs.items():
        found |= summary(what, sorted(each, key=lambda pair: pair.others)[:repeats], gigabytes=gigabytes)
    return found


def summary(what: str, pairs: list[Pair], *, gigabytes: float) -> dict:
    found: dict = {}
    for side in ("eyas", "webdataset"):
        took = [getattr(pair, side) for pair in pairs]
        found[f"{side}_{what}"] = statistics.median(gigabytes / one.seconds for one in took)
        processor_seconds = statistics.median(one.processor_seconds for one in took)
        found[f"{side}_{what}_processor_seconds_per_gb"] = processor_seconds / gigabytes
    ratios = sorted(pair.ratio for pair in pairs)
    found |= {f"{what}_ratio": statistics.median(ratios), f"{what}_ratio_range": [ratios[0], ratios[-1]]}
    return found | {f"{what}_others": statistics.median(pair.others for pair in pairs)}


def rounded(value: object) -> object:
    """Five digits of every number in it."""
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    if isinstance(value, list):
        return [rounded(each) for each in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"), help="where both write: tmpfs, or a disk")
    parser.add_argument("--gigabytes", type=float, default=1.5, help="of states, for each of them")
    parser.add_argument("--repeats", type=int, default=5, help="turns that are counted")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    shapes: dict[str, dict] = {}
    for shape in SHAPES:
        with tempfile.TemporaryDirectory(prefix="eyas-shards-", dir=options.folder) as folder:
            found = measure(shape, Path(folder), num_bytes=int(options.gigabytes * 1e9), repeats=options.repeats)
        shapes[shape.name] = found
        print(f"{shape.name}, {found['records']} records of {found['bytes_per_token']} bytes a token")
        for what in ("write", "read", "batch"):
            low, high = found[f"{what}_ratio_range"]
            print(f"  {what:>5}  ratio {found[f'{what}_ratio']:.2f} ({low:.2f} to {high:.2f})", end="")
            for side, name in (("eyas", "Eyas"), ("webdataset", "WebDataset")):
                spent = found[f"{side}_{what}_processor_seconds_per_gb"]
                print(f"   {name} {found[f'{side}_{what}']:5.2f} GB/s, {spent:.2f} processor s/GB", end="")
            print(f"   others {found[f'{what}_others']:.1f}")
    result = {f"{what}_ratio": min(found[f"{what}_ratio"] for found in shapes.values()) for what in ("write", "read")}
    print(f"write_ratio {result['write_ratio']:.2f}, read_ratio {result['read_ratio']:.2f}")
    if options.json:
        about = {"repeats": options.repeats, "folder": str(options.folder)}
        content = rounded({**result, **about, "gb_per_s": shapes})
        options.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
