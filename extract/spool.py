"""The spool: a folder through which the server's processes hand captured rows to the extractor.

    server-<pid>.json                          what one scheduler process captures, or why it cannot
    <rid>/<start>-<stop>.r<rank>.safetensors   rows of a request: tokens [T], aux [T, A, H], last [T, H]
    <rid>/feed-<start>-...                     what the drafter was fed with the prompt, without last; extract/feed.py
    <rid>/steps.jsonl                          what the drafter proposed, one verified step a line
    <rid>/error.json                           why the rows of this request are not here; empty: the disk is full

A file appears under its name when it is complete. Both sides import this file; it needs only torch.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

RID_PREFIX = "eyas-"  # requests of ours; all others pass unseen
ALL_RANKS_PREFIX = "eyas-all-"  # of these every tensor-parallel rank writes its rows, to be compared
FEED = "feed-"  # kind of the parts that hold what a drafter is fed: aux [T, A, H], no last
STEPS = "steps.jsonl"

DTYPE_NAMES = {
    torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int32: "I32", torch.int64: "I64",
}  # fmt: skip
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


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
            "dtype": DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end],
        }  # fmt: skip
        chunks.append(_bytes(tensor))
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-(len(text) + 8) % 64)
    name = part_name(start, len(tokens), rank, kind)
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


def part_name(start: int, count: int, rank: int, kind: str) -> str:
    """Of the file with rows start .. start + count - 1 of a request."""
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
                left = left_of(left, os.writev(descriptor, left))
        finally:
            os.close(descriptor)
        os.replace(temporary, f"{folder}/{name}")
    except OSError:
        Path(temporary).unlink(missing_ok=True)
        raise


def _bytes(tensor: Tensor) -> memoryview:
    """Of a contiguous tensor on the CPU, without a copy."""
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())


def left_of(views: list[memoryview], count: int) -> list[memoryview]:
    """What is left of them once `count` bytes are read or written."""
    while views and count >= len(views[0]):
        count -= len(views[0])
        views = views[1:]
    return [views[0][count:], *views[1:]] if count else views
