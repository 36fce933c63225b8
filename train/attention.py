"""Attention of training-time test over packed documents: the dense reference, and where one is chosen.

At depth k a row sees the depth-0 keys of the rows before it and of itself, in its own document, and its
own keys of depths 1 .. k: the chain it drafted. No row sees another row's drafts.

Only the active rows R ask: those from a document's first counted row on. The rows before (the prompt,
often half of the tokens) are seen, and need neither query nor MLP nor head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from data.batch import Batch

# (query, keys of depths 0..k, values of depths 0..k, documents) -> [R, heads, D]
TTTAttention = Callable[[Tensor, list[Tensor], list[Tensor], "Documents"], Tensor]


@dataclass(frozen=True)
class Documents:
    """Which rows of a pack ask, and what they may see.

    active     [R]    int64, the pack's rows that ask: of each document its last ones
    cu_query   [N+1]  int32, document n owns active rows cu_query[n] .. cu_query[n+1]-1
    cu_key     [N+1]  int32, and sees rows cu_key[n] .. cu_key[n+1]-1 of the pack
    max_query, max_key  the longest of each, in rows
    """

    active: Tensor
    cu_query: Tensor
    cu_key: Tensor
    max_query: int
    max_key: int

    @classmethod
    def of(cls, batch: Batch, *, counted: Tensor, bucket: int = 1) -> Documents:
        """counted [T] bool: rows that some depth counts. On the CPU: nothing here waits for a device.

        R is rounded up to a multiple of `bucket` (as far as the pack has rows), so that shapes repeat: the
        rows added are the nearest ones before those that count.
        """
        stops = batch.cu_seqlens[1:].long()
        row = torch.arange(batch.num_tokens)
        first = torch.where(counted, row, batch.num_tokens)
        starts = stops.clone().scatter_reduce(0, batch.document, first, "amin")  # [N]; stop where nothing counts
        wanted = min(-(-max(int((stops - starts).sum()), 1) // bucket) * bucket, batch.num_tokens)
        missing = wanted - int((stops - starts).sum())
        spare = starts - batch.cu_seqlens[:-1]  # [N], rows of each document that do not ask yet
        taken = (missing - (spare.cumsum(0) - spare)).clamp(min=0)
        starts = starts - torch.minimum(taken, spare)
        lengths = stops - starts
        return cls(
            active=row[row >= starts[batch.document]],
            cu_query=torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).to(torch.int32),
            cu_key=batch.cu_seqlens,
            max_query=int(lengths.max()),
            max_key=batch.max_seqlen,
        )

    def to(self, device: torch.device | str) -> Documents:
        tensors = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(
            self, **{n: t.to(device, non_blocking=True) for n, t in tensors.items() if isinstance(t, Tensor)}
        )


def dense(query: Tensor, keys: list[Tensor], values: list[Tensor], documents: Documents) -> Tensor:
    """The definition, in plain PyTorch: every score in memory, softmax in float32.

    query         [R, heads, D]
    keys, values  [T, kv_heads, D] of depth 0, then one [R, kv_heads, D] for each depth 1 .. k

    Returns [R, heads, D]. Memory grows with N * max_query * max_key: short documents only.
    """
    kv_heads, head_dim = keys[0].shape[1:]
    asks, inside = _rectangle(documents.cu_query, documents.max_query)  # [N, I]
    sees, exists = _rectangle(documents.cu_key, documents.max_key)  # [N, J]
    q = query[asks].unflatten(2, (kv_heads, -1)) * head_dim**-0.5  # [N, I, kv_heads, group, D]
    scores = torch.einsum("nihgd,njhd->nhgij", q, keys[0][sees])  # [N, kv_heads, group, I, J]
    own_row = documents.active[asks]  # [N, I], the pack's row that asks
    # Where the rectangle holds no row, everything is visible: a row that sees nothing would give nan.
    visible = exists[:, None] & ((sees[:, None] <= own_row[..., None]) | ~inside[..., None])  # [N, I, J]
    scores = scores.masked_fill(~visible[:, None, None], float("-inf"))
    own = [torch.einsum("nihgd,nihd->nhgi", q, key[asks]) for key in keys[1:]]  # k times [N, kv_heads, group, I]
    scores = torch.cat([scores, *(s[..., None] for s in own)], dim=-1)  # [N, kv_heads, group, I, J + k]
    wide = scores.float() if scores.dtype in (torch.bfloat16, torch.float16) else scores
    weights = wide.softmax(-1).to(query.dtype)
    output = torch.einsum("nhgij,njhd->nihgd", weights[..., : sees.shape[1]], values[0][sees])
    for depth, value in enumerate(values[1:]):
        output = output + torch.einsum("nhgi,nihd->nihgd", weights[..., sees.shape[1] + depth], value[asks])
    return output.flatten(2, 3)[inside]  # [R, heads, D]


def _rectangle(edges: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Runs edges[n] .. edges[n+1]-1 as rows of a rectangle [N, width], and where it holds one of them.

    Outside stands the run's first row, clamped into range: a valid index, whose scores nobody reads.
    """
    starts, stops = edges[:-1].long()[:, None], edges[1:].long()[:, None]
    index = starts + torch.arange(width, device=edges.device)
    inside = index < stops
    return torch.minimum(torch.where(inside, index, starts), edges[-1].long() - 1), inside


def choose(name: str) -> TTTAttention:
    """The attention that `attention=name` asks for. Raises ValueError for a name that is none."""
    if name == "dense":
        return dense
    if name == "fused":
        from train.kernels.attention import fused  # needs Triton, which a CPU run does without

        return fused
    raise ValueError(f"attention is {name!r}: choose dense or fused")
