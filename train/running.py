"""A run as processes: one run in a folder, that may be told to end, whose processes agree on what comes next."""

from __future__ import annotations

import fcntl
import os
import signal
from pathlib import Path
from types import FrameType
from typing import IO

import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor


def only_run(out: Path, accelerator: Accelerator) -> IO[str] | None:
    """An open file, held by the first process until it ends. Raises ValueError where another run holds it."""
    if not accelerator.is_main_process:
        return None
    out.mkdir(parents=True, exist_ok=True)
    file = (out / ".run.lock").open("a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        holder = file.read().strip() or "of another machine"
        file.close()
        raise ValueError(
            f"another run trains in {out} (process {holder}): stop it first, or choose another out="
        ) from None
    except OSError:  # a file system without locks
        return file
    file.truncate(0)
    file.write(f"{os.getpid()} on {os.uname().nodename}\n")
    file.flush()
    return file


class Termination:
    """While it is open, SIGTERM only leaves a note; the loop looks at it after each step and saves."""

    asked = False

    def __enter__(self) -> Termination:
        self.before = signal.signal(signal.SIGTERM, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGTERM, self.before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.asked = True


class Agreement:
    """A small sum over all processes, on the CPU: no device waits for it, and the loop may look at the result."""

    def __init__(self, num_processes: int):
        self.group = dist.new_group(backend="gloo") if num_processes > 1 else None

    def sum(self, values: Tensor) -> Tensor:
        """values: int64, as many on every process."""
        if self.group is not None:
            dist.all_reduce(values, group=self.group)
        return values
