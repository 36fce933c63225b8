"""What a request left in the spool, read into memory: the extractor's side of extract/spool.py."""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from extract import spool


class Rows(NamedTuple):
    """A request's rows from one rank, in their order."""

    tokens: Tensor  # [T] int32
    aux: Tensor  # [T, A, H] the boundaries in their order; the server's dtype
    last: Tensor | None  # [T, H]
    states: Tensor  # [N] aux and last, as they lie in memory


def _fresh(size: int) -> np.ndarray:
    return np.empty(size, dtype=np.uint8)


def read_rows(
    folder: Path, rid: str, *, kind: str = "", memory: Callable[[int], np.ndarray] = _fresh
) -> dict[int, Rows]:
    """rank -> its rows of `rid` in the spool `folder`, all parts as one; what was read outlives its files.

    memory  gives so many bytes for one rank's rows, [size] uint8

    Raises ValueError if rows are missing before others, came twice, or a part is damaged; OSError.
    """
    parts: dict[int, list[tuple[int, int]]] = {}
    for rank, start, count in spool.list_rows(folder, rid, kind=kind):
        parts.setdefault(rank, []).append((start, count))
    return {rank: _read_rank(f"{folder}/{rid}", rank, parts[rank], kind=kind, memory=memory) for rank in parts}


def take_whole(folder: Path, rid: str, num_rows: int, *, memory: Callable[[int], np.ndarray] = _fresh) -> Rows | None:
    """Rank 0's rows where one part is all of them, as most are: they are not in the spool any more. Else None.

    Without a look into the folder: each call of the system may hand the interpreter over. Raises as `read_rows` does.
    """
    name = spool.part_name(0, num_rows, rank=0, kind="")
    try:
        rows = _read_rank(f"{folder}/{rid}", 0, [(0, num_rows)], kind="", memory=memory)
    except FileNotFoundError:
        return None
    os.unlink(f"{folder}/{rid}/{name}")
    try:
        os.rmdir(f"{folder}/{rid}")
    except OSError:
        spool.forget(folder, [rid])
    return rows


def _read_rank(
    folder: str, rank: int, parts: list[tuple[int, int]], *, kind: str, memory: Callable[[int], np.ndarray]
) -> Rows:
    num_rows = 0
    for start, count in parts:
        if start != num_rows:
            raise ValueError(f"rows {num_rows} .. {start - 1} are missing, or came twice")
        num_rows += count
    columns: list[_Column] = []
    for start, count in parts:
        name = spool.part_name(start, count, rank, kind)
        descriptor = os.open(f"{folder}/{name}", os.O_RDONLY)
        try:
            header, offset = _header_of(descriptor)
            if not columns:
                columns = _columns_of(header, num_rows)
                block = memoryview(memory(columns[-1].end(num_rows)))
            if [(column.name, column.dtype, [count, *column.shape]) for column in columns] != [
                (name, spool.DTYPES[entry["dtype"]], entry["shape"]) for name, entry in header.items()
            ]:
                raise ValueError(f"{name} holds {header}")
            views = [block[column.end(start) : column.end(start + count)] for column in columns]
            while views:  # a read of more than 2 GB comes in parts
                done = os.preadv(descriptor, views, offset)
                if done == 0:
                    raise ValueError(f"{name} ends before its rows do")
                views, offset = spool.left_of(views, done), offset + done
        finally:
            os.close(descriptor)
    tensors = {
        column.name: torch.frombuffer(
            block, dtype=column.dtype, count=num_rows * math.prod(column.shape), offset=column.begin
        ).view(num_rows, *column.shape)
        for column in columns
    }
    states = torch.frombuffer(block, dtype=columns[0].dtype, count=columns[-1].begin // columns[0].dtype.itemsize)
    return Rows(tokens=tensors["tokens"], aux=tensors["aux"], last=tensors.get("last"), states=states)


class _Column(NamedTuple):
    """Where a column's rows are in a block: from byte `begin` on, each of `shape`."""

    name: str
    dtype: torch.dtype
    shape: list[int]
    begin: int

    def end(self, num_rows: int) -> int:
        """Where the first `num_rows` end."""
        return self.begin + num_rows * math.prod(self.shape) * self.dtype.itemsize


def _columns_of(header: dict[str, Any], num_rows: int) -> list[_Column]:
    """The columns of a part, in their order, for so many rows, one after the other."""
    columns, end = [], 0
    for name, entry in header.items():
        dtype = spool.DTYPES[entry["dtype"]]
        columns.append(_Column(name, dtype, entry["shape"][1:], end + -end % dtype.itemsize))
        end = columns[-1].end(num_rows)
    return columns


def _header_of(descriptor: int) -> tuple[dict[str, Any], int]:
    """A part's header, and where its data begins."""
    content = os.pread(descriptor, 4096, 0)
    (length,) = struct.unpack_from("<Q", content)
    return json.loads(content[8 : 8 + length]), 8 + length
