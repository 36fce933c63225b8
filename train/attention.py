"""Attention of training-time test over packed documents: the dense reference, and where one is chosen.

At depth k a row sees the depth-0 keys of the rows before it and of itself, in its own document, and its
own keys of depths 1 .. k: the chain it drafted. No row sees another row's drafts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from data.batch import Batch

# (query, keys of depths 0..k, values of depths 0..k, documents) -> [T, heads, D]
TTTAttention = Callable[[Tensor, list[Tensor], list[Tensor], "Documents"], Tensor]


@dataclass(frozen=True)
class Documents:
    """Where the documents of a pack lie, in the two forms that attention kernels ask for.

    cu_seqlens  [N+1]  int32          max_seqlen  int, L
    rows        [N, L] int64, the pack's row of each document's token; any row where there is none
    inside      [N, L] bool, False beyond a document's end
    """

    cu_seqlens: Tensor
    max_seqlen: int
    rows: Tensor
    inside: Tensor

    @classmethod
    def of(cls, batch: Batch) -> Documents:
        starts, stops = batch.cu_seqlens[:-1].long(), batch.cu_seqlens[1:].long()
        rows = starts[:, None] + torch.arange(batch.max_seqlen, device=starts.device)  # [N, L]
        inside = rows < stops[:, None]
        return cls(
            cu_seqlens=batch.cu_seqlens,
            max_seqlen=batch.max_seqlen,
            rows=rows.clamp(max=batch.num_tokens - 1),
            inside=inside,
        )


def dense(query: Tensor, keys: list[Tensor], values: list[Tensor], documents: Documents) -> Tensor:
    """The definition, in plain PyTorch: every score in memory, softmax in float32.

    query         [T, heads, D]
    keys, values  one [T, kv_heads, D] for each depth 0 .. k

    Returns [T, heads, D]. Memory grows with N * L * L: short documents only.
    """
    kv_heads, head_dim = keys[0].shape[1:]
    group = query.shape[1] // kv_heads
    rows, length = documents.rows, documents.max_seqlen
    q = query[rows].unflatten(2, (kv_heads, group)) * head_dim**-0.5  # [N, L, kv_heads, group, D]
    scores = torch.einsum("nihgd,njhd->nhgij", q, keys[0][rows])  # [N, kv_heads, group, L, L]
    causal = torch.ones(length, length, dtype=torch.bool, device=query.device).tril()
    scores = scores.masked_fill(~causal, float("-inf"))
    own = [torch.einsum("nihgd,nihd->nhgi", q, key[rows]) for key in keys[1:]]  # k times [N, kv_heads, group, L]
    scores = torch.cat([scores, *(s[..., None] for s in own)], dim=-1)  # [N, kv_heads, group, L, L + k]
    wide = scores.float() if scores.dtype in (torch.bfloat16, torch.float16) else scores
    weights = wide.softmax(-1).to(query.dtype)
    output = torch.einsum("nhgij,njhd->nihgd", weights[..., :length], values[0][rows])  # [N, L, kv_heads, group, D]
    for depth, value in enumerate(values[1:]):
        output = output + torch.einsum("nhgi,nihd->nihgd", weights[..., length + depth], value[rows])
    return output.flatten(2, 3)[documents.inside].view_as(query)


def choose(name: str) -> TTTAttention:
    """The attention that `attention=name` asks for. Raises ValueError for a name that is none."""
    if name == "dense":
        return dense
    raise ValueError(f"attention is {name!r}: choose dense")
