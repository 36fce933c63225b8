"""Prompts: tokenized conversations with their loss mask, and the set of them on disk."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from data.config import write_atomically

NOT_SERVED = 7  # last tokens of a context: SGLang prefills no prompt that reaches them


@dataclass(frozen=True)
class Prompt:
    """One tokenized conversation: tokens [T] int32, loss_mask [T] uint8, 1 where the assistant wrote it."""

    id: str
    source: str
    split: str
    tokens: np.ndarray
    loss_mask: np.ndarray


def split_of(id: str, *, validation_fraction: float) -> str:
    """train | validation: depends on the id alone, so a row never changes sides as a file grows."""
    share = int.from_bytes(hashlib.sha256(id.encode()).digest()[:8], "big") / 2**64
    return "validation" if share < validation_fraction else "train"


def part_of(id: str, num_parts: int) -> int:
    """0 .. num_parts - 1: which of n servers captures this conversation; depends on the id alone."""
    return int.from_bytes(hashlib.sha256(f"part {id}".encode()).digest()[:8], "big") % num_parts


@dataclass
class PromptSet:
    """All prompts of a run, flat: prompt i is tokens[offsets[i] : offsets[i + 1]].

    tokens [sum T] int32, loss_mask [sum T] uint8, offsets [n + 1] int64; ids, sources, splits: n strings
    """

    tokens: np.ndarray
    loss_mask: np.ndarray
    offsets: np.ndarray
    ids: list[str]
    sources: list[str]
    splits: list[str]

    @classmethod
    def collect(cls, prompts: Iterable[Prompt]) -> PromptSet:
        prompts = list(prompts)
        return cls(
            tokens=np.concatenate([np.zeros(0, np.int32), *(prompt.tokens for prompt in prompts)]),
            loss_mask=np.concatenate([np.zeros(0, np.uint8), *(prompt.loss_mask for prompt in prompts)]),
            offsets=np.cumsum([0, *(len(prompt.tokens) for prompt in prompts)], dtype=np.int64),
            ids=[prompt.id for prompt in prompts],
            sources=[prompt.source for prompt in prompts],
            splits=[prompt.split for prompt in prompts],
        )

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, i: int) -> Prompt:
        rows = slice(self.offsets[i], self.offsets[i + 1])
        return Prompt(self.ids[i], self.sources[i], self.splits[i], self.tokens[rows], self.loss_mask[rows])

    def __iter__(self) -> Iterator[Prompt]:
        return (self[i] for i in range(len(self)))

    def part(self, number: int, num_parts: int) -> PromptSet:
        """The prompts of part `number` of `num_parts`; all parts together are all prompts, each once."""
        return PromptSet.collect(prompt for prompt in self if part_of(prompt.id, num_parts) == number)

    def save(self, folder: Path | str) -> None:
        """Writes prompts.safetensors and prompts.jsonl into `folder`."""
        rows = zip(self.ids, self.sources, self.splits)
        lines = [json.dumps({"id": id, "source": source, "split": split}) + "\n" for id, source, split in rows]
        write_atomically(Path(folder) / "prompts.jsonl", "".join(lines))
        columns = {"tokens": self.tokens, "loss_mask": self.loss_mask, "offsets": self.offsets}
        write_atomically(Path(folder) / "prompts.safetensors", save(columns))

    @classmethod
    def load(cls, folder: Path | str) -> PromptSet:
        """Raises ValueError if `folder` holds no prompts, or damaged ones."""
        try:
            columns = load_file(Path(folder) / "prompts.safetensors")
            rows = [json.loads(line) for line in (Path(folder) / "prompts.jsonl").read_text().splitlines()]
            loaded = cls(
                **columns,
                ids=[row["id"] for row in rows],
                sources=[row["source"] for row in rows],
                splits=[row["split"] for row in rows],
            )
        except NotADirectoryError:
            raise ValueError(
                f"{folder} is a file, and prompts are a folder: make it with python data/main.py conversations={folder} "
                f"out=DIR"
            ) from None
        except FileNotFoundError:
            raise ValueError(
                f"{folder} holds no prompts: make them with python data/main.py conversations=FILE out={folder}"
            ) from None
        except (SafetensorError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"the prompts in {folder} are damaged ({error}): run python data/main.py again") from error
        if len(loaded.offsets) != len(rows) + 1 or loaded.offsets[-1] != len(loaded.tokens):
            raise ValueError(f"the prompts in {folder} are damaged (files disagree): run python data/main.py again")
        return loaded
