"""The spool: a folder through which the server's processes hand captured rows to the extractor.

    server-<pid>.json                          what one scheduler process captures, or why it cannot
    <rid>/<start>-<stop>.r<rank>.safetensors   rows of a request: tokens [T], aux [T, A, H], last [T, H]
    <rid>/feed-<start>-...                     what the drafter was fed with the prompt, without last; extract/feed.py
    <rid>/steps.jsonl                          what the drafter proposed, one verified step a line
    <rid>/error.json                           why the rows of this request are not here; empty: the disk is full

A file appears under its name when it is complete. Both sides import this file; it needs only torch and numpy.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import struct
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

RID_PREFIX = "eyas-"  # requests of ours; all others pass unseen
ALL_RANKS_PREFIX = "eyas-all-"  # of these every tensor-parallel rank writes its rows, to be compared
FEED = "feed-"  # kind of the parts that hold what a drafter is fed: aux [T, A, H], no last
STEPS = "steps.jsonl"

_DTYPE_NAMES = {
    torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int32: "I32", torch.int64: "I64",
}  # fmt: skip
_DTYPES = {name: dtype for dtype, name in _DTYPE_NAMES.items()}


class Rows(NamedTuple):
    """A request's rows from one rank, in their order."""

    tokens: Tensor  # [T] int32
    aux: Tensor  # [T, A, H] the boundaries in their order; the server's dtype
    last: Tensor | None  # [T, H]
    states: Tensor  # [N] aux and last, as they lie in memory


def _fresh(size: int) -> np.ndarray:
    return np.empty(size, dtype=np.uint8)


def write_part(
    spool: Path,
    rid: str,
    *,
    start: int,
    rank: int,
    tokens: Tensor,
    aux: Tensor,
    last: Tensor | None,
    kind: str = "",
) -> None:
    """One part of request `rid`; tensors on the CPU, contiguous. Raises OSError if the disk is full."""
    header: dict[str, Any] = {}
    offset, chunks = 0, []
    for name, tensor in (("aux", aux), ("last", last), ("tokens", tokens)):
        if tensor is None:
            continue
        end = offset + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end],
        }  # fmt: skip
        chunks.append(_bytes(tensor))
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-(len(text) + 8) % 64)
    name = _part_name(start, len(tokens), rank, kind)
    _write(f"{spool}/{rid}", name, [struct.pack("<Q", len(text)), text, *chunks])


def write_json(path: Path, content: Any) -> None:
    _write(str(path.parent), path.name, [json.dumps(content).encode()])


def append_line(path: Path, content: Any) -> None:
    """One JSON line, in one write."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab", buffering=0) as file:
        file.write(json.dumps(content).encode() + b"\n")


def list_rows(spool: Path, rid: str, *, kind: str = "") -> list[tuple[int, int, int]]:
    """(rank, first row, number of rows) of the parts of `rid` that are here, without reading them."""
    try:
        names = os.listdir(spool / rid)
    except FileNotFoundError:
        return []
    found = [re.fullmatch(rf"{kind}(\d+)-(\d+)\.r(\d+)\.safetensors", name) for name in names]
    rows = [[int(number) for number in match.groups()] for match in found if match]
    return sorted((rank, start, stop - start) for start, stop, rank in rows)


def read_rows(
    spool: Path, rid: str, *, kind: str = "", memory: Callable[[int], np.ndarray] = _fresh
) -> dict[int, Rows]:
    """rank -> its rows of `rid`, all parts as one; what was read outlives its files.

    memory  gives so many bytes for one rank's rows, [size] uint8

    Raises ValueError if rows are missing before others, came twice, or a part is damaged; OSError.
    """
    parts: dict[int, list[tuple[int, int]]] = {}
    for rank, start, count in list_rows(spool, rid, kind=kind):
        parts.setdefault(rank, []).append((start, count))
    return {rank: _read_rank(f"{spool}/{rid}", rank, parts[rank], kind=kind, memory=memory) for rank in parts}


def take_whole(spool: Path, rid: str, num_rows: int, *, memory: Callable[[int], np.ndarray] = _fresh) -> Rows | None:
    """Rank 0's rows where one part is all of them, as most are: they are not in the spool any more. Else None.

    Without a look into the folder: each call of the system may hand the interpreter over. Raises as `read_rows` does.
    """
    folder, name = f"{spool}/{rid}", _part_name(0, num_rows, 0, "")
    try:
        rows = _read_rank(folder, 0, [(0, num_rows)], kind="", memory=memory)
    except FileNotFoundError:
        return None
    os.unlink(f"{folder}/{name}")
    try:
        os.rmdir(folder)
    except OSError:
        forget(spool, [rid])
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
        name = _part_name(start, count, rank, kind)
        descriptor = os.open(f"{folder}/{name}", os.O_RDONLY)
        try:
            header, offset = _header_of(descriptor)
            if not columns:
                columns = _columns_of(header, num_rows)
                block = memoryview(memory(columns[-1].end(num_rows)))
            if [(column.name, column.dtype, [count, *column.shape]) for column in columns] != [
                (name, _DTYPES[entry["dtype"]], entry["shape"]) for name, entry in header.items()
            ]:
                raise ValueError(f"{name} holds {header}")
            views = [block[column.end(start) : column.end(start + count)] for column in columns]
            while views:  # a read of more than 2 GB comes in parts
                done = os.preadv(descriptor, views, offset)
                if done == 0:
                    raise ValueError(f"{name} ends before its rows do")
                views, offset = _after(views, done), offset + done
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
        dtype = _DTYPES[entry["dtype"]]
        columns.append(_Column(name, dtype, entry["shape"][1:], end + -end % dtype.itemsize))
        end = columns[-1].end(num_rows)
    return columns


def _header_of(descriptor: int) -> tuple[dict[str, Any], int]:
    """A part's header, and where its data begins."""
    content = os.pread(descriptor, 4096, 0)
    (length,) = struct.unpack_from("<Q", content)
    return json.loads(content[8 : 8 + length]), 8 + length


