"""DeepSpeed's ZeRO as an engine: what every process would hold alike is cut over the processes. AdamW only."""

from __future__ import annotations

import copy
import gc
import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

from train import optim
from train.checkpoint import Stored
from train.config import EngineConfig, OptimConfig
from train.metrics import DepthSums
from train.model import Drafter
from train.unroll import TrainingTimeTest

ADAMW_STATE = ("exp_avg", "exp_avg_sq")


class Zero:
    """DeepSpeed's ZeRO-1 and ZeRO-2: weights whole everywhere, the rest of it cut into flat pieces. AdamW only."""

    def __init__(
        self, config: EngineConfig, module: TrainingTimeTest, optimizer: OptimConfig, accelerator: Accelerator
    ):
        self.drafter, self.accelerator = module.drafter, accelerator
        deepspeed = _deepspeed(accelerator.device)
        self.average = self._averaged(optimizer)
        (self.adamw,) = optim.build(self.drafter, optimizer)
        settings = _settings(config, max_grad_norm=optimizer.max_grad_norm, device=accelerator.device)
        self.engine, *_ = deepspeed.initialize(model=self._wrapped(module), optimizer=self.adamw, config=settings)

    def _wrapped(self, module: TrainingTimeTest) -> torch.nn.Module:
        return module

    def _averaged(self, config: OptimConfig):
        return optim.averaged(self.drafter, config)

    def accumulate(self, *inputs: Any, last: bool) -> DepthSums:
        self.engine.set_gradient_accumulation_boundary(last)
        summand, sums = self.engine(*inputs)
        self.engine.backward(summand * self.accelerator.num_processes)  # it averages, as DDP does
        return sums

    def step(self, lr: float) -> Tensor:
        optim.set_learning_rate([self.adamw], lr)
        self.engine.step()  # clips, updates and clears
        if self.average is not None:
            self._update_average()
        return torch.as_tensor(self.engine.get_global_grad_norm())

    def _update_average(self) -> None:
        self.average.update_parameters(self.drafter)

    def served(self) -> Drafter:
        return optim.served(self.drafter, self.average)

    def stored(self) -> Iterator[Stored]:
        from deepspeed.utils import safe_get_full_optimizer_state

        yield from (Stored("drafter", name, tensor) for name, tensor in self._whole_weights().items())
        if self.average is not None:
            yield from (Stored("average", name, tensor) for name, tensor in self._whole_average().items())
        steps = [state["step"] for state in self.adamw.state.values()]
        if not steps:
            return  # before the first step
        self._link_state()
        for name, parameter in self.drafter.named_parameters():
            yield Stored("optimizer", f"{name}/step", steps[0])
            for key in ADAMW_STATE:
                yield Stored("optimizer", f"{name}/{key}", safe_get_full_optimizer_state(parameter, key))

    def _whole_weights(self) -> dict[str, Tensor]:
        return self.drafter.state_dict()

    def _whole_average(self) -> dict[str, Tensor]:
        return self.average.module.state_dict()

    def restore(self, average: dict[str, Tensor], optimizer: dict[str, Tensor]) -> None:
        if self.average is not None:
            self._restore_average(average)
        if optimizer:
            self._restore_optimizer(optimizer)

    def _restore_average(self, whole: dict[str, Tensor]) -> None:
        optim.restore_average(self.average, whole)

    def _restore_optimizer(self, whole: dict[str, Tensor]) -> None:
        fused = any(group.get("fused") for group in self.adamw.param_groups)
        step = next(tensor for name, tensor in whole.items() if name.endswith("/step"))
        for piece in self._pieces():  # as AdamW's first step would make it
            zeros = {key: torch.zeros_like(piece) for key in ADAMW_STATE}
            self.adamw.state[piece] = {"step": step.to(piece.device if fused else "cpu", copy=True), **zeros}
        self._link_state()
        for name, parameter in self.drafter.named_parameters():
            for key in ADAMW_STATE:
                self._set_state(parameter, key, whole[f"{name}/{key}"])

    def _set_state(self, parameter: Tensor, key: str, whole: Tensor) -> None:
        from deepspeed.utils import safe_set_full_optimizer_state

        safe_set_full_optimizer_state(parameter, whole.to(self.accelerator.device), key)

    def close(self) -> None:
        self.engine.destroy()
        del self.engine
        gc.collect()  # what is left to the end of the process can abort it

    def _pieces(self) -> list[Tensor]:
        """This process's flat pieces of the float32 masters, which are what AdamW sees."""
        return list(self.engine.optimizer.single_partition_of_fp32_groups)

    def _link_state(self) -> None:
        """Let DeepSpeed find AdamW's state of every parameter: by itself it looks after the first group's step only."""
        self.engine.optimizer._hp_optimizer_states_linked = False
        self.engine.optimizer._lazy_init_hp_params_optimizer_state()


