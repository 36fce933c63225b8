"""The fused head loss and teacher: three ways against float64, on the CPU (interpreted) or on a GPU."""

from __future__ import annotations

import pytest
import torch

from train.kernels import linear_loss
from train.loss import Teacher, head_loss

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"


def case(*, rows, teacher_rows, hidden_size, vocab, draft_vocab, seed=0):
    """Random inputs on the grid of bf16, so that every precision sees the same numbers."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape, scale=1.0):
        values = torch.randn(*shape, generator=generator, dtype=torch.float64) * scale
        return values.to(torch.bfloat16).double().to(DEVICE)

    weight = torch.rand(rows, generator=generator).to(DEVICE)
    weight[1::3] = 0
    seen = torch.randint(0, teacher_rows, (rows,), generator=generator).to(DEVICE)
    target_ids = torch.randperm(vocab, generator=generator)[:draft_vocab].sort().values.to(DEVICE)
    return (
        random(rows, hidden_size),
        random(draft_vocab, hidden_size, scale=0.3),
        random(teacher_rows, hidden_size),
        random(vocab, hidden_size, scale=0.3),
        target_ids,
        seen,
        weight,
    )


def results(inputs, dtype, *, make_teacher, loss_function, cap=None):
    hidden, head, last, target_head, target_ids, seen, weight = inputs
    hidden, head = hidden.to(dtype).requires_grad_(), head.to(dtype).requires_grad_()
    teacher = make_teacher(last.to(dtype), target_head.to(dtype), target_ids=target_ids, cap=cap)
    found = loss_function(hidden, head, teacher, seen, weight.to(torch.float64 if dtype == torch.float64 else torch.float32))
    grad_hidden, grad_head = torch.autograd.grad(found.loss, (hidden, head))
    counted = weight > 0
    return {
        "loss": found.loss.detach(),
        "entropy": found.entropy[counted],
        "alpha": found.alpha[counted],
        "hidden's gradient": grad_hidden,
        "head's gradient": grad_head,
    }, found.top1[counted]


def error(found, truth):
    return ((found.double() - truth.double()).norm() / truth.double().norm().clamp(min=1e-12)).item()


@pytest.mark.parametrize(
    "rows, teacher_rows, hidden_size, vocab, draft_vocab",
    [(7, 5, 24, 301, 130), (33, 40, 64, 5000, 4099), (1, 1, 16, 40, 40)],
)
@pytest.mark.parametrize(("chunk", "cap"), [(1 << 28, None), (9000, None), (9000, 6.0)])
def test_fused_equals_float64_as_well_as_the_reference_does(
    rows, teacher_rows, hidden_size, vocab, draft_vocab, chunk, cap, monkeypatch
):
    """Odd sizes, rows of weight 0, one chunk and several, and a target that caps its logits where they bend."""
    monkeypatch.setattr(linear_loss, "CHUNK_ELEMENTS", chunk)
    inputs = case(
        rows=rows, teacher_rows=teacher_rows, hidden_size=hidden_size, vocab=vocab, draft_vocab=draft_vocab
    )  # fmt: skip
    plain = dict(make_teacher=Teacher.of, loss_function=head_loss, cap=cap)
    truth, top1 = results(inputs, torch.float64, **plain)
    reference, _ = results(inputs, torch.bfloat16, **plain)
    fused, fused_top1 = results(
        inputs, torch.bfloat16, make_teacher=linear_loss.fused_teacher, loss_function=linear_loss.fused_head_loss,
        cap=cap,
    )
    for name, exact in truth.items():
        # the fused teacher's logits are rounded to bf16 once: as much as the reference's own logits are
        assert error(fused[name], exact) <= max(1.5 * error(reference[name], exact), 0.008), name
    assert (fused_top1 == top1).float().mean() > 0.85, "bf16 logits may swap two tokens that are all but equal"


@pytest.mark.parametrize("cap", [None, 2.0])
def test_the_normalizer_equals_logsumexp_and_argmax(cap):
    logits = torch.randn(5, 9001, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    found, top1 = linear_loss.normalizer(logits, cap=cap)
    expected = logits if cap is None else cap * torch.tanh(logits / cap)
    torch.testing.assert_close(found, expected.logsumexp(-1))
    assert torch.equal(top1, logits.argmax(-1))


@pytest.mark.parametrize("within", [False, True])
def test_a_capped_teacher_is_as_exact_as_one_without_a_cap(within):
    """Logits of some 40 bend to less than 30, where bf16 has steps of 1/8: they are bent in float32, and the argmax stays."""
    generator = torch.Generator().manual_seed(5)
    last, head = (3 * torch.randn(*shape, generator=generator).bfloat16().to(DEVICE) for shape in ((16, 16), (700, 16)))
    target_ids = torch.arange(0, 700, 1 if within else 3, device=DEVICE)
    plain = Teacher.of(last, head, target_ids=target_ids, within=within, cap=30.0)
    fused = linear_loss.fused_teacher(last, head, target_ids=target_ids, within=within, cap=30.0)
    assert plain.logits.abs().max() > 60 and torch.equal(fused.top1, plain.top1) and torch.equal(fused.logits.float(), plain.logits)
    torch.testing.assert_close(fused.draft_normalizer, (30 * torch.tanh(plain.logits / 30)).logsumexp(-1))
    for name in ("log_normalizer", "draft_normalizer"):
        torch.testing.assert_close(getattr(fused, name), getattr(plain, name))


def test_a_row_of_weight_0_gives_no_gradient_whatever_it_holds():
    hidden = torch.tensor([[1.0, 0.0], [float("inf"), float("nan")]], dtype=torch.bfloat16, device=DEVICE)
    hidden.requires_grad_()
    head = torch.eye(2, dtype=torch.bfloat16, device=DEVICE)
    teacher = linear_loss.fused_teacher(
        torch.ones(1, 2, dtype=torch.bfloat16, device=DEVICE), head, target_ids=torch.arange(2, device=DEVICE)
    )
    weight, seen = torch.tensor([1.0, 0.0], device=DEVICE), torch.zeros(2, dtype=torch.int64, device=DEVICE)
    found = linear_loss.fused_head_loss(hidden, head, teacher, seen, weight)
    found.loss.backward()
    assert found.loss.isfinite() and hidden.grad[1].tolist() == [0.0, 0.0]