def _part_name(start: int, count: int, rank: int, kind: str) -> str:
    return f"{kind}{start:08d}-{start + count:08d}.r{rank}.safetensors"


def write_error(spool: Path, rid: str, reason: str) -> None:
    """Says why the rows of `rid` will not come. Raises OSError if even an empty file cannot be made."""
    path = spool / rid / "error.json"
    try:
        write_json(path, {"error": reason})
    except OSError:
        path.touch()  # a full disk still takes a name


def read_error(spool: Path, rid: str) -> str | None:
    """Why the plugin could not capture `rid`; None if it says nothing."""
    try:
        content = (spool / rid / "error.json").read_text()
    except FileNotFoundError:
        return None
    return json.loads(content)["error"] if content else f"there is no room in {spool}"


def forget(spool: Path, rids: Iterable[str]) -> None:
    """Empties the spool of these requests."""
    for rid in rids:
        folder = f"{spool}/{rid}"
        try:
            for name in os.listdir(folder):
                os.unlink(f"{folder}/{name}")
            os.rmdir(folder)
        except OSError:  # it is not there, or something comes in
            shutil.rmtree(folder, ignore_errors=True)


def empty(spool: Path) -> None:
    """Removes what a killed run has left; whatever else the folder holds is not ours."""
    for path in spool.glob(f"{RID_PREFIX}*"):
        shutil.rmtree(path, ignore_errors=True)
    for path in spool.glob("server-*.json"):
        path.unlink(missing_ok=True)


def _write(folder: str, name: str, chunks: list[Any]) -> None:
    """A file that appears when it is complete. By names and not by Paths: the server's scheduler waits meanwhile."""
    temporary = f"{folder}/.{name}.{os.getpid()}.tmp"
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    try:
        try:
            descriptor = os.open(temporary, flags, 0o644)
        except FileNotFoundError:
            os.makedirs(folder, exist_ok=True)
            descriptor = os.open(temporary, flags, 0o644)
        try:
            left = [memoryview(chunk) for chunk in chunks]
            while left:
                left = _after(left, os.writev(descriptor, left))
        finally:
            os.close(descriptor)
        os.replace(temporary, f"{folder}/{name}")
    except OSError:
        Path(temporary).unlink(missing_ok=True)
        raise


def _bytes(tensor: Tensor) -> memoryview:
    """Of a contiguous tensor on the CPU, without a copy."""
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())


def _after(views: list[memoryview], count: int) -> list[memoryview]:
    """What is left of them once `count` bytes are read or written."""
    while views and count >= len(views[0]):
        count -= len(views[0])
        views = views[1:]
    return [views[0][count:], *views[1:]] if count else views
