"""Does a server get anywhere? What its log and its processes say, in words, and the stacks of a server that hangs."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

LOG_TAIL_BYTES = 16384
PY_SPY_SECONDS = 20.0  # for one process
MAX_STACKS = 16  # processes whose stacks are saved
COMPUTES = 0.2  # CPU seconds a second, of all processes together; below that they wait

# What SGLang's log says of its start, newest last: a progress bar, or a stage.
_BAR = re.compile(r"([A-Z][\w ()/=,.:-]*?):?\s+(\d{1,3})%(?:\s+Completed)?\s*\|")
_STAGES = {
    "Load weight begin": "loads the weights",
    "Load weight end": "has the weights",
    "Capture cuda graph begin": "captures CUDA graphs",
    "Capture cuda graph end": "has its CUDA graphs",
    "Memory pool end": "has its KV cache",
    "KV Cache is allocated": "has its KV cache",
    "Init torch distributed begin": "connects its processes",
    "Uvicorn running": "serves",
}


def loading_progress(log: str) -> str:
    """The last stage of its start that SGLang's log tells of, like "loads the weights, 40 %"; empty if none."""
    said = ""
    for line in re.split(r"[\r\n]+", log):
        if bar := list(_BAR.finditer(line)):
            said = f"{bar[-1][1].strip()} {bar[-1][2]} %"
        for words, stage in _STAGES.items():
            if words in line:
                said = stage
    return said


def cure_of(last_lines: list[str]) -> str:
    """What to do about a server whose log ended so."""
    text = " ".join(last_lines).lower()
    if "no space left" in text:
        return "free some disk space"
    if "out of memory" in text or "not enough memory" in text:
        return "lower engine.mem_fraction or engine.max_total_tokens, or use more GPUs (engine.tensor_parallel)"
    if "address already in use" in text:
        return "set server.port=0 for a free one"
    return "see its log"


@dataclass(frozen=True)
class Activity:
    """What a server's processes did in the seconds between two looks."""

    num_processes: int
    cpu_per_second: float
    bytes_per_second: float

    def __str__(self) -> str:
        doing = "compute" if self.cpu_per_second > COMPUTES else "wait"
        reading = f" and read {self.bytes_per_second / 1e6:.0f} MB/s" if self.bytes_per_second > 1e6 else ""
        return f"its {self.num_processes} processes {doing}{reading} ({self.cpu_per_second:.1f} CPU seconds a second)"


class Watch:
    """Looks at a server's log and processes, and tells when they have been silent for too long.

    pid              of its first process; None: not ours to see
    silence_seconds  without a new line in the log, after which the silence is told and stacks are saved
    hang_seconds     after which a silent server counts as hanging
    """

    def __init__(self, log: Path, pid: int | None, *, silence_seconds: float, hang_seconds: float) -> None:
        self._log, self._pid = log, pid
        self.silence_seconds, self.hang_seconds = silence_seconds, hang_seconds
        self._size, self._since, self._told = -1, time.monotonic(), False
        self._log_counts = True
        self.schedulers: list[int] = []  # further process ids to look at, where they are known
        self._before = self._measure()

    def progress(self) -> str:
        """What the log tells of the start."""
        try:
            with self._log.open("rb") as file:
                file.seek(max(0, self._log.stat().st_size - LOG_TAIL_BYTES))
                return loading_progress(file.read().decode(errors="replace"))
        except OSError:
            return ""

    def activity(self) -> Activity | None:
        """Since the last call; None if the processes cannot be seen."""
        before, now = self._before, self._measure()
        self._before = now
        if before is None or now is None:
            return None
        seconds = max(now[0] - before[0], 1e-3)
        return Activity(now[1], max(0.0, now[2] - before[2]) / seconds, max(0.0, now[3] - before[3]) / seconds)

    def alive(self) -> None:
        """A sign of life from elsewhere than the log: the silence begins anew."""
        self._since, self._told = time.monotonic(), False

    def ignore_log(self) -> None:
        """From now on `alive` alone ends a silence."""
        self._log_counts = False
        self.alive()

    def silence(self) -> float:
        """Seconds since the last new line in the log, or since `alive` was called."""
        if not self._log_counts:
            return time.monotonic() - self._since
        try:
            size = self._log.stat().st_size
        except OSError:
            size = 0
        if size != self._size:
            self._size = size
            self.alive()
        return time.monotonic() - self._since

    def look(self, state: str) -> str | None:
        """Words about a silence, once each time; afterwards, and while there is none, nothing."""
        seconds = self.silence()
        if seconds < min(1.0, self.silence_seconds / 2):
            self.activity()  # what follows is measured from here
        if seconds < self.silence_seconds or self._told:
            return None
        self._told = True
        return f"the server has said nothing for {seconds:.0f} s ({state}; {self.describe()}); {self.save_stacks()}"

    def hangs(self) -> bool:
        return self.silence() >= self.hang_seconds

    def describe(self) -> str:
        activity = self.activity()
        return str(activity) if activity else "its processes are not ours to see"

    def save_stacks(self) -> str:
        """Where every Python process of the server stands, into a file beside the log; in words, where, or why not."""
        if self._pid is None:
            return "its stacks are not ours to see"
        number = len(list(self._log.parent.glob("stacks-*.txt")))
        file = self._log.parent / f"stacks-{number}.txt"
        try:
            with file.open("w") as out:
                for process in self._processes()[:MAX_STACKS]:
                    try:
                        about = f"{process.pid} {process.name()} {process.status()}"
                    except psutil.Error:
                        continue
                    out.write(f"==== {about}\n{_stacks_of(process.pid)}\n\n")
        except OSError as error:
            return f"the stacks of its processes cannot be written to {file}: {error.strerror}"
        return f"the stacks of its processes are in {file}"

    def _processes(self) -> list[psutil.Process]:
        """The server's, its schedulers first: that is where it computes."""
        found: dict[int, psutil.Process] = {}
        for pid in (self._pid, *self.schedulers):
            try:
                process = psutil.Process(pid)
                found |= {process.pid: process for process in (process, *process.children(recursive=True))}
            except psutil.Error:
                continue
        return sorted(found.values(), key=lambda process: (process.pid not in self.schedulers, process.pid))

    def _measure(self) -> tuple[float, int, float, float] | None:
        """Time, number of processes, their CPU seconds and the bytes they have read."""
        if self._pid is None:
            return None
        cpu, read, count = 0.0, 0.0, 0
        for process in self._processes():
            try:
                cpu += sum(process.cpu_times()[:2])
                read += process.io_counters().read_bytes
                count += 1
            except (psutil.Error, OSError):
                continue
        return time.monotonic(), count, cpu, read


def _stacks_of(pid: int) -> str:
    """py-spy's answer, or why there is none."""
    beside = Path(sys.executable).parent / "py-spy"
    program = str(beside) if beside.exists() else shutil.which("py-spy")
    if program is None:
        return "py-spy is not installed here: pip install py-spy"
    line = [program, "dump", "--pid", str(pid)]
    try:
        done = subprocess.run(line, capture_output=True, text=True, timeout=PY_SPY_SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"py-spy cannot look at it: {error}"
    return done.stdout.strip() or f"py-spy cannot look at it: {done.stderr.strip() or 'no output'}"
