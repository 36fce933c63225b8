"""Whole runs of two processes that are killed, told to end, or lose a machine: the same command goes on as if nothing was.

The measure is a run that nobody disturbed: its losses, and every bit of its last checkpoint.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from pathlib import Path

import psutil
import pytest
import torch

from tests.launched import LAUNCH, SECONDS, Started, launcher, losses, options, run, same, tensors
from train import checkpoint

STEPS = 40
SETTINGS = {"epochs": 8, "evaluate_every_epochs": 4, "checkpoint_every_steps": 2}  # five steps an epoch


@pytest.fixture(scope="module")
def whole(tmp_path_factory, shards, tiny_llama) -> Path:
    out = tmp_path_factory.mktemp("whole") / "run"
    run([*launcher(2), "train/main.py", *options(shards, out, tiny_llama, **SETTINGS)])
    return out


def wait_for_step(out: Path, step: int, process: Started) -> None:
    """Until a checkpoint of `step` or later is begun, or complete."""
    deadline = time.monotonic() + SECONDS
    while True:
        names = [path.name for path in (out / "checkpoints").glob("*step-*")] if (out / "checkpoints").exists() else []
        if any(int(name.rsplit("-", 1)[1]) >= step for name in names):
            return
        assert process.poll() is None, f"ended before step {step}: {process.printed()[-4000:]}"
        assert time.monotonic() < deadline, f"no checkpoint of step {step} in {SECONDS} s"
        time.sleep(0.005)


def rank_of(process: Started, rank: int) -> int:
    """The process id of a rank below a launcher."""
    for child in psutil.Process(process.pid).children(recursive=True):
        if child.environ().get("RANK") == str(rank):
            return child.pid
    raise AssertionError(f"no rank {rank}")


def kill(process: Started) -> None:
    """A launcher and all its processes, at once: each of them has a process group of its own."""
    for one in [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]:
        one.kill()


def ended(process: Started) -> str:
    """What it printed."""
    try:
        process.wait(SECONDS)
    except subprocess.TimeoutExpired:
        kill(process)
        raise
    return process.printed()


def check_as_whole(out: Path, whole: Path) -> None:
    assert losses(out) == losses(whole)
    last = f"checkpoints/step-{STEPS:06d}"
    assert same(tensors(out / last), tensors(whole / last))
    summary, expected = (json.loads((folder / "summary.json").read_text()) for folder in (out, whole))
    for name in ("steps", "tau", "best_tau", "loss", "supervised_tokens", "documents"):
        assert summary[name] == expected[name], name


def test_a_killed_rank_and_a_termination_leave_no_trace(whole, shards, tiny_llama, tmp_path):
    """Rank 1 is killed while a checkpoint is written; what goes on is told to end, and goes on once more."""
    out = tmp_path / "run"
    command = [*launcher(2), "train/main.py", *options(shards, out, tiny_llama, **SETTINGS)]
    process = Started(command)
    wait_for_step(out, 4, process)
    os.kill(rank_of(process, 1), signal.SIGKILL)
    printed = ended(process)
    assert process.returncode != 0
    assert "Unable to shutdown process" not in printed, "the launcher had to kill the other one, half a minute later"
    killed_at = checkpoint.read_state(checkpoint.latest(out / "checkpoints")).step
    assert 2 <= killed_at < STEPS, "killed too late to test anything"

    process = Started([*command, "batch.num_workers=1"])
    wait_for_step(out, killed_at + 4, process)
    process.terminate()  # as SLURM does before it takes the machine away; the launcher passes it on, also to workers
    printed = ended(process)
    assert "destroy_process_group() was not called" not in printed  # which NCCL would say
    assert f"resuming from {out}/checkpoints/step-{killed_at:06d}" in printed
    stopped_at = checkpoint.read_state(checkpoint.latest(out / "checkpoints")).step
    assert f"told to end: step {stopped_at} is saved" in printed
    assert killed_at < stopped_at < STEPS and not (out / "summary.json").exists()

    assert f"step-{stopped_at:06d}" in run(command)
    check_as_whole(out, whole)


def test_two_machines_are_one_group_and_losing_one_is_made_good(request, shards, tiny_llama, tmp_path):
    """Two launchers, one process each, that meet over TCP: as two processes of one machine, also after a death.

    With a GPU the undisturbed run is one of two machines as well: two processes of one would talk otherwise, or be on
    the CPU.
    """

    def machines(out: Path) -> list[Started]:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        shared = [
            *LAUNCH, "--config_file", "launch/accelerate/multi_node.yaml", "--num_machines", "2", "--num_processes", "2",
            "--main_process_ip", "127.0.0.1", "--main_process_port", str(port),
        ]  # fmt: skip
        stage = ["train/main.py", *options(shards, out, tiny_llama, **SETTINGS)]
        return [Started([*shared, "--machine_rank", str(rank), *stage], machine=rank) for rank in (0, 1)]

    def both_end(processes: list[Started]) -> list[str]:
        printed = [ended(process) for process in processes]
        assert [process.returncode for process in processes] == [0, 0], printed[0][-4000:]
        return printed

    if torch.cuda.is_available():
        whole = tmp_path / "whole"
        both_end(machines(whole))
    else:
        whole = request.getfixturevalue("whole")

    out = tmp_path / "run"
    first, second = machines(out)
    wait_for_step(out, 4, first)
    kill(second)
    ended(second)
    ended(first)
    assert first.returncode != 0 and not (out / "summary.json").exists()

    assert "resuming from" in both_end(machines(out))[0]
    check_as_whole(out, whole)
