"""Training on several GPUs of one machine: tokens/s, scaling, and memory of every engine, beside one GPU.

    python benchmarks/engines.py [--gpus 2] [--shape 8b] [--packs 1 4] [--engines ddp ddp-bf16 zero1 zero2] [--json FILE]

Whole steps on the product's own engines (train/engine.py), started by `accelerate launch` as a run is: once on one GPU,
once on all. Every GPU has packs of random states, all tokens supervised; --packs: micro-batches of a step on each. Without
a GPU the tiny shape runs on as many processes, to show that it works: its figures mean nothing.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import argparse
import gc
import json
import os
import subprocess
import tempfile
import time

import torch
from omegaconf import OmegaConf

from benchmarks.cases import (
    CASES,
    CUDA,
    DEPTHS,
    Case,
    micro_batch,
    optimizer_config,
    random_batch,
    random_module,
    random_target,
)
from data.config import typed
from train import engine
from train.config import EngineConfig
from train.plan import Engine as Layout
from train.plan import communication_bytes
from train.target import Target

ROOT = Path(__file__).resolve().parent.parent
# name: (conf/engine/..., what is changed in it, optimizer)
VARIANTS = {
    "ddp": ("ddp", {}, "adamw"),
    "ddp-bf16": ("ddp", {"gradient_dtype": "bf16"}, "adamw"),
    "ddp-muon": ("ddp", {}, "muon"),
    "zero1": ("zero1", {}, "adamw"),
    "zero1-bf16": ("zero1", {"gradient_dtype": "bf16"}, "adamw"),
    "zero2": ("zero2", {}, "adamw"),
    "zero3": ("zero3", {}, "adamw"),
}
ROUNDS, STEPS = (5, 4) if CUDA else (2, 1)  # the median of the rounds, each of so many steps


def worker(arguments: argparse.Namespace) -> None:
    """One of the processes that accelerate launched: every variant, one after the other."""
    accelerator = engine.accelerator_of(engine_config("ddp", {}))
    case = CASES[arguments.shape]
    target = random_target(case.shape)
    rows = []
    for name in arguments.engines:
        for packs in arguments.packs:
            try:
                row = measure(name, case, target, packs=packs, lane=accelerator)
            except torch.cuda.OutOfMemoryError:  # a result, too
                row = {"engine": name, "packs": packs, "failed": "out of memory"}
            rows.append({"gpus": accelerator.num_processes, **row})
            accelerator.print(json.dumps(rows[-1]), flush=True)
            gc.collect()
            if CUDA:
                torch.cuda.empty_cache()
    if accelerator.is_main_process:
        Path(arguments.json).write_text(json.dumps(rows))
    accelerator.end_training()  # or the processes leave NCCL as it is, which warns of it


def measure(name: str, case: Case, target: Target, *, packs: int, lane) -> dict:
    """lane: the Accelerator that started this process."""
    kind, changes, optimizer = VARIANTS[name]
    config = engine_config(kind, changes)
    accelerator = engine.accelerator_of(config)  # the same processes, with this engine's DDP settings
    torch.manual_seed(0)  # the same weights everywhere
    running = engine.choose(config, random_module(case.shape, target), optimizer_config(optimizer), accelerator)
    if CUDA:
        running.drafter.compile()
    masks = [torch.ones(length, dtype=torch.bool) for length in case.lengths]
    batches = [micro_batch(random_batch(case, masks, seed=lane.process_index * packs + i)) for i in range(packs)]
    counts = sum(batch.counted.sum(1) for batch in batches).float() * lane.num_processes  # alike on all

    def step(number: int) -> None:
        for i, micro in enumerate(batches):
            running.accumulate(
                micro.batch, micro.documents, micro.counted, counts, number % 4 == 0, last=i + 1 == packs
            )
        running.step(1e-4)

    for number in range(4 if CUDA else 1):  # compiles, and has DDP make its buckets anew
        step(number)
    if CUDA:
        torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(ROUNDS):
        finish(lane)
        started = time.perf_counter()
        for number in range(STEPS):
            step(number)
        finish(lane)
        seconds.append((time.perf_counter() - started) / STEPS)
    running.close()
    median = sorted(seconds)[len(seconds) // 2]
    peak = torch.tensor(torch.cuda.max_memory_allocated() / 2**30 if CUDA else 0.0, device=lane.device)
    tokens = packs * sum(case.lengths) * lane.num_processes
    return {
        "engine": name,
        "packs": packs,
        "ms": 1e3 * median,
        "ms_by_round": [round(1e3 * one, 2) for one in seconds],
        "tokens_per_second": tokens / median,
        "gib": float(lane.gather(peak[None]).max()),
        "gigabytes_sent": communication_bytes(
            case.shape,
            Layout(lane.num_processes, int(kind[-1]) if kind != "ddp" else 0),
            gradient_bytes=2 if config.gradient_dtype == "bf16" else 4,
        )
        / 1e9,
    }


def finish(lane) -> None:
    """Until every GPU has done what it was given."""
    if CUDA:
        torch.cuda.synchronize()
    lane.wait_for_everyone()


def engine_config(name: str, changes: dict) -> EngineConfig:
    return typed(EngineConfig, OmegaConf.merge(OmegaConf.load(ROOT / f"conf/engine/{name}.yaml"), changes))


def launch(gpus: int, engines: list[str], arguments: argparse.Namespace) -> list[dict]:
    """Run every variant on so many processes, as a user would start them; their rows."""
    one = "gpu" if CUDA else "cpu"
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        command = [
            sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch",
            "--config_file", str(ROOT / f"launch/accelerate/{one if gpus == 1 else 'ddp'}.yaml"),
            "--num_processes", str(gpus), str(ROOT / "benchmarks/engines.py"), "--worker", "--shape", arguments.shape,
            "--packs", *map(str, arguments.packs), "--json", str(out), "--engines", *engines,
        ]  # fmt: skip
        done = subprocess.run(command, env={"OMP_NUM_THREADS": "1", **os.environ})
        if done.returncode or not out.exists():
            print(f"on {gpus}: ended with status {done.returncode}, see above", flush=True)
            return []
        return json.loads(out.read_text())


def with_scaling(rows: list[dict], single: list[dict]) -> list[dict]:
    """Adds what one GPU with the same optimizer and packs would give that many times over."""
    alone = {(VARIANTS[row["engine"]][2], row["packs"]): row for row in single if "ms" in row}
    for row in rows:
        base = alone.get((VARIANTS[row["engine"]][2], row["packs"]))
        if base is not None and "ms" in row:
            row["scaling"] = row["tokens_per_second"] / (row["gpus"] * base["tokens_per_second"])
            row["ms_beside_one_gpu"] = row["ms"] - base["ms"]
    return rows


def table(rows: list[dict]) -> None:
    for row in rows:
        where = f"{row['gpus']} x  {row['engine']:11} {row['packs']:2} packs"
        if "ms" not in row:
            print(f"{where}  {row['failed']}")
            continue
        scaling = ""
        if row["gpus"] > 1 and "scaling" in row:
            scaling = f"{100 * row['scaling']:6.1f} %  {row['ms_beside_one_gpu']:+7.1f} ms"
        print(f"{where} {row['ms']:9.1f} ms {row['tokens_per_second']:10.0f} tok/s {row['gib']:6.1f} GiB "
              f"{row['gigabytes_sent']:6.2f} GB sent {scaling}")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, default=torch.cuda.device_count() if CUDA else 2)
    parser.add_argument("--shape", default="8b" if CUDA else "tiny", choices=sorted(CASES))
    parser.add_argument("--packs", type=int, nargs="+", default=[1, 4] if CUDA else [1, 2])
    parser.add_argument("--engines", nargs="+", default=["ddp", "ddp-bf16", "zero1", "zero2"], choices=sorted(VARIANTS))
    parser.add_argument("--json", help="file for every figure")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        return worker(arguments)
    if not CUDA:
        print("no GPU here: a tiny shape runs in float32, its figures mean nothing")
        arguments.engines = [name for name in arguments.engines if "bf16" not in name]  # gloo has no such sums
    optimizers = dict.fromkeys(VARIANTS[name][2] for name in arguments.engines)
    single = launch(1, [{"adamw": "ddp", "muon": "ddp-muon"}[optimizer] for optimizer in optimizers], arguments)
    rows = with_scaling(launch(arguments.gpus, arguments.engines, arguments), single)
    device = torch.cuda.get_device_name() if CUDA else "cpu"
    print(f"\n{device}, torch {torch.__version__}, {arguments.shape}, {DEPTHS} depths")
    table([*single, *rows])
    if arguments.json:
        content = {"device": device, "torch": torch.__version__, "shape": arguments.shape, "rows": [*single, *rows]}
        Path(arguments.json).write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
