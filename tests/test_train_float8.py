"""Products in float8: how far from exact they are, and that the gradient of the matrix is not rounded."""

from __future__ import annotations

import pytest
import torch

from train.float8 import Float8Matrix, rounded

CUDA = torch.cuda.is_available()
DEVICE, DTYPE = ("cuda", torch.bfloat16) if CUDA else ("cpu", torch.float32)


def random(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, DTYPE)


def relative(found, exact):
    return ((found.double() - exact.double()).norm() / exact.double().norm()).item()


def test_every_value_is_within_a_sixteenth_whatever_the_other_rows_hold():
    """e4m3 has 3 bits of mantissa: half a step is 1/16 of a value. Rows 1e4 apart do not disturb each other."""
    x = random(6, 64, seed=0) * torch.logspace(-2, 2, 6, device=DEVICE, dtype=DTYPE)[:, None]
    low, scale = rounded(x)
    assert low.dtype == torch.float8_e4m3fn and scale.shape == (6, 1)
    large = x.abs() > x.abs().amax(1, keepdim=True) / 2**8  # smaller ones are subnormal in e4m3
    error = ((low.float() * scale - x.float()).abs() / x.float().abs())[large]
    assert error.max() <= 1 / 16 + 1e-3


def test_a_row_of_zeros_stays_zeros():
    low, scale = rounded(torch.zeros(2, 32, device=DEVICE, dtype=DTYPE))
    assert not low.float().any() and scale.isfinite().all()


@pytest.mark.parametrize("rows", [1, 33, 64])
def test_the_product_and_its_gradients_are_as_near_as_float8_allows(rows):
    """Two factors of 3 mantissa bits, uniform in their steps: about 0.026 each, 0.037 together."""
    x, matrix = random(rows, 96, seed=1), random(48, 96, seed=2)
    grad = random(rows, 48, seed=3)
    exact_x, exact_matrix = x.double().requires_grad_(), matrix.double().requires_grad_()
    exact = exact_x @ exact_matrix.T
    exact.backward(grad.double())
    x.requires_grad_(), matrix.requires_grad_()
    found = Float8Matrix.of(matrix).times(x)
    found.backward(grad)
    assert 0.005 < relative(found, exact) < 0.05
    assert 0.005 < relative(x.grad, exact_x.grad) < 0.05
    assert relative(matrix.grad, exact_matrix.grad) < (0.01 if CUDA else 1e-6)
