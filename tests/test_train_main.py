"""A whole training run as a user starts it: learning, export, a second start. Deaths: tests/test_train_resume.py."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from data import vocab
from data.locks import claim
from data.shards import ShardReader, ShardWriter
from launch.compare import of_folder
from tests.datasets import write_dataset
from tests.launched import ROOT, environment, launcher, losses, options, run, tensors
from train import checkpoint


def command(shards: Path, out: Path, target, **changes: object) -> list[str]:
    return [*launcher(1), "train/main.py", *options(shards, out, target, **changes)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory, shards, tiny_llama):
    out = tmp_path_factory.mktemp("runs") / "run"
    run(command(shards, out, tiny_llama))
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
        [sys.executable, "train/evaluate.py", "target=tiny_llama", f"target.path={tiny_llama.path}",
         f"drafter={trained}/export", f"shards={shards}", f"out={tmp_path}"]
    )  # fmt: skip
    summary, said = (json.loads((folder / "summary.json").read_text()) for folder in (tmp_path, trained))
    assert summary["loss"] == pytest.approx(said["loss"], rel=0.01)
    few, most = summary["tau_by_drafts"][0], summary["tau_by_drafts"][-1]
    assert 1.0 <= few <= most == summary["tau"] and len(summary["tau_by_drafts"]) == 3
    assert summary["greedy_share"] == 1.0, "the conversations are the target's own greedy answers"
    assert sum(group["documents"] for group in summary["by_length"].values()) == 6


def test_a_run_that_holds_nothing_out_says_so_first_and_last_and_its_summary_is_json(tiny_llama, tmp_path):
    shards = write_dataset(tmp_path / "shards", Path(tiny_llama.path), name="tiny_llama", train=6, validation=0)
    out = tmp_path / "run"
    said = run([sys.executable, "train/main.py", *options(shards, out, tiny_llama, epochs=1, checkpoint_every_steps=1)])
    assert "NONE FOR VALIDATION: no tau is measured" in said
    assert "no validation records, no tau(3) after 2 steps" in said

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    summary = json.loads((out / "summary.json").read_text(), parse_constant=refuse)
    assert summary["tau"] is None and summary["best_tau"] is None and summary["acc"] == [None] * 3
    assert of_folder(out).tau is None
    assert "nothing to do" in run([sys.executable, "train/main.py", *options(shards, out, tiny_llama, epochs=1,
                                                                             checkpoint_every_steps=1)])  # fmt: skip


def test_shards_that_are_not_there_are_an_error_that_says_what_to_do(tiny_llama, tmp_path):
    said = run([sys.executable, "train/main.py", *options(tmp_path / "none", tmp_path / "run", tiny_llama)], status=2)
    assert f"error: {tmp_path}/none has no manifest.json: run python extract/main.py out={tmp_path}/none" in said


def test_a_second_run_of_the_same_command_does_nothing(trained, shards, tiny_llama):
    before = (trained / "export" / "model.safetensors").stat().st_mtime_ns
    assert "nothing to do" in run(command(shards, trained, tiny_llama))
    assert (trained / "export" / "model.safetensors").stat().st_mtime_ns == before


def test_other_settings_in_the_same_folder_are_refused(trained, shards, tiny_llama):
    done = subprocess.run(
        command(shards, trained, tiny_llama, seed=1),
        cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode != 0
    assert "(seed=0 there, 1 here): choose another out=" in done.stderr
    assert json.loads((trained / "run.json").read_text())["seed"] == 0, "what is told of the run stays as it was"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"export_engine": "sglnag"}, "engine=sglnag: expected sglang or vllm"),
        ({"attention": "fused", "log_every_steps": 4}, "attention=fused computes in bf16, precision is fp32"),
    ],
)
def test_what_could_not_end_well_is_said_before_the_first_step(changes, words, shards, tiny_llama, tmp_path):
    said = run([sys.executable, "train/main.py", *options(shards, tmp_path / "run", tiny_llama, **changes)], status=2)
    assert words in said and not (tmp_path / "run" / "checkpoints").exists()


def test_an_export_that_could_not_be_replaced_is_said_before_the_first_step(shards, tiny_llama, tmp_path):
    """Days later the run would end with it."""
    card = tmp_path / "run" / "export" / "README.md"
    card.parent.mkdir(parents=True)
    card.write_text("This hawk is mine.")
    said = run([sys.executable, "train/main.py", *options(shards, tmp_path / "run", tiny_llama)], status=2)
    assert "export holds README.md, and an export replaces all of it: move that" in said
    assert not (tmp_path / "run" / "checkpoints").exists() and card.exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_what_needs_a_gpu_says_so_without_one(trained, shards, tiny_llama, tmp_path):
    changes = {"attention": "fused", "log_every_steps": 4, "precision": "bf16"}
    said = run([sys.executable, "train/main.py", *options(shards, tmp_path / "run", tiny_llama, **changes)], status=2)
    assert "attention=fused runs on CUDA, this is CPU: set attention=dense" in said
    told = [f"target.path={tiny_llama.path}", f"drafter={trained}/export", f"shards={shards}", f"out={tmp_path}/evaluation"]
    said = run([sys.executable, "train/evaluate.py", "target=tiny_llama", *told, "device=cuda"], status=2)
    assert "device=cuda: PyTorch finds no GPU here" in said


def with_nan(shards: Path, out: Path) -> Path:
    """The dataset with one number of record 7 gone."""
    for split in ("train", "validation"):
        reader = ShardReader(shards, split=split)
        with ShardWriter(out, provenance=reader.provenance, split=split, shard_bytes=1 << 20) as writer:
            for i, record in enumerate(reader):
                aux = record.aux.clone()
                if (split, i) == ("train", 7):
                    aux[3, 1, 5] = float("nan")
                writer.write(replace(record, aux=aux))
    shutil.copy(shards / vocab.FILE, out)
    return out


def test_a_step_that_is_not_finite_ends_the_run_before_it_is_saved(shards, tiny_llama, tmp_path):
    data = with_nan(shards, tmp_path / "shards")
    settings = {"log_every_steps": 10, "checkpoint_every_steps": 1}
    said = run([sys.executable, "train/main.py", *options(data, tmp_path / "run", tiny_llama, **settings)], status=2)
    lost = int(re.search(r"error: the gradients of step (\d+) or of one shortly before are not finite", said)[1])
    newest = checkpoint.latest(tmp_path / "run" / "checkpoints")
    assert 1 <= checkpoint.read_state(newest).step < lost <= 5
    assert all(tensor.isfinite().all() for tensor in tensors(newest).values())
    assert not (tmp_path / "run" / "export").exists()


def test_a_run_whose_folder_another_one_trains_in_is_refused_and_leaves_it_alone(shards, tiny_llama, tmp_path):
    with claim(tmp_path / ".run.lock", taken="", cure=""):
        said = run([sys.executable, "train/main.py", *options(shards, tmp_path, tiny_llama)], status=2)
    assert f"error: another run trains in {tmp_path} (process {os.getpid()} on " in said and "stop it first" in said
    assert {file.name for file in tmp_path.iterdir()} <= {".run.lock", ".hydra", "main.log", "train.log"}
