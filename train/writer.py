"""Writes checkpoints beside the training: the step waits for a copy in the CPU's memory, not for the disk."""

from __future__ import annotations

import time
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

from train import checkpoint
from train.checkpoint import RunState, Stored


class CheckpointWriter:
    """Of the process that writes; the others take part in `save`, because the engine may have to put tensors together.

    As a context it ends when the checkpoint at hand is on the disk, also where the training broke off.

    folder  RUN/checkpoints
    keep    newest checkpoints that stay, beside the best one
    """

    def __init__(self, folder: Path, *, keep: int, writes: bool):
        self.folder, self.keep, self.writes = folder, keep, writes
        self.copies: dict[tuple[str, str], Tensor] = {}  # made once, filled again for every checkpoint
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self.running: Future | None = None
        self.write_seconds = 0.0  # of the last checkpoint, beside the training

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.finish()

    @property
    def busy(self) -> bool:
        return self.running is not None and not self.running.done()

    def save(self, stored: Iterable[Stored], state: RunState) -> float:
        """Begin to write a checkpoint; returns the seconds that the training stood still for it.

        Raises ValueError when the checkpoint before could not be written.
        """
        started = time.monotonic()
        self.finish()
        files: dict[str, dict[str, Tensor]] = {}
        for file, name, tensor in stored:
            if self.writes:
                files.setdefault(file, {})[name] = self._copy(file, name, tensor)
        if self.writes:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self.running = self.thread.submit(self._write, files, asdict(state))
        return time.monotonic() - started

    def finish(self) -> float:
        """Wait until the checkpoint at hand is on the disk; returns the seconds that took."""
        started = time.monotonic()
        running, self.running = self.running, None
        if running is not None:
            running.result()
        return time.monotonic() - started

    def _copy(self, file: str, name: str, tensor: Tensor) -> Tensor:
        copy = self.copies.get((file, name))
        if copy is None:
            copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self.copies[file, name] = copy
        return copy.copy_(tensor.detach(), non_blocking=True)

    def _write(self, files: dict[str, dict[str, Tensor]], state: dict) -> None:
        started = time.monotonic()
        checkpoint.write(self.folder, files, state)
        checkpoint.prune(self.folder, keep=self.keep)
        self.write_seconds = time.monotonic() - started
