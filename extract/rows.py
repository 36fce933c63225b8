"""What is in the spool, read into memory: the extractor's side of extract/spool.py."""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from data.codecs import is_finite
from extract.spool import DTYPES, left_of

_HEADER_BYTES = 1 << 12  # that are read first; most headers are shorter


class Segment(NamedTuple):
    """Rows start, start + 1, ... of a request, [N] of them."""

    rid: str
    start: int
    tokens: Tensor  # [N] int32
    aux: Tensor  # [N, A, H] the boundaries in their order; the server's dtype
    last: Tensor  # [N, H]
    finite: bool


class Piece(NamedTuple):
    """What one rank prefilled together."""

    rank: int
    segments: list[Segment]


def read_piece(
    path: Path, *, memory: Callable[[int], np.ndarray], wanted: Callable[[str], bool] = lambda rid: True
) -> Piece | None:
    """A piece of the spool; it outlives its file. None if no rid of it is wanted.

    memory  gives so many bytes for all of its rows, [size] uint8

    Raises ValueError, KeyError or struct.error if it is damaged; OSError.
    """
    with _Columns(path) as file:
        about = file.header.pop("__metadata__")
        whose = json.loads(about["segments"])
        if not any(wanted(rid) for rid, _, _ in whose):
            return None
        columns = file.read(memory)
    tokens, aux, last = (columns[name] for name in ("tokens", "aux", "last"))
    if sum(count for _, _, count in whose) != len(tokens):
        raise ValueError(f"{path.name} has {len(tokens)} rows, and says {whose}")
    all_finite, segments, first = is_finite(aux) and is_finite(last), [], 0
    for rid, start, count in whose:
        rows = slice(first, first + count)
        finite = all_finite or is_finite(aux[rows]) and is_finite(last[rows])
        segments.append(Segment(rid, start, tokens[rows], aux[rows], last[rows], finite))
        first += count
    return Piece(int(about["rank"]), segments)


def read_feed(path: Path) -> tuple[Tensor, Tensor]:
    """What a drafter was fed: tokens [T], features [T, A*H]. Raises as `read_piece` does."""
    with _Columns(path) as file:
        columns = file.read(lambda size: np.empty(size, dtype=np.uint8))
    return columns["tokens"], columns["features"]


class _Columns:
    """A safetensors file, read in as few calls as may be: each may hand the interpreter to another thread."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> _Columns:
        self._descriptor = os.open(self._path, os.O_RDONLY)
        try:
            content = os.pread(self._descriptor, _HEADER_BYTES, 0)
            (length,) = struct.unpack_from("<Q", content)
            self._data = 8 + length
            if self._data > len(content):
                content = os.pread(self._descriptor, self._data, 0)
            self.header = json.loads(content[8 : self._data])
        except BaseException:
            os.close(self._descriptor)
            raise
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._descriptor)

    def read(self, memory: Callable[[int], np.ndarray]) -> dict[str, Tensor]:
        """All columns, in one block of memory."""
        size = max(entry["data_offsets"][1] for entry in self.header.values())
        block = memoryview(memory(size))
        left, offset = [block], self._data
        while left:  # a read of more than 2 GB comes in parts
            done = os.preadv(self._descriptor, left, offset)
            if done == 0:
                raise ValueError(f"{self._path.name} ends before its rows do")
            left, offset = left_of(left, done), offset + done
        columns = {}
        for name, entry in self.header.items():
            shape, dtype = entry["shape"], DTYPES[entry["dtype"]]
            column = torch.frombuffer(block, dtype=dtype, count=math.prod(shape), offset=entry["data_offsets"][0])
            columns[name] = column.view(shape)
        return columns
