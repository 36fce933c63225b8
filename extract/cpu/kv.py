"""Where a request's keys and values lie: the bookkeeping kernels of SGLang's CPU build, in plain PyTorch.

`req_to_token` [requests, positions] holds, for a request and a position, the slot of the KV pool.
`req_pool_indices` [B] says which rows of it the batch uses. Outputs are written in place.
"""

from __future__ import annotations

import ctypes

from torch import Tensor


def copy_all_layer_kv_cache_cpu(data_ptrs: Tensor, strides: Tensor, tgt_loc: Tensor, src_loc: Tensor) -> None:
    """Moves slots of the KV pool, in every layer's buffers: slot src_loc[i] goes to tgt_loc[i].

    data_ptrs [L]  addresses of the buffers        strides [L]  bytes of one slot in each
    """
    targets, sources = tgt_loc.tolist(), src_loc.tolist()
    for pointer, stride in zip(data_ptrs.tolist(), strides.tolist()):
        # Read all before the first write: a target may be a later source.
        rows = [ctypes.string_at(pointer + source * stride, stride) for source in sources]
        for target, row in zip(targets, rows):
            ctypes.memmove(pointer + target * stride, row, stride)


def assign_req_to_token_pool_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    end_offset: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
) -> None:
    """Writes the packed `out_cache_loc` into positions start..end-1 of each request's row of `req_to_token`."""
    taken = 0
    for row, start, end in zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist()):
        req_to_token[row, start:end] = out_cache_loc[taken : taken + end - start].to(req_to_token.dtype)
        taken += end - start


def assign_extend_cache_locs_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    end_offset: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
) -> None:
    """The reverse: packs positions start..end-1 of each request's row of `req_to_token` into `out_cache_loc`."""
    filled = 0
    for row, start, end in zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist()):
        out_cache_loc[filled : filled + end - start] = req_to_token[row, start:end].to(out_cache_loc.dtype)
        filled += end - start


def assign_draft_cache_locs_contiguous_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    seq_lens: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
    topk: int,
    num_steps: int,
) -> None:
    """Packs the topk * num_steps slots that follow each request's seq_lens tokens into `out_cache_loc`."""
    width = topk * num_steps
    for i, (row, start) in enumerate(zip(req_pool_indices.tolist(), seq_lens.tolist())):
        out_cache_loc[i * width : (i + 1) * width] = req_to_token[row, start : start + width].to(out_cache_loc.dtype)


def build_draft_decode_metadata_cpu(
    req_to_token: Tensor, req_pool_indices: Tensor, seq_lens: Tensor, topk: int, num_steps: int, pool_len: int
) -> Tensor:
    """One row of `req_to_token` per request and branch, each branch seeing its own draft slots after the prefix.

    Branch t of a request owns slots seq_len + t * num_steps ... of the request's row.
    Returns [B * topk, positions], a copy.
    """
    rows = req_to_token[req_pool_indices.long()].repeat_interleave(topk, dim=0)
    if topk == 1:  # the only branch lies in place already
        return rows
    for i, start in enumerate(seq_lens.tolist()):
        source = req_to_token[int(req_pool_indices[i])]
        for branch in range(topk):
            first = start + branch * num_steps
            rows[i * topk + branch, start : start + num_steps] = source[first : first + num_steps]
    return rows
