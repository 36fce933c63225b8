"""THE definition of a record: columns, dtypes, shapes, provenance, version. docs/design.md, "The record".

T tokens of the conversation, A boundaries, H hidden size. See data/batch.py for all letters.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data.boundaries import check_boundaries, text_config
from data.fingerprints import chat_template_hash, config_hash, tokenizer_hash, weights_fingerprint

SCHEMA_VERSION = 1
SPLITS = ("train", "validation")
CODECS = {"bf16": torch.bfloat16, "fp32": torch.float32}  # dtype of aux and last on disk

_SAFETENSORS_NAMES = {torch.int32: "I32", torch.uint8: "U8", torch.bfloat16: "BF16", torch.float32: "F32"}
_DTYPES = {name: dtype for dtype, name in _SAFETENSORS_NAMES.items()}
_ALIGNMENT = 64  # bytes, of the tensors within a file


@dataclass(frozen=True)
class Record:
    """One conversation as the target saw it.

    id         unique in a dataset            source, split  free text; train | validation
    tokens     [T]        int32               loss_mask      [T]  uint8, 1 where the token is the assistant's
    aux        [T, A, H]  residual stream at the boundaries, in their order
    last       [T, H]     hidden state after the target's final norm
    """

    id: str
    tokens: Tensor
    loss_mask: Tensor
    aux: Tensor
    last: Tensor
    source: str
    split: str

    @property
    def num_tokens(self) -> int:
        return self.tokens.shape[0]


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
        if self.codec not in CODECS:
            raise ValueError(f"codec={self.codec}: expected one of {', '.join(CODECS)}")

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


@dataclass(frozen=True)
class ShardInfo:
    """One finished shard, as the manifest lists it."""

    name: str
    split: str
    samples: int
    tokens: int
    supervised: int
    bytes: int
    sha256: str
    index_sha256: str


@dataclass(frozen=True)
class Manifest:
    """manifest.json of a dataset: the only list of what is complete."""

    provenance: Provenance
    shards: tuple[ShardInfo, ...] = ()
    schema_version: int = SCHEMA_VERSION

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=1) + "\n"

    @classmethod
    def load(cls, folder: Path | str) -> Manifest:
        """Raises ValueError if there is none, it cannot be read, or it is of another schema version."""
        file = Path(folder) / "manifest.json"
        try:
            content = json.loads(file.read_text())
            version = content["schema_version"]
        except FileNotFoundError:
            raise ValueError(f"{folder} has no manifest.json: run python extract/main.py out={folder}") from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{file} cannot be read ({error}): extract again") from error
        if version != SCHEMA_VERSION:
            raise ValueError(f"{file} has schema version {version}, this Eyas reads {SCHEMA_VERSION}: extract again")
        try:
            provenance = Provenance(**content["provenance"])
            return cls(provenance=provenance, shards=tuple(ShardInfo(**shard) for shard in content["shards"]))
        except (KeyError, TypeError) as error:
            raise ValueError(f"{file} lacks or adds a field ({error}): extract again") from error


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


def check_same(found: Provenance, expected: Provenance, *, where: str) -> None:
    """Raises ValueError naming both sides and the cure if data in `where` is not what this run needs."""
    words = difference(found, expected)
    if words is None:
        return
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
    T, A, H = record.num_tokens, len(provenance.boundaries), provenance.hidden_size
    expected = {"tokens": (T,), "loss_mask": (T,), "aux": (T, A, H), "last": (T, H)}
    for name, shape in expected.items():
        found = tuple(getattr(record, name).shape)
        if found != shape or T == 0:
            raise ValueError(f"record {record.id}: {name} has shape {list(found)}, expected {list(shape)}, T > 0")
    if record.split not in SPLITS:
        raise ValueError(f"record {record.id}: split {record.split!r}, expected {' or '.join(SPLITS)}")


def encode(record: Record, codec: str) -> tuple[bytes, list[Tensor]]:
    """The record as a safetensors file: its header, and the tensors that follow it back to back.

    Their memory is written as it is; aux and last are cast to the codec's dtype, round to nearest.
    """
    columns = {
        "tokens": record.tokens.to(torch.int32),
        "aux": record.aux.to(CODECS[codec]),
        "last": record.last.to(CODECS[codec]),
        "loss_mask": record.loss_mask.to(torch.uint8),
    }  # in this order every tensor starts at a multiple of its element's size
    header: dict[str, Any] = {}
    offset = 0
    for name, tensor in columns.items():
        end = offset + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _SAFETENSORS_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % _ALIGNMENT)
    return struct.pack("<Q", len(text)) + text, [tensor.detach().cpu().contiguous() for tensor in columns.values()]


def decode(buffer: Any, *, offset: int, size: int) -> dict[str, Tensor]:
    """Columns of the safetensors file at buffer[offset : offset + size], sharing the buffer's memory.

    Raises ValueError, KeyError or struct.error if it is damaged: the caller knows the file's name.
    """
    (length,) = struct.unpack_from("<Q", buffer, offset)
    if length + 8 > size:
        raise ValueError(f"header of {length} bytes in a record of {size}")
    header = json.loads(bytes(buffer[offset + 8 : offset + 8 + length]))
    start = offset + 8 + length
    columns = {}
    for name in ("tokens", "aux", "last", "loss_mask"):
        column = header[name]
        begin, end = column["data_offsets"]
        dtype = _DTYPES[column["dtype"]]
        count = (end - begin) // dtype.itemsize
        if start + end > offset + size:
            raise ValueError(f"{name} ends after the record")
        columns[name] = torch.frombuffer(buffer, dtype=dtype, count=count, offset=start + begin).view(column["shape"])
    return columns
