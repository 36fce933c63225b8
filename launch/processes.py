"""A process and all that it started, as a group: told to end, and waited for until the last of them is gone.

`accelerate launch` ends before what it launched has saved its checkpoint.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress

import psutil

POLL_SECONDS = 0.1
GRACE_SECONDS = 120  # a job that is told to stop saves a checkpoint first
PATIENT = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(GRACE_SECONDS)}  # its launcher, where there are several ranks; else 30


def tell(group: int, number: int = signal.SIGTERM) -> None:
    """A signal for every process of the group."""
    with suppress(ProcessLookupError):
        os.killpg(group, number)


def lives(group: int) -> bool:
    """Whether a process of the group runs."""
    for process in psutil.process_iter():
        with suppress(psutil.Error, ProcessLookupError):
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                return True
    return False


def wait_until_gone(group: int, *, seconds: float) -> bool:
    """Whether the last of the group has ended before so many seconds have passed."""
    limit = time.monotonic() + seconds
    while lives(group):
        if time.monotonic() > limit:
            return False
        time.sleep(POLL_SECONDS)
    return True
