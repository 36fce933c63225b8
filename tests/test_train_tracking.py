"""What leaves the process: metrics.jsonl, an offline W&B run without a login that holds no secret, TensorBoard."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from launch import offline_runs
from train.tracking import _flat, costs, git_commit, wandb_mode, without_secrets

ROOT = Path(__file__).resolve().parent.parent

SCRIPT = """
import sys
from pathlib import Path
from accelerate import Accelerator
from hydra import compose, initialize_config_dir
from data.config import typed
from train.config import TrainConfig
from train.tracking import Tracker

out, name, mode = sys.argv[1:]
with initialize_config_dir("ROOT/conf", version_base=None):
    config = typed(TrainConfig, compose("train", [
        f"out={out}", "shards=s3://user:hidden-in-the-address@host/shards", f"tracker={name}", f"tracker.mode={mode}",
        "tracker.group=a-sweep", "tracker.run_name='lr=1e-3 depths=4'", "optim.lr=1e-3", "target=tiny_llama",
        "target.path=models/hidden-by-value/tiny",
    ]))
export = Path(out, "export")
export.mkdir(parents=True)
(export / "model.safetensors").write_bytes(bytes(range(256)) * 4096)
accelerator = Accelerator(cpu=True, log_with=name, project_dir=out)
tracker = Tracker(config, accelerator, provenance={"boundaries": [2, 15, 27], "weights_fingerprint": "f00d"})
tracker.begin(0)
tracker.log(1, {"loss": 2.0, "acc": [0.5, 0.25], "alpha": [0.6, 0.5], "supervised_tokens": 1000})
tracker.log(2, {"loss": 1.5, "acc": [0.6, float("nan")], "alpha": [0.7, 0.5], "supervised_tokens": 2500})
tracker.log(2, {"tau": 1.75, "validation": {"tau": 1.75, "acc": [0.55, 0.3]}})
tracker.finish({"best_tau": 1.75, "gpu_hours": 0.5, "dollars": 1.25, "boundaries": [2, 15, 27]}, drafter=export)
""".replace("ROOT", str(ROOT))


def environment(folder: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("WANDB")}
    secrets = {"HF_TOKEN": "hidden-by-value", "AWS_SECRET_ACCESS_KEY": "hidden-in-environment", "EYAS_CANARY": "canary-value"}
    return {**kept, "HOME": str(folder), "NETRC": str(folder / "none"), "PYTHONPATH": str(ROOT), **secrets}


def track(folder: Path, name: str, mode: str = "auto") -> Path:
    out = folder / "run"
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(out), name, mode], env=environment(folder), cwd=folder,
        capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return out


@pytest.fixture(scope="module")
def out(tmp_path_factory) -> Path:
    """A run tracked by W&B on a machine without a login."""
    return track(tmp_path_factory.mktemp("tracked"), "wandb")


@pytest.fixture(scope="module")
def run(out: Path) -> offline_runs.OfflineRun:
    (folder,) = out.glob("wandb/offline-run-*")
    return offline_runs.read(folder)


def test_the_run_is_named_and_grouped_by_what_a_sweep_says(run):
    assert (run.name, run.group) == ("lr=1e-3 depths=4", "a-sweep")


def test_the_whole_resolved_config_is_there_with_provenance_and_commit(run):
    assert run.config["optim"]["lr"] == 1e-3 and run.config["drafter"]["num_key_value_heads"] is None
    assert run.config["provenance"]["weights_fingerprint"] == "f00d"
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    assert run.config["git"] == git_commit() and git_commit().get("commit", "") == head


def test_every_curve_is_drawn_over_supervised_tokens(run):
    """A validation has no count of its own: it stands at the last step's."""
    assert run.axes["*"] == run.axes["tau"] == "supervised_tokens"
    assert [row["supervised_tokens"] for row in run.history] == [1000, 2500]
    assert run.history[-1]["tau"] == 1.75 and run.history[-1]["acc/0"] == 0.6


def test_accuracy_and_alpha_are_one_chart_each_with_a_line_per_depth(run, out):
    charts = {key.rsplit("/", 1)[-1] for key in run.config if key.startswith("_wandb/visualize")}
    assert charts == {"acc", "alpha"}
    (table,) = out.glob("wandb/offline-run-*/files/media/table/by_depth/acc_table*.json")
    rows = json.loads(table.read_text())["data"]
    assert [row for row in rows if "draft 1" in row] == [[1000, "draft 1", 0.5], [2500, "draft 1", 0.6]]
    assert [row for row in rows if "draft 2" in row] == [[1000, "draft 2", 0.25], [2500, "draft 2", None]]


