"""Whole training runs as a user starts them: learning, killed and continued, on two processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.datasets import write_dataset

ROOT = Path(__file__).resolve().parent.parent
ACCELERATE = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch"]
NO_ACCELERATION = ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
ONE = [*ACCELERATE, "--cpu", "--num_processes", "1", *NO_ACCELERATION]
# accelerate starts one process for --cpu --num_processes 2, without a word; with --multi_gpu it starts two
TWO = [*ACCELERATE, "--multi_gpu", "--num_processes", "2", "--main_process_port", "0", *NO_ACCELERATION]


@pytest.fixture(scope="module")
def shards(tmp_path_factory, tiny_llama):
    return write_dataset(tmp_path_factory.mktemp("data") / "shards", Path(tiny_llama.path), name="tiny_llama")


def options(shards: Path, out: Path, tiny_llama) -> list[str]:
    return [
        "target=tiny_llama", f"target.path={tiny_llama.path}", f"shards={shards}", f"out={out}", "tracker=none",
        "precision=fp32", "epochs=4", "log_every_steps=1", "checkpoint_every_steps=4", "keep_checkpoints=10",
        "drafter.draft_vocab_size=256", "drafter.depths=3", "batch.conversations_per_step=5",
        "batch.tokens_per_pack=48", "batch.num_workers=0", "optim=adamw", "optim.lr=5e-3", "optim.ema=0.9",
    ]  # fmt: skip


def environment() -> dict:
    return {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}


def run(launcher: list[str], arguments: list[str], *, script: str = "train/main.py") -> str:
    done = subprocess.run(
        [*launcher, script, *arguments], cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def losses(out: Path) -> list[float]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


@pytest.fixture(scope="module")
def trained(tmp_path_factory, shards, tiny_llama):
    out = tmp_path_factory.mktemp("runs") / "run"
    run(ONE, options(shards, out, tiny_llama))
    return out


def test_a_run_learns_and_says_what_it_did(trained):
    """24 conversations, 5 a step: 5 steps an epoch, 20 in all, the last loss a tenth below the first."""
    found, summary = losses(trained), json.loads((trained / "summary.json").read_text())
    assert len(found) == summary["steps"] == 20
    assert found[-1] < 0.9 * found[0]
    assert summary["boundaries"] == [2, 3, 5]
    assert summary["tau"] >= 1.0 and len(summary["acc"]) == 3


def test_the_exported_drafter_scores_what_training_said(trained, shards, tiny_llama, tmp_path):
    """The export is rounded to bf16: the loss moves by less than one per cent."""
    run(
        [sys.executable],
        ["target=tiny_llama", f"target.path={tiny_llama.path}", f"drafter={trained}/export", f"shards={shards}",
         f"out={tmp_path}"],
        script="train/evaluate.py",
    )  # fmt: skip
    summary, said = (json.loads((folder / "summary.json").read_text()) for folder in (tmp_path, trained))
    assert summary["loss"] == pytest.approx(said["loss"], rel=0.01)
    assert summary["greedy_share"] == 1.0, "the conversations are the target's own greedy answers"
    assert sum(group["documents"] for group in summary["by_length"].values()) == 6


def test_a_second_run_of_the_same_command_does_nothing(trained, shards, tiny_llama):
    before = (trained / "export" / "model.safetensors").stat().st_mtime_ns
    assert "nothing to do" in run(ONE, options(shards, trained, tiny_llama))
    assert (trained / "export" / "model.safetensors").stat().st_mtime_ns == before


def test_a_killed_run_goes_on_bit_for_bit(trained, shards, tiny_llama, tmp_path):
    """SIGKILL in the middle of an epoch; the same command ends with the very weights of the run that was not killed."""
    out = tmp_path / "run"
    command = [*ONE, "train/main.py", *options(shards, out, tiny_llama)]
    process = subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=subprocess.DEVNULL,
                               stderr=subprocess.DEVNULL, start_new_session=True)  # fmt: skip
    deadline = time.monotonic() + 120
    while not (out / "checkpoints" / "step-000004").exists():
        assert process.poll() is None and time.monotonic() < deadline, "the run ended before its first checkpoint"
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert not (out / "summary.json").exists(), "killed too late to test anything"
    assert "resuming from" in run(ONE, options(shards, out, tiny_llama))
    for name in ("drafter", "average", "optimizer"):
        whole, continued = (load_file(r / "checkpoints" / "step-000020" / f"{name}.safetensors") for r in (trained, out))
        assert whole.keys() == continued.keys()
        assert all(torch.equal(whole[key], continued[key]) for key in whole), name
    assert losses(out) == losses(trained)


def test_two_processes_have_the_loss_of_one(trained, shards, tiny_llama, tmp_path):
    """Packs of 48 tokens: the ranks hold different numbers of counted rows, and some steps an empty pack."""
    run(TWO, options(shards, tmp_path / "run", tiny_llama))
    assert losses(tmp_path / "run") == pytest.approx(losses(trained), rel=1e-5)
    one, two = (json.loads((r / "summary.json").read_text()) for r in (trained, tmp_path / "run"))
    assert two["supervised_tokens"] == one["supervised_tokens"]
    assert two["documents"] == one["documents"] == 6
    assert two["loss"] == pytest.approx(one["loss"], rel=1e-4)


def test_other_settings_in_the_same_folder_are_refused(trained, shards, tiny_llama):
    done = subprocess.run(
        [*ONE, "train/main.py", *options(shards, trained, tiny_llama), "seed=1"],
        cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode != 0
    assert "(seed=0 there, 1 here): choose another out=" in done.stderr
