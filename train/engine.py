"""Engines: how the gradients of all processes become new weights, and who holds what.

    ddp     every process holds everything; gradients are summed while the backward pass still runs
    zero1   the optimizer's state is cut over the processes; zero2: the gradients as well; zero3: the weights as well

Whatever the engine: the masters are float32, the same gradients are clipped and applied in the same way, the
average of the weights is kept, and a checkpoint holds the same whole tensors under the same names, so that a run
may go on under another engine and on another number of processes. Every method is called by every process.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs, PartialState
from torch import Tensor

from train.checkpoint import Stored
from train.config import EngineConfig, OptimConfig
from train.metrics import DepthSums
from train.model import Drafter
from train.replicated import Replicated
from train.unroll import TrainingTimeTest
from train.zero import Zero, ZeroThree


class Engine(Protocol):
    """What the loop needs. `drafter` is the module whose parameters are trained; under zero3 they are cut."""

    drafter: Drafter

    def accumulate(self, *inputs: Any, last: bool) -> DepthSums:
        """Forward and backward pass of one micro-batch; with the `last` of a step gradients are summed over processes."""

    def step(self, lr: float) -> Tensor:
        """Clip, update the masters and their average; returns the norm of the gradients before clipping."""

    def served(self) -> Drafter:
        """A drafter with the weights that are evaluated and exported: the average where there is one."""

    def stored(self) -> Iterator[Stored]:
        """Every tensor of a checkpoint, one after the other; what is cut is put together on every process."""

    def restore(self, average: dict[str, Tensor], optimizer: dict[str, Tensor]) -> None:
        """Take the average and the optimizer's state of a checkpoint; the drafter's weights were loaded before."""

    def close(self) -> None:
        """Let go of what communicates."""


def accelerator_of(config: EngineConfig, **options: Any) -> Accelerator:
    """Accelerate starts the processes and moves small things between them; the model is handed to the engine below.

    Raises ValueError for bf16 gradients without a GPU.
    """
    os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)  # has been heard: train/config.py, launched_engine
    if not torch.cuda.is_available():
        PartialState(cpu=True)  # or Accelerate looks for a GPU in each process of several
    if config.gradient_dtype == "bf16" and not torch.cuda.is_available():
        raise ValueError("engine.gradient_dtype=bf16: collectives on the CPU sum float32 only: leave it at fp32")
    ddp = DistributedDataParallelKwargs(
        broadcast_buffers=False,  # the only buffers are the vocabulary map, which never changes
        gradient_as_bucket_view=True,
        bucket_cap_mb=100,  # MiB of gradients that begin their way together; torch.compile cuts its graphs there, too
    )
    # mixed_precision: the drafter casts its matrices itself, once a step
    return Accelerator(mixed_precision="no", kwargs_handlers=[ddp], **options)


def choose(config: EngineConfig, module: TrainingTimeTest, optimizer: OptimConfig, accelerator: Accelerator) -> Engine:
    """The engine that `engine=name` asks for, around the drafter of `module`."""
    if config.name == "ddp":
        return Replicated(config, module, optimizer, accelerator)
    kind = ZeroThree if config.name == "zero3" else Zero
    return kind(config, module, optimizer, accelerator)
