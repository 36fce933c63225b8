"""The engine of one process, and of DDP: every process holds everything."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

from accelerate import Accelerator
from torch import Tensor

from train import optim
from train.checkpoint import Stored
from train.config import OptimConfig
from train.metrics import DepthSums
from train.model import Drafter
from train.unroll import TrainingTimeTest


class Replicated:
    """One process, or DDP."""

    def __init__(self, module: TrainingTimeTest, config: OptimConfig, accelerator: Accelerator):
        self.drafter, self.config, self.accelerator = module.drafter, config, accelerator
        self.average = optim.averaged(self.drafter, config)
        self.optimizers = optim.build(self.drafter, config)
        self.model = accelerator.prepare(module)

    def accumulate(self, *inputs: Any, last: bool) -> DepthSums:
        ranks = self.accelerator.num_processes
        with nullcontext() if last or ranks == 1 else self.accelerator.no_sync(self.model):
            summand, sums = self.model(*inputs)
            self.accelerator.backward(summand * ranks)  # DDP averages over the processes: the sum is what is wanted
        return sums

    def step(self, lr: float) -> Tensor:
        optim.set_learning_rate(self.optimizers, lr)
        norm = self.accelerator.clip_grad_norm_(self.drafter.parameters(), self.config.max_grad_norm)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if self.average is not None:
            self.average.update_parameters(self.drafter)
        return norm

    def served(self) -> Drafter:
        return optim.served(self.drafter, self.average)

    def stored(self) -> Iterator[Stored]:
        yield from (Stored("drafter", name, tensor) for name, tensor in self.drafter.state_dict().items())
        if self.average is not None:
            yield from (Stored("average", name, tensor) for name, tensor in self.average.module.state_dict().items())
        names = {id(p): name for name, p in self.drafter.named_parameters()}
        for optimizer in self.optimizers:
            for parameter, state in optimizer.state.items():
                yield from (Stored("optimizer", f"{names[id(parameter)]}/{key}", x) for key, x in state.items())

    def restore(self, average: dict[str, Tensor], optimizer: dict[str, Tensor]) -> None:
        optim.restore_average(self.average, average)
        names = {id(p): name for name, p in self.drafter.named_parameters()}
        for one in self.optimizers:
            for group in one.param_groups:
                for parameter in group["params"]:
                    prefix = names[id(parameter)] + "/"
                    mine = {n.removeprefix(prefix): t for n, t in optimizer.items() if n.startswith(prefix)}
                    keep = not group.get("fused")  # PyTorch's steps lie on the CPU, unless the optimizer is fused
                    if mine:
                        one.state[parameter] = {
                            n: t.clone() if n == "step" and keep else t.to(parameter.device, copy=True)
                            for n, t in mine.items()
                        }

    def close(self) -> None:
        self.accelerator.free_memory()
