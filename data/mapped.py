"""One finished shard: its records, mapped, read into a buffer, or fetched from where the shard is."""

from __future__ import annotations

import mmap
import os
import struct
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

from data.encoding import Layout, decode
from data.manifest import Entry, ShardInfo, read_index
from data.schema import Provenance, Record
from data.storage import Remote, Unreachable

_READERS, _AHEAD, _AHEAD_BYTES = 2, 4, 1 << 28  # threads that read ahead; so many records, and so many bytes, at most
_MOST_OPEN = 64  # shards of a process; each takes two of the files that it may have open, often 1,024


class Shard:
    """One finished shard of a dataset: its records, mapped or read. Raises ValueError if its index is damaged."""

    def __init__(self, folder: Path, info: ShardInfo, provenance: Provenance) -> None:
        self.folder, self.info, self.provenance = folder, info, provenance
        self.entries = read_index(folder, info)
        self._layout = Layout(provenance)
        self._file: IO[bytes] | None = None
        self._map: mmap.mmap | None = None

    def close(self) -> None:
        """Opened again by the next read; records that were read stay as they are."""
        self._file = self._map = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_map": None, "_file": None}

    def read(self, i: int, *, into: bytearray | None = None) -> Record:
        """Record i of the shard; its tensors are views, so do not write to them.

        into  a buffer of entries[i].size bytes or more that they are views into; None: into the mapped file

        Raises ValueError if it is damaged, or the place where the shard is cannot be reached.
        """
        entry = self.entries[i]
        try:
            buffer, offset = self._bytes(entry, into)
            columns = decode(buffer, offset=offset, size=entry.size, num_tokens=entry.num_tokens, layout=self._layout)
            return Record(id=entry.id, source=entry.source, split=self.info.split, **columns)
        except Unreachable:
            raise
        except (ValueError, LookupError, TypeError, AttributeError, RuntimeError, struct.error) as error:
            file = self.folder / self.info.name
            raise ValueError(f"{file} is corrupt at record {entry.id} ({error}): extract again") from error

    def _bytes(self, entry: Entry, into: bytearray | None) -> tuple[mmap.mmap | bytearray, int]:
        """Where the record's bytes are in memory: a buffer, and the offset in it."""
        file, mapped = self._file, self._map  # another thread may close it
        if file is None:
            path = self.folder / self.info.name
            if not path.exists() and (remote := Remote.of(self.folder)):
                if not remote.keep:
                    return remote.read(self.info.name, entry.offset, entry.size), 0
                remote.download(self.info, self.folder)
            self._file = file = path.open("rb", buffering=0)
            _close_oldest(self)
        if into is not None:
            view, done = memoryview(into)[: entry.size], 0
            while done < entry.size:  # a read of more than 2 GB comes in parts
                count = os.preadv(file.fileno(), [view[done:]], entry.offset + done)
                if count == 0:
                    raise ValueError("the file ends before it")
                done += count
            return into, 0
        if mapped is None:
            # a private copy-on-write map: torch takes it as writable, the file stays as it is
            self._map = mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        start = entry.offset - entry.offset % mmap.PAGESIZE
        mapped.madvise(mmap.MADV_WILLNEED, start, entry.offset + entry.size - start)  # all of it in one go
        return mapped, entry.offset


def read_ahead(places: Iterable[tuple[Shard, int]]) -> Iterator[Future[Record]]:
    """Records, each a shard and a number in it, in turn; threads read the next ones while one is used.

    A record is read into a buffer that is used again: its tensors hold until the next is asked for. The future raises
    what `Shard.read` raises, and those after it go on.
    """
    free: list[bytearray] = []
    waiting: deque[tuple[Future[Record], bytearray]] = deque()
    num_bytes = 0  # of the buffers of those that wait
    threads = ThreadPoolExecutor(_READERS, "shard-reader")
    try:
        for shard, i in places:
            size = shard.entries[i].size
            while waiting and (len(waiting) == _AHEAD or num_bytes + size > _AHEAD_BYTES):
                future, buffer = waiting.popleft()
                yield future
                free.append(buffer)
                num_bytes -= len(buffer)
            buffer = free.pop() if free else bytearray()
            if not size <= len(buffer) <= 2 * size:  # a long record's buffer is not kept for short ones
                buffer = bytearray(size)
            waiting.append((threads.submit(shard.read, i, into=buffer), buffer))
            num_bytes += len(buffer)
        while waiting:
            yield waiting.popleft()[0]
    finally:  # perhaps by the garbage collector, in a thread that holds what a wait for these would need
        threads.shutdown(wait=False, cancel_futures=True)


_opened: deque[weakref.ref[Shard]] = deque()  # in the order in which they were opened


def _close_oldest(newest: Shard) -> None:
    """Once more than _MOST_OPEN are open."""
    _opened.append(weakref.ref(newest))
    if len(_opened) > _MOST_OPEN and (oldest := _opened.popleft()()) is not None:
        oldest.close()
