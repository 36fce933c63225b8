"""Loss, alpha and the teacher, against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from train.loss import Teacher, head_loss


def teacher_with(logits: torch.Tensor, *, known: int | None = None) -> Teacher:
    """The teacher whose full logits these are; the drafter knows the first `known` tokens."""
    wide = logits.double() if logits.dtype == torch.float64 else logits.float()
    draft = wide[:, :known]
    return Teacher(draft, wide.logsumexp(-1), draft.logsumexp(-1), wide.argmax(-1))


def loss_of(logits: torch.Tensor, teacher: Teacher, weight: list[float]):
    """Of these very logits: the head is the identity."""
    seen = torch.arange(logits.shape[0])
    eye = torch.eye(logits.shape[1], dtype=logits.dtype)
    return head_loss(logits, eye, teacher, seen, torch.tensor(weight, dtype=torch.float32))


def test_a_perfect_drafter_pays_the_targets_entropy():
    """By hand: two equally likely tokens have an entropy of ln 2 = 0.6931 nats."""
    logits = torch.tensor([[0.0, 0.0, -1e4], [5.0, 5.0, -1e4]])
    assert loss_of(logits, teacher_with(logits), [1.0, 1.0]).loss.item() == pytest.approx(2 * 0.693147, abs=1e-5)


def test_the_loss_is_the_weighted_cross_entropy_of_the_counted_rows():
    """By hand: teacher (3/4, 1/4), drafter (1/2, 1/2): ln 2, times 5. The other row has weight 0, whatever it holds."""
    teacher = teacher_with(torch.tensor([[math.log(3.0), 0.0], [float("nan"), float("inf")]]))
    found = loss_of(torch.zeros(2, 2), teacher, [5.0, 0.0])
    assert found.loss.item() == pytest.approx(5 * math.log(2))
    assert found.entropy[0].item() == pytest.approx(math.log(2))


def test_the_gradient_is_weight_times_q_minus_p():
    logits = torch.randn(5, 7, dtype=torch.float64, requires_grad=True)
    full = torch.randn(5, 7, dtype=torch.float64)
    weight = torch.tensor([1.0, 0.0, 0.5, 2.0, 0.0])
    loss_of(logits, teacher_with(full), weight.tolist()).loss.backward()
    expected = (logits.detach().softmax(-1) - full.softmax(-1)) * weight[:, None]
    torch.testing.assert_close(logits.grad, expected)


def test_softmax_is_float32_whatever_the_logits_are():
    """32,000 equal bf16 logits: a bf16 softmax loses the sum, ln 32000 = 10.3735 does not come out."""
    hidden, head = torch.zeros(1, 4, dtype=torch.bfloat16), torch.zeros(32000, 4, dtype=torch.bfloat16)
    teacher = teacher_with(torch.zeros(1, 32000))
    found = head_loss(hidden, head, teacher, torch.tensor([0]), torch.tensor([1.0]))
    assert found.loss.dtype == torch.float32
    assert found.loss.item() == pytest.approx(math.log(32000), abs=1e-3)


def test_alpha_is_the_overlap_and_what_the_drafter_cannot_say_is_lost():
    """By hand: P = (1/2, 1/4, 1/4) of which the drafter knows the first two; Q = (1/4, 3/4): 1/4 + 1/4 = 1/2."""
    teacher = teacher_with(torch.tensor([[math.log(2.0), 0.0, 0.0]]), known=2)
    found = loss_of(torch.tensor([[0.0, math.log(3.0)]]), teacher, [1.0])
    assert found.alpha.item() == pytest.approx(0.5)
    assert found.top1.item() == 1


def test_the_teacher_normalizes_over_both_vocabularies_and_names_the_targets_own_token():
    teacher = Teacher.of(torch.tensor([[0.0, 1.0, 2.0, 3.0]]), torch.eye(4), target_ids=torch.tensor([0, 2]))
    assert teacher.logits.tolist() == [[0.0, 2.0]]
    assert teacher.log_normalizer.item() == pytest.approx(math.log(sum(math.exp(x) for x in range(4))))
    assert teacher.draft_normalizer.item() == pytest.approx(math.log(1 + math.exp(2)))
    assert teacher.top1.item() == 3


def test_disagreeing_shapes_are_refused():
    with pytest.raises(ValueError, match=r"expected \[M, H\]"):
        head_loss(torch.zeros(3, 4), torch.eye(5), teacher_with(torch.zeros(3, 5)), torch.arange(3), torch.ones(3))
