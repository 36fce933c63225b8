"""Are a dataset's answers the target's own words? Measured on what was captured, on a sample of its records."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from data.shards import ShardReader

RECORDS, TOKENS_OF_EACH = 48, 24  # of the sample: as many rows of the head, 1152, take a second for a small target
LEAST = 0.95  # of the share that is expected of the target's own words


@dataclass(frozen=True)
class Agreement:
    """tokens    supervised ones that were looked at
    share     of them that are the target's most likely next token
    expected  the target's own probability of that token, on average: what `share` would be at temperature 1
    """

    tokens: int
    share: float
    expected: float

    @property
    def is_own(self) -> bool:
        return self.share >= LEAST * self.expected

    @property
    def warning(self) -> str:
        """Empty where the answers are the target's own."""
        if self.is_own:
            return ""
        return (
            f"warning: {self.share:.1%} of the supervised tokens are the target's own first choice, {self.expected:.1%} "
            f"would be if it had written them: a drafter imitates its target, so let it answer these questions itself "
            f"(mode=generate)"
        )


@torch.no_grad()
def measure(out: Path, head: Tensor) -> Agreement | None:
    """head [V, H] of the target. None if no record has a supervised token after its first."""
    equal, expected, count = 0, 0.0, 0
    for reader in (ShardReader(out, split=split) for split in ("train", "validation")):
        for index in np.unique(np.linspace(0, len(reader) - 1, min(RECORDS, len(reader))).astype(int)):
            record = reader.read(int(index))
            rows = record.loss_mask[1:].nonzero()[:, 0]  # row p says what token p + 1 should be
            rows = rows[torch.linspace(0, len(rows) - 1, min(TOKENS_OF_EACH, len(rows))).long()]
            if not len(rows):
                continue
            if record.top_ids is not None:
                likely, probability = record.top_ids[rows, 0], record.top_log_probs[rows, 0].exp()
            else:
                last = record.decoded().last[rows].to(head.dtype if head.is_cuda else torch.float32)
                probabilities = (last.to(head.device) @ head.to(last.dtype).T).float().softmax(-1)  # [rows, V]
                probability, likely = probabilities.max(-1)
            equal += int((likely.cpu() == record.tokens[rows + 1]).sum())
            expected += float(probability.sum())
            count += len(rows)
    return Agreement(count, equal / count, expected / count) if count else None
