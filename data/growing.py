"""A file that is written once, front to back: hashed as it is written, and flushed behind the writer."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from data.checksums import Checksum

_GATHER_BYTES = 1 << 22  # of small records, written and hashed together
_PART_BYTES = 1 << 22  # of a large one, likewise
_JOIN_BYTES = 1 << 14  # neighbours that are smaller are joined: a chunk costs more than its copy
_FLUSH_BYTES = 1 << 28  # after so many the disk is told to write, so that it has little left at the file's end

Chunk = bytes | memoryview  # a memoryview of bytes, in one dimension


class GrowingFile:
    """A new file at `path`. size: bytes appended so far. Every method raises OSError if the disk is full."""

    def __init__(self, path: Path) -> None:
        self.path, self.size = path, 0
        self._file = path.open("wb", buffering=0)
        self._gathered, self._written = list[Chunk](), 0
        self._checksum, self._flusher = Checksum(), ThreadPoolExecutor(1)
        self._flushed: Future | None = None

    def append(self, chunks: list[Chunk]) -> None:
        """Their memory must stay as it is: it is written with what comes next if it is little."""
        self._gathered += chunks
        self.size += sum(map(len, chunks))
        if self.size - self._written >= _GATHER_BYTES:
            self._write()

    def _write(self) -> None:
        gathered, self._gathered = self._gathered, []
        before = self._written
        for chunk in _joined(gathered):
            self._checksum.update(chunk)  # and is in the cache when it is written
            while chunk:
                count = os.write(self._file.fileno(), chunk)  # may be less than all of it
                self._written += count
                chunk = memoryview(chunk)[count:]
        if before // _FLUSH_BYTES < self._written // _FLUSH_BYTES and (self._flushed is None or self._flushed.done()):
            if self._flushed is not None:
                self._flushed.result()  # what was lost is said once: the next flush would succeed
            self._flushed = self._flusher.submit(os.fdatasync, self._file.fileno())

    def finish(self) -> str:
        """Everything is on the disk; its checksum."""
        self._write()
        if self._flushed is not None:
            self._flushed.result()
        os.fsync(self._file.fileno())
        self._flusher.shutdown()
        self._file.close()
        return str(self._checksum)

    def discard(self) -> None:
        """Removes the file."""
        self._flusher.shutdown()
        self._file.close()
        self.path.unlink(missing_ok=True)


def _joined(chunks: list[Chunk]) -> Iterator[Chunk]:
    """The chunks that have something in them, small neighbours as one, large ones in parts."""
    for small, run in itertools.groupby(chunks, key=lambda chunk: len(chunk) < _JOIN_BYTES):
        if not small:
            for chunk in map(memoryview, run):
                yield from (chunk[at : at + _PART_BYTES] for at in range(0, len(chunk), _PART_BYTES))
        elif joined := b"".join(run):
            yield joined
