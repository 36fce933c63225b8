"""The teacher, the reference loss and what is counted with it: hits and alpha. Everything in float32.

Source: EAGLE-3, arXiv 2503.01840, section 3; alpha is the acceptance probability of speculative
sampling, arXiv 2211.17192, theorem 3.5.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

ROWS_PER_CHUNK = 2048  # of the full vocabulary at a time: 2048 x 163,840 float32 logits are 1.3 GB


@dataclass(frozen=True)
class Teacher:
    """The target's next-token distributions of one pack, computed once for all depths.

    logits          [T, V]  float32, of the draft vocabulary's tokens only
    log_normalizer  [T]     float32, log-sum-exp over the whole vocabulary
    top1            [T]     int64, the target's own id of its most likely token
    """

    logits: Tensor
    log_normalizer: Tensor
    top1: Tensor

    @classmethod
    @torch.no_grad()
    def of(cls, last: Tensor, head: Tensor, *, target_ids: Tensor) -> Teacher:
        """last [T, H] after the target's final norm, head [vocab, H], target_ids [V] of the draft tokens."""
        logits, log_normalizer, top1 = [], [], []
        for rows in last.split(ROWS_PER_CHUNK):
            full = _wide(rows.to(head.dtype) @ head.T)  # [rows, vocab]
            logits.append(full[:, target_ids])
            log_normalizer.append(full.logsumexp(-1))
            top1.append(full.argmax(-1))
        return cls(torch.cat(logits), torch.cat(log_normalizer), torch.cat(top1))

    def seen_from(self, rows: Tensor, *, ahead: int) -> Teacher:
        """The teacher that each of `rows` [R] finds that many rows ahead. Beyond the end it wraps: nothing counts there."""
        index = (rows + ahead) % self.top1.shape[0]
        return Teacher(self.logits[index], self.log_normalizer[index], self.top1[index])


def draft_loss(logits: Tensor, target_logits: Tensor, *, counted: Tensor) -> Tensor:
    """Cross-entropy of the drafter against the target's own distribution, at one depth.

    logits         [T, V]  drafter's, over the draft vocabulary
    target_logits  [T, V]  target's, over the same tokens; their softmax is the teacher, renormalized
    counted        [T]     bool, see "Alignment" in docs/design.md

    Returns the sum over counted rows, in nats: the step divides once, by the number of counted rows of all
    ranks and micro-batches, so that short rows do not weigh more. Raises ValueError if the shapes disagree.
    Source: EAGLE-3, arXiv 2503.01840.
    """
    if logits.shape != target_logits.shape or counted.shape != logits.shape[:1]:
        raise ValueError(
            f"logits {list(logits.shape)}, target_logits {list(target_logits.shape)}, counted {list(counted.shape)}: "
            "expected [T, V], [T, V], [T]"
        )
    # A row that nothing counts may hold anything, even infinities: it is left out, not multiplied by 0.
    logits, target_logits = logits[counted], target_logits[counted]
    log_q = _wide(logits).log_softmax(-1)
    return -(_wide(target_logits).softmax(-1) * log_q).sum()


@torch.no_grad()
def acceptance(logits: Tensor, teacher: Teacher) -> Tensor:
    """alpha [T]: sum over tokens of min(P, Q), the probability that sampling accepts the draft.

    P is the target's full distribution: what it gives to tokens that the drafter cannot say is lost.
    """
    p = (_wide(teacher.logits) - teacher.log_normalizer[:, None]).exp()
    q = _wide(logits).softmax(-1)
    return torch.minimum(p, q).sum(-1)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
