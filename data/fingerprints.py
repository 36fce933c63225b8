"""Short hashes that say which target, tokenizer and template a dataset belongs to."""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path
from typing import Any

from data.boundaries import text_config

_NOTES = ("_name_or_path", "_model_name_or_path", "transformers_version")  # say nothing about the model
_BLOCK_BYTES, _NUM_BLOCKS = 4096, 16


def config_hash(path: Path | str) -> str:
    """Of config.json less its notes. Raises ValueError if it is missing or damaged."""
    text_config(path)
    config = json.loads((Path(path) / "config.json").read_text())
    return short_hash({key: value for key, value in config.items() if key not in _NOTES})


def tokenizer_hash(path: Path | str) -> str:
    """Of the file that decides token ids. Raises ValueError if the folder has none."""
    for name in ("tokenizer.json", "tiktoken.model", "tokenizer.model"):
        if (Path(path) / name).exists():
            return short_hash((Path(path) / name).read_bytes())
    raise ValueError(f"{path} has no tokenizer.json, tiktoken.model or tokenizer.model: download the target again")


def chat_template_hash(path: Path | str) -> str:
    """Of the chat template as text, "none" if the tokenizer has none."""
    file, config = Path(path) / "chat_template.jinja", Path(path) / "tokenizer_config.json"
    if file.exists():
        return short_hash(file.read_bytes())
    template = json.loads(config.read_text()).get("chat_template") if config.exists() else None
    return short_hash(template) if template else "none"


def weights_fingerprint(path: Path | str) -> str:
    """Of name, size, header and 16 evenly spaced blocks of each *.safetensors: seconds for 600 GB.

    Raises ValueError if there are no weights.
    """
    files = sorted(Path(path).glob("*.safetensors"))
    if not files:
        raise ValueError(f"{path} has no *.safetensors: download the target again")
    digest = hashlib.sha256()
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name} {size}".encode())
        with file.open("rb") as stream:
            length = struct.unpack("<Q", stream.read(8).ljust(8, b"\0"))[0]
            digest.update(stream.read(min(length, size)))
            for i in range(_NUM_BLOCKS):
                stream.seek(max(0, size - _BLOCK_BYTES) * i // (_NUM_BLOCKS - 1))
                digest.update(stream.read(_BLOCK_BYTES))
    return digest.hexdigest()[:16]


def short_hash(content: Any) -> str:
    """16 hex digits of the sha256 of bytes, text, or a JSON value."""
    if not isinstance(content, bytes):
        content = (content if isinstance(content, str) else json.dumps(content, sort_keys=True)).encode()
    return hashlib.sha256(content).hexdigest()[:16]
