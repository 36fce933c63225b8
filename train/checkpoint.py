"""Checkpoints of a run: safetensors in a folder that appears whole or not at all.

    checkpoints/step-000519/
      drafter.safetensors     the masters, float32, with d2t and t2d
      average.safetensors     their moving average, where the run keeps one
      optimizer.safetensors   the moments, PARAMETER/exp_avg and so on, whole whatever engine wrote them
      state.json              step, epoch, shape, boundaries, fingerprints of settings and shards
    checkpoints/tau.json      tau of every validated step: the best one is kept
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from data.config import fingerprint, write_atomically
from train.config import TrainConfig
from train.shape import DrafterShape

PREFIX = "step-"
FILES = ("drafter", "average", "optimizer")


class Stored(NamedTuple):
    """One whole tensor of a checkpoint: in which of its files, under which name."""

    file: str  # one of FILES
    name: str
    tensor: Tensor


@dataclass
class RunState:
    """Where a run stands, besides its tensors: everything that a resumed run cannot work out again."""

    step: int  # optimizer steps done
    epoch: int  # epoch that the next step belongs to
    step_in_epoch: int
    supervised_tokens: int
    seconds: float
    shape: dict
    boundaries: list[int]
    depths: int
    target: str
    fingerprint: dict = field(default_factory=dict)  # what must not change between a run and its continuation
    interval: list[dict] = field(default_factory=list)  # of each process: what it summed since the last line of the log
    arrived: list[int] = field(default_factory=list)  # with follow: how many records each part of the first epoch had

    @classmethod
    def fresh(cls, config: TrainConfig, shape: DrafterShape, *, shards: Path) -> RunState:
        """Before the first step of the run that `config` asks for, on the dataset in the folder `shards`."""
        batch = {name: value for name, value in asdict(config.batch).items() if name != "num_workers"}
        return cls(
            step=0,
            epoch=0,
            step_in_epoch=0,
            supervised_tokens=0,
            seconds=0.0,
            shape=shape.as_dict(),
            boundaries=list(config.target.boundaries),
            depths=config.drafter.depths,
            target=config.target.name,
            fingerprint={
                **{name: asdict(getattr(config, name)) for name in ("drafter", "loss", "optim")},
                **{name: getattr(config, name) for name in ("seed", "epochs", "precision", "init_from", "follow")},
                "batch": batch,
                "shards": config.shards if config.follow else fingerprint(shards / "manifest.json"),
            },
        )

    def check_continues(self, checkpoint: Path, found: RunState) -> None:
        """Raises ValueError naming both sides where `found`, read from `checkpoint`, is of another run than this."""
        there, here = _by_option(found.fingerprint), _by_option(self.fingerprint)
        changed = [f"{key}={there.get(key)} there, {value} here" for key, value in here.items() if there.get(key) != value]
        if changed:
            raise ValueError(
                f"{checkpoint} belongs to a run with other settings ({'; '.join(changed[:3])}): choose another out=, "
                "or remove the folder"
            )


def _by_option(settings: dict, prefix: str = "") -> dict[str, Any]:
    """optim.lr -> its value."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        found |= _by_option(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return found


def write(folder: Path, files: Mapping[str, dict[str, Tensor]], state: dict) -> Path:
    """Write one checkpoint under `folder` and return its path. Called by one process.

    files  {"drafter": {name: tensor}, ...}, on the CPU and contiguous; state: a RunState as a dict

    Raises ValueError when the disk is full: then nothing of it is left, and the earlier ones are whole.
    """
    final = folder / f"{PREFIX}{state['step']:06d}"
    partial = folder / f".partial-{final.name}"
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        for name, tensors in files.items():
            save_tensors(tensors, partial / f"{name}.safetensors")
        (partial / "state.json").write_text(json.dumps(state, indent=1))
        for path in (*partial.iterdir(), partial):
            _sync(path)
        if not final.exists():  # else a run that was continued came here a second time, with the same tensors
            partial.rename(final)
        shutil.rmtree(partial, ignore_errors=True)
        _sync(folder)
    except (OSError, SafetensorError) as error:  # safetensors has its own word for a full disk
        shutil.rmtree(partial, ignore_errors=True)
        raise ValueError(
            f"could not write checkpoint {final}: {error}. Earlier checkpoints are whole: free some space, and the "
            "same command continues from the last of them"
        ) from error
    return final


def save_tensors(tensors: dict[str, Tensor], file: Path, metadata: dict[str, str] | None = None) -> None:
    """As safetensors' save_file, which makes a file that only its owner may read: a server may be another user's."""
    file.touch()
    mode = file.stat().st_mode & 0o777  # as the umask has it
    save_file(tensors, file, metadata)
    file.chmod(mode)


