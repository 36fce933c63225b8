"""A teacher made from the target's k most likely tokens: what a dataset of codec topk gives the loss."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from data.codecs import TeacherHead
from train.attention import Documents
from train.loss import PLAIN, Teacher
from train.unroll import counted_rows, teacher_of
from tests.packs import DRAFT_VOCAB, HIDDEN, VOCAB, pack_of, small_drafter, small_target

DOCUMENTS = [([5, 9, 11, 3, 8, 2], [0, 0, 1, 1, 1, 1]), ([7, 7, 30, 31], [0, 1, 1, 1])]


def test_the_rest_is_spread_over_the_tokens_that_were_not_kept_by_hand():
    """Four tokens of probability 0.5, 0.3, 0.15, 0.05, two kept: the others get 0.1 each. The drafter knows 0, 2, 3."""
    log_probs = torch.tensor([[0.5, 0.3]]).log()
    teacher = Teacher.from_top_k(
        torch.tensor([[0, 1]], dtype=torch.int32), log_probs, target_ids=torch.tensor([0, 2, 3]), vocab_size=4,
        dtype=torch.float32,
    )  # fmt: skip
    torch.testing.assert_close(
        (teacher.logits - teacher.log_normalizer[:, None]).exp(), torch.tensor([[0.5, 0.1, 0.1]])
    )
    within = (teacher.logits - teacher.draft_normalizer[:, None]).exp()
    torch.testing.assert_close(within, torch.tensor([[0.5, 0.1, 0.1]]) / 0.7)
    assert teacher.top1.tolist() == [0] and teacher.top1.dtype == torch.int64


def test_a_row_whose_likely_tokens_the_drafter_cannot_say_stays_finite():
    teacher = Teacher.from_top_k(
        torch.tensor([[1, 2]], dtype=torch.int32), torch.tensor([[-1e-9, -25.0]]), target_ids=torch.tensor([0, 3]),
        vocab_size=4, dtype=torch.bfloat16,
    )  # fmt: skip
    within = (teacher.logits - teacher.draft_normalizer[:, None]).exp()
    torch.testing.assert_close(within.float(), torch.tensor([[0.5, 0.5]]))
    assert teacher.logits.isfinite().all() and teacher.top1.tolist() == [1]


@pytest.mark.parametrize("top_k", [VOCAB, 8])
def test_loss_and_metrics_are_those_of_the_whole_distribution(top_k: int):
    """With every token kept they are the same; with 8 of 64 what was lost shows, and no more than that."""
    target = small_target(dtype=torch.float32)
    drafter = small_drafter(target)
    batch = pack_of(DOCUMENTS, dtype=torch.float32)
    counted = counted_rows(batch, depths=3)
    documents = Documents.of(batch, counted=counted[0])
    ids, log_probs, _ = TeacherHead(target.head, device="cpu").top_k(batch.last, top_k).values()
    short = replace(batch, last=None, top_ids=ids, top_log_probs=log_probs)
    arguments = dict(target_ids=drafter.target_ids, depths=3, make=PLAIN.teacher)
    whole, seen = teacher_of(target, batch, documents, **arguments)
    kept, also_seen = teacher_of(target, short, documents, **arguments)
    assert torch.equal(seen, also_seen) and torch.equal(whole.top1, kept.top1)

    hidden = torch.randn(seen.numel(), HIDDEN, generator=torch.Generator().manual_seed(2))
    weight = counted[:, documents.active].float().flatten()
    assert weight.any() and whole.logits.shape == kept.logits.shape == (len(documents.active), DRAFT_VOCAB)
    found, expected = (
        PLAIN.loss(hidden, drafter.lm_head.weight, teacher, seen.flatten(), weight) for teacher in (kept, whole)
    )
    if top_k == VOCAB:
        torch.testing.assert_close(found.loss, expected.loss, rtol=1e-5, atol=0)
        torch.testing.assert_close(found.alpha, expected.alpha, rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(found.entropy, expected.entropy, rtol=1e-5, atol=0)
    else:
        probabilities = (batch.last[documents.active] @ target.head.T).softmax(-1)
        lost = 1 - probabilities.topk(top_k).values.sum(-1)[seen.flatten()]
        assert (found.alpha - expected.alpha).abs().le(lost + 1e-6).all() and lost.max() > 0.01
        assert not torch.equal(found.alpha, expected.alpha)
