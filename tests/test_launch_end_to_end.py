"""The whole way on the tiny Llama: the quickstart's own commands, real servers, its promises kept."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from data.config import TargetConfig

ROOT = Path(__file__).resolve().parent.parent
NUM_QUESTIONS = 48


@pytest.fixture(scope="module")
def environment(tiny_llama: TargetConfig) -> dict[str, str]:
    return os.environ | {"EYAS_MODELS": str(Path(tiny_llama.path).parent), "WANDB_MODE": "offline"}


def run(command: list[str], environment: dict[str, str]) -> str:
    """What the command says. Fails with all of it if it fails."""
    done = subprocess.run([sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def answers(environment: dict[str, str], tmp_path_factory) -> Path:
    """The target's own answers to some of the shipped questions, as data/examples/README.md makes them."""
    folder = tmp_path_factory.mktemp("answers")
    questions = (ROOT / "data" / "examples" / "prompts.jsonl").read_text().splitlines()[:NUM_QUESTIONS]
    (folder / "questions.jsonl").write_text("".join(question + "\n" for question in questions))
    run(
        ["extract/main.py", "mode=generate", "target=tiny_llama", f"conversations={folder / 'questions.jsonl'}",
         f"out={folder}", "sampling.temperature=0", "sampling.max_new_tokens=24"],
        environment,
    )  # fmt: skip
    return folder / "conversations.jsonl"


@pytest.fixture(scope="module")
def quickstart(environment: dict[str, str], answers: Path, tmp_path_factory) -> tuple[list[str], Path]:
    """The command, and the folder it left."""
    out = tmp_path_factory.mktemp("quickstart")
    command = [
        "launch/quickstart.py", "target=tiny_llama", f"conversations={answers}", f"out={out}",
        "validation_fraction=0.2",
        'options.train=["drafter.draft_vocab_size=256","epochs=10"]',
    ]  # fmt: skip
    run(command, environment)
    return command, out


def test_live_tau_is_the_offline_tau_and_no_output_changes(quickstart: tuple[list[str], Path]):
    _, out = quickstart
    summary = json.loads((out / "summary.json").read_text())
    assert all(summary["promises"].values()) and len(summary["promises"]) == 5
    assert summary["conversations_kept"] == summary["records"] == NUM_QUESTIONS
    assert (summary["boundaries"], summary["engine_ids"]) == ([2, 3, 5], [1, 2, 4])
    assert summary["live_tau"] == pytest.approx(summary["offline_tau"], rel=0.02)
    assert (out / "quickstart.png").stat().st_size > 10_000


def test_bench_counts_every_step(quickstart: tuple[list[str], Path]):
    """An answer's first token comes from the prefill, the others from `steps` verifications, which the histogram adds up to."""
    _, out = quickstart
    summary = json.loads((out / "bench" / "summary.json").read_text())
    assert summary["outputs_identical"] is True and summary["first_difference"] is None
    assert sum(summary["accept_histogram"]) == summary["steps"] > 0
    assert len(summary["accept_histogram"]) <= summary["num_drafts"] + 1
    assert summary["tau"] == pytest.approx((summary["tokens"] - summary["answers"]) / summary["steps"])
    assert summary["tau"] < summary["server_accept_length"], "which counts the first token too"
    assert sum(part["steps"] for part in summary["by_source"].values()) == summary["steps"]


def test_a_second_run_reuses_what_is_finished(quickstart: tuple[list[str], Path], environment: dict[str, str]):
    command, out = quickstart
    said = run(command, environment)
    assert said.count("nothing to do") == 4, said  # train/evaluate.py takes seconds, and computes again
    assert all(json.loads((out / "summary.json").read_text())["promises"].values())


def test_any_checkpoint_is_exported_as_the_run_was(quickstart: tuple[list[str], Path], environment, tmp_path: Path):
    _, out = quickstart
    checkpoint = sorted((out / "run" / "checkpoints").glob("step-*"))[-1]
    run(["train/export.py", "target=tiny_llama", f"checkpoint={checkpoint}", f"out={tmp_path / 'again'}"], environment)
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "again" / name).read_bytes() == (out / "run" / "export" / name).read_bytes()
