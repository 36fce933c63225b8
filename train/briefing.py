"""The start-up block: what a run will do and what it will take, before it does it. `plan=true` stops after it."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import torch

from data.shards import ShardReader
from data.stream import plan_epoch
from train import plan
from train.config import TrainConfig
from train.follow import records_to_come
from train.plan import GIB, Engine
from train.progress import device_name
from train.shape import DrafterShape


def briefing(
    config: TrainConfig,
    shape: DrafterShape,
    reader: ShardReader,
    *,
    held_out: int,
    device: torch.device,
    num_processes: int,
) -> str:
    """Lines for the terminal. reader: of the train split; held_out: records of the other."""
    engine = Engine(num_processes, int(config.engine.name.removeprefix("zero")) if config.engine.name != "ddp" else 0)
    on_gpu = device.type == "cuda"
    name = device_name(device)
    steps, fullest = _steps(config, reader)
    tokens = int(reader.lengths.sum())
    supervised, disk = (sum(getattr(shard.info, name) for shard in reader.shards) for name in ("supervised", "bytes"))
    pack = config.batch.tokens_per_pack if config.batch.pad_packs else min(fullest, config.batch.tokens_per_pack)
    saved = plan.checkpoint_bytes(shape, optimizer=config.optim.name, ema=config.optim.ema is not None)
    kept = (config.keep_checkpoints + 1) * saved  # and the best
    lines = {
        "target": f"{config.target.name}, boundaries {list(config.target.boundaries)}",
        "data": f"{len(reader):,} conversations, {_count(tokens)} tokens, {_count(supervised)} supervised; "
        f"{_size(disk)} of shards ({reader.provenance.codec}); "
        + (f"{held_out:,} more for validation" if held_out or config.follow else "NONE FOR VALIDATION: no tau is measured"),
        "drafter": f"{_count(sum(plan.num_parameters(shape).values()))} parameters, {config.drafter.depths} depths, "
        f"{shape.draft_vocab_size:,} of {shape.vocab_size:,} tokens; {config.attention} attention, {config.precision}",
        "steps": f"{steps:,} in {config.epochs} epochs, {_per_step(config)}, packs of {config.batch.tokens_per_pack:,} tokens",
        "devices": f"{num_processes} x {name}, {engine.name}; float32 masters, {config.optim.name}"
        + (f", {plan.communication_bytes(shape, engine, gradient_bytes=_gradient_bytes(config)) / 1e9:.2f} GB sent and "
           "received a step by each" if num_processes > 1 else ""),
        "memory": _memory(config, shape, engine, tokens=pack, device=device if on_gpu else None),
        "work": _work(config, shape, reader, name=name, devices=num_processes),
        "checkpoints": f"{_size(saved)} each, at most {_size(kept)} in {config.out} ({_size(_free(Path(config.out)))} free there)",
    }  # fmt: skip
    if not (reader.complete or config.follow):
        lines["data"] += f"\n  {'':<12} NOT COMPLETE: its extraction has not ended: run that to its end first, or set follow=true"
    if kept > _free(Path(config.out)):
        lines["checkpoints"] += ": TOO LITTLE: set keep_checkpoints=1, or another out="
    return "\n".join(f"  {label:<12} {text}" for label, text in lines.items() if text)


def _steps(config: TrainConfig, reader: ShardReader) -> tuple[int, int]:
    """Steps of the whole run, and tokens of the fullest pack."""
    batch = config.batch
    epoch = plan_epoch(
        reader.lengths, seed=config.seed, epoch=0, tokens_per_pack=batch.tokens_per_pack,
        conversations_per_step=batch.conversations_per_step, packs_per_step=batch.packs_per_step,
    )  # fmt: skip
    fullest = max(sum(piece.stop - piece.start for piece in pack) for step in epoch for pack in step)
    if config.follow:
        records = records_to_come(reader, config.follow_conversations)
        return config.epochs * -(-records // batch.conversations_per_step), fullest
    return config.epochs * len(epoch), fullest


def _memory(
    config: TrainConfig, shape: DrafterShape, engine: Engine, *, tokens: int, device: torch.device | None
) -> str:
    if device is None or config.attention != "fused":
        return ""  # the estimate is of the fused step
    parts = plan.memory(
        shape, tokens=tokens, depths=config.drafter.depths, optimizer=config.optim.name, ema=config.optim.ema is not None,
        engine=engine, checkpointing=config.activation_checkpointing,
    )  # fmt: skip
    needed, there = sum(parts.values()) + plan.BESIDE, torch.cuda.get_device_properties(device).total_memory
    text = f"about {needed / GIB:.1f} of {there / GIB:.0f} GiB of each GPU, if every row of a full pack asks"
    if needed > there:
        text += ": TOO MUCH: lower batch.tokens_per_pack, or set activation_checkpointing=layer"
    return text + "".join(f"\n  {'':<12}   {size / GIB:6.2f} GiB  {part}" for part, size in parts.items())


def _work(config: TrainConfig, shape: DrafterShape, reader: ShardReader, *, name: str, devices: int) -> str:
    """An upper bound: as if every row asked."""
    operations = config.epochs * plan.flops_per_step(shape, reader.lengths.tolist(), depths=config.drafter.depths)
    text = f"{_scaled(operations, ('', 'k', 'M', 'G', 'T', 'P', 'E'))}FLOP at most"
    peak = config.tracker.peak_tflops or plan.peak_tflops(name)
    if peak is None or config.attention != "fused":
        return text
    hours = operations / (peak * 1e12 * devices * plan.MEASURED_MFU) / 3600
    return text + f", {hours:.2f} hours at {100 * plan.MEASURED_MFU:.0f} % of {peak:.0f} TFLOP/s a device"


def _gradient_bytes(config: TrainConfig) -> int:
    return plan.BF16 if config.engine.gradient_dtype == "bf16" else plan.FLOAT32


def _per_step(config: TrainConfig) -> str:
    batch = config.batch
    if batch.conversations_per_step is not None:
        return f"{batch.conversations_per_step} conversations each"
    return f"{batch.packs_per_step} packs each"


def _free(folder: Path) -> int:
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def _count(number: float) -> str:
    return _scaled(number, ("", "k", "M", "B")).replace(" ", "")


def _size(number: float) -> str:
    return _scaled(number, ("", "k", "M", "G", "T", "P")) + "B"


def _scaled(number: float, prefixes: tuple[str, ...]) -> str:
    """1234567 -> "1.23 M"."""
    step = min(int(math.log10(max(number, 1))) // 3, len(prefixes) - 1)
    return f"{number / 1000**step:.3g} {prefixes[step]}"
