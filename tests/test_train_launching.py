"""What `accelerate launch` is told, and what of it a run refuses before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest
from accelerate.commands.config.config_args import load_config_from_file
from hydra import compose, initialize_config_dir

from data.config import typed
from tests.conftest import CONF
from tests.launched import LAUNCH, ROOT, run
from train.config import TrainConfig

FILES = sorted((ROOT / "launch/accelerate").glob("*.yaml"))


def config(*overrides: str) -> TrainConfig:
    with initialize_config_dir(str(CONF), version_base=None):
        return typed(TrainConfig, compose("train", overrides=["shards=S", "out=O", *overrides]))


def launched_with_deepspeed(monkeypatch, stage: int) -> None:
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO_STAGE", str(stage))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_file_is_one_that_accelerate_reads(file: Path):
    found = load_config_from_file(str(file))
    assert found.mixed_precision == "no", "the drafter casts its own matrices: precision=..."
    assert found.deepspeed_config.keys() <= {"zero_stage"}, "DeepSpeed's settings stand in conf/engine/"


def test_there_is_a_file_for_each_way_to_run():
    assert {file.stem for file in FILES} == {"cpu", "gpu", "ddp", "zero1", "zero2", "zero3", "multi_node"}


def test_a_file_that_starts_deepspeed_chooses_the_engine(tmp_path):
    """As accelerate launch tells its processes, read from one of them."""
    script = tmp_path / "tells.py"
    script.write_text(
        f"import json, sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "from tests.test_train_launching import config\n"
        "found = config('optim=adamw').engine\n"
        "print(json.dumps([found.name, found.deepspeed['zero_optimization']['stage']]))\n"
    )
    printed = run([*LAUNCH, "--config_file", "launch/accelerate/zero2.yaml", "--num_processes", "1", str(script)])
    assert '["zero2", 2]' in printed


@pytest.mark.parametrize("stage", [1, 3])
def test_the_files_that_start_deepspeed_differ_in_the_stage_alone(stage):
    one, two = ((ROOT / f"launch/accelerate/zero{n}.yaml").read_text() for n in (stage, 2))
    assert one.replace(f"zero_stage: {stage}", "zero_stage: 2").replace(f"zero{stage}", "zero2") == two


def test_without_deepspeed_the_engine_is_ddp_and_an_option_overrides_a_file(monkeypatch):
    assert config().engine.name == "ddp"
    launched_with_deepspeed(monkeypatch, 3)
    assert config("optim=adamw").engine.name == "zero3"
    assert config("optim=adamw", "engine=zero1").engine.name == "zero1"
    with pytest.raises(ValueError, match="told to use DeepSpeed, and engine is ddp: leave engine=zero3"):
        config("engine=ddp")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["engine=zero2", "optim=muon"], "Muon needs whole matrices: set optim=adamw, or engine=ddp"),
        (["engine=zero1", "optim=adamw", "precision=fp64"], "keeps float32 masters"),
        (["engine.gradient_dtype=fp8"], "choose fp32 or bf16"),
        (["follow=true"], "set follow_conversations"),
    ],
)
def test_what_cannot_work_is_refused_at_the_start(overrides, message):
    with pytest.raises(ValueError, match=message):
        config(*overrides)
