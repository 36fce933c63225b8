"""Matrix products in float8: half the time of bf16 where the chip has float8 units, at an error that training bears.

Each row of x, of the gradient and of the matrix has a scale of its own, so that one large value costs its row and
no other. The forward product and the gradient of the input run in e4m3; the gradient of the matrix, which is summed
over all rows and depths, stays a product in the input's own dtype.

Source: rowwise scaling, FP8-LM and arXiv 2209.05433; which products stay wide, torchao's `rowwise_with_gw_hp`.
What it does to tau: docs/LOG.md.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0  # of e4m3


class Float8Matrix(NamedTuple):
    """A matrix and its two roundings: with a scale for each output, and turned, with a scale for each input."""

    wide: Tensor  # [O, I], gets the gradient
    rows: Tensor  # [O, I] e4m3
    row_scale: Tensor  # [O, 1] float32
    columns: Tensor  # [I, O] e4m3
    column_scale: Tensor  # [I, 1] float32

    @classmethod
    def of(cls, matrix: Tensor) -> Float8Matrix:
        return cls(matrix, *rounded(matrix.detach()), *rounded(matrix.detach().T))

    def times(self, x: Tensor) -> Tensor:
        """x [R, I] times the transpose -> [R, O]."""
        return _Product.apply(x, *self)


def rounded(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [M, N] -> e4m3 [M, N] and float32 [M, 1], whose product is x to within 1/16 of each value."""
    wide = x.float()
    scale = wide.abs().amax(-1, keepdim=True).clamp(min=1e-12) / LARGEST  # [M, 1]
    return (wide / scale).clamp(-LARGEST, LARGEST).to(E4M3).contiguous(), scale


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        x: Tensor,
        wide: Tensor,
        rows: Tensor,
        row_scale: Tensor,
        columns: Tensor,
        column_scale: Tensor,
    ):
        ctx.save_for_backward(x, columns, column_scale)
        return _scaled(*rounded(x), rows, row_scale, dtype=x.dtype, fast=True)

    @staticmethod
    def backward(ctx, grad: Tensor):
        x, columns, column_scale = ctx.saved_tensors
        grad_x = _scaled(*rounded(grad), columns, column_scale, dtype=x.dtype, fast=False)
        return grad_x, grad.T @ x, None, None, None, None


def _scaled(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, *, dtype: torch.dtype, fast: bool) -> Tensor:
    """a [M, K], b [N, K], both e4m3 with a scale for each row -> [M, N].

    fast  sums within the tensor cores' own precision: enough forward, not for gradients
    """
    if a.is_cuda:
        return torch._scaled_mm(a, b.T, scale_a=a_scale, scale_b=b_scale.T, out_dtype=dtype, use_fast_accum=fast)
    return ((a.float() * a_scale) @ (b.float() * b_scale).T).to(dtype)
