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

from data.codecs import decode_fp8


@dataclass(frozen=True)
class Batch:
    """One pack of documents, as tensors.

    tokens          [T]        int64, the target's token ids
    loss_mask       [T]        bool, True where the token is the assistant's
    aux             [T, A*H]   residual stream at the boundaries, in their order, side by side
    last            [T, H]     hidden state after the target's final norm; None where the top k stand in its place
    positions       [T]        int64, restarts at 0 in every document
    document        [T]        int64, 0 .. N-1, non-decreasing
    cu_seqlens      [N+1]      int32, document n holds rows cu_seqlens[n] .. cu_seqlens[n+1]-1
    max_seqlen      int        longest document, in tokens
    ids, sources               of the documents that came from records (the padding has none)
    aux_scale       [T, A]     float32, where aux is e4m3, as it comes from a shard; `to` makes numbers of both
    last_scale      [T]        likewise
    top_ids         [T, k]     int32, the teacher's most likely next tokens, its argmax first; None where there is last
    top_log_probs   [T, k]     float32, their log-probabilities over the whole vocabulary
    log_normalizer  [T]        float32, log-sum-exp of the teacher's logits
    """

    tokens: Tensor
    loss_mask: Tensor
    aux: Tensor
    last: Tensor | None
    positions: Tensor
    document: Tensor
    cu_seqlens: Tensor
    max_seqlen: int
    ids: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()
    aux_scale: Tensor | None = None
    last_scale: Tensor | None = None
    top_ids: Tensor | None = None
    top_log_probs: Tensor | None = None
    log_normalizer: Tensor | None = None

    @property
    def num_tokens(self) -> int:
        return self.tokens.shape[0]

    def to(self, device: torch.device | str, *, non_blocking: bool = True) -> Batch:
        """The same batch with every tensor on `device`, and decoded there: half the bytes are copied."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking)).decoded()

    def decoded(self) -> Batch:
        """The same batch with aux and last as numbers: bfloat16 where they were e4m3, which is exact."""
        changes = {}
        if self.aux_scale is not None:
            aux = self.aux.view(*self.aux_scale.shape, -1)  # [T, A, H]
            changes |= {"aux": decode_fp8(aux, self.aux_scale).flatten(1), "aux_scale": None}
        if self.last_scale is not None:
            changes |= {"last": decode_fp8(self.last, self.last_scale), "last_scale": None}
        return replace(self, **changes)

    def pin_memory(self) -> Batch:
        """Called by torch's DataLoader, so that copies to the device overlap the step."""
        return self._map(Tensor.pin_memory)

    def _map(self, function) -> Batch:
        tensors = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(self, **{n: function(t) for n, t in tensors.items() if isinstance(t, Tensor)})
