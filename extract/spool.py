"""The spool: a folder through which the server's processes hand captured rows to the extractor.

    server-<pid>.json                          what one scheduler process captures, or why it cannot
    piece-<run>-<pid>-<number>.safetensors     rows as they were prefilled, of one request or several: tokens [N],
                                               aux [N, A, H], last [N, H]; the metadata says whose, and from which rank
    <rid>/error.json                           why the rows of this request are not here; empty: the disk is full
    <rid>/feed-<start>-<stop>.safetensors      what the drafter was fed with the prompt: tokens, features; extract/feed.py
    <rid>/steps.jsonl                          what the drafter proposed, one verified step a line

A file appears under its name when it is complete. Both sides import this file; it needs only torch.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

RID_PREFIX = "eyas-"  # requests of ours; all others pass unseen
ALL_RANKS_PREFIX = "eyas-all-"  # of these every tensor-parallel rank writes its rows, to be compared
FORMAT = 2  # of these files; a server that another version of Eyas has started writes others
SUFFIX = ".safetensors"
FEED = "feed-"
STEPS = "steps.jsonl"

DTYPE_NAMES = {
    torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int32: "I32", torch.int64: "I64",
}  # fmt: skip
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


def run_of(rid: str) -> str:
    """The run that a request of ours belongs to: a piece has rows of one, and one process takes it."""
    return rid.removeprefix(ALL_RANKS_PREFIX).removeprefix(RID_PREFIX).partition("-")[0]


def write_piece(
    spool: Path, segments: Sequence[Sequence], *, number: int, rank: int, tokens: Tensor, aux: Tensor, last: Tensor
) -> None:
    """Rows of requests of one run, one after the other; tensors on the CPU, contiguous. Raises OSError if the disk is full.

    segments  (rid, start, count) of each: so many rows are the request's from `start`
    number    that this process has given to no other piece
    """
    name = f"piece-{run_of(segments[0][0])}-{os.getpid()}-{number:09d}{SUFFIX}"
    about = {"rank": str(rank), "segments": json.dumps([list(segment) for segment in segments])}
    _write(str(spool), name, _file({"aux": aux, "last": last, "tokens": tokens}, about))


def write_feed(spool: Path, rid: str, *, start: int, tokens: Tensor, features: Tensor) -> None:
    """What a drafter is fed with rows of a prompt: tokens [T] int32, features [T, A*H]; likewise."""
    name = f"{FEED}{start:08d}-{start + len(tokens):08d}{SUFFIX}"
    _write(f"{spool}/{rid}", name, _file({"features": features, "tokens": tokens}, {}))


def _file(columns: dict[str, Tensor], about: dict[str, str]) -> list[Any]:
    """A safetensors file: what is to be written, one after the other."""
    header: dict[str, Any] = {"__metadata__": about} if about else {}
    offset = 0
    for name, tensor in columns.items():
        end = offset + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end],
        }  # fmt: skip
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-(len(text) + 8) % 64)
    return [struct.pack("<Q", len(text)) + text, *(tensor.reshape(-1).view(torch.uint8).numpy() for tensor in columns.values())]


def write_json(path: Path, content: Any) -> None:
    _write(str(path.parent), path.name, [json.dumps(content).encode()])


def append_line(path: Path, content: Any) -> None:
    """One JSON line, in one write."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab", buffering=0) as file:
        file.write(json.dumps(content).encode() + b"\n")


def pieces(spool: Path, run: str) -> list[str]:
    """Names of the complete pieces of a run."""
    start = f"piece-{run}-"
    try:
        return [name for name in os.listdir(spool) if name.startswith(start)]
    except FileNotFoundError:
        return []


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
    """Empties the spool of what is said of these requests."""
    for rid in rids:
        shutil.rmtree(spool / rid, ignore_errors=True)


def forget_servers(spool: Path) -> None:
    """Removes what earlier servers have said of themselves."""
    for path in spool.glob("server-*.json"):
        path.unlink(missing_ok=True)


def empty(spool: Path) -> None:
    """Removes what a killed run has left; whatever else the folder holds is not ours."""
    forget_servers(spool)
    for path in spool.glob(f"{RID_PREFIX}*"):
        shutil.rmtree(path, ignore_errors=True)
    for path in (*spool.glob("piece-*"), *spool.glob(".piece-*.tmp")):
        path.unlink(missing_ok=True)


def forget_abandoned(spool: Path, *, seconds: float) -> None:
    """Removes rows, and what was said instead of them, that are older: nobody can wait for them any more."""
    long_ago = time.time() - seconds
    for path in (*spool.glob(f"{RID_PREFIX}*"), *spool.glob("piece-*"), *spool.glob(".piece-*.tmp")):
        with suppress(OSError):
            if path.stat().st_mtime < long_ago:
                shutil.rmtree(path) if path.is_dir() else path.unlink()


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


def left_of(views: list[memoryview], count: int) -> list[memoryview]:
    """What is left of them once `count` bytes are read or written."""
    while views and count >= len(views[0]):
        count -= len(views[0])
        views = views[1:]
    return [views[0][count:], *views[1:]] if count else views
