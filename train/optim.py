"""Optimizer, learning rate and the average of the weights.

The drafter's parameters are float32 whatever the products run in: they are the masters, and no engine
keeps another copy. AdamW is PyTorch's, fused where the device has it; so is Muon (matrices only, AdamW
beside it for the head and the norms).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from train.config import OptimConfig
from train.model import Drafter

HEAD = "lm_head.weight"


def build(drafter: Drafter, config: OptimConfig) -> list[torch.optim.Optimizer]:
    """The optimizers that together own every trainable parameter once."""
    parameters = {name: p for name, p in drafter.named_parameters() if p.requires_grad}
    matrices = [p for name, p in parameters.items() if p.dim() == 2 and name != HEAD and config.name == "muon"]
    owned = {id(p) for p in matrices}
    others = [p for p in parameters.values() if id(p) not in owned]
    groups = [
        {"params": [p for p in others if p.dim() > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in others if p.dim() <= 1], "weight_decay": 0.0},
    ]
    on_cuda = all(p.is_cuda for p in others)
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(groups, lr=config.lr, betas=tuple(config.betas), eps=1e-8, fused=on_cuda)
    ]
    if matrices:
        # match_rms_adamw scales Muon's update to AdamW's size, so that one learning rate serves both
        muon = torch.optim.Muon(
            matrices, lr=config.lr, weight_decay=config.weight_decay, adjust_lr_fn="match_rms_adamw"
        )
        optimizers.append(muon)
    return optimizers


def learning_rate(step: int, *, total_steps: int, config: OptimConfig) -> float:
    """Of step 0 .. total_steps-1: linear from 0 over the warm-up, then a cosine to final_lr_fraction * lr."""
    warmup = round(config.warmup_fraction * total_steps)
    if step < warmup:
        return config.lr * (step + 1) / warmup
    progress = (step - warmup) / max(total_steps - 1 - warmup, 1)
    floor = config.final_lr_fraction
    return config.lr * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0))))


def set_learning_rate(optimizers: list[torch.optim.Optimizer], lr: float) -> None:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = lr


def averaged(drafter: Drafter, config: OptimConfig) -> AveragedModel | None:
    """The exponential moving average of the weights, or None when the config wants none."""
    if config.ema is None:
        return None
    average = AveragedModel(drafter, multi_avg_fn=get_ema_multi_avg_fn(config.ema))
    return average.requires_grad_(False)


def served(drafter: Drafter, average: AveragedModel | None) -> Drafter:
    """The weights that are evaluated and exported: the average where there is one."""
    return drafter if average is None else average.module


def restore_average(average: AveragedModel | None, tensors: dict[str, Tensor]) -> None:
    """Take the average of a checkpoint, where there is one."""
    if average is not None:
        average.module.load_state_dict(tensors)
        average.n_averaged.fill_(1)  # not 0, which would make the next update a copy
