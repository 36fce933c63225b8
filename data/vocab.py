"""Token counts -> draft vocabulary (d2t, t2d), and the counts on disk."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from data.config import write_atomically
from data.fingerprints import tokenizer_hash
from data.prompts import PromptSet

FILE = "vocabulary.safetensors"


@dataclass(frozen=True)
class Vocabulary:
    """How often the assistant uses each token of the target.

    counts          [vocab] int64, over supervised tokens of the train split
    special_ids     [n]     int64, the tokenizer's special tokens: always in a draft vocabulary
    tokenizer_hash, data_hash  what was counted, with what
    """

    counts: Tensor
    special_ids: Tensor
    tokenizer_hash: str
    data_hash: str

    @classmethod
    def count(cls, prompts: PromptSet, tokenizer: Any, *, vocab_size: int, tokenizer_hash: str) -> Vocabulary:
        """Raises ValueError if the train split supervises nothing."""
        lengths = np.diff(prompts.offsets)
        in_train = np.repeat(np.array([split == "train" for split in prompts.splits], dtype=bool), lengths)
        supervised = prompts.tokens[in_train & (prompts.loss_mask == 1)]
        if len(supervised) == 0:
            raise ValueError("no supervised token in the train split: give more conversations")
        return cls(
            counts=torch.from_numpy(np.bincount(supervised, minlength=vocab_size).astype(np.int64)),
            special_ids=torch.tensor([i for i in special_ids(tokenizer) if i < vocab_size], dtype=torch.int64),
            tokenizer_hash=tokenizer_hash,
            data_hash=hashlib.sha256(supervised.tobytes()).hexdigest()[:16],
        )

    def save(self, folder: Path | str) -> None:
        tensors = {"counts": self.counts, "special_ids": self.special_ids}
        metadata = {"tokenizer_hash": self.tokenizer_hash, "data_hash": self.data_hash}
        write_atomically(Path(folder) / FILE, save(tensors, metadata=metadata))

    @classmethod
    def load(cls, folder: Path | str) -> Vocabulary:
        """Raises ValueError if `folder` holds none, or a damaged one."""
        file = Path(folder) / FILE
        try:
            with safe_open(file, "pt") as content:
                return cls(content.get_tensor("counts"), content.get_tensor("special_ids"), **content.metadata())
        except FileNotFoundError:
            raise ValueError(f"{file} is missing: python data/main.py makes it, extract copies it") from None
        except (SafetensorError, TypeError) as error:
            raise ValueError(f"{file} is damaged ({error}): run python data/main.py again") from error


def check_tokenizer(prompts: Path | str, target: Path) -> None:
    """Raises ValueError if data/main.py made `prompts` with another tokenizer than that of the model in `target`."""
    found, expected = Vocabulary.load(prompts).tokenizer_hash, tokenizer_hash(target)
    if found != expected:
        raise ValueError(
            f"{prompts} was tokenized for another target (tokenizer {found}, that of {target} is {expected}): set target= "
            f"to that one, or run python data/main.py for this one"
        )


def special_ids(tokenizer: Any) -> list[int]:
    """Ids of all tokens that the tokenizer treats as special, ascending."""
    added = {id for id, token in tokenizer.added_tokens_decoder.items() if token.special}
    return sorted(added | set(tokenizer.all_special_ids))


def draft_vocabulary(counts: Tensor, *, size: int, special_ids: list[int] | Tensor) -> tuple[Tensor, Tensor]:
    """The special tokens and the most frequent others, `size` in all; of equally frequent ones the lowest ids.

    counts  [vocab] int64

    Returns d2t [size] int64, an offset: draft id i is target id i + d2t[i], ascending; and t2d [vocab]
    bool, whether a target id is in. Where fewer distinct tokens were seen than asked for, unseen ones
    fill up, so that the drafter's shapes do not depend on the data.
    Raises ValueError if `size` is larger than the target's vocabulary, or too small for the special tokens.
    """
    vocab_size = counts.shape[0]
    special_ids = torch.as_tensor(special_ids, dtype=torch.int64)
    if size > vocab_size:
        raise ValueError(
            f"drafter.draft_vocab_size={size} is larger than the target's vocabulary of {vocab_size}: "
            f"expected at most {vocab_size}"
        )
    if size < len(special_ids) + 1:
        raise ValueError(
            f"drafter.draft_vocab_size={size} leaves no room beside {len(special_ids)} special tokens: make it larger"
        )
    rank = counts.clone()
    rank[special_ids] = counts.max() + 1
    chosen = torch.argsort(rank, descending=True, stable=True)[:size].sort().values  # [size], target ids
    t2d = torch.zeros(vocab_size, dtype=torch.bool)
    t2d[chosen] = True
    return chosen - torch.arange(size), t2d
