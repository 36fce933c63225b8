"""A matrix whose gradient is summed in float32, in one place, by the products that read it.

Autograd makes a gradient of low precision for each of them, adds these up in that precision, and casts the sum. Here
every product adds its part to one float32 tensor while it makes it, and the master gets that tensor as it is.
Off unless Drafter.float32_sums asks for it: what it saves on a GPU is not measured yet (benchmarks/step.py).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear


class SummedMatrix(NamedTuple):
    """A matrix as products read it, and the sum of its gradients."""

    narrow: Tensor  # [O, I] in the dtype of products, unknown to autograd
    total: Tensor  # [O, I] as wide as the master; complete when all backward passes of the products have been
    link: Tensor  # scalar without a meaning: by it autograd knows that the master comes after the products

    @classmethod
    def of(cls, master: Tensor, dtype: torch.dtype) -> SummedMatrix:
        return cls(*_Narrow.apply(master, dtype))

    def times(self, x: Tensor) -> Tensor:
        """x [R, I] times the transpose -> [R, O]."""
        return _Product.apply(x, *self)


class _Narrow(torch.autograd.Function):
    @staticmethod
    def forward(ctx, master: Tensor, dtype: torch.dtype):
        narrow, ctx.total = master.to(dtype, copy=True), torch.zeros_like(master)
        ctx.mark_non_differentiable(narrow, ctx.total)
        return narrow, ctx.total, master.new_zeros(())

    @staticmethod
    def backward(ctx, *_):
        return ctx.total, None


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, narrow: Tensor, total: Tensor, link: Tensor):
        ctx.save_for_backward(x, narrow)
        ctx.total = total  # not saved: it changes
        return linear(x, narrow)

    @staticmethod
    def backward(ctx, grad: Tensor):
        x, narrow = ctx.saved_tensors
        traced_add_product(ctx.total, grad.T, x)
        return grad @ narrow if ctx.needs_input_grad[0] else None, None, None, ctx.total.new_zeros(())


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, summed in the dtype of `total` from factors that may be narrower."""
    if total.is_cuda and left.dtype != total.dtype:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total += left.to(total.dtype) @ right.to(total.dtype)


# For backward passes that torch.compile traces: it leaves the call alone, and the sum in place.
traced_add_product = torch.library.custom_op(
    "eyas::add_product",
    add_product,
    mutates_args=("total",),
    schema="(Tensor(a!) total, Tensor left, Tensor right) -> ()",
)
traced_add_product.register_fake(lambda total, left, right: None)