class ZeroThree(Zero):
    """DeepSpeed's ZeRO-3: the weights are cut too, and so is their average."""

    def _wrapped(self, module: TrainingTimeTest) -> torch.nn.Module:
        return OneModule(module)

    def _averaged(self, config: OptimConfig) -> ShardAverage | None:
        self.template = copy.deepcopy(self.drafter).requires_grad_(False).to("meta")
        return None if config.ema is None else ShardAverage(config.ema)

    def _update_average(self) -> None:
        self.average.update([parameter.ds_tensor for parameter in self.drafter.parameters()])

    def served(self) -> Drafter:
        drafter = copy.deepcopy(self.template).to_empty(device=self.accelerator.device)
        drafter.rotary = copy.deepcopy(self.drafter.rotary)  # its table is in no state dict
        drafter.load_state_dict(self._whole_weights() if self.average is None else self._whole_average())
        return drafter

    def _whole_weights(self) -> dict[str, Tensor]:
        return self._whole([parameter.ds_tensor for parameter in self.drafter.parameters()])

    def _whole_average(self) -> dict[str, Tensor]:
        if not self.average.shards:  # before the first step
            return self._whole_weights()
        return self._whole(self.average.shards)

    def _whole(self, shards: list[Tensor]) -> dict[str, Tensor]:
        """Every process's shards put together, and the vocabulary map, which is not cut."""
        whole = {}
        for (name, parameter), shard in zip(self.drafter.named_parameters(), shards, strict=True):
            flat = shard.new_empty(shard.numel() * self.accelerator.num_processes)
            if self.accelerator.num_processes > 1:
                dist.all_gather_into_tensor(flat, shard.detach().contiguous())
            else:
                flat.copy_(shard.detach())
            whole[name] = flat[: parameter.ds_numel].view(parameter.ds_shape)
        return whole | {name: self.drafter.get_buffer(name) for name in ("d2t", "t2d")}

    def _restore_average(self, whole: dict[str, Tensor]) -> None:
        parameters = self.drafter.named_parameters()
        self.average.shards = [self._shard(whole[name], of=parameter) for name, parameter in parameters]

    def _set_state(self, parameter: Tensor, key: str, whole: Tensor) -> None:
        """By this process's part: DeepSpeed's own way of cutting fails where the parts are not equal."""
        from deepspeed.utils import safe_set_local_optimizer_state

        safe_set_local_optimizer_state(parameter, self._shard(whole, of=parameter), key)

    def _shard(self, whole: Tensor, *, of: Tensor) -> Tensor:
        """This process's part of a whole tensor, cut as DeepSpeed cuts: equal parts, the last one padded."""
        size, rank = of.ds_tensor.numel(), self.accelerator.process_index
        flat = torch.zeros(size * self.accelerator.num_processes, dtype=whole.dtype)
        flat[: whole.numel()] = whole.flatten()
        return flat[rank * size : (rank + 1) * size].to(self.accelerator.device)

    def _pieces(self) -> list[Tensor]:
        return list(self.engine.optimizer.fp32_partitioned_groups_flat)

    def _link_state(self) -> None:
        pass  # ZeRO-3 looks its state up each time


class OneModule(torch.nn.Module):
    """The step as a module without children: ZeRO-3 gathers weights for a module when it is called, and the step
    reads all of them at once, from the drafter's modules that it never calls."""

    def __init__(self, module: TrainingTimeTest):
        super().__init__()
        self.step = [module]  # in a list: no child
        for name, parameter in module.drafter.named_parameters():
            # the same object: what is gathered for this module is seen by the drafter
            self.register_parameter(name.replace(".", "/"), parameter)

    def forward(self, *inputs: Any) -> tuple[Tensor, DepthSums]:
        return self.step[0](*inputs)


class ShardAverage:
    """The exponential moving average of this process's shards; the first update copies them, as PyTorch's does."""

    def __init__(self, decay: float):
        self.shards: list[Tensor] = []
        self.move = get_ema_multi_avg_fn(decay)

    @torch.no_grad()
    def update(self, shards: list[Tensor]) -> None:
        if not self.shards:
            self.shards = [shard.detach().clone() for shard in shards]
        else:
            self.move(self.shards, shards, None)


def _deepspeed(device: torch.device) -> Any:
    """The package, told to use this device. Raises ValueError where it is not installed."""
    if device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    try:
        import deepspeed
    except ImportError as error:
        raise ValueError(
            f"engine=zero1 to zero3 need DeepSpeed ({error}): pip install deepspeed, or engine=ddp"
        ) from error
    if device.type == "cpu":
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # 80 s of compiling; gloo does the same
    deepspeed.utils.logger.setLevel("WARNING")
    deepspeed.init_distributed(verbose=False, auto_mpi_discovery=False)
    return deepspeed


def _settings(config: EngineConfig, *, max_grad_norm: float, device: torch.device) -> dict:
    """DeepSpeed's configuration: conf/engine/, and what Eyas has said elsewhere already."""
    settings = copy.deepcopy(dict(config.deepspeed))
    zero = settings["zero_optimization"]
    if device.type == "cpu":
        zero["overlap_comm"] = False
    settings["communication_data_type"] = config.gradient_dtype
    settings["gradient_clipping"] = max_grad_norm
    return settings