def latest(folder: Path) -> Path | None:
    """The newest complete checkpoint under `folder`, or None."""
    found = sorted(folder.glob(f"{PREFIX}*/state.json"), key=lambda path: _step(path.parent))
    return found[-1].parent if found else None


def remove_partial(folder: Path) -> None:
    """What a killed run left half-written."""
    for partial in folder.glob(".partial-*"):
        shutil.rmtree(partial)


def read_state(checkpoint: Path) -> RunState:
    """Raises ValueError when `checkpoint` is no checkpoint of Eyas."""
    try:
        return RunState(**json.loads((checkpoint / "state.json").read_text()))
    except (OSError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(
            f"{checkpoint} is no checkpoint ({error}): give a folder such as RUN/checkpoints/step-000519"
        ) from error


def read_tensors(checkpoint: Path, *, needed: Collection[str] = ("drafter",)) -> dict[str, dict[str, Tensor]]:
    """{"drafter": {name: tensor}, "average": ..., "optimizer": ...}, on the CPU; a file that is not there is empty.

    Raises ValueError where one is damaged, or a `needed` one is not there: a copy of the checkpoint was cut short.
    """
    files = {name: checkpoint / f"{name}.safetensors" for name in FILES}
    return {name: _read(file) if name in needed or file.exists() else {} for name, file in files.items()}


def read_served(checkpoint: Path) -> dict[str, Tensor]:
    """The weights that are exported: the average where there is one. Raises ValueError as `read_tensors` does."""
    average = checkpoint / "average.safetensors"
    return _read(average if average.exists() else checkpoint / "drafter.safetensors")


def _read(file: Path) -> dict[str, Tensor]:
    try:
        return load_file(file)
    except (OSError, SafetensorError) as error:
        raise ValueError(
            f"{file} is damaged ({error}): copy {file.parent.name} again, or remove it and use the one before"
        ) from error


def load_weights(module: nn.Module, tensors: Mapping[str, Tensor], *, where: Path | str) -> None:
    """Copy `tensors` into `module`: every name and shape must fit, both ways, or ValueError lists them."""
    check_fit(tensors, module.state_dict(), where=where)
    module.load_state_dict(tensors)


def check_fit(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], *, where: Path | str) -> None:
    """Raises ValueError that lists, with both shapes, what of `found`, from `where`, is not as `expected`."""
    wrong = [
        f"{name}: found {list(found[name].shape) if name in found else 'nothing'}, "
        f"expected {list(expected[name].shape) if name in expected else 'no such tensor'}"
        for name in sorted(found.keys() | expected.keys())
        if name not in found or name not in expected or found[name].shape != expected[name].shape
    ]
    if wrong:
        raise ValueError(f"{where} does not fit this drafter: " + "; ".join(wrong[:5]))


def taus(folder: Path) -> dict[int, float]:
    """tau of every step that was validated."""
    file = folder / "tau.json"
    return {int(step): tau for step, tau in json.loads(file.read_text()).items()} if file.exists() else {}


def record_tau(folder: Path, step: int, tau: float) -> None:
    write_atomically(folder / "tau.json", json.dumps(taus(folder) | {step: tau}))


def forget_taus(folder: Path, *, beyond: int) -> None:
    """Of steps that a run which goes on after `beyond` has still to do, because their checkpoint never was complete."""
    known = taus(folder)
    kept = {step: tau for step, tau in known.items() if step <= beyond}
    if kept != known:
        write_atomically(folder / "tau.json", json.dumps(kept))


def best(folder: Path) -> tuple[int, float] | tuple[None, None]:
    """Step and tau of the best validation, the first of equal ones; None of both before any. nan is none: it had no record."""
    measured = [(step, tau) for step, tau in taus(folder).items() if tau == tau]
    return max(measured, key=lambda item: (item[1], -item[0]), default=(None, None))


def prune(folder: Path, *, keep: int) -> None:
    """Remove all but the newest `keep` checkpoints and the best one."""
    best_step, _ = best(folder)
    found = sorted(folder.glob(f"{PREFIX}*"), key=_step)
    for checkpoint in found[:-keep]:
        if _step(checkpoint) != best_step:
            doomed = folder / f".partial-{checkpoint.name}"  # under this name a kill leaves no half of a checkpoint
            checkpoint.rename(doomed)
            shutil.rmtree(doomed)


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix(PREFIX))


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
