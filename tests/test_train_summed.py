"""Gradients of the layer's matrices, summed in one place: autograd's own to float64's last digits, and better in bf16."""

from __future__ import annotations

import pytest
import torch

from tests.test_train_compile import new_model, step
from train.summed import SummedMatrix

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"


@pytest.mark.parametrize(
    ("again", "float8", "compiled"),
    [("none", False, False), ("none", True, False), ("mlp", True, False), ("layer", False, False), ("mlp", True, True)],
)
def test_the_gradients_are_autograds(again, float8, compiled):
    """Two micro-batches before the gradients are looked at."""
    torch._dynamo.reset()
    plain, summed = new_model(), new_model()
    summed.drafter.float32_sums = True
    for model in (plain, summed):
        model.float8, model.drafter.activation_checkpointing = float8, again
        if compiled:
            model.drafter.compile(backend="aot_eager")
    for seed, prompt in ((1, 5), (2, 5)):
        assert step(plain, prompt=prompt, seed=seed) == pytest.approx(step(summed, prompt=prompt, seed=seed), abs=1e-9)
    for (name, a), (_, b) in zip(plain.named_parameters(), summed.named_parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-9, atol=1e-12, msg=name)
    torch._dynamo.reset()


def test_in_bf16_the_sum_of_seven_depths_is_nearer_to_the_truth_than_autograds():
    """Every one of autograd's gradients, and each of their sums, is rounded to 8 bits."""
    draw = torch.Generator().manual_seed(0)
    master = torch.randn(48, 96, generator=draw).to(DEVICE).requires_grad_()
    xs, grads = (torch.randn(7, 65, width, generator=draw).bfloat16().to(DEVICE) for width in (96, 48))
    exact = sum(grad.double().T @ x.double() for x, grad in zip(xs, grads))

    def error(times) -> float:
        master.grad = None
        sum((times(x) * grad).sum() for x, grad in zip(xs, grads)).backward()
        assert master.grad.dtype == torch.float32
        return float((master.grad.double() - exact).norm() / exact.norm())

    narrow, summed = master.bfloat16(), SummedMatrix.of(master, torch.bfloat16)
    assert error(summed.times) < 1e-6 < 1e-3 < error(lambda x: torch.nn.functional.linear(x, narrow))


def test_what_needs_no_gradient_gets_none():
    x, master = torch.randn(5, 8), torch.randn(6, 8, requires_grad=True)
    SummedMatrix.of(master, torch.float32).times(x).sum().backward()
    assert x.grad is None and torch.allclose(master.grad, x.sum(0).expand(6, 8))
