"""What a run will take, worked out before its first step: operations, memory by part, communication, disk, hours.

Everything is a pure function of sizes. benchmarks/memory.py holds the memory estimate against a GPU's own count,
launch/plan.py prints a plan for machines that are not at hand, and train/main.py opens with one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from train.shape import DrafterShape

GIB = 2**30
FLOAT32, BF16 = 4, 2  # bytes
BESIDE = 2 * GIB  # CUDA context, NCCL, what the allocator cannot use
MEASURED_MFU = 0.64  # of the H200's peak, 8B shape in bf16, docs/LOG.md: what hours are worked out with

# Dense bf16 products with float32 sums, TFLOP/s, without sparsity. The first name that is part of the device's wins.
PEAK_TFLOPS = {
    "B200": 2250.0,  # NVIDIA HGX B200 datasheet: 36 PFLOP/s of 8 GPUs with sparsity
    "H200": 989.4,  # NVIDIA H200 datasheet: 1979 with sparsity; NVL 835.5
    "H100 PCIe": 756.5,  # NVIDIA H100 datasheet: 1513 with sparsity
    "H100 NVL": 835.5,  # 1671 with sparsity
    "H100": 989.4,  # SXM, 1979 with sparsity
    "RTX PRO 6000 Blackwell Max-Q": 438.9,  # NVIDIA RTX Blackwell PRO architecture paper, at its boost clock
    "RTX PRO 6000": 503.8,  # the same paper, workstation edition: 1007.6 with sparsity
    "A100": 312.0,  # NVIDIA A100 datasheet
    "A10": 125.0,  # NVIDIA A10 datasheet
    "L40S": 362.1,  # NVIDIA L40S datasheet: 733 with sparsity
    "L4": 121.0,  # NVIDIA L4 datasheet: 242 with sparsity
    "RTX 6000 Ada": 364.2,  # NVIDIA Ada PRO architecture paper
    "RTX 5090": 209.5,  # NVIDIA RTX Blackwell architecture paper, float32 sums
    "RTX 4090": 165.2,  # NVIDIA Ada architecture paper, float32 sums
    "RTX 3090": 71.0,  # NVIDIA Ampere GA102 architecture paper, float32 sums
    "MI300X": 1307.4,  # AMD Instinct MI300X datasheet
}


def peak_tflops(device_name: str) -> float | None:
    """Dense bf16 TFLOP/s of a device by the name that CUDA gives it; None for one that the table does not have."""
    named = (peak for name, peak in PEAK_TFLOPS.items() if re.search(rf"\b{name}\b", device_name, re.IGNORECASE))
    return next(named, None)


# ---- operations ---------------------------------------------------------------------------------


def flops_per_step(
    shape: DrafterShape, lengths: Sequence[int], *, depths: int, asking: Sequence[int] | None = None
) -> float:
    """Floating-point operations of one step over documents.

    lengths  tokens of each document
    asking   rows of each document that ask, its last ones; None: all of them
    """
    asking = lengths if asking is None else asking
    pairs = sum(pairs_seen(n, a) for n, a in zip(lengths, asking, strict=True))
    return flops(shape, tokens=sum(lengths), rows=sum(asking), pairs=pairs, depths=depths)


def pairs_seen(length: int, asking: int) -> int:
    """Twice the pairs of query and key that causal attention has, where the last `asking` of `length` rows ask."""
    return asking * (2 * length - asking)


def flops(shape: DrafterShape, *, tokens: int, rows: int, pairs: int, depths: int) -> float:
    """Of matrix products and causal attention, forward and backward.

    tokens  of all documents; the rows that do not ask give a key and a value at depth 0, and nothing else
    rows    that ask    pairs  sum of `pairs_seen`

    Nothing that is recomputed counts, and nothing is left out that a rearrangement saves.
    """
    width, kv_width = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
    hidden = shape.hidden_size
    layer = hidden * (2 * (width + 2 * kv_width) + width + 3 * shape.intermediate_size + shape.draft_vocab_size)
    # fc has no gradient of its input; the teacher none
    project, teach = tokens * 4 * shape.num_boundaries * hidden * hidden, rows * 2 * hidden * shape.vocab_size
    only_seen = (tokens - rows) * 6 * hidden * 4 * kv_width
    scores = 3.5 * 2 * width * pairs  # 4 n^2 D, half of it causal, and 2.5 times back
    return project + teach + depths * (rows * 6 * layer + scores) + only_seen


# ---- parameters, memory, disk -------------------------------------------------------------------


def num_parameters(shape: DrafterShape) -> dict[str, int]:
    """Of the layer's matrices (fc with them), the head, and the norms."""
    width, kv_width = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
    hidden, boundaries = shape.hidden_size, shape.num_boundaries
    matrices = hidden * (boundaries * hidden + 2 * (width + 2 * kv_width) + width + 3 * shape.intermediate_size)
    norms = hidden * (4 + boundaries * (shape.fc_norm + shape.norm_before_fc))
    return {"matrices": matrices, "head": hidden * shape.draft_vocab_size, "norms": norms}


