"""Fused twin of train.attention.dense: FlashAttention over depth 0, own keys merged by log-sum-exp.

Depth 0 is ordinary causal attention over packed documents, which FlashAttention does at the speed of the
chip: FlashAttention-4 where it is installed (`pip install flash-attn-4`), else the one PyTorch brings. The one
key that a row sees at each depth 1 .. k is merged into its output by a small kernel:

    lse' = log(exp(lse) + sum_i exp(s_i)),   out' = out * exp(lse - lse') + sum_i v_i * exp(s_i - lse')

The backward pass is exact because it hands FlashAttention the MERGED output and log-sum-exp: its softmax
weights exp(s - lse') and its delta = sum(grad * out') are then those of the whole row. Handing it the pair
from before the merge trains as well, with dQ and dK wrong by half.

No [T, T] tensor, no copies of keys: the kernels read every depth's keys where they are.
"""

from __future__ import annotations

from functools import cache
from types import ModuleType

import torch
import triton
import triton.language as tl
from torch import Tensor

from train.attention import Documents

# Rows times queries of a group that one program holds: 32 x 128 float32 is 32 registers a thread and tensor.
QUERIES = 32
# Rows * heads * D * longest document, from which on FlashAttention-4 is the faster one. On an H200 the two break
# even at 4,700 rows of 32 x 128 in documents of up to 390.
SCORES_FOR_FA4 = 5e9


