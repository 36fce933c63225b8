"""Reads what W&B wrote to disk without a network: run-ID.wandb, a log of protobuf records.

The framing is LevelDB's log: blocks of 32 KiB after a header of 7 bytes, each record cut at the block's end.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

BLOCK, HEADER = 32768, 7
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


@dataclass
class OfflineRun:
    """name, group: as they were given; config: nested; history: one dict a line; summary: flat, with / in its names."""

    name: str = ""
    group: str = ""
    config: dict = field(default_factory=dict)
    history: list[dict] = field(default_factory=list)
    summary: dict = field(default_factory=dict)
    axes: dict[str, str] = field(default_factory=dict)  # metric, or a glob of them -> what it is drawn over
    artifacts: list[str] = field(default_factory=list)


def records(file: Path) -> Iterator[bytes]:
    """The payloads, in order; what a killed process left half written at the end is not there.

    Raises ValueError if the file is no W&B log.
    """
    content = file.read_bytes()
    if content[:4] != b":W&B":
        raise ValueError(f"{file} is no run file of W&B: give a run's folder, or wandb/offline-run-*")
    position, parts = HEADER, []
    while position + HEADER <= len(content):
        if BLOCK - position % BLOCK < HEADER:  # too little for a header is left of this block: zeros
            position += BLOCK - position % BLOCK
            continue
        _, length, kind = struct.unpack_from("<IHB", content, position)
        position += HEADER
        if kind not in (FULL, FIRST, MIDDLE, LAST) or position + length > len(content):
            return
        parts = [] if kind in (FULL, FIRST) else parts
        parts.append(content[position : position + length])
        position += length
        if kind in (FULL, LAST):
            yield b"".join(parts)


def read(folder: Path) -> OfflineRun:
    """The run in `folder`, an offline-run-*. Raises ValueError if there is none, it is damaged, or wandb is not installed."""
    files = sorted(folder.glob("run-*.wandb"))
    if len(files) != 1:
        raise ValueError(f"{folder} holds {len(files)} run-*.wandb files, expected one")
    try:
        from google.protobuf.message import DecodeError
        from wandb.proto.wandb_internal_pb2 import Record
    except ImportError as error:
        raise ValueError(f"reading {folder} needs wandb: pip install wandb, or give the run's own folder") from error
    run = OfflineRun()
    for payload in records(files[0]):
        try:
            record = Record.FromString(payload)
        except DecodeError as error:
            raise ValueError(f"{files[0]} is damaged ({error}): give the run's own folder, which has the same in it") from error
        kind = record.WhichOneof("record_type")
        if kind == "run":
            run.name, run.group = record.run.display_name, record.run.run_group
            run.config |= _items(record.run.config.update)
        elif kind == "config":
            run.config |= _items(record.config.update)
        elif kind == "history":
            run.history.append(_items(record.history.item))
        elif kind == "summary":
            run.summary |= _items(record.summary.update)
        elif kind == "metric":
            run.axes[record.metric.name or record.metric.glob_name] = record.metric.step_metric
        elif kind == "artifact":
            run.artifacts.append(record.artifact.name)
        elif kind == "request" and record.request.WhichOneof("request_type") == "log_artifact":
            run.artifacts.append(record.request.log_artifact.artifact.name)
    run.config.pop("_wandb", None)
    return run


def _items(items) -> dict:
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}
