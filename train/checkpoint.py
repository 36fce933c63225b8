"""Checkpoints of a run: safetensors in a folder that appears whole or not at all.

    checkpoints/step-000519/
      drafter.safetensors     the masters, float32, with d2t and t2d
      average.safetensors     their moving average, where the run keeps one
      optimizer.safetensors   AdamW's moments, one pair for each parameter
      state.json              step, epoch, shape, boundaries, provenance, best tau
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

PREFIX = "step-"


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
    best_tau: float = -1.0
    best_step: int = -1
    fingerprint: dict = field(default_factory=dict)  # what must not change between a run and its continuation

    @classmethod
    def fresh(cls, *, shape: dict, boundaries: list[int], depths: int, target: str, fingerprint: dict) -> RunState:
        """Before the first step."""
        return cls(0, 0, 0, 0, 0.0, shape, list(boundaries), depths, target, fingerprint=fingerprint)


def save(
    folder: Path,
    *,
    drafter: nn.Module,
    average: AveragedModel | None,
    optimizers: list[torch.optim.Optimizer],
    state: RunState,
) -> Path:
    """Write one checkpoint under `folder` and return its path. Called by one process."""
    final = folder / f"{PREFIX}{state.step:06d}"
    partial = folder / f".partial-{final.name}"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        save_file(_contiguous(drafter.state_dict()), partial / "drafter.safetensors")
        if average is not None:
            save_file(_contiguous(average.module.state_dict()), partial / "average.safetensors")
        save_file(_optimizer_tensors(drafter, optimizers), partial / "optimizer.safetensors")
        (partial / "state.json").write_text(json.dumps(asdict(state), indent=1))
        for file in partial.iterdir():
            _sync(file)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise ValueError(
            f"could not write checkpoint {final}: {error}. Earlier checkpoints are whole: free some space, and the "
            "same command continues from the last of them"
        ) from error
    if final.exists():
        shutil.rmtree(final)
    partial.rename(final)
    _sync(folder)
    return final


def latest(folder: Path) -> Path | None:
    """The newest complete checkpoint under `folder`, or None."""
    found = sorted(folder.glob(f"{PREFIX}*/state.json"))
    return found[-1].parent if found else None


def read_state(checkpoint: Path) -> RunState:
    """Raises ValueError when `checkpoint` is no checkpoint of Eyas."""
    try:
        return RunState(**json.loads((checkpoint / "state.json").read_text()))
    except (OSError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{checkpoint} is no checkpoint ({error}): give a folder such as RUN/checkpoints/step-000519") from error


def load(
    checkpoint: Path,
    *,
    drafter: nn.Module,
    average: AveragedModel | None,
    optimizers: list[torch.optim.Optimizer],
) -> RunState:
    """Restore everything in place. Raises ValueError when a tensor does not fit."""
    state = read_state(checkpoint)
    load_weights(drafter, checkpoint / "drafter.safetensors")
    if average is not None:
        load_weights(average.module, checkpoint / "average.safetensors")
        average.n_averaged.fill_(state.step)
    tensors = load_file(checkpoint / "optimizer.safetensors")
    names = {id(p): name for name, p in drafter.named_parameters()}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                prefix = names[id(parameter)] + "/"
                mine = {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
                optimizer.state[parameter] = {
                    n: t if n == "step" and not group.get("fused") else t.to(parameter.device) for n, t in mine.items()
                }
    return state


def load_weights(module: nn.Module, file: Path) -> None:
    """Copy the tensors of `file` into `module`: every name and shape must fit, both ways."""
    found = load_file(file)
    expected = module.state_dict()
    wrong = [
        f"{name}: file {list(found[name].shape) if name in found else 'absent'}, "
        f"drafter {list(expected[name].shape) if name in expected else 'absent'}"
        for name in sorted(found.keys() | expected.keys())
        if name not in found or name not in expected or found[name].shape != expected[name].shape
    ]
    if wrong:
        raise ValueError(f"{file} does not fit this drafter: " + "; ".join(wrong[:5]))
    module.load_state_dict(found)


def prune(folder: Path, *, keep: int, best_step: int) -> None:
    """Remove all but the newest `keep` checkpoints and the best one."""
    found = sorted(folder.glob(f"{PREFIX}*"))
    for checkpoint in found[:-keep]:
        if checkpoint.name != f"{PREFIX}{best_step:06d}":
            shutil.rmtree(checkpoint)


def _optimizer_tensors(drafter: nn.Module, optimizers: list[torch.optim.Optimizer]) -> dict[str, Tensor]:
    names = {id(p): name for name, p in drafter.named_parameters()}
    return _contiguous(
        {
            f"{names[id(parameter)]}/{entry}": tensor
            for optimizer in optimizers
            for parameter, state in optimizer.state.items()
            for entry, tensor in state.items()
        }
    )


def _contiguous(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
