"""What a training run is told: types, units and checks. The defaults stand in conf/train.yaml.

null in a drafter's size means "as the target has it".
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from omegaconf import OmegaConf

from data.config import TargetConfig

ENGINES = ("ddp", "zero1", "zero2", "zero3")


@dataclass
class DrafterConfig:
    """Shape of the drafter. Sizes are counts; null takes the target's."""

    draft_vocab_size: int
    depths: int  # K, the drafts trained for: training-time test runs this many passes
    intermediate_size: int | None
    num_attention_heads: int | None
    num_key_value_heads: int | None
    head_dim: int | None
    rope_theta: float | None
    inherit_rope_scaling: bool  # off for targets whose scaling is made for another attention (MLA)
    max_position_embeddings: int | None
    fc_norm: bool  # EAGLE-3.1: an RMSNorm for each boundary before fc
    norm_before_fc: bool  # EAGLE-3.1: one RMSNorm over all boundaries before fc
    norm_output: bool  # EAGLE-3.1: feed the normed output back instead of the residual stream
    init_std: float  # standard deviation of the drafter's own matrices
    init_head_from_target: bool  # draft head and final norm start as the target's rows

    def __post_init__(self):
        if self.depths < 1:
            raise ValueError(f"drafter.depths is {self.depths}: at least one draft is needed")
        if self.draft_vocab_size < 1:
            raise ValueError(f"drafter.draft_vocab_size is {self.draft_vocab_size}: it must be positive")
        if self.fc_norm and self.norm_before_fc:
            raise ValueError("drafter.fc_norm and drafter.norm_before_fc exclude each other: set one of them to false")


@dataclass
class LossConfig:
    """How the depths are weighed."""

    gamma: float  # weight of depth k is gamma ** k

    def __post_init__(self):
        if not 0 < self.gamma <= 1:
            raise ValueError(f"loss.gamma is {self.gamma}: it must lie in (0, 1]")


@dataclass
class OptimConfig:
    """AdamW, or Muon beside it, on float32 masters; linear warm-up, cosine decay, gradient clipping."""

    name: str  # adamw | muon
    lr: float
    betas: list[float]
    weight_decay: float
    warmup_fraction: float  # of all steps
    final_lr_fraction: float  # of lr, reached at the last step
    max_grad_norm: float
    ema: float | None  # decay of the exponential moving average that is evaluated and exported; null for none

    def __post_init__(self):
        if self.name not in ("adamw", "muon"):
            raise ValueError(f"optim.name is {self.name!r}: choose adamw or muon")
        if self.lr <= 0 or self.max_grad_norm <= 0:
            raise ValueError("optim.lr and optim.max_grad_norm must be positive")
        for name in ("warmup_fraction", "final_lr_fraction"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"optim.{name} is {getattr(self, name)}: it must lie in [0, 1]")
        if self.ema is not None and not 0 < self.ema < 1:
            raise ValueError(f"optim.ema is {self.ema}: it must lie in (0, 1), or be null")


def launched_engine() -> str:
    """The engine that `accelerate launch` was told of: zero1 .. zero3 when it starts DeepSpeed, else ddp."""
    if os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() != "true":
        return "ddp"
    return "zero" + os.environ.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", "2")


# conf/train.yaml asks for it, so that a file of launch/accelerate/ chooses the engine too
OmegaConf.register_new_resolver("launched_engine", launched_engine, replace=True)


@dataclass
class EngineConfig:
    """How the work of a step is spread over the processes. One YAML of conf/engine/ each."""

    name: str  # ddp | zero1 | zero2 | zero3
    gradient_dtype: str  # fp32 | bf16: what a gradient is while it crosses between devices; it is summed into float32
    deepspeed: dict[str, Any] | None  # DeepSpeed's own settings; null where it is not used

    def __post_init__(self):
        if self.name not in ENGINES:
            raise ValueError(f"engine.name is {self.name!r}: choose one of {', '.join(ENGINES)}")
        if self.gradient_dtype not in ("fp32", "bf16"):
            raise ValueError(f"engine.gradient_dtype is {self.gradient_dtype!r}: choose fp32 or bf16")


@dataclass
class BatchConfig:
    """What one optimizer step eats, whatever the number of processes."""

    tokens_per_pack: int  # budget of one forward pass on one device
    conversations_per_step: int | None
    packs_per_step: int | None
    pad_packs: bool  # static shapes: pad every pack to its budget
    num_workers: int  # processes that read ahead, on each rank

    def __post_init__(self):
        if (self.conversations_per_step is None) == (self.packs_per_step is None):
            raise ValueError("set exactly one of batch.conversations_per_step and batch.packs_per_step")
        for name in ("tokens_per_pack", "conversations_per_step", "packs_per_step"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"batch.{name} is {value}: it must be positive")
        if self.num_workers < 0:
            raise ValueError(f"batch.num_workers is {self.num_workers}: it must be 0 or more")


