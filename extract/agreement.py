"""Are a dataset's answers the target's own words? Measured on what was captured, on a sample of its records."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from data.codecs import capped
from data.schema import Record
from data.shards import ShardReader

RECORDS, TOKENS_OF_EACH = 48, 24  # of each split's sample: as many rows of the head, 1152, take a second for a small target
VOCAB_AT_A_TIME = 4096
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


def measure(out: Path, head: Tensor, *, cap: float | None = None) -> Agreement | None:
    """head [V, H] and cap of the target's logits. None if no record has a supervised token after its first."""
    found: list[tuple[Tensor, Tensor]] = []  # the likeliest tokens and their probabilities
    written: list[Tensor] = []  # what stands there
    states: list[Tensor] = []  # of the records whose codec left the choice to be computed
    computed: list[Tensor] = []  # what stands there, in those
    for record, rows in _sample(out):
        answers = record.tokens[rows + 1]
        if record.top_ids is not None:
            found.append((record.top_ids[rows, 0], record.top_log_probs[rows, 0].exp()))
            written.append(answers)
        else:
            states.append(record.decoded().last[rows])
            computed.append(answers)
    if states:
        found.append(likeliest(torch.cat(states), head, cap=cap))
    if not found:
        return None
    likely, probability = (torch.cat(column) for column in zip(*found))
    equal = likely == torch.cat(written + computed)
    return Agreement(len(equal), float(equal.double().mean()), float(probability.double().mean()))


def _sample(out: Path) -> Iterator[tuple[Record, Tensor]]:
    """Records from all over each split, and rows of each that say what a supervised token should be."""
    for reader in (ShardReader(out, split=split) for split in ("train", "validation")):
        for index in np.unique(np.linspace(0, len(reader) - 1, min(RECORDS, len(reader))).astype(int)):
            record = reader.read(int(index))
            rows = record.loss_mask[1:].nonzero()[:, 0]  # row p says what token p + 1 should be
            if len(rows):
                yield record, rows[torch.linspace(0, len(rows) - 1, min(TOKENS_OF_EACH, len(rows))).long()]


@torch.no_grad()
def likeliest(last: Tensor, head: Tensor, *, cap: float | None = None) -> tuple[Tensor, Tensor]:
    """last [T, H] -> the most likely next tokens [T] int64, the lower id of two alike, and their probabilities [T].

    In float32, over a part of the vocabulary at a time: a head is large, and each of its rows is converted once.
    """
    last = last.to(head.device, torch.float32)
    best = normalizer = torch.full((len(last),), float("-inf"), device=head.device)
    tokens = torch.zeros(len(last), dtype=torch.int64, device=head.device)
    for first in range(0, len(head), VOCAB_AT_A_TIME):
        logits = capped(last @ head[first : first + VOCAB_AT_A_TIME].float().T, cap)  # [T, VOCAB_AT_A_TIME]
        value, token = logits.max(-1)
        tokens = torch.where(value > best, first + token, tokens)
        best = torch.maximum(best, value)
        normalizer = torch.logaddexp(normalizer, logits.logsumexp(-1))
    return tokens.cpu(), (best - normalizer).exp().cpu()
