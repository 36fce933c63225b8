"""THE definition of a record: columns, dtypes, shapes, provenance, version. docs/design.md, "The record".

T tokens of the conversation, A boundaries, H hidden size. See data/batch.py for all letters.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data.boundaries import check_boundaries, text_config
from data.codecs import DTYPES, STATE_COLUMNS, Codec, decode_fp8, encode_fp8
from data.fingerprints import chat_template_hash, config_hash, tokenizer_hash, weights_fingerprint

SPLITS = ("train", "validation")


@dataclass(frozen=True)
class Record:
    """One conversation as the target saw it: what is captured, or what a shard stores of it (data/codecs.py).

    id              unique in a dataset         source, split  free text; train | validation
    tokens          [T]        int32            loss_mask      [T]  uint8, 1 where the token is the assistant's
    aux             [T, A, H]  residual stream at the boundaries, in their order
    last            [T, H]     hidden state after the target's final norm; None where the top k stand in its place
    aux_scale       [T, A]     float32; None unless aux is e4m3          last_scale  [T]  likewise
    top_ids         [T, k]     int32, the teacher's most likely next tokens, its argmax first
    top_log_probs   [T, k]     float32, their log-probabilities over the whole vocabulary
    log_normalizer  [T]        float32, log-sum-exp of the teacher's logits
    """

    id: str
    tokens: Tensor
    loss_mask: Tensor
    aux: Tensor
    last: Tensor | None
    source: str
    split: str
    aux_scale: Tensor | None = None
    last_scale: Tensor | None = None
    top_ids: Tensor | None = None
    top_log_probs: Tensor | None = None
    log_normalizer: Tensor | None = None

    @property
    def num_tokens(self) -> int:
        return self.tokens.shape[0]

    def states(self) -> dict[str, Tensor]:
        """The columns of STATE_COLUMNS that this record has, each [T, ...]."""
        return {name: column for name in STATE_COLUMNS if (column := getattr(self, name)) is not None}

    def decoded(self) -> Record:
        """The same record with aux and last as numbers; bfloat16 where they were e4m3, which is exact."""
        changes: dict[str, Any] = {}
        for name in ("aux", "last"):
            scale = getattr(self, f"{name}_scale")
            if scale is not None:
                changes |= {name: decode_fp8(getattr(self, name), scale), f"{name}_scale": None}
        return dataclasses.replace(self, **changes)


@dataclass(frozen=True)
class Provenance:
    """What a dataset's numbers mean. Engine and codec may differ between runs; nothing else may."""

    target: str
    config_hash: str
    weights_fingerprint: str
    tokenizer_hash: str
    chat_template_hash: str
    boundaries: tuple[int, ...]
    num_layers: int
    hidden_size: int
    vocab_size: int
    codec: str
    engine: str
    engine_version: str
    last: str = "post_norm"

    def __post_init__(self) -> None:
        object.__setattr__(self, "boundaries", tuple(self.boundaries))
        check_boundaries(self.boundaries, self.num_layers)
        codec = Codec.parse(self.codec)
        object.__setattr__(self, "codec", codec.name)
        if codec.top_k >= self.vocab_size:
            raise ValueError(
                f"codec={codec.name} keeps all {self.vocab_size} tokens of {self.target}, or more: expected fewer, like topk64"
            )

    @classmethod
    def of_target(
        cls, path: Path | str, *, name: str, boundaries: list[int], codec: str, engine: str, engine_version: str
    ) -> Provenance:
        """The provenance of records captured from the Hugging Face folder `path`.

        Reads the config, the tokenizer's files and a sample of every weight file, not all of them.
        Raises ValueError if the folder has no config, no weights, or no tokenizer.
        """
        path = Path(path)
        config = text_config(path)
        return cls(
            target=name,
            config_hash=config_hash(path),
            weights_fingerprint=weights_fingerprint(path),
            tokenizer_hash=tokenizer_hash(path),
            chat_template_hash=chat_template_hash(path),
            boundaries=tuple(boundaries),
            num_layers=config["num_hidden_layers"],
            hidden_size=config["hidden_size"],
            vocab_size=config["vocab_size"],
            codec=codec,
            engine=engine,
            engine_version=engine_version,
        )


