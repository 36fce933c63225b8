"""Runs of several processes for the tests of train/: how they are started, and what is read of them afterwards."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parent.parent
LAUNCH = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--dynamo_backend", "no"]
SECONDS = 400  # a start takes a quarter of a minute while others work


def launcher(processes: int) -> list[str]:
    file = "cpu.yaml" if processes == 1 else "ddp.yaml"
    return [*LAUNCH, "--config_file", f"launch/accelerate/{file}", "--num_processes", str(processes)]


def options(shards: Path, out: Path, target, **changes: object) -> list[str]:
    """24 conversations of 5 to 27 tokens; packs of 48, so that a step has several and processes hold unequal ones."""
    chosen = {
        "target": "tiny_llama", "target.path": target.path, "shards": shards, "out": out, "tracker": "none",
        "precision": "fp32", "epochs": 4, "log_every_steps": 1, "keep_checkpoints": 10, "drafter.draft_vocab_size": 256,
        "drafter.depths": 3, "batch.conversations_per_step": 5, "batch.tokens_per_pack": 48, "batch.num_workers": 0,
        "optim": "adamw", "optim.lr": 5e-3, "optim.ema": 0.9, **changes,
    }  # fmt: skip
    return [f"{name}={value}" for name, value in chosen.items()]


def environment(machine: int | None = None) -> dict[str, str]:
    """Two processes of a machine do not share a GPU: NCCL refuses it. Where there is only one, they run on the CPU.

    machine  the number of one that stands for a machine of its own: it has one GPU of several, or shares the only one,
             of which NCCL believes that it is another host's
    """
    gpus, changes = torch.cuda.device_count(), {}
    if machine is not None and gpus:
        changes = {"CUDA_VISIBLE_DEVICES": str(machine % gpus), "NCCL_HOSTID": f"machine-{machine}"}
    elif gpus == 1:
        changes = {"CUDA_VISIBLE_DEVICES": ""}
    return {**os.environ, "OMP_NUM_THREADS": "1", **changes}


class Started(subprocess.Popen):
    """A command in a process group of its own. It prints to a file: a pipe that nobody reads fills up and stops it."""

    def __init__(self, command: list[str], *, machine: int | None = None):
        self.file = tempfile.NamedTemporaryFile("a", prefix="printed-")
        super().__init__(
            command, cwd=ROOT, env=environment(machine), stdout=self.file, stderr=subprocess.STDOUT, start_new_session=True
        )

    def printed(self) -> str:
        return Path(self.file.name).read_text()


def run(command: list[str], *, status: int = 0) -> str:
    """What it printed. Fails, with the end of that, unless it ends with `status`."""
    done = subprocess.run(
        command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=SECONDS
    )
    assert done.returncode == status, done.stdout[-2000:] + done.stderr[-6000:]
    return done.stdout + done.stderr


def losses(out: Path) -> list[float]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


def tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Of all files: drafter/..., average/..., optimizer/..."""
    return {
        f"{file.stem}/{name}": tensor
        for file in sorted(checkpoint.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Bit for bit."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """The largest over all tensors of |one - other| / |one|."""
    assert one.keys() == other.keys()
    return max(
        float((tensor.double() - other[name].double()).norm() / tensor.double().norm().clamp(min=1e-30))
        for name, tensor in one.items()
    )
