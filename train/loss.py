"""The teacher, and the loss of the draft head against it: hits, alpha and cross-entropy. All in float32.

Source: EAGLE-3, arXiv 2503.01840, section 3; alpha is the acceptance probability of speculative
sampling, arXiv 2211.17192, theorem 3.5.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from data.codecs import capped

ROWS_PER_CHUNK = 2048  # of the full vocabulary at a time: 2048 x 163,840 float32 logits are 1.3 GB


@dataclass(frozen=True)
class Teacher:
    """The target's next-token distributions in the R active rows of a pack, computed once for all depths.

    logits            [R, V]  of the draft vocabulary's tokens only, before the cap
    log_normalizer    [R]     float32, log-sum-exp over the whole vocabulary
    draft_normalizer  [R]     float32, log-sum-exp over the draft vocabulary: renormalizes the teacher
    top1              [R]     int64, the target's own id of its most likely token
    cap               of the target's logits, if it has one (data/boundaries.logits_cap): bent as they are read, in float32

    The loss reads logits and draft_normalizer alone. Of a teacher `within` the draft vocabulary, which costs a
    quarter of the work, log_normalizer and top1 are those of the draft vocabulary, and alpha and hits mean nothing.
    """

    logits: Tensor
    log_normalizer: Tensor
    draft_normalizer: Tensor
    top1: Tensor
    cap: float | None = None

    @classmethod
    @torch.no_grad()
    def of(
        cls, last: Tensor, head: Tensor, *, target_ids: Tensor, within: bool = False, cap: float | None = None
    ) -> Teacher:
        """last [R, H] after the target's final norm, head [vocab, H], target_ids [V] of the draft tokens.

        within  only the draft vocabulary's logits are made
        """
        if within:
            logits = _wide(last.to(head.dtype) @ head[target_ids].T)  # [R, V]
            normalizer = capped(logits, cap).logsumexp(-1)
            return cls(logits, normalizer, normalizer, target_ids[logits.argmax(-1)], cap)
        columns = []
        for rows in last.split(ROWS_PER_CHUNK):
            full = _wide(rows.to(head.dtype) @ head.T)  # [rows, vocab]
            draft = full[:, target_ids]
            columns.append((draft, capped(full, cap).logsumexp(-1), capped(draft, cap).logsumexp(-1), full.argmax(-1)))
        return cls(*(torch.cat(column) for column in zip(*columns, strict=True)), cap)

    @classmethod
    @torch.no_grad()
    def from_top_k(
        cls, ids: Tensor, log_probs: Tensor, *, target_ids: Tensor, vocab_size: int, dtype: torch.dtype
    ) -> Teacher:
        """From the k most likely tokens of the target, ids [R, k] with their log_probs [R, k], the argmax first.

        What they leave of the probability is spread evenly over all other tokens of the target's vocabulary.
        dtype  of the logits, which are log-probabilities here, so that their normalizer is 0
        """
        others = vocab_size - ids.shape[1]
        rest = (1 - log_probs.double().exp().sum(-1)).clamp(min=1e-9).float()  # [R]
        draft_ids = torch.full((vocab_size,), -1, device=ids.device)
        draft_ids[target_ids] = torch.arange(target_ids.shape[0], device=ids.device)
        draft_ids = draft_ids[ids.long()]  # [R, k], -1 outside the draft vocabulary
        each = (rest / max(others, 1)).log().minimum(log_probs[:, -1])  # none is likelier than the last that was kept
        logits = each.to(dtype)[:, None].repeat(1, target_ids.shape[0])  # [R, V]
        known = log_probs.masked_fill(draft_ids < 0, float("-inf")).to(dtype)
        logits.scatter_reduce_(1, draft_ids.clamp(min=0), known, "amax")
        draft_normalizer = _wide(logits).logsumexp(-1)
        return cls(logits, torch.zeros_like(draft_normalizer), draft_normalizer, ids[:, 0].long())


@dataclass(frozen=True)
class HeadLoss:
    """What the draft head gives for M rows. Only `loss` has a gradient.

    loss     scalar, sum over rows of weight * cross-entropy
    entropy  [M]  float32, cross-entropy of each row in nats, whatever its weight
    top1     [M]  int64, the drafter's most likely token, in the draft vocabulary
    alpha    [M]  float32, sum over tokens of min(P, Q): the probability that sampling accepts the draft
    """

    loss: Tensor
    entropy: Tensor
    top1: Tensor
    alpha: Tensor


def head_loss(hidden: Tensor, head: Tensor, teacher: Teacher, seen: Tensor, weight: Tensor) -> HeadLoss:
    """Cross-entropy of the drafter against the target's own distribution, renormalized over the draft vocabulary.

    hidden  [M, H]  the drafter's normed outputs, of any depths
    head    [V, H]  the draft head
    seen    [M]     int64, the teacher's row that each of them is compared with
    weight  [M]     float32, 0 for rows that nothing counts: their logits may be anything, and give no gradient

    Raises ValueError if the shapes disagree. Fused twin: train/kernels/linear_loss.py.
    Source: EAGLE-3, arXiv 2503.01840. P in alpha is the target's full distribution: what it gives to tokens
    that the drafter cannot say is lost.
    """
    check_shapes(hidden, head, teacher, seen, weight)
    counted = weight > 0
    logits = _wide(hidden @ head.to(hidden.dtype).T)  # [M, V]
    target_logits = capped(_wide(teacher.logits[seen]), teacher.cap)
    log_q = logits.log_softmax(-1)
    p = (target_logits - teacher.draft_normalizer[seen, None]).exp()
    entropy = -(p * log_q).sum(-1)
    loss = (weight[counted] * entropy[counted]).sum()
    with torch.no_grad():
        full_p = (target_logits - teacher.log_normalizer[seen, None]).exp()
        alpha = torch.minimum(full_p, log_q.exp()).sum(-1)
    return HeadLoss(loss, entropy.detach(), logits.detach().argmax(-1), alpha)


def check_shapes(hidden: Tensor, head: Tensor, teacher: Teacher, seen: Tensor, weight: Tensor) -> None:
    rows, vocab = hidden.shape[0], teacher.logits.shape[1]
    if head.shape != (vocab, hidden.shape[1]) or seen.shape != (rows,) or weight.shape != (rows,):
        raise ValueError(
            f"hidden {list(hidden.shape)}, head {list(head.shape)}, teacher {list(teacher.logits.shape)}, "
            f"seen {list(seen.shape)}, weight {list(weight.shape)}: expected [M, H], [V, H], [R, V], [M], [M]"
        )


class MakeTeacher(Protocol):
    def __call__(
        self, last: Tensor, head: Tensor, *, target_ids: Tensor, within: bool = False, cap: float | None = None
    ) -> Teacher: ...


class LossOfHead(Protocol):
    def __call__(self, hidden: Tensor, head: Tensor, teacher: Teacher, seen: Tensor, weight: Tensor) -> HeadLoss: ...


class HeadFunctions(NamedTuple):
    """A teacher and the loss that reads it: they agree on the dtype of its logits."""

    teacher: MakeTeacher
    loss: LossOfHead


PLAIN = HeadFunctions(Teacher.of, head_loss)


def choose(name: str) -> HeadFunctions:
    """The head that goes with `attention=name`."""
    if name == "fused":
        from train.kernels.linear_loss import fused_head_loss, fused_teacher  # needs Triton

        return HeadFunctions(fused_teacher, fused_head_loss)
    return PLAIN


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