def difference(found: Provenance, expected: Provenance) -> str | None:
    """What of `found` must equal `expected` and does not, in words naming both sides; None if nothing."""
    words = {
        "target": "of target {}", "boundaries": "at boundaries {}", "num_layers": "from {} layers",
        "hidden_size": "with hidden size {}", "vocab_size": "with {} token ids", "last": "with last {}",
        "config_hash": "with config {}", "weights_fingerprint": "with weights {}",
        "tokenizer_hash": "with tokenizer {}", "chat_template_hash": "with chat template {}",
    }  # fmt: skip
    for name, phrase in words.items():
        a, b = getattr(found, name), getattr(expected, name)
        if a != b:
            a, b = (list(v) if isinstance(v, tuple) else v for v in (a, b))
            return f"was captured {phrase.format(a)}, this run asks for {b}"
    return None


def check_same(found: Provenance, expected: Provenance, *, where: str, cure: str | None = None) -> None:
    """Raises ValueError naming both sides and the cure if data in `where` is not what this run needs.

    cure  null: for a run that takes its target and boundaries from the command line
    """
    words = difference(found, expected)
    if words is None:
        return
    if cure is not None:
        raise ValueError(f"{where} {words}: {cure}")
    cure = "extract again"
    if found.boundaries != expected.boundaries and found.target == expected.target:
        cure = f"set target.boundaries={str(list(found.boundaries)).replace(' ', '')}, or extract again"
    elif found.target != expected.target:
        cure = f"set target={found.target}, or extract again"
    raise ValueError(f"{where} {words}: {cure}")


def safe_key(id: str) -> str:
    """The id as a WebDataset key: no dot (ends a key), no slash (is a folder), short enough for a tar header.

    An id that had to change carries a hash of itself, so that two of them do not meet.
    """
    key = re.sub(r"[^A-Za-z0-9_-]", "_", id)[:64]
    return key if key == id and key else f"{key}-{hashlib.sha256(id.encode()).hexdigest()[:12]}"


def check_record(record: Record, provenance: Provenance) -> None:
    """Raises ValueError if shapes or ids of `record` do not fit the dataset it is meant for."""
    for name, (_, shape) in stored_columns(provenance).items():
        column, expected = getattr(record, name), (record.num_tokens, *shape)
        if column is not None and (tuple(column.shape) != expected or record.num_tokens == 0):
            found = list(column.shape)
            raise ValueError(f"record {record.id}: {name} has shape {found}, expected {list(expected)}, T > 0")
    if record.split not in SPLITS:
        raise ValueError(f"record {record.id}: split {record.split!r}, expected {' or '.join(SPLITS)}")


@functools.lru_cache(maxsize=64)
def stored_columns(provenance: Provenance) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Every column of a dataset's records on disk: dtype, and shape for one token. Not to be changed: all share it."""
    states = Codec.parse(provenance.codec).columns(
        num_boundaries=len(provenance.boundaries), hidden_size=provenance.hidden_size
    )
    return {"tokens": (torch.int32, ()), "loss_mask": (torch.uint8, ()), **states}


def stored(record: Record, codec: Codec) -> Record:
    """`record`, whose aux and last are numbers, with the columns of `codec` and no others; casts round to nearest.

    Raises ValueError if the codec stores what the record does not have, or fp8 is to hold what is not finite.
    """
    return dataclasses.replace(record, **(dict.fromkeys(STATE_COLUMNS) | state_columns(record, codec)))


def state_columns(record: Record, codec: Codec) -> dict[str, Tensor]:
    """The columns of STATE_COLUMNS that `stored` leaves in it. Raises ValueError as `stored` does."""
    columns: dict[str, Tensor] = {}
    for name, stored_as in (("aux", codec.aux), ("last", codec.last)):
        column = getattr(record, name)
        if stored_as == "topk":
            columns |= {name: getattr(record, name) for name in ("top_ids", "top_log_probs", "log_normalizer")}
            if any(column is None for column in columns.values()):
                raise ValueError(f"record {record.id} has no top-k tokens, codec {codec.name} stores them")
        elif column is None:
            raise ValueError(f"record {record.id} has no {name}, codec {codec.name} stores it")
        elif stored_as == "fp8":
            columns[name], columns[f"{name}_scale"] = encode_fp8(column)
        else:
            columns[name] = column.to(DTYPES[stored_as])
    return columns
