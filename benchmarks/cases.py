"""What the benchmarks of training run on: drafters' shapes, and packs, targets and modules of random numbers."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from data.batch import Batch
from train import attention, loss
from train.attention import Documents
from train.config import OptimConfig
from train.feed import MicroBatch
from train.model import Drafter
from train.shape import DrafterShape
from train.target import Target
from train.unroll import TrainingTimeTest

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
DTYPE = torch.bfloat16 if CUDA else torch.float32
DEPTHS = 7


@dataclass(frozen=True)
class Case:
    """One row of the table: a drafter's shape, and the lengths of the documents of one step."""

    name: str
    shape: DrafterShape
    lengths: tuple[int, ...]
    tokens_per_pack: int
    peers: tuple[tuple[str, int], ...] = ()  # SpecForge's (attention, batch) to run beside it
    variants: tuple[str, ...] = ("bf16", "fp8")  # of benchmarks/step.py


def shape_of(**sizes: int) -> DrafterShape:
    return DrafterShape(
        num_boundaries=3, rms_norm_eps=1e-5, rope_theta=5e5, rope_scaling={}, max_position_embeddings=65536,
        fc_norm=False, norm_before_fc=False, norm_output=False, **sizes,
    )  # fmt: skip


LLAMA_8B = shape_of(
    hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8, head_dim=128,
    vocab_size=128256, draft_vocab_size=32000,
)  # fmt: skip
KIMI = shape_of(
    hidden_size=7168, intermediate_size=18432, num_attention_heads=56, num_key_value_heads=8, head_dim=128,
    vocab_size=163840, draft_vocab_size=32000,
)  # fmt: skip
TINY = shape_of(
    hidden_size=64, intermediate_size=128, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    vocab_size=512, draft_vocab_size=128,
)  # fmt: skip
CASES = {
    "8b": Case(
        "8B, 4 x 2048", LLAMA_8B, (2048,) * 4, 8192, (("flex_attention", 4), ("flex_attention", 1)),
        ("bf16", "fp8", "hits"),
    ),
    "8b-half": Case("8B, 2 x 2048", LLAMA_8B, (2048,) * 2, 4096),
    "kimi": Case("Kimi, 2 x 4096", KIMI, (4096,) * 2, 8192, (("flex_attention", 1),)),
    "kimi-32k": Case("Kimi, 1 x 32768", KIMI, (32768,), 32768, (), ("layers-again", "mlp-again", "bf16")),
    "tiny": Case("tiny, 2 x 64", TINY, (64,) * 2, 128),
}  # fmt: skip


def random_batch(case: Case, masks: list[Tensor], *, seed: int = 0) -> Batch:
    """A pack with random states, padded to the budget; masks: one bool [length] for each document."""
    lengths = [len(mask) for mask in masks]
    if padding := case.tokens_per_pack - sum(lengths):
        lengths, masks = [*lengths, padding], [*masks, torch.zeros(padding, dtype=torch.bool)]
    generator = torch.Generator(DEVICE).manual_seed(seed)
    sizes = torch.tensor(lengths)
    tokens, hidden = int(sizes.sum()), case.shape.hidden_size
    edges = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
    document = torch.repeat_interleave(torch.arange(len(lengths)), sizes)
    return Batch(
        tokens=torch.randint(0, case.shape.vocab_size, (tokens,)),
        loss_mask=torch.cat(masks),
        aux=torch.randn(tokens, 3 * hidden, generator=generator, device=DEVICE, dtype=DTYPE),
        last=torch.randn(tokens, hidden, generator=generator, device=DEVICE, dtype=DTYPE),
        positions=torch.arange(tokens) - edges[document],
        document=document,
        cu_seqlens=edges.int(),
        max_seqlen=max(lengths),
    )


def micro_batch(batch: Batch, *, depths: int = DEPTHS, bucket: int = 1024, every_row: bool = False) -> MicroBatch:
    """What the loader's thread makes of a pack on the CPU, then on the device, where the states are already.

    bucket     1024: an eighth of 8192, as train/loop.py has it
    every_row  asks, also those before the first that counts
    """
    looked_through = replace(batch, aux=batch.aux[:0], last=batch.last[:0])
    found = MicroBatch.of(looked_through, depths=depths, bucket=bucket)
    if every_row:
        rows = torch.ones_like(batch.loss_mask)
        found = replace(found, documents=Documents.of(looked_through, counted=rows, bucket=bucket))
    return replace(found, batch=batch).to(torch.device(DEVICE))


def random_target(shape: DrafterShape) -> Target:
    embedding, head = (
        torch.randn(shape.vocab_size, shape.hidden_size, device=DEVICE, dtype=DTYPE) * 0.02 for _ in range(2)
    )
    return Target(embedding=embedding, final_norm=torch.ones(shape.hidden_size, device=DEVICE), head=head, config={})


def random_module(
    shape: DrafterShape, target: Target, *, depths: int = DEPTHS, float8: bool = False
) -> TrainingTimeTest:
    """The forward pass of a step as train/loop.py makes it, fused where there is a GPU; its drafter is not compiled."""
    name = "fused" if CUDA else "dense"
    with torch.device(DEVICE):
        drafter = Drafter(
            shape,
            d2t=torch.zeros(shape.draft_vocab_size, dtype=torch.int64),
            t2d=torch.arange(shape.vocab_size) < shape.draft_vocab_size,
        )
    return TrainingTimeTest(
        drafter, target, depths=depths, gamma=0.8, attention=attention.choose(name), head=loss.choose(name),
        dtype=DTYPE, float8=float8,
    )  # fmt: skip


def optimizer_config(name: str = "adamw") -> OptimConfig:
    return OptimConfig(
        name, lr=1e-4, betas=[0.9, 0.95], weight_decay=0.0, warmup_fraction=0.0, final_lr_fraction=0.0,
        max_grad_norm=0.5, ema=None,
    )  # fmt: skip