@dataclass(frozen=True)
class Engine:
    """How a step is spread. zero: 0 for DDP (or one process), 1 .. 3 for DeepSpeed's stages."""

    devices: int = 1
    zero: int = 0

    @property
    def name(self) -> str:
        return f"ZeRO-{self.zero}" if self.zero else ("DDP" if self.devices > 1 else "one process")


def optimizer_bytes(shape: DrafterShape, *, optimizer: str) -> int:
    """AdamW keeps two float32 moments for each parameter, Muon one for each matrix of the layer."""
    count = num_parameters(shape)
    moments = 2 * sum(count.values()) - (count["matrices"] if optimizer == "muon" else 0)
    return FLOAT32 * moments


def memory(
    shape: DrafterShape,
    *,
    tokens: int,
    rows: int | None = None,
    depths: int,
    optimizer: str = "adamw",
    ema: bool = False,
    engine: Engine = Engine(),
    checkpointing: str = "none",
) -> dict[str, int]:
    """Bytes of one GPU at a step's peak, by part; their sum is the peak. For attention=fused, compile, bf16.

    tokens         of a pack    rows  that ask; None: all tokens
    checkpointing  none | mlp | layer, as activation_checkpointing

    The peak lies where the backward pass begins. What the CUDA context, NCCL and the allocator's gaps take comes on
    top: leave 2 GiB, and a tenth for packs whose shapes differ.
    """
    rows = tokens if rows is None else rows
    count = num_parameters(shape)
    total, layer, head = sum(count.values()), count["matrices"], count["head"]
    width, kv_width = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
    hidden, inner = shape.hidden_size, shape.intermediate_size
    share = engine.devices if engine.zero else 1
    states = optimizer_bytes(shape, optimizer=optimizer)
    masters = FLOAT32 * total
    if engine.zero:
        masters += FLOAT32 * total // share  # DeepSpeed's own flat copy of the part that this process updates
    if engine.zero == 3:
        masters = FLOAT32 * total // share * 2 + FLOAT32 * total  # kept in parts, and whole while a step runs
    # of one process: grown during the backward pass, after the peak, but for the head's, which the loss makes
    gradients = FLOAT32 * head
    if engine.devices > 1:
        gradients = FLOAT32 * (total // share if engine.zero >= 2 else total)
    token_part = (width + 2 * kv_width) * hidden * FLOAT32  # the tokens' half of q, k, v, saved for its norm's gradient
    asked = width + width + FLOAT32 // BF16 * shape.num_attention_heads  # query, output, log-sum-exp
    per_depth = {
        "attention": 2 * kv_width + (asked if checkpointing != "layer" else 0),
        "MLP": 3 * inner if checkpointing == "none" else 0,  # gate, up, and their product
        "residuals": 3 * hidden + (hidden if shape.norm_output else 0),  # before and after the MLP, normed for the head
    }
    parts = {
        "masters, float32": masters,
        "gradients": gradients,
        f"{optimizer}'s state": states // share,
        "average of the weights": FLOAT32 * total // (share if engine.zero == 3 else 1) if ema else 0,
        "matrices in bf16, with their gradients": 2 * BF16 * layer + token_part,
        "target's embedding and head": 2 * BF16 * shape.vocab_size * hidden,
        "the pack and its projections": BF16 * tokens * (
            (shape.num_boundaries + 1) * hidden + 2 * hidden + 3 * (width + 2 * kv_width)
        ),
        "teacher's logits": BF16 * rows * shape.draft_vocab_size,
    }  # fmt: skip
    for name, size in per_depth.items():
        parts[f"{name}, {depths} depths"] = BF16 * rows * depths * size
    parts["gradients of the outputs"] = 2 * BF16 * rows * depths * hidden
    again = 0 if checkpointing == "none" else 3 * inner
    parts["one depth's backward pass"] = BF16 * rows * (4 * inner + 3 * hidden + again)
    return {name: size for name, size in parts.items() if size}


def checkpoint_bytes(shape: DrafterShape, *, optimizer: str, ema: bool) -> int:
    """Of one checkpoint: masters, their average, the optimizer's state; the map d2t and t2d beside the weights."""
    vocabulary = 8 * shape.draft_vocab_size + shape.vocab_size
    copies = 2 if ema else 1
    weights = copies * (FLOAT32 * sum(num_parameters(shape).values()) + vocabulary)
    return weights + optimizer_bytes(shape, optimizer=optimizer)


# ---- communication ------------------------------------------------------------------------------


def communication_bytes(shape: DrafterShape, engine: Engine, *, gradient_bytes: int = FLOAT32) -> int:
    """Bytes that one GPU sends (and receives) in a step, over rings. gradient_bytes: of one gradient on its way.

    DDP sums the gradients in two rounds of (n-1)/n each. ZeRO-1 and 2 sum them in one, and gather the new float32
    weights in another. ZeRO-3 gathers the weights before the forward and before the backward pass.
    """
    gradients, weights = {0: (2, 0), 1: (1, 1), 2: (1, 1), 3: (1, 2)}[engine.zero]
    count = sum(num_parameters(shape).values())
    return count * (gradients * gradient_bytes + weights * FLOAT32) * (engine.devices - 1) // engine.devices
