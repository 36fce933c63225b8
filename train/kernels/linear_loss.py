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
BLOCK = 4096  # columns of one step; a row of 32,000 takes 8


@triton.jit
def _normalizer(logits, log_normalizer, top1, num_columns, BLOCK: tl.constexpr):
    """Per row of logits [rows, num_columns]: log-sum-exp in float32, and the first largest column."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * num_columns
    column = tl.arange(0, BLOCK)
    top = float("-inf")
    total = 0.0
    best = 0
    for start in range(0, num_columns, BLOCK):
        x = tl.load(logits + start + column, mask=start + column < num_columns, other=float("-inf")).to(tl.float32)
        largest = tl.max(x, 0)
        best = tl.where(largest > top, start + tl.argmax(x, 0), best)
        higher = tl.maximum(top, largest)
        total = total * tl.exp(top - higher) + tl.sum(tl.exp(x - higher), 0)
        top = higher
    tl.store(log_normalizer + row, top + tl.log(total))
    tl.store(top1 + row, best.to(tl.int64))


@triton.jit
def _loss_rows(
    logits, teacher, seen, log_normalizer, draft_normalizer, weight, entropy, top1, alpha, num_columns,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Per row: cross-entropy, most likely token, alpha; then the gradient in the logits' own memory."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * num_columns
    teacher_row = tl.load(seen + row)
    teacher += teacher_row * num_columns
    full, draft = tl.load(log_normalizer + teacher_row), tl.load(draft_normalizer + teacher_row)
    w = tl.load(weight + row)
    column = tl.arange(0, BLOCK)
    top = float("-inf")
    total = 0.0
    cross = 0.0
    best = 0
    for start in range(0, num_columns, BLOCK):
        inside = start + column < num_columns
        x = tl.load(logits + start + column, mask=inside, other=float("-inf")).to(tl.float32)
        t = tl.load(teacher + start + column, mask=inside, other=float("-inf")).to(tl.float32)
        cross += tl.sum(tl.where(inside, tl.exp(t - draft) * x, 0.0), 0)
        largest = tl.max(x, 0)
        best = tl.where(largest > top, start + tl.argmax(x, 0), best)
        higher = tl.maximum(top, largest)
        total = total * tl.exp(top - higher) + tl.sum(tl.exp(x - higher), 0)
        top = higher
    own = top + tl.log(total)
    overlap = 0.0
    for start in range(0, num_columns, BLOCK):
        inside = start + column < num_columns
        x = tl.load(logits + start + column, mask=inside, other=float("-inf")).to(tl.float32)
        t = tl.load(teacher + start + column, mask=inside, other=float("-inf")).to(tl.float32)
        q = tl.exp(x - own)
        overlap += tl.sum(tl.minimum(q, tl.exp(t - full)), 0)
        # weight 0: no gradient, even where the row holds infinities
        gradient = tl.where(w > 0, (q - tl.exp(t - draft)) * w, 0.0)
        tl.store(logits + start + column, gradient.to(logits.dtype.element_ty), mask=inside)
    tl.store(entropy + row, own - cross)
    tl.store(top1 + row, best.to(tl.int64))
    tl.store(alpha + row, overlap)


def normalizer(logits: Tensor) -> tuple[Tensor, Tensor]:
    """log-sum-exp [rows] float32 and argmax [rows] int64 of contiguous logits [rows, columns], in one pass."""
    assert logits.is_contiguous()
    rows, columns = logits.shape
    log_normalizer = torch.empty(rows, dtype=torch.float32, device=logits.device)
    top1 = torch.empty(rows, dtype=torch.int64, device=logits.device)
    _normalizer[(rows,)](logits, log_normalizer, top1, columns, BLOCK=BLOCK, num_warps=8)
    return log_normalizer, top1


@torch.no_grad()
def fused_teacher(last: Tensor, head: Tensor, *, target_ids: Tensor) -> Teacher:
    """As Teacher.of; the draft vocabulary's logits stay in the inputs' dtype."""
    rows, vocab = last.shape[0], head.shape[0]
    device = last.device
    draft = torch.empty(rows, target_ids.shape[0], dtype=head.dtype, device=device)
    log_normalizer = torch.empty(rows, dtype=torch.float32, device=device)
    top1 = torch.empty(rows, dtype=torch.int64, device=device)
    for chunk in torch.arange(rows).split(max(CHUNK_ELEMENTS // vocab, 1)):
        part = slice(int(chunk[0]), int(chunk[-1]) + 1)
        full = last[part].to(head.dtype) @ head.T  # [chunk, vocab]
        log_normalizer[part], top1[part] = normalizer(full)
        torch.index_select(full, 1, target_ids, out=draft[part])
    return Teacher(draft, log_normalizer, normalizer(draft)[0], top1)


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden: Tensor, head: Tensor, teacher: Teacher, seen: Tensor, weight: Tensor):
        rows, vocab = hidden.shape[0], head.shape[0]
        half = head.to(hidden.dtype)
        entropy, alpha = torch.empty(2, rows, dtype=torch.float32, device=hidden.device)
        top1 = torch.empty(rows, dtype=torch.int64, device=hidden.device)
        grad_hidden = torch.empty_like(hidden)
        grad_head = torch.zeros(head.shape, dtype=torch.float32, device=hidden.device)
        size = max(CHUNK_ELEMENTS // vocab, 1)
        for start in range(0, rows, size):
            part = slice(start, min(start + size, rows))
            logits = hidden[part] @ half.T  # [chunk, V]; becomes its own gradient
            _loss_rows[(logits.shape[0],)](
                logits, teacher.logits, seen[part], teacher.log_normalizer, teacher.draft_normalizer, weight[part],
                entropy[part], top1[part], alpha[part], vocab, BLOCK=BLOCK, num_warps=8,
            )  # fmt: skip
            torch.mm(logits, half, out=grad_hidden[part])
            _add_product(grad_head, logits.T, hidden[part])
        ctx.save_for_backward(grad_hidden, grad_head)
        ctx.mark_non_differentiable(entropy, top1, alpha)
        loss = torch.where(weight > 0, weight * entropy, 0.0).sum()
        return loss, entropy, top1, alpha

    @staticmethod
    def backward(ctx, grad: Tensor, *_):
        grad_hidden, grad_head = ctx.saved_tensors
        return grad_hidden * grad, grad_head.mul_(grad), None, None, None


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, summed in float32 from low-precision factors."""
    if total.is_cuda and left.dtype != torch.float32:
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    else:
        total += left.float() @ right.float()


def fused_head_loss(hidden: Tensor, head: Tensor, teacher: Teacher, seen: Tensor, weight: Tensor) -> HeadLoss:
    """As train.loss.head_loss; `teacher` from `fused_teacher`, in the dtype of `hidden`."""
    check_shapes(hidden, head, teacher, seen, weight)
    return HeadLoss(*_HeadLoss.apply(hidden.contiguous(), head, teacher, seen.contiguous(), weight.contiguous()))
