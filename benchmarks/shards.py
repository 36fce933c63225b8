"""Shards, Eyas beside WebDataset: writing and reading on tmpfs, in one run, taking turns.

    python benchmarks/shards.py [--folder /dev/shm] [--gigabytes 1.5] [--repeats 5] [--json FILE]

    write   records in memory -> finished shards; Eyas' with index, manifest and sha256, those of ShardWriter without
    read    shards -> every record's tensors in the process's own memory; WebDataset's through safetensors
    batch   shards -> training packs of 8192 tokens, back to back

Medians of GB/s of states. `write_ratio` and `read_ratio` are those of the shape where Eyas gains less.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import argparse
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass

import safetensors.torch
import torch
import webdataset

from data.packing import collate, pack
from data.schema import Provenance, Record
from data.shards import ShardReader, ShardWriter
from data.stream import PackDataset

SHARD_BYTES = 500_000_000
TOKENS_PER_PACK = 8192
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


def numbered(records: list[Record], num_bytes: int, bytes_per_token: int) -> list[tuple[str, Record]]:
    """The records round and round under new ids, until they are so many bytes."""
    chosen, size = [], 0
    while size < num_bytes:
        record = records[len(chosen) % len(records)]
        chosen.append((f"record-{len(chosen):06d}", record))
        size += record.num_tokens * bytes_per_token
    return chosen


def write_eyas(folder: Path, rows: list[tuple[str, Record]], provenance: Provenance) -> None:
    with ShardWriter(folder, provenance=provenance, split="train", shard_bytes=SHARD_BYTES) as writer:
        for id, record in rows:
            writer.write(Record(**{**record.__dict__, "id": id}))


def write_webdataset(folder: Path, rows: list[tuple[str, Record]]) -> None:
    folder.mkdir()
    with webdataset.ShardWriter(f"{folder}/train-%06d.tar", maxcount=1 << 30, maxsize=SHARD_BYTES, verbose=0) as writer:
        for id, record in rows:
            columns = {name: getattr(record, name) for name in ("tokens", "loss_mask", "aux", "last")}
            about = {"id": id, "source": record.source, "split": record.split, "num_tokens": record.num_tokens}
            writer.write({"__key__": id, "json": about, "safetensors": safetensors.torch.save(columns)})


def read_eyas(folder: Path) -> int:
    """Each record's columns in one buffer, which is used again for the next."""
    reader = ShardReader(folder, split="train")
    buffer = bytearray(max(entry.size for entry in reader.entries))
    return sum(reader.read(i, into=buffer).num_tokens > 0 for i in range(len(reader)))


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


def rate(num_bytes: int, function: Callable[[], object]) -> float:
    """GB/s."""
    started = time.perf_counter()
    function()
    return num_bytes / (time.perf_counter() - started) / 1e9


def measure(shape: Shape, folder: Path, *, num_bytes: int, repeats: int) -> dict:
    rows = numbered(shape.records(), num_bytes, shape.bytes_per_token)
    size = sum(record.num_tokens for _, record in rows) * shape.bytes_per_token
    ours, theirs = folder / "eyas", folder / "webdataset"
    rates: dict[str, list[float]] = {}
    for _ in range(repeats):
        for name, target, function in (
            ("webdataset_write", theirs, lambda: write_webdataset(theirs, rows)),
            ("webdataset_read", theirs, lambda: read_webdataset(theirs)),
            ("webdataset_batch", theirs, lambda: batch_webdataset(theirs)),
            ("eyas_write", ours, lambda: write_eyas(ours, rows, shape.provenance())),
            ("eyas_read", ours, lambda: read_eyas(ours)),
            ("eyas_batch", ours, lambda: batch_eyas(ours)),
        ):
            rates.setdefault(name, []).append(rate(size, function))
            if name.endswith("batch"):
                shutil.rmtree(target)
    medians = {name: statistics.median(values) for name, values in rates.items()}
    ratios = {
        f"{what}_ratio": medians[f"eyas_{what}"] / medians[f"webdataset_{what}"] for what in ("write", "read", "batch")
    }
    rounded = {name: round(value, 5) for name, value in (medians | ratios).items()}
    return {
        **rounded,
        "records": len(rows),
        "gigabytes": round(size / 1e9, 3),
        "bytes_per_token": shape.bytes_per_token,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"), help="where both write: tmpfs, or a disk")
    parser.add_argument("--gigabytes", type=float, default=1.5, help="of states, for each of them")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    result: dict = {"gb_per_s": {}, "repeats": options.repeats, "folder": str(options.folder)}
    for shape in SHAPES:
        with tempfile.TemporaryDirectory(prefix="eyas-shards-", dir=options.folder) as folder:
            found = measure(shape, Path(folder), num_bytes=int(options.gigabytes * 1e9), repeats=options.repeats)
        result["gb_per_s"][shape.name] = found
        print(f"{shape.name}, {found['records']} records of {found['bytes_per_token']} bytes a token, GB/s:")
        for what in ("write", "read", "batch"):
            print(
                f"  {what:>5}  Eyas {found[f'eyas_{what}']:6.2f}   WebDataset {found[f'webdataset_{what}']:6.2f}   "
                f"ratio {found[f'{what}_ratio']:.2f}"
            )
    for what in ("write", "read"):
        result[f"{what}_ratio"] = min(found[f"{what}_ratio"] for found in result["gb_per_s"].values())
    print(f"write_ratio {result['write_ratio']:.2f}, read_ratio {result['read_ratio']:.2f}")
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
