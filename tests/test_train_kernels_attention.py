"""The merge kernels against float64, on the CPU with Triton's interpreter and on a GPU where there is one."""

from __future__ import annotations

import pytest
import torch

from tests.packs import pack_of
from train.attention import Documents, dense
from train.kernels import attention as kernels
from train.kernels.attention import fused, merge_backward, merge_forward

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"


def case(*, lengths, heads, kv_heads, head_dim, depths, dtype, first_counted=0, seed=0):
    """Random query, keys, values and an upstream gradient; float64 originals and their copies in `dtype`."""
    batch = pack_of([([1] * n, [1] * n) for n in lengths])
    documents = Documents.of(batch, counted=batch.positions >= first_counted)
    generator = torch.Generator().manual_seed(seed)
    rows, active = batch.num_tokens, documents.active.shape[0]

    def random(n, h):
        return torch.randn(n, h, head_dim, generator=generator, dtype=torch.float64).to(dtype).to(DEVICE)

    query, grad = random(active, heads), random(active, heads)
    keys, values = ([random(rows, kv_heads)] + [random(active, kv_heads) for _ in range(depths)] for _ in range(2))
    return documents.to(DEVICE), query, keys, values, grad


def gradients(attention, documents, query, keys, values, grad, *, dtype):
    """Output and the gradient of every input, computed in `dtype`."""
    inputs = [t.detach().to(dtype).requires_grad_() for t in (query, *keys, *values)]
    split = 1 + len(keys)
    out = attention(inputs[0], inputs[1:split], inputs[split:], documents)
    return [out.detach(), *torch.autograd.grad(out, inputs, grad.to(dtype))]


def error(found, truth):
    return ((found.double() - truth).norm() / truth.norm().clamp(min=1e-12)).item()


def merged_on_plain_tensors(documents, query, keys, values, grad):
    """The kernels under a depth-0 attention of plain PyTorch: what FlashAttention does on a GPU, done exactly."""
    q, k, v = (t.double() for t in (query, keys[0], values[0]))
    group = q.shape[1] // k.shape[1]
    scores = torch.einsum("ihd,jhd->hij", q, k.repeat_interleave(group, 1)) * q.shape[-1] ** -0.5
    start = torch.zeros(k.shape[0], dtype=torch.long, device=q.device)
    for a, b in zip(documents.cu_key.tolist(), documents.cu_key.tolist()[1:]):
        start[a:b] = a
    column = torch.arange(k.shape[0], device=q.device)
    visible = (column <= documents.active[:, None]) & (column >= start[documents.active][:, None])
    scores = scores.masked_fill(~visible, float("-inf"))
    lse = scores.logsumexp(-1)  # [heads, R]
    out = torch.einsum("hij,jhd->ihd", (scores - lse[..., None]).exp(), v.repeat_interleave(group, 1))
    out, lse = out.to(query.dtype).contiguous(), lse.float().contiguous()
    merged, merged_lse = merge_forward(query, out, lse, tuple(keys[1:]), tuple(values[1:]))
    # depth 0's gradient of the query from the merged pair, as FlashAttention's backward computes it
    weights = (scores - merged_lse.double()[..., None]).exp()
    delta = (grad.double() * merged.double()).sum(-1).T[..., None]  # [heads, R, 1]
    grad_scores = weights * (torch.einsum("ihd,jhd->hij", grad.double(), v.repeat_interleave(group, 1)) - delta)
    grad_query = torch.einsum("hij,jhd->ihd", grad_scores, k.repeat_interleave(group, 1)) * q.shape[-1] ** -0.5
    grad_query = grad_query.to(query.dtype).contiguous()
    own_keys, own_values = merge_backward(
        query, merged, merged_lse, grad, grad_query, tuple(keys[1:]), tuple(values[1:])
    )
    return merged, grad_query, own_keys, own_values


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "lengths, heads, kv_heads, head_dim, depths, first_counted",
    [
        ([5, 1, 7], 4, 4, 64, 1, 0),
        ([33, 2], 6, 2, 96, 3, 1),
        ([40], 8, 1, 128, 7, 3),
        ([1, 1, 3], 2, 2, 64, 2, 0),
    ],
)
def test_merging_own_keys_equals_one_softmax_over_all_of_them(
    lengths, heads, kv_heads, head_dim, depths, first_counted, dtype
):
    """Three ways: float64 truth, the dense reference in low precision, the kernel."""
    documents, query, keys, values, grad = case(
        lengths=lengths, heads=heads, kv_heads=kv_heads, head_dim=head_dim, depths=depths,
        dtype=dtype, first_counted=first_counted,
    )  # fmt: skip
    truth = gradients(dense, documents, query, keys, values, grad, dtype=torch.float64)
    reference = gradients(dense, documents, query, keys, values, grad, dtype=dtype)
    merged, grad_query, own_keys, own_values = merged_on_plain_tensors(documents, query, keys, values, grad)
    split = 2 + len(keys)
    found = [merged, grad_query, *own_keys, *own_values]
    expected = [truth[0], truth[1], *truth[3:split], *truth[split + 1 :]]
    low = [reference[0], reference[1], *reference[3:split], *reference[split + 1 :]]
    unit = torch.finfo(dtype).eps
    for kernel, exact, plain in zip(found, expected, low, strict=True):
        assert error(kernel, exact) <= max(error(plain, exact) * 1.5, unit)


