"""Fused twins of train.loss: the teacher and the draft head's loss, in chunks, no [M, V] tensor kept.

A chunk of logits is made by one matrix product, read twice by one kernel, and overwritten by its own gradient
(q - p) * weight, from which the gradients of the hidden states and of the head follow by two more products
while the chunk is still hot. All depths go through at once, so that the head's gradient is summed in float32
in one place. Softmax, sums and alpha are float32; logits are rounded to the inputs' dtype once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from train.loss import HeadLoss, Teacher, check_shapes

CHUNK_ELEMENTS = 1 << 28  # logits in memory at a time: 512 MiB in bf16
# Columns of one step and warps that share them: 8 a thread. Measured on an H200: with 16 a thread, or with the
# reductions over all threads that a scalar running maximum needs, the kernel is a fifth to a half slower.
BLOCK, WARPS = 2048, 8


# Stands for a column beyond the row: its exponential is 0, and 0 times it is 0, which -inf would make nan.
OUTSIDE = tl.constexpr(-2e30)


@triton.jit
def _nothing_yet(BLOCK: tl.constexpr):
    """Largest value, sum of exponentials relative to it, and column of each lane, before the first block.

    The lanes go over a row side by side and meet once at its end: a reduction over all threads in each block
    costs more than the block's own work.
    """
    return tl.full((BLOCK,), -1e30, tl.float32), tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.int32)


@triton.jit
def _and_then(top, total, best, x, column):
    """The same three with one more value in every lane: one exponential, of the smaller one relative to the larger."""
    above = x > top
    smaller = tl.exp(-tl.abs(x - top))
    total = tl.where(above, total * smaller + 1.0, total + smaller)
    return tl.maximum(top, x), total, tl.where(above, column, best)


@triton.jit
def _over_lanes(top, total, best):
    """log-sum-exp of the row, and its first largest column."""
    largest = tl.max(top, 0)
    first = tl.min(tl.where(top == largest, best, 2147483647), 0)
    return largest + tl.log(tl.sum(total * tl.exp(top - largest), 0)), first


@triton.jit
def _bent(x, inside, CAP: tl.constexpr):
    """CAP * tanh(x / CAP) inside the row: what some targets make of their logits. None: x."""
    if CAP is not None:
        small = tl.exp(-2 * tl.abs(x) / CAP)
        x = tl.where(inside, tl.where(x < 0, -CAP, CAP) * (1 - small) / (1 + small), OUTSIDE)
    return x


@triton.jit
def _normalizer(logits, log_normalizer, top1, num_columns, CAP: tl.constexpr, BLOCK: tl.constexpr):
    """Per row of logits [rows, num_columns], bent: log-sum-exp in float32, and the first largest column."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * num_columns
    column = tl.arange(0, BLOCK)
    top, total, best = _nothing_yet(BLOCK)
    for start in range(0, num_columns, BLOCK):
        inside = start + column < num_columns
        x = tl.load(logits + start + column, mask=inside, other=OUTSIDE).to(tl.float32)
        x = _bent(x, inside, CAP)
        top, total, best = _and_then(top, total, best, x, start + column)
    log_sum, first = _over_lanes(top, total, best)
    tl.store(log_normalizer + row, log_sum)
    tl.store(top1 + row, first.to(tl.int64))


@triton.jit
def _loss_rows(
    logits, teacher, seen, log_normalizer, draft_normalizer, weight, entropy, top1, alpha, num_columns,
    CAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Per row: cross-entropy, most likely token, alpha; then the gradient in the logits' own memory."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * num_columns
    teacher_row = tl.load(seen + row)
    teacher += teacher_row * num_columns
    draft = tl.load(draft_normalizer + teacher_row)
    share = tl.exp(draft - tl.load(log_normalizer + teacher_row))  # of the target's mass that the drafter can say
    w = tl.load(weight + row)
    column = tl.arange(0, BLOCK)
    top, total, best = _nothing_yet(BLOCK)
    cross = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, num_columns, BLOCK):
        inside = start + column < num_columns
        x = tl.load(logits + start + column, mask=inside, other=OUTSIDE).to(tl.float32)
        t = tl.load(teacher + start + column, mask=inside, other=OUTSIDE).to(tl.float32)
        t = _bent(t, inside, CAP)
        cross += tl.exp(t - draft) * x
        top, total, best = _and_then(top, total, best, x, start + column)
    log_sum, first = _over_lanes(top, total, best)
    overlap = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, num_columns, BLOCK):
        inside = start + column < num_columns
        x = tl.load(logits + start + column, mask=inside, other=OUTSIDE).to(tl.float32)
        t = tl.load(teacher + start + column, mask=inside, other=OUTSIDE).to(tl.float32)
        t = _bent(t, inside, CAP)
        q, p = tl.exp(x - log_sum), tl.exp(t - draft)
        overlap += tl.minimum(q, p * share)
        # weight 0: no gradient, even where the row holds infinities
        gradient = tl.where(w > 0, (q - p) * w, 0.0)
        tl.store(logits + start + column, gradient.to(logits.dtype.element_ty), mask=inside)
    tl.store(entropy + row, log_sum - tl.sum(cross, 0))
    tl.store(top1 + row, first.to(tl.int64))
    tl.store(alpha + row, tl.sum(overlap, 0))


