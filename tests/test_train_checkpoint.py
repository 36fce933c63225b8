"""Checkpoints: whole or absent, and nothing is lost in one."""

from __future__ import annotations

import copy

import pytest
import torch
from omegaconf import OmegaConf

from tests.conftest import CONF
from tests.packs import small_drafter, small_target
from train import checkpoint, optim
from train.checkpoint import RunState
from train.config import OptimConfig


def optimizer_config(**changes) -> OptimConfig:
    yaml = OmegaConf.load(CONF / "optim" / "adamw.yaml")
    return OptimConfig(**{**OmegaConf.to_container(yaml), **changes})


def new_run(config: OptimConfig, *, seed: int = 0):
    drafter = small_drafter(small_target(dtype=torch.float32), seed=seed)
    state = RunState.fresh(shape=drafter.shape.as_dict(), boundaries=[2, 15, 27], depths=3, target="small", fingerprint={})
    return drafter, optim.averaged(drafter, config), optim.build(drafter, config), state


def steps(run, number: int, *, first: int = 0) -> None:
    """Steps with gradients that depend on the step alone."""
    drafter, average, optimizers, state = run
    for step in range(first, first + number):
        generator = torch.Generator().manual_seed(step)
        for parameter in drafter.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        for optimizer in optimizers:
            optimizer.step()
        if average is not None:
            average.update_parameters(drafter)
        state.step = step + 1


@pytest.mark.parametrize("name", ["adamw", "muon"])
@pytest.mark.parametrize("ema", [None, 0.9])
def test_a_restored_run_goes_on_bit_for_bit(tmp_path, name, ema):
    config = optimizer_config(name=name, ema=ema)
    run = new_run(config)
    steps(run, 3)
    saved = checkpoint.save(tmp_path, drafter=run[0], average=run[1], optimizers=run[2], state=copy.copy(run[3]))
    steps(run, 3, first=3)
    restored = new_run(config, seed=9)
    state = checkpoint.load(saved, drafter=restored[0], average=restored[1], optimizers=restored[2])
    assert state.step == 3
    steps(restored, 3, first=3)
    for whole, continued in zip(run[:2], restored[:2], strict=True):
        if whole is not None:
            for key, tensor in whole.state_dict().items():
                assert torch.equal(tensor, continued.state_dict()[key]), key


def test_every_parameter_has_one_optimizer():
    run = new_run(optimizer_config(name="muon"))
    owned = [id(p) for optimizer in run[2] for group in optimizer.param_groups for p in group["params"]]
    assert sorted(owned) == sorted(id(p) for p in run[0].parameters())


def test_a_full_disk_leaves_the_earlier_checkpoint_and_says_what_to_do(tmp_path, monkeypatch):
    run = new_run(optimizer_config())
    steps(run, 1)
    first = checkpoint.save(tmp_path, drafter=run[0], average=None, optimizers=run[2], state=run[3])
    steps(run, 1, first=1)

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "_sync", full)
    with pytest.raises(ValueError, match="No space left.*same command continues"):
        checkpoint.save(tmp_path, drafter=run[0], average=None, optimizers=run[2], state=run[3])
    assert checkpoint.latest(tmp_path) == first
    assert [path.name for path in tmp_path.iterdir()] == [first.name]


def test_what_was_not_finished_is_no_checkpoint(tmp_path):
    (tmp_path / ".partial-step-000007").mkdir()
    assert checkpoint.latest(tmp_path) is None


def test_the_newest_and_the_best_are_kept(tmp_path):
    run = new_run(optimizer_config())
    for step in range(1, 6):
        steps(run, 1, first=step - 1)
        checkpoint.save(tmp_path, drafter=run[0], average=None, optimizers=run[2], state=run[3])
        checkpoint.prune(tmp_path, keep=2, best_step=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000002", "step-000004", "step-000005"]


def test_a_drafter_of_another_size_is_refused_with_both_shapes(tmp_path):
    config = optimizer_config()
    run = new_run(config)
    saved = checkpoint.save(tmp_path, drafter=run[0], average=None, optimizers=run[2], state=run[3])
    other = small_drafter(small_target(dtype=torch.float32), intermediate_size=48)
    with pytest.raises(ValueError, match=r"down_proj.weight: file \[16, 40\], drafter \[16, 48\]"):
        checkpoint.load(saved, drafter=other, average=None, optimizers=optim.build(other, config))


def test_the_learning_rate_warms_up_and_falls_on_a_cosine():
    """By hand, 11 steps of which 1 warms up: full at step 1, half way down at step 5.5, the floor at step 10."""
    config = optimizer_config(lr=1.0, warmup_fraction=2 / 11, final_lr_fraction=0.1)
    rates = [optim.learning_rate(step, total_steps=11, config=config) for step in range(11)]
    assert rates[0] == 0.5 and rates[1] == 1.0 and rates[2] == 1.0
    assert rates[6] == pytest.approx(0.1 + 0.9 * 0.5)
    assert rates[10] == pytest.approx(0.1)
