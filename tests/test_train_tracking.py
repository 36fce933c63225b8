"""What leaves the process: metrics.jsonl, an offline W&B run without a login, and no secret."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from train.tracking import _flat, wandb_mode, without_secrets

ROOT = Path(__file__).resolve().parent.parent

SCRIPT = """
import json, sys
from accelerate import Accelerator
from types import SimpleNamespace
from omegaconf import OmegaConf
from train.tracking import Tracker

class Config(SimpleNamespace):
    pass

import train.tracking as tracking
tracking.asdict = lambda config: {"seed": 0, "wandb_api_key": "hidden", "optim": {"lr": 1e-3}}
config = Config(out=sys.argv[1], tracker=SimpleNamespace(name="wandb", project="eyas", group="g", run_name=None, mode="auto"))
accelerator = Accelerator(cpu=True, log_with="wandb", project_dir=sys.argv[1])
tracker = Tracker(config, accelerator, provenance={"boundaries": [2, 15, 27]})
tracker.log(1, {"loss": 2.0, "acc": [0.5, 0.25]})
tracker.log(2, {"tau": 1.5})
tracker.resume(1)
tracker.finish({"tau": 1.5})
"""


def environment(folder: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("WANDB")}
    return {**kept, "HOME": str(folder), "NETRC": str(folder / "none"), "PYTHONPATH": str(ROOT)}


def test_without_a_login_the_run_is_written_offline_and_holds_no_secret(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)], env=environment(tmp_path), cwd=tmp_path,
        capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    (run,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    content = run.read_bytes()
    assert b"acc/1" in content
    assert b"hidden" not in content
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines == [{"step": 1, "loss": 2.0, "acc": [0.5, 0.25]}], "a resumed run writes the lines beyond its step again"


def test_the_environment_has_the_last_word_on_the_mode(monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert wandb_mode("online") == "disabled"
    monkeypatch.delenv("WANDB_MODE")
    assert wandb_mode("offline") == "offline"


def test_names_that_speak_of_a_secret_are_dropped_and_token_counts_are_not():
    config = {"api_key": "x", "hf": {"token": "y", "tokens_per_pack": 8192}, "password": "z", "lr": 1.0}
    assert without_secrets(config) == {"hf": {"tokens_per_pack": 8192}, "lr": 1.0}


def test_figures_per_depth_become_one_curve_each():
    assert _flat({"acc": [0.5, 0.25], "validation": {"tau": 1.5}}) == {"acc/0": 0.5, "acc/1": 0.25, "validation/tau": 1.5}
