"""The jobs of a sweep: how they are numbered and named, which are finished, and how they are run a few at a time.

    SWEEP/00-lr-1e-4-depths-4/     a run folder like any other, and beside its own files
      job.json                     what the job was told, and how it ended
      job.log                      everything it printed, a line with the time and the command before each start

A job is known by what it is told, not by its number: a sweep that is repeated or widened finds its finished jobs.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from tqdm import tqdm

from data.config import write_atomically
from launch.processes import GRACE_SECONDS, Family

LOG, STATUS = "job.log", "job.json"
START = "== started "  # begins the line in LOG with which a job is started, for the first time or again
LONGEST_NAME = 100  # characters of a label in a folder's name


@dataclass(frozen=True)
class Job:
    """One run of a sweep.

    number     0, 1, ... in the order in which the sweep's folder first saw them
    label      what differs from the others, "lr=1e-4 depths=4"
    out        its folder
    overrides  its whole command line
    inputs     fingerprint of its configuration and data, whatever its folder
    """

    number: int
    label: str
    out: Path
    overrides: tuple[str, ...]
    inputs: str

    @property
    def log(self) -> Path:
        return self.out / LOG

    def summary(self) -> dict | None:
        """The summary.json of this very job, if it has finished; None otherwise."""
        ended, summary = _read(self.out / STATUS), _read(self.out / "summary.json")
        done = ended.get("inputs") == self.inputs and ended.get("status") == 0
        return summary if done and summary else None

    def record(self, status: int | None, *, seconds: float = 0.0, cluster_job: str | None = None) -> None:
        """Write job.json.

        status       of the process; None while it runs
        seconds      from its start (on a cluster, from its queueing) to its end
        cluster_job  SLURM's number of it, while it is queued or runs there
        """
        content = {
            "number": self.number, "label": self.label, "inputs": self.inputs, "status": status,
            "seconds": round(seconds, 1), "overrides": list(self.overrides), "cluster_job": cluster_job,
        }  # fmt: skip
        write_atomically(self.out / STATUS, json.dumps(content, indent=1) + "\n")

    def queued_as(self) -> tuple[str | None, bool]:
        """SLURM's number of the job that was last seen in its folder (None: none, or it has ended), and whether that
        was told the same."""
        known = _read(self.out / STATUS)
        return known.get("cluster_job"), known.get("inputs") == self.inputs

    def last_words(self) -> str:
        """The last line that says something, of an error if there is one. What it said in an earlier start does not count."""
        try:
            text = self.log.read_text(errors="replace")
        except FileNotFoundError:
            return "it left no log"
        text = re.split(rf"^{START}.*\n?", text, flags=re.MULTILINE)[-1]
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        errors = [line for line in lines if re.match(r"error: |\w*(Error|Exception|Interrupt)\b", line)]
        saved = [line for line in lines if line.startswith("told to end: ")]  # a progress bar comes after it
        return (errors or saved or lines or ["its log is empty"])[-1][:300]


def varied_keys(jobs: list[list[str]], *, swept: set[str]) -> list[str]:
    """The options by which jobs are told apart: those that were swept, and those that differ between the jobs."""
    told = [dict(_split(override) for override in overrides) for overrides in jobs]
    keys = dict.fromkeys(key for options in told for key in options)
    return [key for key in keys if key in swept or len({options.get(key) for options in told}) > 1]


def label_of(overrides: list[str], keys: list[str]) -> str:
    """ "lr=1e-4 depths=4": the last part of each key, or all of it where two end alike."""
    ends = [key.rsplit(".", 1)[-1] for key in keys]
    names = {key: end if ends.count(end) == 1 else key for key, end in zip(keys, ends)}
    options = dict(_split(override) for override in overrides)
    return " ".join(f"{names[key]}={_short(options[key])}" for key in keys if key in options)


def place(folder: Path, wanted: list[tuple[list[str], str, str]], *, by_label: bool = False) -> list[Job]:
    """Give every (overrides, label, inputs) its number and folder: the one it had, or the next that is free.

    by_label  a job is known by what differs, and its folder has no number: what was changed goes on there

    Jobs that are told the same are one. Raises ValueError if two others would share a folder.
    """
    if by_label:
        named: dict[Path, Job] = {}
        places = [folder / (_words(label) or ["job"])[0] for _, label, _ in wanted]
        for out, (overrides, label, inputs) in zip(places, wanted):
            job = named.setdefault(out, Job(len(named), label, out, tuple(overrides), inputs))
            if job.overrides != tuple(overrides):
                raise ValueError(f"{job.label!r} and {label!r} would both be written to {out}: sweep over them one by one, "
                                 "each with an out= of its own")  # fmt: skip
        return [named[out] for out in places]
    known, taken = {}, [-1]
    for file in sorted(folder.glob(f"*/{STATUS}")):
        found = _read(file)
        if "inputs" in found:
            known[found["inputs"]] = (found["number"], file.parent)
            taken.append(found["number"])
    jobs = []
    for overrides, label, inputs in wanted:
        if inputs not in known:
            number = max(taken) + 1
            taken.append(number)
            known[inputs] = (number, folder / "-".join([f"{number:02d}", *_words(label)]))
        number, out = known[inputs]
        jobs.append(Job(number, label, out, tuple(overrides), inputs))
    return jobs


def run_jobs(
    jobs: list[Job], *, command: Callable[[Job], list[str]], environment: Callable[[int], dict], at_once: int
) -> dict[Job, int]:
    """Run every job as a process of its own, `at_once` at a time; the exit status of each, when all have ended.

    command      of a job
    environment  of slot 0 .. at_once-1, which a job has to itself
    A job has ended when all that it started has. SIGINT and SIGTERM go on to the jobs, which save and stop; then
    KeyboardInterrupt is raised.
    """
    if not jobs:
        return {}
    slots, started, ended = list(range(at_once)), {}, {}
    running: dict[Job, Family] = {}
    lock = threading.Lock()

    def run(job: Job, slot: int) -> int:
        began = time.monotonic()
        job.out.mkdir(parents=True, exist_ok=True)
        job.record(None)
        words = command(job)
        with open_log(job.log, words) as log:
            family = Family(
                words, env=environment(slot), stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT
            )  # fmt: skip
            with lock:
                running[job] = family
            status = family.wait()
        with lock:
            del running[job]
        job.record(status, seconds=time.monotonic() - began)
        return status

    def run_or_say_why(job: Job, slot: int) -> int:
        try:
            return run(job, slot)
        except (OSError, ValueError) as error:  # its folder cannot be written: the others go on
            with suppress(OSError), job.log.open("a") as log:
                log.write(f"error: {error}\n")
            return 1
        finally:
            with lock:
                slots.append(slot)

    with ThreadPoolExecutor(at_once) as pool, _signals() as stopped, _bar(len(jobs)) as bar:
        waiting, futures = list(jobs), {}
        while (waiting and not stopped) or futures:
            with lock:
                free = sorted(slots) if not stopped else []
            for slot in free[: len(waiting)]:
                job = waiting.pop(0)
                slots.remove(slot)
                started[job] = time.monotonic()
                futures[pool.submit(run_or_say_why, job, slot)] = job
                bar.write(f"started {job.out}")
            _show(bar, list(futures.values()))
            for future in wait(futures, timeout=1.0, return_when=FIRST_COMPLETED).done:
                job = futures.pop(future)
                ended[job] = future.result()
                bar.update()
                word = "ended  " if ended[job] == 0 else "stopped" if stopped else "FAILED "
                bar.write(f"{word} {job.out}: "
                          f"{outcome(job, ended[job])}, {time.monotonic() - started[job]:.0f} s")  # fmt: skip
            if stopped:
                _stop(running, lock, futures)
    if stopped:
        raise KeyboardInterrupt
    return ended


def open_log(file: Path | str, command: list[str]) -> IO[bytes]:
    """The job's log, to be added to: it begins with a line that says when `command` was started."""
    log = open(file, "ab")
    log.write(f"{START}{time.strftime('%Y-%m-%d %H:%M:%S')}: {shlex.join(command)}\n".encode())
    log.flush()
    return log


