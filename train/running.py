"""A run as processes: one run in a folder, that may be told to end, whose processes agree on what comes next."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor

from data.locks import claim
from data.signals import heard
from train.config import TrainConfig


@contextmanager
def only_run(out: Path, accelerator: Accelerator) -> Iterator[None]:
    """Inside, no other run can begin in `out`. Raises ValueError where one is at work."""
    if not accelerator.is_main_process:
        yield
        return
    out.mkdir(parents=True, exist_ok=True)
    with claim(out / ".run.lock", taken=f"another run trains in {out}", cure="stop it first, or choose another out="):
        yield


@contextmanager
def memory_or_what_to_do(config: TrainConfig, device: torch.device) -> Iterator[None]:
    """Raises ValueError where the memory of the device, or of the machine, is not enough for what happens inside."""
    try:
        yield
    except RuntimeError as error:
        said = str(error).partition("\n")[0]
        if not isinstance(error, torch.OutOfMemoryError) and "allocate memory" not in said:
            raise
        cure = f"lower batch.tokens_per_pack, which is {config.batch.tokens_per_pack}"
        if device.type == "cuda" and config.activation_checkpointing == "none":
            cure += ", or set activation_checkpointing=layer"
        if device.type == "cpu":
            cure += "; experiment=quickstart is made for a laptop"
        raise ValueError(f"out of memory ({said}): {cure}") from error


class Termination:
    """While it is open, SIGTERM, Ctrl-C and a terminal that is closed only leave a note; the loop looks at it after each
    step and saves. Ctrl-C once more is what it was before.
    """

    number: int | None = None  # of the first signal

    def __enter__(self) -> Termination:
        self._heard = heard(self._note)
        self._before = self._heard.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._heard.__exit__(*error)

    @property
    def asked(self) -> bool:
        return self.number is not None

    @property
    def status(self) -> int:
        """The exit status of a run that was told to end, here or in another process: as shells say it."""
        return 128 + (self.number or signal.SIGTERM)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.asked and number == signal.SIGINT:
            signal.signal(number, self._before[number])
            signal.raise_signal(number)
        self.number = self.number or number


class Agreement:
    """What the processes tell one another, on the CPU: no device waits for it, and the loop may look at the result.

    Whoever waits here may wait for half an hour, and hears at once that another process has died. Where a GPU waits,
    nobody hears anything, and NCCL ends the process after ten minutes: what one process does alone is waited for here.
    Every process calls every method; ValueError where another one has ended.
    """

    def __init__(self, num_processes: int):
        self.group = dist.new_group(backend="gloo") if num_processes > 1 else None

    def sum(self, values: Tensor) -> Tensor:
        """values: on the CPU, as many on every process; they become the sum."""
        if self.group is not None:
            with _others_may_have_ended():
                dist.all_reduce(values, group=self.group)
        return values

    def gather(self, value: Any) -> list[Any]:
        """The value of each process, in their order."""
        if self.group is None:
            return [value]
        found = [None] * dist.get_world_size(self.group)
        with _others_may_have_ended():
            dist.all_gather_object(found, value, group=self.group)
        return found

    def wait(self) -> None:
        """Until every process is here."""
        self.gather(None)


@contextmanager
def _others_may_have_ended() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # gloo's: a connection is closed
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"another process of this run has ended, see what it said ({reason}): the same command goes on from the "
            "last checkpoint"
        ) from error


class Watch:
    """While it is open, this process ends soon after another one of the run has died on the same machine.

    Its GPU may be waiting for that one in a collective that never ends, and its main thread for the GPU: it would not
    even hear a signal, and the launcher would kill it half a minute later or more, with a checkpoint on its way to the disk.

    busy  whether there is such a checkpoint: it is waited for
    """

    EVERY_SECONDS = 0.5

    def __init__(self, agreement: Agreement, *, busy: Callable[[], bool]):
        self.agreement, self.busy, self.over = agreement, busy, threading.Event()
        here, me = _machine(), os.getpid()
        self.others = [pid for machine, pid in agreement.gather((here, me)) if machine == here and pid != me and here]

    def __enter__(self) -> Watch:
        if self.others:
            threading.Thread(target=self._look, name="watch", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()

    def part(self) -> None:
        """Called by every process at the end of its work: from here on each of them may end when it likes."""
        self.over.set()
        self.agreement.wait()

    def _look(self) -> None:
        while not self.over.wait(self.EVERY_SECONDS):
            died = [pid for pid in self.others if not Path(f"/proc/{pid}").exists()]
            if died:
                while self.busy():
                    time.sleep(0.05)
                text = f"process {died[0]} of this run has died: the same command goes on from the last checkpoint"
                print(f"error: {text}", file=sys.stderr, flush=True)
                os._exit(1)


def _machine() -> str:
    """What processes share that see one another under their process ids; empty where there is no Linux to ask."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text() + os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""