@pytest.mark.parametrize("lengths, first_counted", [([33, 2], 1), ([1], 0), ([40, 3, 21], 39)])
def test_every_element_of_every_output_is_written(lengths, first_counted, monkeypatch):
    """Memory as it comes holds old numbers that look right; here it holds nan."""
    plain = torch.empty_like
    documents, query, keys, values, grad = case(
        lengths=lengths, heads=6, kv_heads=2, head_dim=64, depths=2, dtype=torch.bfloat16, first_counted=first_counted
    )
    monkeypatch.setattr(torch, "empty_like", lambda tensor: plain(tensor).fill_(float("nan")))
    merged, grad_query, own_keys, own_values = merged_on_plain_tensors(documents, query, keys, values, grad)
    assert all(tensor.isfinite().all() for tensor in (merged, grad_query, *own_keys, *own_values))


@pytest.mark.skipif(not CUDA, reason="FlashAttention runs on CUDA only; the merge itself is tested above")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [64, 96, 128])
@pytest.mark.parametrize("group", [1, 2, 4, 8])
@pytest.mark.parametrize("depths", [0, 1, 3, 7])
def test_fused_equals_dense_on_ragged_documents(group, depths, head_dim, dtype):
    documents, query, keys, values, grad = case(
        lengths=[300, 1, 77, 128, 513, 2], heads=8, kv_heads=8 // group, head_dim=head_dim, depths=depths,
        dtype=dtype, first_counted=40,
    )  # fmt: skip
    truth = gradients(dense, documents, query, keys, values, grad, dtype=torch.float64)
    reference = gradients(dense, documents, query, keys, values, grad, dtype=dtype)
    found = gradients(fused, documents, query, keys, values, grad, dtype=dtype)
    for kernel, exact, plain in zip(found, truth, reference, strict=True):
        assert error(kernel, exact) <= max(error(plain, exact) * 1.5, torch.finfo(dtype).eps)


@pytest.mark.skipif(not CUDA or kernels.flash_attention_4() is None, reason="needs CUDA and flash-attn-4")
@pytest.mark.parametrize("head_dim, heads, kv_heads", [(128, 8, 2), (64, 9, 3)])
def test_fused_on_flash_attention_4_equals_dense(head_dim, heads, kv_heads, monkeypatch):
    """Merged log-sum-exps go into its backward pass as they go into PyTorch's."""
    monkeypatch.setattr(kernels, "SCORES_FOR_FA4", 0)
    documents, query, keys, values, grad = case(
        lengths=[300, 1, 77, 128, 513, 2], heads=heads, kv_heads=kv_heads, head_dim=head_dim, depths=3,
        dtype=torch.bfloat16, first_counted=40,
    )  # fmt: skip
    truth = gradients(dense, documents, query, keys, values, grad, dtype=torch.float64)
    reference = gradients(dense, documents, query, keys, values, grad, dtype=torch.bfloat16)
    found = gradients(fused, documents, query, keys, values, grad, dtype=torch.bfloat16)
    for kernel, exact, plain in zip(found, truth, reference, strict=True):
        assert error(kernel, exact) <= max(error(plain, exact) * 1.5, torch.finfo(torch.bfloat16).eps)
