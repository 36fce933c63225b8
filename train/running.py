"""A run as a process of this machine: only one in a folder, and it may be told to end."""

from __future__ import annotations

import fcntl
import os
import signal
from pathlib import Path
from types import FrameType
from typing import IO

from accelerate import Accelerator


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
        raise ValueError(f"another run trains in {out} (process {holder}): stop it first, or choose another out=") from None
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