@dataclass
class TrackerConfig:
    """Where the curves go, through Accelerate."""

    name: str  # wandb | tensorboard | none
    project: str
    group: str | None
    run_name: str | None
    mode: str  # auto = online when logged in, else offline | online | offline | disabled
    dollars_per_gpu_hour: float | None  # for the summary's dollars
    peak_tflops: float | None  # dense bf16, of one device, for MFU; null: what train/plan.py knows of the device

    def __post_init__(self):
        if self.name not in ("wandb", "tensorboard", "none"):
            raise ValueError(f"tracker.name is {self.name!r}: choose wandb, tensorboard or none")
        if self.mode not in ("auto", "online", "offline", "disabled"):
            raise ValueError(f"tracker.mode is {self.mode!r}: choose auto, online, offline or disabled")


@dataclass
class TrainConfig:
    target: TargetConfig
    drafter: DrafterConfig
    loss: LossConfig
    optim: OptimConfig
    batch: BatchConfig
    tracker: TrackerConfig
    engine: EngineConfig
    shards: str
    out: str
    plan: bool  # print what would be done, and stop
    init_from: str | None  # an exported drafter's folder to start from, with its vocabulary map; null: random weights
    follow: bool  # train on shards while they are being written
    follow_conversations: int | None  # with follow: how many there will be, for the learning rate
    epochs: int
    seed: int
    precision: str  # bf16 | fp32: what matrix products run in; masters, softmax and loss are float32 always.
    # fp8: the MLP's products in float8, the others in bf16. fp64 is for proofs: masters too, on ddp
    activation_checkpointing: str  # none | mlp | layer: what the backward pass computes again to save memory
    measure_every_steps: int  # one of so many counts hits and alpha, which alone need the teacher's whole vocabulary
    attention: str  # dense | fused
    compile: bool  # torch.compile of what lies between the matrix products and around attention
    log_every_steps: int
    checkpoint_every_steps: int | None  # null: at the end of every epoch only
    keep_checkpoints: int
    evaluate_every_epochs: int  # 0: only at the end
    export_engine: str  # sglang | vllm
    export_engine_version: str  # some versions number layers differently

    def __post_init__(self):
        if self.precision not in ("bf16", "fp8", "fp32", "fp64"):
            raise ValueError(f"precision is {self.precision!r}: choose bf16, fp8 or fp32")
        if self.attention == "fused" and self.precision not in ("bf16", "fp8"):
            raise ValueError(
                f"attention=fused computes in bf16, precision is {self.precision}: set precision=bf16 or fp8, or "
                "attention=dense"
            )
        if self.activation_checkpointing not in ("none", "mlp", "layer"):
            raise ValueError(
                f"activation_checkpointing is {self.activation_checkpointing!r}: choose none, mlp or layer"
            )
        if not 1 <= self.measure_every_steps <= self.log_every_steps:
            raise ValueError(
                f"measure_every_steps is {self.measure_every_steps}: from 1 to log_every_steps, {self.log_every_steps}, "
                "or a line of the log would have nothing to say"
            )
        if self.engine.name != "ddp" and self.optim.name == "muon":
            raise ValueError(
                f"engine={self.engine.name} cuts the optimizer's state into flat pieces, and Muon needs whole matrices: "
                "set optim=adamw, or engine=ddp"
            )
        if self.engine.name != "ddp" and self.precision == "fp64":
            raise ValueError(f"engine={self.engine.name} keeps float32 masters: precision=fp64 needs engine=ddp")
        if self.engine.name == "ddp" and launched_engine() != "ddp":
            raise ValueError(
                f"accelerate launch was told to use DeepSpeed, and engine is ddp: leave engine={launched_engine()}, or "
                "launch without DeepSpeed"
            )
        if self.follow and (self.follow_conversations is None or self.batch.conversations_per_step is None):
            raise ValueError(
                "follow=true plans the steps before the shards are there: set follow_conversations to how many "
                "conversations will be written (about), and batch.conversations_per_step"
            )
        for name in ("epochs", "log_every_steps", "keep_checkpoints"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}: it must be at least 1")
        if self.checkpoint_every_steps is not None and self.checkpoint_every_steps < 1:
            raise ValueError("checkpoint_every_steps must be at least 1, or null")


@dataclass
class EvaluateConfig:
    target: TargetConfig
    drafter: str  # an exported drafter's folder
    shards: str
    split: str
    out: str
    depths: int | None  # null: as many as the drafter was trained for
    tokens_per_pack: int
    precision: str  # bf16 | fp32
    device: str  # auto | cpu | cuda

    def __post_init__(self):
        if self.precision not in ("bf16", "fp32"):
            raise ValueError(f"precision is {self.precision!r}: choose bf16 or fp32")
        if self.device not in ("auto", "cpu", "cuda"):
            raise ValueError(f"device is {self.device!r}: choose auto, cpu or cuda")
        if self.depths is not None and self.depths < 1:
            raise ValueError(f"depths is {self.depths}: at least one draft is needed, or null")


@dataclass
class ExportConfig:
    target: TargetConfig
    checkpoint: str
    out: str
    engine: str  # sglang | vllm
    engine_version: str
