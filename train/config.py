"""What a training run is told: types, units and checks. The defaults stand in conf/train.yaml.

null in a drafter's size means "as the target has it".
"""

from __future__ import annotations

from dataclasses import dataclass

from data.config import TargetConfig


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
    """AdamW on float32 masters, linear warm-up, cosine decay, gradient clipping."""

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


@dataclass
class TrackerConfig:
    """Where the curves go, through Accelerate."""

    name: str  # wandb | tensorboard | none
    project: str
    group: str | None
    run_name: str | None
    mode: str  # auto = online when logged in, else offline | online | offline | disabled
    dollars_per_gpu_hour: float | None  # for the summary's dollars
    peak_tflops: float | None  # dense bf16, of one device, for MFU; null: train/plan.py knows the device, or there is none

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
    shards: str
    out: str
    plan: bool  # print what would be done, and stop
    epochs: int
    seed: int
    precision: str  # bf16 | fp32: what matrix products run in; masters, softmax and loss are float32 always
    attention: str  # dense | fused
    compile: bool  # torch.compile around attention and the head
    log_every_steps: int
    checkpoint_every_steps: int | None  # null: at the end of every epoch only
    keep_checkpoints: int
    evaluate_every_epochs: int  # 0: only at the end
    export_engine: str  # sglang | vllm
    export_engine_version: str  # some versions number layers differently

    def __post_init__(self):
        if self.precision not in ("bf16", "fp32"):
            raise ValueError(f"precision is {self.precision!r}: choose bf16 or fp32")
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
    precision: str
    device: str  # auto | cpu | cuda


@dataclass
class ExportConfig:
    target: TargetConfig
    checkpoint: str
    out: str
    engine: str  # sglang | vllm
    engine_version: str
