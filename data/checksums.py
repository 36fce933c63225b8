"""Checksums of files as the manifest has them: "blake3:" and 64 hex digits, which b3sum says too.

BLAKE3 is a cryptographic hash that one core computes at 7.5 GB/s with AVX-512, so that it costs less than writing the
bytes; sha256 takes 0.5 s a GB where the processor has instructions for it, and 1.3 s where not.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import blake3

_CHUNK_BYTES = 1 << 22  # read and hashed at a time
_KINDS: dict[str, Callable[[], Any]] = {"blake3": blake3.blake3, "sha256": hashlib.sha256}
_CHECKSUM = re.compile(rf"({'|'.join(_KINDS)}):[0-9a-f]{{64}}")


def is_checksum(text: Any) -> bool:
    return isinstance(text, str) and _CHECKSUM.fullmatch(text) is not None


class Checksum:
    """Of bytes that come one after the other. Hashing them does not hold the interpreter.

    like  a checksum of the kind that is to be made; datasets of schema version 1 have sha256
    """

    def __init__(self, *, like: str = "blake3:") -> None:
        self._kind = like.partition(":")[0]
        self._hash = _KINDS[self._kind]()
        self.update = self._hash.update

    def __str__(self) -> str:
        return f"{self._kind}:{self._hash.hexdigest()}"


def is_unchanged(file: Path, checksum: str, *, read: Callable[[int], object] = lambda count: None) -> bool:
    """Whether the file's checksum is still this one. read: called with the number of bytes of each part."""
    found, buffer = Checksum(like=checksum), memoryview(bytearray(_CHUNK_BYTES))
    with file.open("rb", buffering=0) as content:
        while count := content.readinto(buffer):
            found.update(buffer[:count])
            read(count)
    return str(found) == checksum
