"""What the loader can feed beside what a training step eats: real shards on tmpfs, through the loop's own data path.

    python benchmarks/loader.py [--shapes kimi 8b] [--workers 0 1 2 3 4] [--codecs bf16 fp8] [--gigabytes 4] [--json FILE]

Tokens/s from shards to micro-batches, packed and looked through (train/feed.py), pinned where there is a GPU and then
on the GPU as well. The step's figures are those of one H200 in docs/LOG.md: a loader per GPU must feed one of them.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import argparse
import json
import os
import tempfile
import time
from dataclasses import dataclass

import torch
from torch.utils.data import DataLoader

from data.packing import pack
from data.schema import Provenance, Record
from data.shards import ShardReader, ShardWriter
from data.stream import PackDataset
from train.feed import MicroBatches, keep_freed_memory

DEPTHS, TOKENS_PER_PACK, BUCKET = 7, 8192, 1024
DISTINCT = 4  # records in memory, written again and again under new ids


@dataclass(frozen=True)
class Shape:
    """A target as the shards see it. eaten: tokens/s of the training step on one H200, docs/LOG.md."""

    name: str
    hidden_size: int
    num_layers: int
    record_tokens: int
    eaten: float

    def provenance(self, codec: str) -> Provenance:
        return Provenance(
            target=self.name, config_hash="-", weights_fingerprint="-", tokenizer_hash="-", chat_template_hash="-",
            boundaries=(2, self.num_layers // 2, self.num_layers - 3), num_layers=self.num_layers,
            hidden_size=self.hidden_size, vocab_size=1 << 15, codec=codec, engine="-", engine_version="-",
        )  # fmt: skip


SHAPES = {
    "8b": Shape("8b", 4096, 32, 2048, 33_226),
    "kimi": Shape("kimi", 7168, 61, 8000, 15_458),
    "tiny": Shape("tiny", 128, 8, 512, 33_226),
}


def write(folder: Path, shape: Shape, *, codec: str, num_bytes: float) -> int:
    """Shards of random states, about `num_bytes` as bf16; returns their bytes on disk."""
    generator = torch.Generator().manual_seed(0)
    T, H = shape.record_tokens, shape.hidden_size
    drawn = [torch.randn(T, 4, H, generator=generator).bfloat16() for _ in range(DISTINCT)]
    count = max(int(num_bytes / (T * 4 * H * 2)), DISTINCT)
    with ShardWriter(folder, provenance=shape.provenance(codec), split="train", shard_bytes=1_000_000_000) as writer:
        for i in range(count):
            states = drawn[i % DISTINCT]
            writer.write(
                Record(
                    id=f"record-{i:06d}", source="benchmark", split="train",
                    tokens=torch.randint(0, 1 << 15, (T,), generator=generator, dtype=torch.int32),
                    loss_mask=(torch.arange(T) > T // 4).to(torch.uint8),
                    aux=states[:, :3].contiguous(), last=states[:, 3].contiguous(),
                )
            )  # fmt: skip
    return sum(file.stat().st_size for file in folder.glob("*.tar"))


def feed(folder: Path, *, workers: int, pinned: bool, device: torch.device | None, seconds: float) -> float:
    """Tokens/s after the workers have started: whole epochs, one after the other, for at least `seconds`."""
    reader = ShardReader(folder, split="train")
    packs = pack(reader.lengths, budget=TOKENS_PER_PACK)
    repeated = packs * 200
    loader = DataLoader(
        MicroBatches(PackDataset(reader, repeated, pad_to=None), depths=DEPTHS, bucket=BUCKET), batch_size=None,
        num_workers=workers, prefetch_factor=4 if workers else None, pin_memory=pinned,
    )  # fmt: skip
    tokens, started, warm_up = 0, None, 2 + 2 * workers
    for i, batch in enumerate(loader):
        if device is not None:
            batch = batch.to(device)
        if i + 1 == warm_up:
            started = time.perf_counter()
        elif started is not None:
            tokens += batch.num_tokens
            if time.perf_counter() - started > seconds:
                break
    if device is not None:
        torch.cuda.synchronize(device)
    return tokens / (time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["kimi", "8b"], choices=sorted(SHAPES))
    parser.add_argument("--workers", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--codecs", nargs="+", default=["bf16", "fp8"])
    parser.add_argument("--folder", default="/dev/shm", help="where the shards are written (%(default)s)")
    parser.add_argument("--gigabytes", type=float, default=4.0, help="of states, as bf16, for each shape")
    parser.add_argument("--seconds", type=float, default=5.0, help="of every measurement, at least")
    parser.add_argument("--fresh-pages", action="store_true", help="without what train/feed.py tells glibc")
    parser.add_argument("--json", type=Path, help="file for every figure")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # as a worker has it
    if not arguments.fresh_pages:
        keep_freed_memory()  # as the loop does
    gpu = torch.device("cuda") if torch.cuda.is_available() else None
    name = torch.cuda.get_device_name() if gpu else "no GPU: nothing is pinned"
    print(f"{len(os.sched_getaffinity(0))} cores, {name}, torch {torch.__version__}")
    rows = []
    for shape in (SHAPES[name] for name in arguments.shapes):
        for codec in arguments.codecs:
            with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
                size = write(Path(folder) / "shards", shape, codec=codec, num_bytes=arguments.gigabytes * 1e9)
                total = int(ShardReader(Path(folder) / "shards", split="train").lengths.sum())
                for workers in arguments.workers:
                    for pinned in (False, True) if gpu else (False,):
                        options = {"pinned": pinned, "device": gpu, "seconds": arguments.seconds}
                        rate = feed(Path(folder) / "shards", workers=workers, **options)
                        rows.append(
                            {"shape": shape.name, "codec": codec, "workers": workers, "pinned": pinned, "tokens_per_second": rate,
                             "gigabytes_per_second": rate * size / total / 1e9, "eaten": shape.eaten, "ratio": rate / shape.eaten}
                        )  # fmt: skip
                        print(
                            f"{shape.name:5} {codec:10} {workers} workers{', pinned' if pinned else '':8} {rate:10,.0f} tokens/s "
                            f"{rows[-1]['gigabytes_per_second']:6.2f} GB/s, {rate / shape.eaten:6.1f} x what the step eats",
                            flush=True,
                        )
    if arguments.json:
        content = {"cores": len(os.sched_getaffinity(0)), "device": name, "rows": rows}
        arguments.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
