"""A process and all that it starts, wherever that goes: told to end, and waited for until the last of them is gone.

`accelerate launch` ends before the one process that it launched has saved its checkpoint, and where it launches several,
each is in a session of its own: no process group holds them. All of them inherit a mark in their environment.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
import uuid
from contextlib import suppress
from typing import Any

import psutil

GRACE_SECONDS = 120  # a job that is told to end saves a checkpoint first
MARK = "EYAS_FAMILY"
POLL_SECONDS = 0.2
# Of several processes the launcher ends those that have not ended in time; it must do so before it is ended itself.
_LAUNCHER = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(GRACE_SECONDS - 30)}


class Family:
    """A process that is started here in a session of its own, and all that it starts.

    words    of its command
    env      its environment
    options  of subprocess.Popen
    """

    def __init__(self, words: list[str], *, env: dict[str, str] | None = None, **options: Any) -> None:
        self._mark, self._told = uuid.uuid4().hex, False
        env = _LAUNCHER | dict(os.environ if env is None else env)
        marked = env | {MARK: f"{env.get(MARK, '')} {self._mark}"}  # of a family within another both marks are told
        self.process = subprocess.Popen(words, env=marked, start_new_session=True, **options)

    def wait(self) -> int:
        """The exit status of the first one; where that was killed, once the others have ended, too."""
        status = self.process.wait()
        if status < 0:  # it waits for them otherwise
            self.tell()
            self.end(seconds=GRACE_SECONDS)
        return status

    def tell(self) -> None:
        """SIGTERM, once: to the first one's group, as a terminal does, or, where that one has ended, to each that has not."""
        if self._told:
            return
        self._told, living = True, self.living()
        if any(process.pid == self.process.pid for process in living):
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGTERM)
            return
        for process in living:
            with suppress(psutil.Error):
                process.terminate()

    def end(self, *, seconds: float) -> None:
        """Waits for all of them, and kills those that live after so many seconds."""
        limit = time.monotonic() + seconds
        while living := self.living():
            if time.monotonic() > limit:
                for process in living:
                    with suppress(psutil.Error):
                        process.kill()
                return
            time.sleep(POLL_SECONDS)

    def living(self) -> list[psutil.Process]:
        """Those that run."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                if self._mark in process.environ().get(MARK, "") and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found
