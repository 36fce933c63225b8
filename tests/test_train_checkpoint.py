"""Checkpoints: whole or absent, and nothing is lost in one."""

from __future__ import annotations

import dataclasses
import math
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf

from tests.conftest import CONF
from tests.launched import ROOT
from tests.packs import small_drafter, small_target
from train import checkpoint, optim
from train.checkpoint import RunState
from train.config import EngineConfig, OptimConfig
from train.replicated import Replicated
from train.writer import CheckpointWriter


def optimizer_config(**changes) -> OptimConfig:
    yaml = OmegaConf.load(CONF / "optim" / "adamw.yaml")
    return OptimConfig(**{**OmegaConf.to_container(yaml), **changes})


def state_of(step: int, drafter) -> RunState:
    return RunState(
        step=step, epoch=0, step_in_epoch=step, supervised_tokens=0, seconds=0.0, shape=drafter.shape.as_dict(),
        boundaries=[2, 15, 27], depths=3, target="small",
    )  # fmt: skip


class OneProcess:
    """As much of an Accelerator as an engine of one process asks for."""

    num_processes = 1

    def prepare(self, module):
        return module

    def clip_grad_norm_(self, parameters, max_norm):
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm)


def new_run(config: OptimConfig, *, seed: int = 0, **changes) -> Replicated:
    drafter = small_drafter(small_target(dtype=torch.float32), seed=seed, **changes)
    return Replicated(EngineConfig("ddp", "fp32", None), SimpleNamespace(drafter=drafter), config, OneProcess())


def steps(run: Replicated, number: int, *, first: int = 0) -> None:
    """Steps with gradients that depend on the step alone."""
    for step in range(first, first + number):
        generator = torch.Generator().manual_seed(step)
        for parameter in run.drafter.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        run.step(1e-3)


def save(run: Replicated, folder: Path, *, step: int) -> Path:
    files: dict = {}
    for file, name, tensor in run.stored():
        files.setdefault(file, {})[name] = tensor.detach().clone()
    return checkpoint.write(folder, files, dataclasses.asdict(state_of(step, run.drafter)))


def load(run: Replicated, saved: Path) -> None:
    tensors = checkpoint.read_tensors(saved)
    checkpoint.load_weights(run.drafter, tensors["drafter"], where=saved)
    run.restore(tensors["average"], tensors["optimizer"])


@pytest.mark.parametrize("name", ["adamw", "muon"])
@pytest.mark.parametrize("ema", [None, 0.9])
def test_a_restored_run_goes_on_bit_for_bit(tmp_path, name, ema):
    config = optimizer_config(name=name, ema=ema)
    run = new_run(config)
    steps(run, 3)
    saved = save(run, tmp_path, step=3)
    steps(run, 3, first=3)
    restored = new_run(config, seed=9)
    load(restored, saved)
    assert checkpoint.read_state(saved) == state_of(3, run.drafter)
    steps(restored, 3, first=3)
    whole, continued = ({(f, n): t for f, n, t in one.stored()} for one in (run, restored))
    assert whole.keys() == continued.keys()
    assert all(torch.equal(whole[key], continued[key]) for key in whole)


def test_every_parameter_has_one_optimizer():
    run = new_run(optimizer_config(name="muon"))
    owned = [id(p) for optimizer in run.optimizers for group in optimizer.param_groups for p in group["params"]]
    assert sorted(owned) == sorted(id(p) for p in run.drafter.parameters())


def test_a_full_disk_leaves_the_earlier_checkpoint_and_says_what_to_do(tmp_path, monkeypatch):
    run = new_run(optimizer_config())
    steps(run, 1)
    first = save(run, tmp_path, step=1)

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "_sync", full)
    with pytest.raises(ValueError, match="No space left.*same command continues"):
        save(run, tmp_path, step=2)
    assert checkpoint.latest(tmp_path) == first
    assert [path.name for path in tmp_path.iterdir()] == [first.name]


FULL = """
import resource, signal, sys, torch
from pathlib import Path
from train import checkpoint

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))  # no file may grow beyond it
try:
    checkpoint.write(Path(sys.argv[1]), {"drafter": {"weight": torch.zeros(10_000)}}, {"step": 1})
except ValueError as error:
    print(error)
"""


