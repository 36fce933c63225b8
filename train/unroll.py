"""Training-time test: the drafter eats its own features, K depths deep, as it will when it serves.

The alignment, row p at depth k (docs/design.md, enumerated by tests/test_train_unroll.py):

    reads     token x_{p+1+k}, and fc(aux_p) at depth 0 or its own output of depth k-1 after
    predicts  x_{p+2+k}; its teacher is P_{p+1+k}
    counts    iff x_{p+2} .. x_{p+2+k} all exist, lie in p's document and are all the assistant's
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, pad

from data.batch import Batch
from train.attention import Documents, TTTAttention
from train.loss import HeadFunctions, MakeTeacher, Teacher
from train.metrics import DepthSums
from train.model import Attention, Drafter
from train.target import Target


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
    drafter: Drafter,
    target: Target,
    batch: Batch,
    documents: Documents,
    *,
    depths: int,
    attention: TTTAttention,
    dtype: torch.dtype,
    float8: bool = False,
) -> Tensor:
    """The drafter's normed outputs at depths 0 .. depths-1, all active rows of the pack at once: [K, R, H] in `dtype`.

    dtype   of matrix products and of what flows between them; the parameters stay what they are
    float8  rounds the MLP's products further
    """
    keys: tuple[Tensor, ...] = ()  # of the depths before
    values: tuple[Tensor, ...] = ()
    matrices = drafter.matrices(dtype, float8=float8)
    feature = drafter.project(batch.aux.to(dtype), matrices)
    read = drafter.read_tokens(embedding(batch.tokens, target.embedding).to(dtype), matrices)  # of token x_p in row p
    read_ahead = pad(read, (0, 0, 0, depths))  # nothing is read beyond the end, where no row counts
    positions, active, outputs = batch.positions, documents.active, []
    for depth in range(depths):
        if depth == 1:  # from here on the active rows are among themselves: they run to their documents' ends
            read_ahead = pad(read[documents.active], (0, 0, 0, depths))
            positions, active = positions[documents.active], None
        normed, feature, key, value = drafter(
            read_ahead[1 + depth : 1 + depth + positions.shape[0]],
            feature,
            positions=positions + depth,
            attention=_own_keys_after(attention, keys, values, documents),
            matrices=matrices,
            active=active,
        )
        keys, values = (*keys, key), (*values, value)
        outputs.append(normed)
    return torch.stack(outputs)


def _own_keys_after(
    attention: TTTAttention, keys: tuple[Tensor, ...], values: tuple[Tensor, ...], documents: Documents
) -> Attention:
    """The attention of one depth. It may be asked again in the backward pass: nothing is kept here."""
    return lambda query, key, value: attention(query, [*keys, key], [*values, value], documents)


def teacher_of(
    target: Target,
    batch: Batch,
    documents: Documents,
    *,
    target_ids: Tensor,
    depths: int,
    make: MakeTeacher,
    within: bool = False,
) -> tuple[Teacher, Tensor]:
    """The teacher of the active rows, and which of its rows each depth looks at: Teacher, [K, R] int64.

    The active rows of a document run to its end, so that row p + 1 + k stands 1 + k places further on.
    Beyond a document's end another teacher stands: nothing counts there.
    """
    active = documents.active
    if batch.last is None:
        teacher = Teacher.from_top_k(
            batch.top_ids[active],
            batch.top_log_probs[active],
            target_ids=target_ids,
            vocab_size=target.vocab_size,
            dtype=target.head.dtype,
        )
    else:
        teacher = make(batch.last[active], target.head, target_ids=target_ids, within=within, cap=target.logits_cap)
    place = torch.arange(documents.active.shape[0], device=documents.active.device)
    ahead = 1 + torch.arange(depths, device=place.device)
    return teacher, (place + ahead[:, None]).clamp(max=place.shape[0] - 1)


class TrainingTimeTest(nn.Module):
    """The whole forward pass of a step as one module, so that DDP and DeepSpeed see one call."""

    def __init__(
        self,
        drafter: Drafter,
        target: Target,
        *,
        depths: int,
        gamma: float,
        attention: TTTAttention,
        head: HeadFunctions,
        dtype: torch.dtype,
        float8: bool = False,
    ):
        super().__init__()
        self.drafter = drafter
        self.depths, self.attention, self.head, self.dtype, self.float8 = depths, attention, head, dtype, float8
        gammas = torch.tensor([gamma**depth for depth in range(depths)], device=drafter.d2t.device)
        self.register_buffer("gammas", gammas, persistent=False)  # [K]
        self.frozen_target = [target]  # in a list: its tensors are no parameters and no buffers of this module

    def forward(
        self, batch: Batch, documents: Documents, counted: Tensor, counts: Tensor, measure: bool = True
    ) -> tuple[Tensor, DepthSums]:
        """Loss of one micro-batch, and its share of the step's metrics.

        counted  [K, T]  bool, from `counted_rows`
        counts   [K]     counted rows per depth in the whole step: all ranks, all micro-batches
        measure          also count hits and alpha, for which the teacher reads its whole vocabulary

        The loss is this micro-batch's summand of sum_k gamma^k * (sum of cross-entropy at depth k) / counts[k]:
        adding it up over ranks and micro-batches gives the loss of the step.
        """
        target, drafter = self.frozen_target[0], self.drafter
        normed = unroll(
            drafter,
            target,
            batch,
            documents,
            depths=self.depths,
            attention=self.attention,
            dtype=self.dtype,
            float8=self.float8,
        )
        teacher, seen = teacher_of(
            target,
            batch,
            documents,
            target_ids=drafter.target_ids,
            depths=self.depths,
            make=self.head.teacher,
            within=not measure,
        )
        rows = counted[:, documents.active]  # [K, R]
        weight = rows * (self.gammas / counts.clamp(min=1).float())[:, None]
        found = self.head.loss(normed.flatten(0, 1), drafter.lm_head.weight, teacher, seen.flatten(), weight.flatten())
        hits = drafter.target_ids[found.top1] == teacher.top1[seen.flatten()]
        sums = DepthSums.of(
            counted=rows,
            entropy=found.entropy.view_as(rows),
            hits=hits.view_as(rows),
            alpha=found.alpha.view_as(rows),
            measured=measure,
        )
        return found.loss, sums
