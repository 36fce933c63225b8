"""Loss, alpha and the teacher, against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from train.loss import Teacher, acceptance, draft_loss


def test_a_perfect_drafter_pays_the_targets_entropy():
    """By hand: two equally likely tokens have an entropy of ln 2 = 0.6931 nats."""
    logits = torch.tensor([[0.0, 0.0, -1e9], [5.0, 5.0, -1e9]])
    loss = draft_loss(logits, logits, counted=torch.tensor([True, True]))
    assert loss.item() == pytest.approx(2 * 0.693147, abs=1e-5)


def test_the_loss_is_the_cross_entropy_of_the_counted_rows():
    """By hand: teacher (3/4, 1/4), drafter (1/2, 1/2): ln 2. The other row is not counted, whatever it holds."""
    teacher = torch.tensor([[math.log(3.0), 0.0], [float("nan"), float("inf")]])
    logits = torch.zeros(2, 2)
    assert draft_loss(logits, teacher, counted=torch.tensor([True, False])).item() == pytest.approx(math.log(2))


def test_the_gradient_is_q_minus_p():
    teacher, logits = torch.randn(5, 7, dtype=torch.float64), torch.randn(5, 7, dtype=torch.float64, requires_grad=True)
    counted = torch.tensor([True, False, True, True, False])
    draft_loss(logits, teacher, counted=counted).backward()
    expected = (logits.detach().softmax(-1) - teacher.softmax(-1)) * counted[:, None]
    torch.testing.assert_close(logits.grad, expected)


def test_softmax_is_float32_whatever_the_logits_are():
    """32,000 equal bf16 logits: a bf16 softmax loses the sum, ln 32000 = 10.3735 does not come out."""
    logits = torch.zeros(1, 32000, dtype=torch.bfloat16)
    loss = draft_loss(logits, logits, counted=torch.tensor([True]))
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(math.log(32000), abs=1e-3)


def test_alpha_is_the_overlap_and_what_the_drafter_cannot_say_is_lost():
    """By hand: P = (1/2, 1/4, 1/4) of which the drafter knows the first two; Q = (1/4, 3/4): 1/4 + 1/4 = 1/2."""
    full = torch.tensor([[math.log(2.0), 0.0, 0.0]])
    teacher = Teacher(logits=full[:, :2], log_normalizer=full.logsumexp(-1), top1=torch.tensor([0]))
    alpha = acceptance(torch.tensor([[0.0, math.log(3.0)]]), teacher)
    assert alpha.item() == pytest.approx(0.5)


def test_the_teacher_normalizes_over_the_whole_vocabulary_and_names_the_targets_own_token():
    head = torch.eye(4)
    teacher = Teacher.of(torch.tensor([[0.0, 1.0, 2.0, 3.0]]), head, target_ids=torch.tensor([0, 2]))
    assert teacher.logits.tolist() == [[0.0, 2.0]]
    assert teacher.log_normalizer.item() == pytest.approx(math.log(sum(math.exp(x) for x in range(4))))
    assert teacher.top1.item() == 3


def test_disagreeing_shapes_are_refused():
    with pytest.raises(ValueError, match=r"expected \[T, V\]"):
        draft_loss(torch.zeros(3, 4), torch.zeros(3, 5), counted=torch.ones(3, dtype=torch.bool))