def normalizer(logits: Tensor, *, cap: float | None = None) -> tuple[Tensor, Tensor]:
    """log-sum-exp [rows] float32 and argmax [rows] int64 of contiguous logits [rows, columns], in one pass.

    cap  of the logits: they are bent as they are read
    """
    assert logits.is_contiguous()
    rows, columns = logits.shape
    log_normalizer = torch.empty(rows, dtype=torch.float32, device=logits.device)
    top1 = torch.empty(rows, dtype=torch.int64, device=logits.device)
    _normalizer[(rows,)](logits, log_normalizer, top1, columns, CAP=cap, BLOCK=BLOCK, num_warps=WARPS)
    return log_normalizer, top1


@triton.jit
def _multiply(x, factor, size, BLOCK: tl.constexpr):
    """x [size] times the scalar that `factor` points to, in place."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < size).to(tl.float32) * tl.load(factor)
    tl.store(x + at, value.to(x.dtype.element_ty), mask=at < size)


def multiply_(x: Tensor, factor: Tensor) -> Tensor:
    """x.mul_(factor) for a scalar on the device, at the speed of memory: PyTorch's is four times slower in bf16."""
    assert x.is_contiguous() and factor.numel() == 1
    _multiply[(triton.cdiv(x.numel(), BLOCK),)](x, factor, x.numel(), BLOCK=BLOCK, num_warps=WARPS)
    return x


@torch.no_grad()
def fused_teacher(
    last: Tensor, head: Tensor, *, target_ids: Tensor, within: bool = False, cap: float | None = None
) -> Teacher:
    """As Teacher.of; the draft vocabulary's logits stay in the inputs' dtype."""
    rows, vocab = last.shape[0], head.shape[0]
    if within:
        logits = last.to(head.dtype) @ head[target_ids].T  # [R, V]
        log_sum, best = normalizer(logits, cap=cap)
        return Teacher(logits, log_sum, log_sum, target_ids[best], cap)
    device = last.device
    draft = torch.empty(rows, target_ids.shape[0], dtype=head.dtype, device=device)
    log_normalizer = torch.empty(rows, dtype=torch.float32, device=device)
    top1 = torch.empty(rows, dtype=torch.int64, device=device)
    for chunk in torch.arange(rows).split(max(CHUNK_ELEMENTS // vocab, 1)):
        part = slice(int(chunk[0]), int(chunk[-1]) + 1)
        full = last[part].to(head.dtype) @ head.T  # [chunk, vocab]
        log_normalizer[part], top1[part] = normalizer(full, cap=cap)
        torch.index_select(full, 1, target_ids, out=draft[part])
    return Teacher(draft, log_normalizer, normalizer(draft, cap=cap)[0], top1, cap)


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden: Tensor, head: Tensor, teacher: Teacher, seen: Tensor, weight: Tensor):
        rows, vocab = hidden.shape[0], head.shape[0]
        half = head.to(hidden.dtype)
        entropy, alpha = torch.empty(2, rows, dtype=torch.float32, device=hidden.device)
        top1 = torch.empty(rows, dtype=torch.int64, device=hidden.device)
        grad_head = torch.zeros(head.shape, dtype=torch.float32, device=hidden.device)
        size = max(CHUNK_ELEMENTS // vocab, 1)
        for start in range(0, rows, size):
            part = slice(start, min(start + size, rows))
            logits = hidden[part] @ half.T  # [chunk, V]; becomes its own gradient
            _loss_rows[(logits.shape[0],)](
                logits, teacher.logits, seen[part], teacher.log_normalizer, teacher.draft_normalizer, weight[part],
                entropy[part], top1[part], alpha[part], vocab, CAP=teacher.cap, BLOCK=BLOCK, num_warps=WARPS,
            )  # fmt: skip
            add_product(grad_head, logits.T, hidden[part])
            torch.mm(logits, half, out=hidden[part])  # which the line before was the last to read
        ctx.save_for_backward(hidden, grad_head)
        ctx.mark_non_differentiable(entropy, top1, alpha)
        loss = torch.where(weight > 0, weight * entropy, 0.0).sum()
        return loss, entropy, top1, alpha

    @staticmethod
    def backward(ctx, grad: Tensor, *_):
        grad_hidden, grad_head = ctx.saved_tensors
        return multiply_(grad_hidden, grad), multiply_(grad_head, grad), None, None, None


def fused_head_loss(hidden: Tensor, head: Tensor, teacher: Teacher, seen: Tensor, weight: Tensor) -> HeadLoss:
    """As train.loss.head_loss; `teacher` from `fused_teacher`, in the dtype of `hidden`.

    `hidden` is used up where it is contiguous: its memory holds its own gradient afterwards. All depths' outputs
    are the largest tensor of a step, and nothing reads them again.
    """
    check_shapes(hidden, head, teacher, seen, weight)
    return HeadLoss(*_HeadLoss.apply(hidden.contiguous(), head, teacher, seen.contiguous(), weight.contiguous()))


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, summed in the dtype of `total` from factors that may be narrower."""
    if total.is_cuda and left.dtype != total.dtype:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)
    else:
        total += left.to(total.dtype) @ right.to(total.dtype)
