"""Packs: every token once, nothing over the budget, padding a document of its own."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch

from data.packing import Piece, collate, pack, padding_batch
from tests.records import PROVENANCE, record_of


def test_best_fit_decreasing_by_hand():
    """7 opens a pack, 5 opens one, 3 fits with 7 (room 3) better than with 5 (room 5), 2 and 2 with 5."""
    packs = pack([2, 3, 5, 2, 7], budget=10)
    assert [[piece.index for piece in pieces] for pieces in packs] == [[4, 1], [2, 0, 3]]


def test_a_document_longer_than_a_pack_is_cut():
    packs = pack([25], budget=10)
    assert sorted(piece for pieces in packs for piece in pieces) == [(0, 0, 10), (0, 10, 20), (0, 20, 25)]


@pytest.mark.parametrize("seed", range(5))
def test_every_token_is_in_exactly_one_piece(seed: int):
    lengths = np.random.default_rng(seed).integers(1, 200, 300)
    packs = pack(lengths, budget=64)
    assert all(sum(piece.stop - piece.start for piece in pieces) <= 64 for pieces in packs)
    seen = [(piece.index, token) for pieces in packs for piece in pieces for token in range(piece.start, piece.stop)]
    assert sorted(seen) == [(i, token) for i, length in enumerate(lengths) for token in range(length)]


def test_packs_of_real_lengths_are_full():
    """Log-normal lengths of chat data, median 270: at least 97 % of the budget is tokens."""
    lengths = np.random.default_rng(0).lognormal(5.6, 0.7, 20_000).astype(int) + 2
    packs = pack(lengths, budget=8192)
    assert lengths.sum() / (len(packs) * 8192) >= 0.97


def test_six_hundred_thousand_documents_take_seconds():
    lengths = np.random.default_rng(0).lognormal(7, 0.8, 600_000).astype(int) + 2
    started = time.monotonic()
    pack(lengths, budget=16384)
    assert time.monotonic() - started < 60  # 9 s on two shared cores


def test_nothing_packs_to_nothing():
    assert pack([], budget=8) == []


@pytest.mark.parametrize(("lengths", "budget"), [([0], 8), ([1], 0)])
def test_lengths_and_budget_are_positive(lengths: list[int], budget: int):
    with pytest.raises(ValueError, match="at least 1 token"):
        pack(lengths, budget=budget)


def test_collate_puts_documents_back_to_back_and_pads_with_one_more():
    """Written out: 3 tokens of a, tokens 1 .. 3 of b, and 3 of padding."""
    a, b = record_of("a", num_tokens=3), record_of("b", num_tokens=5)
    batch = collate([a, b], [Piece(0, 0, 3), Piece(1, 1, 4)], pad_to=9)
    assert batch.tokens.tolist() == [*a.tokens.tolist(), *b.tokens[1:4].tolist(), 0, 0, 0]
    assert batch.loss_mask.tolist() == [False, True, False, True, False, True, False, False, False]
    assert batch.positions.tolist() == [0, 1, 2, 0, 1, 2, 0, 1, 2]
    assert batch.document.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert batch.cu_seqlens.tolist() == [0, 3, 6, 9] and batch.max_seqlen == 3
    assert (batch.ids, batch.sources) == (("a", "b"), ("test", "test"))
    assert batch.aux.shape == (9, 24) and torch.equal(batch.aux[3:6].view(3, 3, 8), b.aux[1:4])
    assert torch.equal(batch.last[:3], a.last) and not batch.last[6:].any() and not batch.aux[6:].any()
    assert (batch.tokens.dtype, batch.positions.dtype, batch.document.dtype) == (torch.int64,) * 3
    assert (batch.cu_seqlens.dtype, batch.loss_mask.dtype) == (torch.int32, torch.bool)


def test_boundaries_lie_side_by_side_in_their_order():
    record = record_of("a", num_tokens=2)
    batch = collate([record], [Piece(0, 0, 2)], pad_to=None)
    assert batch.num_tokens == 2 and torch.equal(batch.aux[1], torch.cat([record.aux[1, i] for i in range(3)]))


def test_a_full_pack_has_no_padding():
    batch = collate([record_of("a", num_tokens=4)], [Piece(0, 0, 4)], pad_to=4)
    assert batch.cu_seqlens.tolist() == [0, 4]


def test_a_pack_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="pad_to=3 is too short for a pack of 4 tokens"):
        collate([record_of("a", num_tokens=4)], [Piece(0, 0, 4)], pad_to=3)


def test_padding_alone_counts_nothing():
    batch = padding_batch(6, PROVENANCE)
    assert batch.aux.shape == (6, 24) and batch.last.shape == (6, 8) and batch.aux.dtype == torch.bfloat16
    assert not batch.loss_mask.any() and batch.cu_seqlens.tolist() == [0, 6] and batch.ids == ()
