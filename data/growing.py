"""A file that is written once, front to back: hashed and flushed behind the writer, on threads of their own."""

from __future__ import annotations

import itertools
import os
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from data.checksums import Checksum

_GATHER_BYTES = 1 << 22  # of small records, written and hashed together
_JOIN_BYTES = 1 << 14  # neighbours that are smaller are joined: a chunk costs more than its copy
_GATHER_CHUNKS = 500  # at most, below what one writev takes
_BEHIND_BYTES = 1 << 27  # written and not yet hashed, at most
_FLUSH_BYTES = 1 << 28  # after so many the disk is told to write, so that it has little left at the file's end

Chunk = bytes | memoryview  # a memoryview of bytes, in one dimension


class GrowingFile:
    """A new file at `path`. size: bytes appended so far. Every method raises OSError if the disk is full."""

    def __init__(self, path: Path) -> None:
        self.path, self.size = path, 0
        self._file = path.open("wb", buffering=0)
        self._gathered, self._written = list[Chunk](), 0
        self._digest, self._flusher = _Digest(), ThreadPoolExecutor(1)
        self._flushed: Future | None = None

    def append(self, chunks: list[Chunk]) -> None:
        """Their memory must stay as it is: it is written with what comes next if it is little, and hashed later."""
        self._gathered += chunks
        self.size += sum(map(len, chunks))
        if self.size - self._written >= _GATHER_BYTES or len(self._gathered) > _GATHER_CHUNKS:
            self._write()

    def _write(self) -> None:
        chunks, self._gathered = list(_joined(self._gathered)), []
        before = self._written
        self._digest.add(list(chunks))
        while chunks:
            count = os.writev(self._file.fileno(), chunks[:_GATHER_CHUNKS])  # may be less than all of it
            self._written += count
            while chunks and count >= len(chunks[0]):
                count -= len(chunks.pop(0))
            if count:
                chunks[0] = memoryview(chunks[0])[count:]
        if before // _FLUSH_BYTES < self._written // _FLUSH_BYTES and (self._flushed is None or self._flushed.done()):
            if self._flushed is not None:
                self._flushed.result()  # what was lost is said once: the next flush would succeed
            self._flushed = self._flusher.submit(os.fdatasync, self._file.fileno())

    def finish(self) -> str:
        """Everything is on the disk; its checksum."""
        self._write()
        if self._flushed is not None:
            self._flushed.result()
        os.fsync(self._file.fileno())  # while the last of it is hashed
        checksum = self._digest.result()
        self._flusher.shutdown()
        self._file.close()
        return checksum

    def discard(self) -> None:
        """Removes the file."""
        self._digest.result()
        self._flusher.shutdown()
        self._file.close()
        self.path.unlink(missing_ok=True)


class _Digest(threading.Thread):
    """The checksum of what is added, in order."""

    def __init__(self) -> None:
        super().__init__(name="checksum", daemon=True)
        self._checksum, self._pending, self._bytes = Checksum(), deque[list[Chunk]](), 0
        self._ended, self._changed = False, threading.Condition()
        self.start()

    def add(self, chunks: list[Chunk]) -> None:
        """Waits while _BEHIND_BYTES or more are not hashed yet."""
        with self._changed:
            self._changed.wait_for(lambda: self._bytes < _BEHIND_BYTES)
            self._pending.append(chunks)
            self._bytes += sum(map(len, chunks))
            self._changed.notify_all()

    def result(self) -> str:
        """Of all that was added; nothing can be after that."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        self.join()
        return str(self._checksum)

    def run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._ended or self._pending)
                if not self._pending:
                    return
                chunks = self._pending.popleft()
            for chunk in chunks:
                self._checksum.update(chunk)
            with self._changed:
                self._bytes -= sum(map(len, chunks))
                self._changed.notify_all()


def _joined(chunks: list[Chunk]) -> Iterator[Chunk]:
    """The chunks that have something in them, small neighbours as one."""
    for small, run in itertools.groupby(chunks, key=lambda chunk: len(chunk) < _JOIN_BYTES):
        if not small:
            yield from run
        elif joined := b"".join(run):
            yield joined
