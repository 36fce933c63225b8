"""Batch: what data/ hands to train/, and the legend of every shape letter in Eyas.

    T   tokens of one pack (several documents back to back, perhaps padding at the end)
    N   documents of one pack, the padding counted as one
    A   captured boundaries            H   hidden size of the target and of the drafter
    V   draft vocabulary               D   size of one attention head
    p   row: a position of the pack    k   depth of training-time test, 0 .. K-1
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """One pack of documents, as tensors.

    tokens      [T]        int64, the target's token ids
    loss_mask   [T]        bool, True where the token is the assistant's
    aux         [T, A*H]   residual stream at the boundaries, in their order, side by side
    last        [T, H]     hidden state after the target's final norm
    positions   [T]        int64, restarts at 0 in every document
    document    [T]        int64, 0 .. N-1, non-decreasing
    cu_seqlens  [N+1]      int32, document n holds rows cu_seqlens[n] .. cu_seqlens[n+1]-1
    max_seqlen  int        longest document, in tokens
    ids, sources           of the documents that came from records (the padding has none)
    """

    tokens: Tensor
    loss_mask: Tensor
    aux: Tensor
    last: Tensor
    positions: Tensor
    document: Tensor
    cu_seqlens: Tensor
    max_seqlen: int
    ids: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()

    @property
    def num_tokens(self) -> int:
        return self.tokens.shape[0]

    def to(self, device: torch.device | str, *, non_blocking: bool = True) -> Batch:
        """The same batch with every tensor on `device`."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Batch:
        """Called by torch's DataLoader, so that copies to the device overlap the step."""
        return self._map(Tensor.pin_memory)

    def _map(self, function) -> Batch:
        tensors = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(self, **{n: function(t) for n, t in tensors.items() if isinstance(t, Tensor)})
