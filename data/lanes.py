"""Shards on their way to the disk: each is written by one thread, several at a time, and finished in their order.

One thread encodes, hashes and writes 2 GB/s; a GPU prefills states faster than that.
"""

from __future__ import annotations

import json
import os
import tarfile
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import NamedTuple

import torch

from data.encoding import Layout, encode
from data.growing import GrowingFile
from data.manifest import Entry, ShardInfo, write_index
from data.schema import Provenance, Record, safe_key

_TAR_BLOCK = 512


class Planned(NamedTuple):
    """A record that has its place in a shard: what stands beside it, as json."""

    record: Record
    about: bytes
    num_supervised: int


class OpenShard:
    """A shard that is being filled; everything but `plan` happens in its lane's thread."""

    def __init__(self, out: Path, name: str, *, split: str, provenance: Provenance) -> None:
        self.out, self.name, self.split, self._layout = out, name, split, Layout(provenance)
        self.planned_bytes = 0  # what it will have, with all that was submitted
        self.path = out / f".{name}.tmp"
        self._file: GrowingFile | None = None
        self._entries: list[Entry] = []
        self.broken: BaseException | None = None  # why it will not be finished: half a record may be in it

    def plan(self, record: Record) -> Planned:
        """Counts a record before it is encoded."""
        num_supervised = int(record.loss_mask.sum())
        about = {
            "id": record.id,
            "source": record.source,
            "split": record.split,
            "num_tokens": record.num_tokens,
            "num_supervised": num_supervised,
        }
        planned = Planned(record, json.dumps(about).encode(), num_supervised)
        for size in (len(planned.about), self._layout.num_bytes(record.num_tokens)):
            self.planned_bytes += _TAR_BLOCK + size + -size % _TAR_BLOCK
        return planned

    def add(self, planned: Planned) -> None:
        """Raises OSError if the disk is full, ValueError if the codec cannot store the record."""
        record, about = planned.record, planned.about
        header, tensors = encode(record, self._layout)
        columns = [memoryview(tensor.view(torch.uint8).numpy()).cast("B") for tensor in tensors]
        size, key = len(header) + sum(map(len, columns)), safe_key(record.id)
        before = b"".join(
            (member(f"{key}.json", len(about)), about, padding(len(about)), member(f"{key}.safetensors", size), header)
        )
        if self._file is None:
            self._file = GrowingFile(self.path)
        offset = self._file.size + len(before) - len(header)
        self._file.append([before, *columns, padding(size)])
        self._entries.append(
            Entry(record.id, record.source, record.num_tokens, planned.num_supervised, offset, size)
        )

    def finish(self) -> ShardInfo | None:
        """End of archive, to the disk, index, final name: in this order. None if nothing is in it.

        Raises OSError, and again what a record was interrupted by.
        """
        if self.broken is not None:
            raise self.broken
        if self._file is None:
            return None
        self._file.append([bytes(2 * _TAR_BLOCK)])  # where a tar ends
        checksum = self._file.finish()
        index_sha256 = write_index(self.out, self.name, self._entries)
        os.replace(self.path, self.out / self.name)
        info = ShardInfo(
            name=self.name,
            split=self.split,
            samples=len(self._entries),
            tokens=sum(entry.num_tokens for entry in self._entries),
            supervised=sum(entry.num_supervised for entry in self._entries),
            bytes=self._file.size,
            checksum=checksum,
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
        self._newest: Future | None = None  # of the records that were added
        self.failure: Exception | None = None  # why a shard could not be finished, and with it none after it

    def open(self, shard: OpenShard) -> None:
        self._shards[shard] = self._threads[self._next % len(self._threads)]
        self._next += 1

    def add(self, shard: OpenShard, planned: list[Planned]) -> Future:
        self._newest = self._shards[shard].submit(self._add, shard, planned)
        return self._newest

    def add_here(self, shard: OpenShard, record: Record) -> None:
        """`add` in the caller's thread: who waits for a record anyway need not wait for two threads to wake."""
        if self._newest is not None:  # what was added to the shard before comes before it
            wait([self._newest])
            self._newest = None
        self._add(shard, [shard.plan(record)])

    def _add(self, shard: OpenShard, planned: list[Planned]) -> None:
        refused: ValueError | None = None
        if shard.broken is not None:
            raise shard.broken
        try:
            for one in planned:
                try:
                    shard.add(one)
                except ValueError as error:  # nothing of it is in the file
                    refused = refused or error
        except BaseException as error:  # a full disk, an interrupted `write`
            shard.broken = error  # no shard after it is finished either: `_finish` waits for the one before
            shard.discard()  # those before it may need the room
            raise
        if refused is not None:
            raise refused

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

    def end(self, unfinished: OpenShard | None) -> None:
        """What was closed is finished, unless one before it cannot be; the rest is removed.

        unfinished  the one that was not closed: nothing more need be written to it
        """
        if unfinished is not None and unfinished.broken is None:
            unfinished.broken = RuntimeError(f"{unfinished.name} is abandoned")
        for thread in self._threads:
            thread.shutdown()
        for shard in self._shards:
            shard.discard()
        self._shards.clear()


def member(name: str, size: int) -> bytes:
    """What stands in a tar before a file of `size` bytes, as tarfile makes it of this name in its USTAR_FORMAT.

    Raises ValueError if it does not fit in a tar.
    """
    if size >= 8**11:
        raise ValueError(f"{name} has {size} bytes, a tar holds files below 8 GiB: set max_tokens, or another codec")
    encoded, octal = name.encode("ascii"), b"%011o" % size
    block = bytearray(_NAMELESS)
    block[: len(encoded)], block[124:135] = encoded, octal
    block[148:155] = b"%06o\0" % (_NAMELESS_SUM + sum(encoded) + sum(octal))
    return bytes(block)


def padding(size: int) -> bytes:
    """What stands in a tar after a file of `size` bytes."""
    return bytes(-size % _TAR_BLOCK)


def _nameless() -> bytes:
    info = tarfile.TarInfo()
    info.mode = 0o644
    return info.tobuf(tarfile.USTAR_FORMAT)


_NAMELESS = _nameless()
_NAMELESS_SUM = int(_NAMELESS[148:154], 8) - sum(b"0" * 11)  # its checksum, without the size's digits
