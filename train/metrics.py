"""What is measured: loss, acc and alpha per depth, and tau, the exact greedy acceptance length.

acc_k    P(draft k right | drafts 0 .. k-1 right), over counted rows
alpha_k  mean of sum_v min(P_v, Q_v), the target's full distribution against the drafter's
tau      tokens per verification step when the target's own tokens are walked with K drafts a step

A token outside the draft vocabulary is a miss everywhere: it stays in the denominators.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

FIELDS = ("counted", "loss", "measured", "reached", "hits", "alpha")


@dataclass
class DepthSums:
    """Sums over rows, one column per depth: ranks and micro-batches add theirs up, the division comes last.

    values  [6, K] float64 on the device: rows counted, their loss in nats; rows measured, those of them that were
            reached (every earlier draft right), hits among these, alpha of the measured ones. Nothing here waits
            for the device until `means` is asked for.
    """

    values: Tensor

    @classmethod
    def zeros(cls, depths: int, *, device: torch.device | str) -> DepthSums:
        return cls(torch.zeros(len(FIELDS), depths, dtype=torch.float64, device=device))

    @classmethod
    def of(cls, *, counted: Tensor, entropy: Tensor, hits: Tensor, alpha: Tensor, measured: bool = True) -> DepthSums:
        """counted, hits [K, R] bool; entropy in nats, alpha [K, R]. Rows that nothing counts may hold anything.

        measured  False: there are no hits and no alpha, only a loss
        """
        sums = per_row(counted=counted, entropy=entropy, hits=hits, alpha=alpha).sum(-1)
        sums[2:] *= measured
        return cls(sums)

    def __add__(self, other: DepthSums) -> DepthSums:
        return DepthSums(self.values + other.values)

    def means(self) -> dict[str, list[float]]:
        """{"loss", "acc", "alpha"}: one figure per depth; a depth that nothing counts gives nan."""
        counted, loss, measured, reached, hits, alpha = self.values.cpu().numpy()
        with np.errstate(invalid="ignore", divide="ignore"):
            means = {"loss": loss / counted, "acc": hits / reached, "alpha": alpha / measured}
        return {name: [float(x) for x in column] for name, column in means.items()}


def per_row(*, counted: Tensor, entropy: Tensor, hits: Tensor, alpha: Tensor) -> Tensor:
    """Each row's share of the sums: [6, K, R] float64."""
    right_so_far = hits.cumprod(0).bool()
    reached = counted & torch.cat([torch.ones_like(hits[:1]), right_so_far[:-1]])
    entropy, alpha = (torch.where(counted, column, 0.0) for column in (entropy, alpha))
    return torch.stack([column.double() for column in (counted, entropy, counted, reached, reached & hits, alpha)])


@dataclass(frozen=True)
class Walk:
    """Tokens that verification produced, the steps it took, and how many steps accepted 0 .. K drafts."""

    tokens: int
    steps: int
    histogram: tuple[int, ...]

    @property
    def tau(self) -> float:
        """Acceptance length, tokens per step; nan where nothing was generated."""
        return self.tokens / self.steps if self.steps else float("nan")

    def __add__(self, other: Walk) -> Walk:
        histogram = tuple(a + b for a, b in zip(self.histogram, other.histogram, strict=True))
        return Walk(self.tokens + other.tokens, self.steps + other.steps, histogram)

    @classmethod
    def empty(cls, depths: int) -> Walk:
        return cls(0, 0, (0,) * (depths + 1))


def walk(right: np.ndarray, loss_mask: np.ndarray) -> Walk:
    """Serve one document on paper: every assistant's turn is walked as the server would generate it.

    right      [T, K] bool, row p, depth k: the draft equals token x_{p+2+k}
    loss_mask  [T]    bool, the assistant's tokens; each run of them is one generation

    The first token of a turn comes from the target's prefill. From then on each step verifies K drafts and
    yields those that are right up to the first miss, plus one token of the target's own; the last step of
    a turn yields only what is left. Tokens per step is what SGLang calls the accept length, apart from its
    counting the first token too.
    """
    depths = right.shape[1]
    leading = np.cumprod(right, axis=1).sum(1)  # [T], right drafts before the first miss
    edges = np.flatnonzero(np.diff(np.concatenate([[0], loss_mask.astype(np.int8), [0]])))
    histogram = np.zeros(depths + 1, dtype=np.int64)
    tokens = steps = 0
    for start, stop in edges.reshape(-1, 2):
        row = max(int(start) - 1, 0)  # x_{row+1} is known, x_{row+2} is the first to be drafted
        while (left := int(stop) - (row + 2)) > 0:
            accepted = int(leading[row])
            gain = min(accepted + 1, left)
            histogram[min(accepted, left)] += 1
            tokens, steps, row = tokens + gain, steps + 1, row + gain
    return Walk(tokens, steps, tuple(int(x) for x in histogram))