@triton.jit
def _places(
    num_rows,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_PADDED: tl.constexpr, D: tl.constexpr, D_PADDED: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """What a program works on, each as offsets and which of them exist: [ROWS, GROUP, D] of a query, [ROWS, D] of a key,
    [ROWS, GROUP] of a log-sum-exp."""
    kv_head = tl.program_id(1)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    member = tl.arange(0, GROUP_PADDED)
    column = tl.arange(0, D_PADDED)
    head = kv_head * GROUP + member
    key_mask = (row < num_rows)[:, None] & (column < D)[None, :]
    row_mask = (row < num_rows)[:, None] & (member < GROUP)[None, :]
    mask = row_mask[:, :, None] & (column < D)[None, None, :]
    at = (row[:, None, None] * (KV_HEADS * GROUP) + head[None, :, None]) * D + column[None, None, :]
    at_key = (row[:, None] * KV_HEADS + kv_head) * D + column[None, :]
    at_lse = head[None, :] * num_rows + row[:, None]
    return at, mask, at_key, key_mask, at_lse, row_mask


@triton.jit
def _merge_forward(
    query, out, lse, keys, values, merged, merged_lse, num_rows, scale,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_PADDED: tl.constexpr, D: tl.constexpr, D_PADDED: tl.constexpr,
    DEPTHS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """query, out, merged [R, heads, D]; lse, merged_lse [heads, R] float32; keys, values: DEPTHS of [R, KV_HEADS, D]."""
    at, mask, at_key, key_mask, at_lse, row_mask = _places(num_rows, KV_HEADS, GROUP, GROUP_PADDED, D, D_PADDED, ROWS)
    q = tl.load(query + at, mask=mask, other=0.0).to(tl.float32) * scale  # [ROWS, GROUP, D]
    acc = tl.load(out + at, mask=mask, other=0.0).to(tl.float32)
    log_sum = tl.load(lse + at_lse, mask=row_mask, other=0.0)  # [ROWS, GROUP]
    for i in tl.static_range(DEPTHS):
        k = tl.load(keys[i] + at_key, mask=key_mask, other=0.0).to(tl.float32)
        v = tl.load(values[i] + at_key, mask=key_mask, other=0.0).to(tl.float32)
        score = tl.sum(q * k[:, None, :], 2)
        top = tl.maximum(log_sum, score)
        before, own = tl.exp(log_sum - top), tl.exp(score - top)
        total = before + own
        acc = acc * (before / total)[:, :, None] + v[:, None, :] * (own / total)[:, :, None]
        log_sum = top + tl.log(total)
    tl.store(merged + at, acc.to(merged.dtype.element_ty), mask=mask)
    tl.store(merged_lse + at_lse, log_sum, mask=row_mask)


@triton.jit
def _merge_backward(
    query, merged, merged_lse, grad, grad_query, keys, values, grad_keys, grad_values, num_rows, scale,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_PADDED: tl.constexpr, D: tl.constexpr, D_PADDED: tl.constexpr,
    DEPTHS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """grad_query holds depth 0's part and is added to in place, once: a sum over depths is not rounded on its way."""
    at, mask, at_key, key_mask, at_lse, row_mask = _places(num_rows, KV_HEADS, GROUP, GROUP_PADDED, D, D_PADDED, ROWS)
    q = tl.load(query + at, mask=mask, other=0.0).to(tl.float32)  # [ROWS, GROUP, D]
    g = tl.load(grad + at, mask=mask, other=0.0).to(tl.float32)
    delta = tl.sum(g * tl.load(merged + at, mask=mask, other=0.0).to(tl.float32), 2)  # [ROWS, GROUP]
    log_sum = tl.load(merged_lse + at_lse, mask=row_mask, other=0.0)
    dq = tl.load(grad_query + at, mask=mask, other=0.0).to(tl.float32)
    for i in tl.static_range(DEPTHS):
        k = tl.load(keys[i] + at_key, mask=key_mask, other=0.0).to(tl.float32)
        v = tl.load(values[i] + at_key, mask=key_mask, other=0.0).to(tl.float32)
        weight = tl.exp(tl.sum(q * k[:, None, :], 2) * scale - log_sum)
        grad_score = weight * (tl.sum(g * v[:, None, :], 2) - delta) * scale
        dq += grad_score[:, :, None] * k[:, None, :]
        dk, dv = tl.sum(grad_score[:, :, None] * q, 1), tl.sum(weight[:, :, None] * g, 1)
        tl.store(grad_keys[i] + at_key, dk.to(grad_keys[i].dtype.element_ty), mask=key_mask)
        tl.store(grad_values[i] + at_key, dv.to(grad_values[i].dtype.element_ty), mask=key_mask)
    tl.store(grad_query + at, dq.to(grad_query.dtype.element_ty), mask=mask)


def _launch(query: Tensor, keys: tuple[Tensor, ...]) -> tuple[tuple[int, int], dict]:
    """Grid and compile-time sizes of both kernels."""
    num_rows, heads, head_dim = query.shape
    kv_heads = keys[0].shape[1]
    group = triton.next_power_of_2(heads // kv_heads)
    rows = max(QUERIES // group, 1)
    sizes = dict(
        KV_HEADS=kv_heads,
        GROUP=heads // kv_heads,
        GROUP_PADDED=group,
        D=head_dim,
        D_PADDED=triton.next_power_of_2(head_dim),
        DEPTHS=len(keys),
        ROWS=rows,
    )
    return (triton.cdiv(num_rows, rows), kv_heads), sizes


def merge_forward(
    query: Tensor, out: Tensor, lse: Tensor, keys: tuple[Tensor, ...], values: tuple[Tensor, ...]
) -> tuple[Tensor, Tensor]:
    """out [R, heads, D] and lse [heads, R] of depth 0, with one own key per depth merged in."""
    assert all(t.is_contiguous() for t in (query, out, lse, *keys, *values)), "the kernel walks rows by their size"
    merged, merged_lse = torch.empty_like(out), torch.empty_like(lse)
    grid, sizes = _launch(query, keys)
    scale = query.shape[-1] ** -0.5
    _merge_forward[grid](query, out, lse, keys, values, merged, merged_lse, query.shape[0], scale, **sizes)
    return merged, merged_lse


def merge_backward(
    query: Tensor, merged: Tensor, merged_lse: Tensor, grad: Tensor, grad_query: Tensor,
    keys: tuple[Tensor, ...], values: tuple[Tensor, ...],
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:  # fmt: skip
    """Gradients of the own keys and values; grad_query is completed in place."""
    grad_keys = tuple(torch.empty_like(key) for key in keys)
    grad_values = tuple(torch.empty_like(value) for value in values)
    grid, sizes = _launch(query, keys)
    _merge_backward[grid](
        query, merged, merged_lse, grad, grad_query, keys, values, grad_keys, grad_values,
        query.shape[0], query.shape[-1] ** -0.5, **sizes,
    )  # fmt: skip
    return grad_keys, grad_values


@cache
def flash_attention_4() -> ModuleType | None:
    """FlashAttention-4 where it is installed: on Hopper almost twice as fast as what PyTorch brings.

    Elsewhere than on Hopper and the data centre's Blackwell its kernels are those of other chips: PyTorch's are kept.
    """
    try:
        from flash_attn.cute import interface
    except ImportError:
        return None
    return interface if torch.cuda.get_device_capability()[0] in (9, 10) else None


def _flash_attention_4_for(query: Tensor, documents: Documents) -> ModuleType | None:
    """FlashAttention-4, where its calls, which cost the processor 0.1 ms, are worth it."""
    return flash_attention_4() if query.numel() * documents.max_key >= SCORES_FOR_FA4 else None


def causal_forward(
    query: Tensor, key: Tensor, value: Tensor, documents: Documents, *, flash: ModuleType | None
) -> tuple[Tensor, Tensor]:
    """Causal attention of query [R, heads, D] over key, value [T, kv_heads, D]: [R, heads, D] and lse [heads, R].

    A document's last query row stands at its last key row.
    flash  FlashAttention-4, or None for PyTorch's own
    """
    scale = query.shape[-1] ** -0.5
    if flash:
        out, lse, *_ = flash._flash_attn_fwd(
            query, key, value, cu_seqlens_q=documents.cu_query, cu_seqlens_k=documents.cu_key,
            max_seqlen_q=documents.max_query, max_seqlen_k=documents.max_key, softmax_scale=scale, causal=True,
            return_lse=True,
        )  # fmt: skip
        return out, lse
    edges = (documents.cu_query, documents.cu_key, documents.max_query, documents.max_key)
    return torch.ops.aten._flash_attention_forward(query, key, value, *edges, 0.0, True, False, scale=scale)[:2]


def causal_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, documents: Documents,
    *, flash: ModuleType | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of query, key and value; out and lse may have taken in more than these keys."""
    scale = query.shape[-1] ** -0.5
    if flash:
        return flash._flash_attn_bwd(
            query, key, value, out, grad, lse, cu_seqlens_q=documents.cu_query, cu_seqlens_k=documents.cu_key,
            max_seqlen_q=documents.max_query, max_seqlen_k=documents.max_key, softmax_scale=scale, causal=True,
        )[:3]  # fmt: skip
    edges = (documents.cu_query, documents.cu_key, documents.max_query, documents.max_key)
    unused = torch.empty(2, dtype=torch.uint64, device=grad.device)  # the state of a dropout that is off
    return torch.ops.aten._flash_attention_backward(
        grad, query, key, value, out, lse, *edges, 0.0, True, unused, unused, scale=scale
    )


class _TTTAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, documents: Documents, query: Tensor, *keys_and_values: Tensor) -> Tensor:
        depths = len(keys_and_values) // 2
        keys, values = keys_and_values[:depths], keys_and_values[depths:]
        flash = _flash_attention_4_for(query, documents)
        out, lse = causal_forward(query, keys[0], values[0], documents, flash=flash)
        if depths > 1:
            out, lse = merge_forward(query, out, lse, keys[1:], values[1:])
        ctx.save_for_backward(query, out, lse, *keys_and_values)
        ctx.documents, ctx.depths, ctx.flash = documents, depths, flash
        return out

    @staticmethod
    def backward(ctx, grad: Tensor):
        query, out, lse, *keys_and_values = ctx.saved_tensors
        keys, values = tuple(keys_and_values[: ctx.depths]), tuple(keys_and_values[ctx.depths :])
        grad = grad.contiguous()
        grad_query, grad_key, grad_value = causal_backward(
            grad, query, keys[0], values[0], out, lse, ctx.documents, flash=ctx.flash
        )
        own_keys, own_values = (), ()
        if ctx.depths > 1:
            own_keys, own_values = merge_backward(query, out, lse, grad, grad_query, keys[1:], values[1:])
        return None, grad_query, grad_key, *own_keys, grad_value, *own_values


def fused(query: Tensor, keys: list[Tensor], values: list[Tensor], documents: Documents) -> Tensor:
    """As train.attention.dense, for bf16 and fp16 on CUDA."""
    contiguous = [tensor.contiguous() for tensor in (query, *keys, *values)]
    return _TTTAttention.apply(documents, *contiguous)
