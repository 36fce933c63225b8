"""The engine of one process, and of DDP: every process holds everything."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor
from torch.distributed import GradBucket
from torch.futures import Future

from train import optim
from train.checkpoint import Stored
from train.config import EngineConfig, OptimConfig
from train.metrics import DepthSums
from train.model import Drafter
from train.unroll import TrainingTimeTest


class Replicated:
    """One process, or DDP."""

    def __init__(
        self, config: EngineConfig, module: TrainingTimeTest, optimizer: OptimConfig, accelerator: Accelerator
    ):
        self.drafter, self.accelerator, self.max_grad_norm = module.drafter, accelerator, optimizer.max_grad_norm
        self.average = optim.averaged(self.drafter, optimizer)
        self.optimizers = optim.build(self.drafter, optimizer)
        self.model = accelerator.prepare(module)
        if accelerator.num_processes > 1:
            dtype = torch.bfloat16 if config.gradient_dtype == "bf16" else None
            self.model.register_comm_hook(None, lambda _, bucket: sum_gradients(bucket, dtype))

    def accumulate(self, *inputs: Any, last: bool) -> DepthSums:
        with nullcontext() if last or self.accelerator.num_processes == 1 else self.accelerator.no_sync(self.model):
            summand, sums = self.model(*inputs)
            self.accelerator.backward(summand)
        return sums

    def step(self, lr: float) -> Tensor:
        optim.set_learning_rate(self.optimizers, lr)
        norm = self.accelerator.clip_grad_norm_(self.drafter.parameters(), self.max_grad_norm)
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


def sum_gradients(bucket: GradBucket, dtype: torch.dtype | None) -> Future[Tensor]:
    """Hook of DDP, which would average: the bucket's gradients, each summed over the processes by itself.

    A sum is rounded by the order of its summands, and that by an element's place in what is sent. DDP sends one bucket in
    the first step after a start and others from then on: a run that was continued would round its first step differently.

    dtype  of what is sent; None: the gradient's own
    """
    sums = [_summed(gradient, dtype) for gradient in bucket.gradients()]

    def all_are_here(last: Future[Tensor]) -> Tensor:
        for one in sums[:-1]:
            one.wait()
        return bucket.buffer()

    return sums[-1].then(all_are_here)


def _summed(gradient: Tensor, dtype: torch.dtype | None) -> Future[Tensor]:
    """The gradient, in its own place, once it is the sum over the processes."""
    sent = gradient if dtype is None else gradient.to(dtype)
    received = dist.all_reduce(sent, async_op=True).get_future()
    return received.then(lambda done: done.value()[0] if sent is gradient else gradient.copy_(done.value()[0]))