def outcome(job: Job, status: int) -> str:
    """What became of a job that ended with this exit status, in words."""
    if status:
        words = job.last_words()
        memory = " (killed: was the memory full? dmesg says)" if status == -signal.SIGKILL or "SIGKILL" in words else ""
        return f"status {status}, {words}{memory}"
    return f"tau {tau:.3f}" if (tau := best_tau(job)) is not None else "finished"


def best_tau(job: Job) -> float | None:
    """Of a finished job: what an optimizer over jobs maximizes. None where the stage measures none."""
    summary = job.summary() or {}
    tau = summary.get("best_tau", summary.get("tau"))
    return float(tau) if tau is not None else None


def progress_of(job: Job) -> str:
    """Where a running job stands, from the last line of its metrics.jsonl."""
    try:
        with (job.out / "metrics.jsonl").open("rb") as file:
            file.seek(max(file.seek(0, os.SEEK_END) - 8192, 0))
            row = json.loads(file.read().splitlines()[-1])
    except (OSError, ValueError, IndexError):
        return f"{job.number:02d} starting"
    figures = [f"{name} {row[name]:.2f}" for name in ("loss", "tau") if isinstance(row.get(name), (int, float))]
    return " ".join([f"{job.number:02d} step {row.get('step', '?')}", *figures])


def _bar(total: int) -> tqdm:
    return tqdm(total=total, desc="sweep", unit="job", dynamic_ncols=True, mininterval=1.0)


def _show(bar: tqdm, running: list[Job]) -> None:
    """Where every running job stands: each second on a terminal, twice a minute in a file."""
    if sys.stderr.isatty() or time.monotonic() - getattr(bar, "shown", -30) >= 30:
        bar.shown = time.monotonic()
        bar.set_postfix_str("; ".join(progress_of(job) for job in running), refresh=True)


@contextmanager
def _signals() -> Iterator[list[int]]:
    """A list that is empty until SIGINT or SIGTERM comes."""
    seen: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield seen
        return
    before = {number: signal.signal(number, lambda n, _: seen.append(n)) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield seen
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _stop(running: dict[Job, Family], lock: threading.Lock, futures: dict[Future, Job]) -> None:
    """Tells every job to end, and kills those that have not after GRACE_SECONDS."""
    with lock:
        alive = list(running.values())
    for family in alive:
        family.tell()
    if wait(futures, timeout=GRACE_SECONDS).not_done:
        for family in alive:
            family.end(seconds=0)
        wait(futures)


def _short(value: str) -> str:
    """0.012520653814999465 -> 0.01252: what an optimizer over jobs proposes need not be read to its end."""
    try:
        return f"{float(value):.4g}" if len(value) > 8 else value
    except ValueError:
        return value


def _split(override: str) -> tuple[str, str]:
    key, _, value = override.lstrip("+~").partition("=")
    return key, value


def _words(label: str) -> list[str]:
    """The label as a part of a folder's name that needs no quotes anywhere; nothing for an empty one."""
    word = re.sub(r"[^A-Za-z0-9_.+-]+", "-", label).strip("-")
    if len(word) > LONGEST_NAME:  # two that begin alike stay two
        word = f"{word[: LONGEST_NAME - 9]}-{hashlib.sha256(label.encode()).hexdigest()[:8]}"
    return [word] if word else []


def _read(file: Path) -> dict:
    try:
        content = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
