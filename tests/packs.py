"""Small packs and drafters for the tests of train/, made by hand."""

from __future__ import annotations

import torch
from torch import Tensor

from data.batch import Batch
from train.model import Drafter
from train.shape import DrafterShape
from train.target import Target

VOCAB, HIDDEN, BOUNDARIES, DRAFT_VOCAB = 64, 16, 3, 24


def pack_of(
    documents: list[tuple[list[int], list[int]]], *, seed: int = 0, dtype: torch.dtype = torch.float64
) -> Batch:
    """documents: (tokens, loss_mask) each; the states are random, the same for the same tokens."""
    states = [_states(tokens, seed=seed, dtype=dtype) for tokens, _ in documents]
    lengths = torch.tensor([len(tokens) for tokens, _ in documents])
    return Batch(
        tokens=torch.tensor([t for tokens, _ in documents for t in tokens]),
        loss_mask=torch.tensor([m for _, mask in documents for m in mask], dtype=torch.bool),
        aux=torch.cat([aux for aux, _ in states]),
        last=torch.cat([last for _, last in states]),
        positions=torch.cat([torch.arange(n) for n in lengths.tolist()]),
        document=torch.repeat_interleave(torch.arange(len(documents)), lengths),
        cu_seqlens=torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).to(torch.int32),
        max_seqlen=int(lengths.max()),
        ids=tuple(f"document-{i}" for i in range(len(documents))),
        sources=("test",) * len(documents),
    )


def _states(tokens: list[int], *, seed: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed * 7919 + sum((i + 1) * t for i, t in enumerate(tokens)))
    aux = torch.randn(len(tokens), BOUNDARIES * HIDDEN, generator=generator, dtype=dtype)
    return aux, torch.randn(len(tokens), HIDDEN, generator=generator, dtype=dtype)


def small_target(*, dtype: torch.dtype = torch.float64) -> Target:
    generator = torch.Generator().manual_seed(1)
    embedding, head = (torch.randn(VOCAB, HIDDEN, generator=generator, dtype=dtype) for _ in range(2))
    return Target(embedding=embedding, final_norm=torch.ones(HIDDEN, dtype=dtype), head=head, config={})


def small_shape(**changes) -> DrafterShape:
    sizes = dict(
        hidden_size=HIDDEN,
        intermediate_size=40,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_boundaries=BOUNDARIES,
        vocab_size=VOCAB,
        draft_vocab_size=DRAFT_VOCAB,
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        rope_scaling={},
        max_position_embeddings=128,
        fc_norm=False,
        norm_before_fc=False,
        norm_output=False,
    )
    return DrafterShape(**{**sizes, **changes})


def small_drafter(target: Target, *, seed: int = 0, **changes) -> Drafter:
    """Every second token of the target's vocabulary, from 0 on, in the target's dtype."""
    shape = small_shape(**changes)
    ids = torch.arange(shape.draft_vocab_size) * 2
    t2d = torch.zeros(VOCAB, dtype=torch.bool)
    t2d[ids] = True
    drafter = Drafter(shape, d2t=ids - torch.arange(shape.draft_vocab_size), t2d=t2d)
    drafter.initialize(target, std=0.3, head_from_target=False, seed=seed)
    return drafter.to(target.head.dtype)
