"""Shards on their way to the disk: each is written by one thread, several at a time, and finished in their order.

One thread encodes, writes and hashes 1 to 2 GB/s; a GPU prefills states faster than that.
"""

from __future__ import annotations

import json
import os
import tarfile
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch

from data.growing import GrowingFile
from data.manifest import Entry, ShardInfo, write_index
from data.schema import Provenance, Record, encode, encoded_bytes, safe_key

_TAR_BLOCK = 512


class OpenShard:
    """A shard that is being filled; everything but `plan` happens in its lane's thread."""

    def __init__(self, out: Path, name: str, *, split: str, provenance: Provenance) -> None:
        self.out, self.name, self.split, self.provenance = out, name, split, provenance
        self.planned_bytes = 0  # what it will have, with all that was submitted
        self.path = out / f".{name}.tmp"
        self._file: GrowingFile | None = None
        self._entries: list[Entry] = []
        self.broken: OSError | None = None  # half a record may be in it

    def plan(self, record: Record) -> None:
        """Counts a record before it is encoded."""
        sizes = (len(_about(record)), encoded_bytes(record.num_tokens, self.provenance))
        self.planned_bytes += sum(_TAR_BLOCK + size + -size % _TAR_BLOCK for size in sizes)

    def add(self, record: Record) -> None:
        """Raises OSError if the disk is full, ValueError if the codec cannot store the record."""
        header, tensors = encode(record, self.provenance.codec)
        payload = [memoryview(header), *(memoryview(t.reshape(-1).view(torch.uint8).numpy()) for t in tensors)]
        key = safe_key(record.id)
        chunks, _ = _member(f"{key}.json", [memoryview(_about(record))])
        states, size = _member(f"{key}.safetensors", payload)
        if self._file is None:
            self._file = GrowingFile(self.path)
        offset = self._file.size + sum(chunk.nbytes for chunk in (*chunks, states[0]))
        self._file.append([*chunks, *states])
        self._entries.append(
            Entry(record.id, record.source, record.num_tokens, int(record.loss_mask.sum()), offset, size)
        )

    def finish(self) -> ShardInfo | None:
        """End of archive, to the disk, index, final name: in this order. None if nothing is in it. Raises OSError."""
        if self.broken is not None:
            raise self.broken
        if self._file is None:
            return None
        self._file.append([memoryview(bytes(2 * _TAR_BLOCK))])
        sha256 = self._file.finish()
        index_sha256 = write_index(self.out, self.name, self._entries)
        os.replace(self.path, self.out / self.name)
        info = ShardInfo(
            name=self.name,
            split=self.split,
            samples=len(self._entries),
            tokens=sum(entry.num_tokens for entry in self._entries),
            supervised=sum(entry.num_supervised for entry in self._entries),
            bytes=self._file.size,
            sha256=sha256,
            index_sha256=index_sha256,
        )
        self._file = None
        return info

    def discard(self) -> None:
        if self._file is not None:
            self._file.discard()
            self._file = None


class Lanes:
    """Threads that shards are given to in turn; `committed` is called with each finished one, in the shards' order."""

    def __init__(self, count: int, *, committed: Callable[[ShardInfo], None]) -> None:
        self._threads = [ThreadPoolExecutor(1, f"shard-lane-{number}") for number in range(count)]
        self._committed, self._next = committed, 0
        self._shards: dict[OpenShard, ThreadPoolExecutor] = {}
        self._last: Future = Future()  # of the shard before
        self._last.set_result(None)
        self.failure: Exception | None = None  # why a shard could not be finished, and with it none after it

    def open(self, shard: OpenShard) -> None:
        self._shards[shard] = self._threads[self._next % len(self._threads)]
        self._next += 1

    def add(self, shard: OpenShard, record: Record) -> Future:
        shard.plan(record)
        return self._shards[shard].submit(self._add, shard, record)

    def _add(self, shard: OpenShard, record: Record) -> None:
        try:
            shard.add(record)
        except OSError as error:
            shard.broken = error  # no shard after it is finished either: `_finish` waits for the one before
            raise

    def close(self, shard: OpenShard) -> Future:
        """The shard takes no more records; done when it and all before it are finished."""
        self._last = self._shards[shard].submit(self._finish, shard, self._last)
        return self._last

    def _finish(self, shard: OpenShard, before: Future) -> None:
        before.result()  # one that failed is the last
        try:
            if info := shard.finish():
                self._committed(info)
        except (OSError, ValueError) as error:
            self.failure = error
            raise
        del self._shards[shard]

    def wait(self) -> None:
        """Until all closed shards are finished. Raises what the first that could not raised."""
        self._last.result()

    def end(self) -> None:
        """What is not finished is removed."""
        for thread in self._threads:
            thread.shutdown(cancel_futures=True)
        for shard in self._shards:
            shard.discard()
        self._shards.clear()


def _about(record: Record) -> bytes:
    about = {
        "id": record.id,
        "source": record.source,
        "split": record.split,
        "num_tokens": record.num_tokens,
        "num_supervised": int(record.loss_mask.sum()),
    }
    return json.dumps(about).encode()


def _member(name: str, chunks: list[memoryview]) -> tuple[list[memoryview], int]:
    """One file of a tar: its header, its content, padding; and the size of the content in bytes."""
    info = tarfile.TarInfo(name)
    info.size, info.mode = sum(chunk.nbytes for chunk in chunks), 0o644
    header = info.tobuf(tarfile.USTAR_FORMAT)
    return [memoryview(header), *chunks, memoryview(bytes(-info.size % _TAR_BLOCK))], info.size
