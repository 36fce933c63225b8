"""Fifty steps with the kernels and with their dense twins: the same curve, as far as bf16 can tell."""

from __future__ import annotations

import pytest
import torch

from data.batch import Batch
from train import attention, loss
from train.attention import Documents
from train.model import Drafter
from train.shape import DrafterShape
from train.target import Target
from train.unroll import TrainingTimeTest, counted_rows

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="the kernels run in bf16 on CUDA")
DEVICE, DTYPE, DEPTHS, STEPS = "cuda", torch.bfloat16, 5, 50
HIDDEN, VOCAB, DRAFT_VOCAB = 256, 4096, 1024
LENGTHS = (200, 1, 77, 130, 350, 90, 176)  # 1024 rows


def target_of(generator: torch.Generator) -> Target:
    embedding, head = (torch.randn(VOCAB, HIDDEN, generator=generator, device=DEVICE) for _ in range(2))
    return Target(
        embedding=embedding.to(DTYPE), final_norm=torch.ones(HIDDEN, device=DEVICE), head=(head * 0.2).to(DTYPE), config={}
    )


def pack_from(generator: torch.Generator, target: Target) -> Batch:
    """States that tell what comes next, so that there is something to learn: aux of a row holds the last of the rows ahead."""
    lengths = torch.tensor(LENGTHS)
    rows = int(lengths.sum())
    last = torch.randn(rows, HIDDEN, generator=generator, device=DEVICE)
    edges = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    document = torch.repeat_interleave(torch.arange(len(LENGTHS)), lengths)
    return Batch(
        tokens=(last.to(DTYPE) @ target.head.T).argmax(-1).roll(1),
        loss_mask=torch.arange(rows) - edges[document] >= 5,
        aux=torch.cat([last.roll(-ahead, 0) for ahead in (1, 2, 3)], dim=1).to(DTYPE),
        last=last.to(DTYPE),
        positions=torch.arange(rows) - edges[document],
        document=document,
        cu_seqlens=edges.int(),
        max_seqlen=int(lengths.max()),
    )


def curve(name: str, *, seed: int) -> list[float]:
    """The loss of each step; name is what attention= takes, seed that of the drafter's first weights."""
    generator = torch.Generator(DEVICE).manual_seed(7)
    target = target_of(generator)
    packs = [pack_from(generator, target) for _ in range(4)]
    shape = DrafterShape(
        hidden_size=HIDDEN, intermediate_size=512, num_attention_heads=4, num_key_value_heads=2, head_dim=64,
        num_boundaries=3, vocab_size=VOCAB, draft_vocab_size=DRAFT_VOCAB, rms_norm_eps=1e-5, rope_theta=1e4,
        rope_scaling={}, max_position_embeddings=1024, fc_norm=True, norm_before_fc=False, norm_output=True,
    )  # fmt: skip
    t2d = torch.arange(VOCAB) < DRAFT_VOCAB
    drafter = Drafter(shape, d2t=torch.zeros(DRAFT_VOCAB, dtype=torch.int64), t2d=t2d)
    drafter.initialize(target, std=0.02, head_from_target=False, seed=seed)
    model = TrainingTimeTest(
        drafter.to(DEVICE), target, depths=DEPTHS, gamma=0.8, attention=attention.choose(name), head=loss.choose(name),
        dtype=DTYPE,
    )  # fmt: skip
    optimizer, losses = torch.optim.AdamW(drafter.parameters(), lr=2e-3), []
    for step in range(STEPS):
        batch = packs[step % len(packs)]
        on_cpu = Batch(**{**vars(batch), "tokens": batch.tokens.cpu()})
        counted = counted_rows(on_cpu, depths=DEPTHS)
        documents = Documents.of(on_cpu, counted=counted[0]).to(DEVICE)
        summand, _ = model(batch.to(DEVICE), documents, counted.to(DEVICE), counted.sum(1).to(DEVICE))
        optimizer.zero_grad()
        summand.backward()
        optimizer.step()
        losses.append(summand.item())
    return losses


def test_fifty_steps_follow_the_dense_twins_more_closely_than_another_seed_does():
    dense, kernels, other = curve("dense", seed=0), curve("fused", seed=0), curve("dense", seed=1)
    assert dense[-1] < 0.9 * dense[0], "nothing was learned, so that nothing was compared"
    distance = sum(abs(a - b) for a, b in zip(kernels, dense, strict=True)) / STEPS
    noise = sum(abs(a - b) for a, b in zip(other, dense, strict=True)) / STEPS
    print(f"\nmean distance to the dense curve: kernels {distance:.2e}, another seed {noise:.2e}, loss {dense[0]:.3f} to {dense[-1]:.3f}")
    assert distance < 0.2 * noise