def test_the_summary_says_what_it_took(run):
    assert {name: run.summary[name] for name in ("best_tau", "gpu_hours", "dollars")} == {
        "best_tau": 1.75, "gpu_hours": 0.5, "dollars": 1.25,
    }  # fmt: skip


def test_the_drafter_is_an_artifact_by_reference_and_is_not_copied(run, out):
    assert any(name.startswith("drafter-") for name in run.artifacts)
    content = bytes(range(256)) * 4096
    copies = [f for f in out.rglob("*") if f.is_file() and f.stat().st_size == len(content) and f.parent.name != "export"]
    assert copies == [], "what was exported lies in export/ alone"


def test_no_secret_reaches_anything_that_is_written(out):
    """Neither the environment, nor a value of it inside an option, nor a password in an address."""
    for file in out.rglob("*"):
        if file.is_file() and not file.is_symlink():
            content = file.read_bytes()
            for secret in (b"hidden-by-value", b"hidden-in-environment", b"canary-value", b"hidden-in-the-address"):
                assert secret not in content, (file, secret)


def test_metrics_jsonl_holds_every_line_whatever_the_tracker(out):
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 2]
    assert lines[0] == {"step": 1, "loss": 2.0, "acc": [0.5, 0.25], "alpha": [0.6, 0.5], "supervised_tokens": 1000}
    assert lines[2]["tau"] == 1.75 and lines[2]["supervised_tokens"] == 2500


def test_tensorboard_draws_over_supervised_tokens_too(tmp_path):
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    out = track(tmp_path, "tensorboard")
    (folder,) = {file.parent for file in out.rglob("events.out.tfevents.*") if file.parent.name == "eyas"}
    found = events.EventAccumulator(str(folder)).Reload()
    assert [(e.step, round(e.value, 6)) for e in found.Scalars("acc/0")] == [(1000, 0.5), (2500, 0.6)]
    assert [(e.step, e.value) for e in found.Scalars("tau")] == [(2500, 1.75)]
    assert found.Scalars("summary/best_tau")[0].value == 1.75
    assert "custom_scalars__config__" in found.Tags()["tensors"], "accuracy by depth is one chart"


def test_a_disabled_run_writes_its_metrics_and_nothing_of_wandbs(tmp_path):
    out = track(tmp_path, "wandb", "disabled")
    assert (out / "metrics.jsonl").exists() and not list(out.glob("wandb/*run-*"))


def test_the_environment_has_the_last_word_on_the_mode(monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert wandb_mode("online") == "disabled"
    monkeypatch.delenv("WANDB_MODE")
    assert wandb_mode("offline") == "offline"


def test_names_that_speak_of_a_secret_are_dropped_and_counts_are_not():
    config = {"api_key": "x", "hf": {"token": "y", "tokens_per_pack": 8192}, "password": "z", "num_key_value_heads": 8}
    assert without_secrets(config) == {"hf": {"tokens_per_pack": 8192}, "num_key_value_heads": 8}


def test_an_address_loses_its_password_and_its_signature(monkeypatch):
    assert without_secrets({"shards": "s3://me:word@host/x", "a": ["https://h/x?X-Amz-Signature=1"]}) == {
        "shards": "s3://***@host/x", "a": ["https://h/x?***"],
    }  # fmt: skip
    monkeypatch.setenv("MY_API_KEY", "abcdef123")
    assert without_secrets({"engine": {"extra_args": ["--key=abcdef123"]}}) == {"engine": {"extra_args": ["--key=***"]}}


def test_figures_per_depth_become_one_curve_each():
    assert _flat({"acc": [0.5, 0.25], "validation": {"tau": 1.5}}) == {"acc/0": 0.5, "acc/1": 0.25, "validation/tau": 1.5}


def test_what_a_run_costs():
    """By hand: 8 GPUs for half an hour are 4 GPU hours, 10 dollars at 2.50 each; 9e6 tokens in 1800 s are 5000 a second."""
    found = costs(seconds=1800, devices=8, tokens=9e6, dollars_per_gpu_hour=2.5)
    assert found == {"tokens_per_second": 5000.0, "gpu_hours": 4.0, "dollars": 10.0}
    assert "dollars" not in costs(seconds=1800, devices=8, tokens=9e6, dollars_per_gpu_hour=None)


def test_the_offline_reader_stops_where_a_killed_run_was_cut(out, tmp_path):
    (file,) = out.glob("wandb/offline-run-*/run-*.wandb")
    whole = list(offline_runs.records(file))
    cut = tmp_path / "run-cut.wandb"
    cut.write_bytes(file.read_bytes()[:-5])
    assert list(offline_runs.records(cut)) == whole[:-1]
    cut.write_bytes(b"something else")
    with pytest.raises(ValueError, match="no run file of W&B"):
        list(offline_runs.records(cut))
