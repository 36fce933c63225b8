"""Training-time test: the drafter eats its own features, K depths deep, as it will when it serves.

The alignment, row p at depth k (docs/design.md, enumerated by tests/test_train_unroll.py):

    reads     token x_{p+1+k}, and fc(aux_p) at depth 0 or its own output of depth k-1 after
    predicts  x_{p+2+k}; its teacher is P_{p+1+k}
    counts    iff x_{p+2} .. x_{p+2+k} all exist, lie in p's document and are all the assistant's
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding

from data.batch import Batch
from train.attention import Documents, TTTAttention
from train.loss import Teacher, acceptance, draft_loss
from train.metrics import DepthSums
from train.model import Drafter
from train.target import Target


@dataclass(frozen=True)
class DepthOutput:
    """What the drafter says at one depth, in the rows that are active.

    logits   [R, V]  over the draft vocabulary
    tokens   [R]     int64, the target's id of its most likely draft
    """

    depth: int
    logits: Tensor
    tokens: Tensor


def counted_rows(batch: Batch, *, depths: int) -> Tensor:
    """For each depth k = 0 .. depths-1 the rows whose prediction counts: [K, T] bool."""
    lengths = batch.cu_seqlens.diff().long()[batch.document]  # [T], of the document that a row lies in
    counted, rows = torch.ones_like(batch.loss_mask), []
    for depth in range(depths):
        ahead = 2 + depth
        exists = batch.positions + ahead < lengths
        counted = counted & exists & batch.loss_mask.roll(-ahead, 0)
        rows.append(counted)
    return torch.stack(rows)


def unroll(
    drafter: Drafter, target: Target, batch: Batch, documents: Documents, *, depths: int, attention: TTTAttention
) -> Iterator[DepthOutput]:
    """Yield the drafter's output of depth 0, 1, .. depths-1, all active rows of the pack at once."""
    keys: list[Tensor] = []
    values: list[Tensor] = []

    def remember_and_attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        keys.append(key)
        values.append(value)
        return attention(query, keys, values, documents)

    dtype = _compute_dtype(drafter)
    feature = drafter.project(batch.aux.to(dtype))
    for depth in range(depths):
        tokens = batch.tokens.roll(-1 - depth, 0)  # wraps at the end of the pack, where no row counts
        positions = batch.positions + depth
        if depth > 0:  # from here on the active rows are among themselves
            tokens, positions = tokens[documents.active], positions[documents.active]
        normed, feature = drafter(
            embedding(tokens, target.embedding).to(dtype),
            feature,
            positions=positions,
            attention=remember_and_attend,
            active=documents.active if depth == 0 else None,
        )
        logits = drafter.lm_head(normed)
        yield DepthOutput(depth, logits, drafter.target_ids[logits.detach().argmax(-1)])


def _compute_dtype(drafter: Drafter) -> torch.dtype:
    """What matrix products run in: autocast's dtype where it is on, the weights' own elsewhere."""
    device = drafter.fc.weight.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else drafter.fc.weight.dtype


class TrainingTimeTest(nn.Module):
    """The whole forward pass of a step as one module, so that DDP and DeepSpeed see one call."""

    def __init__(self, drafter: Drafter, target: Target, *, depths: int, gamma: float, attention: TTTAttention):
        super().__init__()
        self.drafter = drafter
        self.depths, self.gamma, self.attention = depths, gamma, attention
        self.frozen_target = [target]  # in a list: its tensors are no parameters and no buffers of this module

    def forward(
        self, batch: Batch, documents: Documents, counted: Tensor, counts: Tensor
    ) -> tuple[Tensor, DepthSums]:
        """Loss of one micro-batch, and its share of the step's metrics.

        counted  [K, T]  bool, from `counted_rows`
        counts   [K]     counted rows per depth in the whole step: all ranks, all micro-batches

        The loss is this micro-batch's summand of sum_k gamma^k * (sum of cross-entropy at depth k) / counts[k]:
        adding it up over ranks and micro-batches gives the loss of the step.
        """
        target = self.frozen_target[0]
        teacher = Teacher.of(batch.last, target.head, target_ids=self.drafter.target_ids)
        active = documents.active
        sums = DepthSums.zeros(self.depths, device=batch.tokens.device)
        loss = torch.zeros((), device=batch.tokens.device)
        right_so_far = torch.ones_like(active, dtype=torch.bool)
        for output in unroll(
            self.drafter, target, batch, documents, depths=self.depths, attention=self.attention
        ):
            k, rows = output.depth, counted[output.depth, active]
            ahead = teacher.seen_from(active, ahead=1 + k)
            summed = draft_loss(output.logits, ahead.logits, counted=rows)
            loss = loss + self.gamma**k * summed / counts[k].clamp(min=1)
            hits = output.tokens == ahead.top1
            sums.add(
                k,
                counted=rows,
                loss=summed,
                hits=hits,
                right_so_far=right_so_far,
                alpha=acceptance(output.logits.detach(), ahead),
            )
            right_so_far = right_so_far & hits
        return loss, sums