def test_tensors_that_find_no_room_are_such_an_error_too(tmp_path):
    """safetensors writes the file by itself, and its error is no OSError."""
    done = subprocess.run([sys.executable, "-c", FULL, tmp_path], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert "could not write checkpoint" in done.stdout and "same command continues" in done.stdout, done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_whose_copy_was_cut_short_is_named(tmp_path):
    run = new_run(optimizer_config(ema=0.9))
    steps(run, 1)
    saved = save(run, tmp_path, step=1)
    for name in checkpoint.FILES:
        file = saved / f"{name}.safetensors"
        whole = file.read_bytes()
        for size in (0, 7, len(whole) // 2, len(whole) - 1):
            file.write_bytes(whole[:size])
            with pytest.raises(ValueError, match=f"{name}.safetensors is damaged .*copy step-000001 again"):
                checkpoint.read_tensors(saved)
        file.unlink()
        with pytest.raises(ValueError, match=f"{name}.safetensors is damaged .*No such file"):
            checkpoint.read_tensors(saved, needed=checkpoint.FILES)
        file.write_bytes(whole)
    assert checkpoint.read_served(saved).keys() == run.drafter.state_dict().keys()


def test_what_was_not_finished_is_no_checkpoint_and_goes_away(tmp_path):
    (tmp_path / ".partial-step-000007").mkdir()
    assert checkpoint.latest(tmp_path) is None
    checkpoint.remove_partial(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_newest_and_the_best_are_kept(tmp_path):
    """Steps are numbers, not words: 1000000 comes after 999999. Of equal taus the first is the best, and nan is none."""
    run = new_run(optimizer_config())
    assert checkpoint.best(tmp_path) == (None, None)
    for step, tau in ((1, math.nan), (2, 2.5), (3, 2.5), (999_999, 2.0), (1_000_000, 1.0)):
        save(run, tmp_path, step=step)
        checkpoint.record_tau(tmp_path, step, tau)
        checkpoint.prune(tmp_path, keep=2)
    assert checkpoint.best(tmp_path) == (2, 2.5)
    assert checkpoint.latest(tmp_path).name == "step-1000000"
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-000002", "step-1000000", "step-999999"]


def test_the_tau_of_a_step_whose_checkpoint_never_was_complete_is_forgotten(tmp_path):
    for step, tau in ((5, 1.5), (10, 2.5)):
        checkpoint.record_tau(tmp_path, step, tau)
    checkpoint.forget_taus(tmp_path, beyond=5)
    assert checkpoint.taus(tmp_path) == {5: 1.5}


def test_a_drafter_of_another_size_is_refused_with_both_shapes(tmp_path):
    config = optimizer_config()
    saved = save(new_run(config), tmp_path, step=1)
    with pytest.raises(ValueError, match=r"down_proj.weight: found \[16, 40\], expected \[16, 48\]"):
        load(new_run(config, intermediate_size=48), saved)


def test_the_step_does_not_wait_for_the_disk_and_what_it_changes_meanwhile_is_not_written(tmp_path, monkeypatch):
    """The disk hangs until the run is three steps further: the checkpoint still holds the weights of its own step."""
    run, released = new_run(optimizer_config(ema=0.9)), threading.Event()
    sync = checkpoint._sync
    monkeypatch.setattr(checkpoint, "_sync", lambda path: released.wait(60) and sync(path))
    steps(run, 2)
    expected = {name: tensor.detach().clone() for name, tensor in run.drafter.state_dict().items()}
    writer = CheckpointWriter(tmp_path, keep=2, writes=True)
    writer.save(run.stored(), state_of(2, run.drafter))
    steps(run, 3, first=2)
    assert writer.busy and checkpoint.latest(tmp_path) is None
    released.set()
    writer.finish()
    found = checkpoint.read_tensors(checkpoint.latest(tmp_path))["drafter"]
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert not torch.equal(found["fc.weight"], run.drafter.fc.weight)


def test_a_kill_at_any_moment_leaves_the_last_complete_checkpoint(tmp_path):
    """Thirty kills of a process that does nothing but write and prune checkpoints, whose every number is their step."""
    drafter = small_drafter(small_target(dtype=torch.float32))
    moments = random.Random(0)
    reached = 0
    for _ in range(30):
        child = os.fork()
        if child == 0:
            try:
                checkpoint.remove_partial(tmp_path)
                for step in range(reached + 1, reached + 10_000):
                    files = {name: {"weight": torch.full((300,), float(step))} for name in checkpoint.FILES}
                    checkpoint.write(tmp_path, files, dataclasses.asdict(state_of(step, drafter)))
                    checkpoint.record_tau(tmp_path, step, float(step % 7))
                    checkpoint.prune(tmp_path, keep=2)
            finally:
                os._exit(1)
        time.sleep(moments.uniform(0.02, 0.2))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        newest = checkpoint.latest(tmp_path)
        if newest is None:  # killed in its first one
            continue
        step = checkpoint.read_state(newest).step
        assert step >= reached and newest.name == f"step-{step:06d}"
        for tensors in checkpoint.read_tensors(newest).values():
            assert torch.equal(tensors["weight"], torch.full((300,), float(step)))
        best_step, _ = checkpoint.best(tmp_path)
        assert best_step is None or (tmp_path / f"step-{best_step:06d}" / "state.json").exists()
        reached = step
    assert reached >= 10, "the kills came too early to test anything"


def test_a_checkpoint_that_could_not_be_written_stops_the_run_at_the_next_one(tmp_path):
    (tmp_path / "checkpoints").write_text("a file where the folder should be")
    run = new_run(optimizer_config())
    writer = CheckpointWriter(tmp_path / "checkpoints", keep=2, writes=True)
    writer.save(run.stored(), state_of(1, run.drafter))
    with pytest.raises(ValueError, match="could not write checkpoint"):
        writer.save(run.stored(), state_of(2, run.drafter))


def test_the_learning_rate_warms_up_and_falls_on_a_cosine():
    """By hand, 11 steps of which 1 warms up: full at step 1, half way down at step 5.5, the floor at step 10."""
    config = optimizer_config(lr=1.0, warmup_fraction=2 / 11, final_lr_fraction=0.1)
    rates = [optim.learning_rate(step, total_steps=11, config=config) for step in range(11)]
    assert rates[0] == 0.5 and rates[1] == 1.0 and rates[2] == 1.0
    assert rates[6] == pytest.approx(0.1 + 0.9 * 0.5)
    assert rates[10] == pytest.approx(0.1)
