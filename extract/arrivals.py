"""Rows as they come into the spool, handed to the requests that wait for them."""

from __future__ import annotations

import asyncio
import logging
import operator
import struct
import uuid
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from extract import spool
from extract.memory import Memory
from extract.rows import Piece, Segment, read_piece

RUN = uuid.uuid4().hex[:8]  # of this process, in its rids: rows that an earlier run asked for are not this one's
SHORTEST_PAUSE, LONGEST_PAUSE = 0.001, 0.02  # seconds between two looks into the spool
_READERS = ThreadPoolExecutor(4, "spool-reader")  # with 8 the interpreter changes hands twice as often, and all is slower
_MEMORY = Memory()  # of the rows that are read

logger = logging.getLogger("eyas")


class Awaited:
    """A request whose rows are to come. `here`: done once there are as many as tokens, of each of its ranks."""

    def __init__(self, num_tokens: int, *, num_ranks: int) -> None:
        self.here = asyncio.get_running_loop().create_future()
        self.sizes: dict[int, int] = {}  # rank -> number of its rows that are here
        self.num_tokens, self._num_ranks = num_tokens, num_ranks
        self._segments: dict[int, list[Segment]] = {}

    def add(self, rank: int, segment: Segment) -> None:
        self._segments.setdefault(rank, []).append(segment)
        self.sizes[rank] = self.sizes.get(rank, 0) + len(segment.tokens)
        complete = len(self.sizes) >= self._num_ranks and all(size >= self.num_tokens for size in self.sizes.values())
        if complete and not self.here.done():
            self.here.set_result(None)

    async def rows(self) -> dict[int, Segment]:
        """rank -> all of its rows, as one segment. Raises ValueError if some are missing or came twice."""
        if all(len(segments) == 1 for segments in self._segments.values()):  # as most are: nothing is copied
            return {rank: _joined(segments) for rank, segments in self._segments.items()}
        return {rank: await asyncio.to_thread(_joined, segments) for rank, segments in self._segments.items()}


class Arrivals:
    """The spool of a server, seen from one event loop."""

    _of_loop: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[Path, Arrivals]] = weakref.WeakKeyDictionary()

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._awaited: dict[str, Awaited] = {}
        self._reading: dict[str, asyncio.Task] = {}  # by the piece's name
        self._looking: asyncio.Task | None = None

    @classmethod
    def at(cls, folder: Path) -> Arrivals:
        """The one of `folder` in the loop that runs."""
        known = cls._of_loop.setdefault(asyncio.get_running_loop(), {})
        return known.setdefault(folder, cls(folder))

    @contextmanager
    def awaiting(self, requests: dict[str, int], *, num_ranks: int = 1) -> Iterator[dict[str, Awaited]]:
        """requests: rid -> number of tokens. Rows that come after the block are removed."""
        awaited = {rid: Awaited(num_tokens, num_ranks=num_ranks) for rid, num_tokens in requests.items()}
        self._awaited |= awaited
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look())
        try:
            yield awaited
        finally:
            for rid in awaited:
                del self._awaited[rid]

    async def _look(self) -> None:
        """While anything is awaited: reads what comes, in threads."""
        pause = SHORTEST_PAUSE
        try:
            while self._awaited:
                for name in spool.pieces(self._folder, RUN):
                    if name not in self._reading:
                        self._reading[name] = asyncio.create_task(self._hand_out(name))
                        pause = SHORTEST_PAUSE
                await asyncio.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE)
        finally:
            for name in set(spool.pieces(self._folder, RUN)) - self._reading.keys():
                (self._folder / name).unlink(missing_ok=True)

    async def _hand_out(self, name: str) -> None:
        try:
            piece = await asyncio.get_running_loop().run_in_executor(_READERS, self._take, self._folder / name)
        finally:
            del self._reading[name]
        for segment in piece.segments if piece else []:
            if segment.rid in self._awaited:
                self._awaited[segment.rid].add(piece.rank, segment)

    def _take(self, path: Path) -> Piece | None:
        """In a thread: the piece, which is not in the spool any more; None if it is of no use."""
        try:
            piece = read_piece(path, memory=_MEMORY.take, wanted=self._awaited.__contains__)
        except (OSError, ValueError, KeyError, RuntimeError, struct.error) as error:
            logger.warning("%s cannot be read: %s", path, error)  # those who wait for it ask again
            piece = None
        path.unlink(missing_ok=True)
        return piece


def _joined(segments: list[Segment]) -> Segment:
    """All of a rank's, in any order."""
    segments = sorted(segments, key=operator.attrgetter("start"))
    stop = 0
    for segment in segments:
        if segment.start != stop:
            raise ValueError(f"rows {stop} .. {segment.start - 1} are missing, or came twice")
        stop += len(segment.tokens)
    if len(segments) == 1:
        return segments[0]

    def column(name: str) -> Tensor:
        return torch.cat([getattr(segment, name) for segment in segments])

    return Segment(
        segments[0].rid, 0, column("tokens"), column("aux"), column("last"), all(segment.finite for segment in segments)
    )
