"""Inside SGLang: carries captured rows off the device while the next forward runs, in bounded memory.

A forward's rows are gathered piece by piece into blocks of host memory (pinned, on a stream of its own, where the
device is a GPU), and threads hand full blocks to the spool. If all blocks are taken the forward waits for one: a slow
disk slows the server, and no memory fills. Needs torch only.
"""

from __future__ import annotations

import logging
import queue
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

BLOCK_BYTES = 64 << 20
NUM_BLOCKS = 16  # 1 GiB of host memory in each process that captures, and at most as much on its device
NUM_WRITERS = 4  # threads; one wrote 2.5 GB/s less than an H200 prefills, four kept up
HAND_OVER_SECONDS = 1e-4  # instead of 5e-3; see Copier
STALL_SECONDS = 60.0  # longest wait for a block; SGLang's watchdog ends a server whose forward stands still for 300

logger = logging.getLogger("eyas")


@dataclass(frozen=True)
class Segment:
    """Rows [first, first + count) of a batch are a request's rows from `start`."""

    rid: str
    first: int
    count: int
    start: int


class Rows(NamedTuple):
    """Captured rows on the host: tokens [T] int32, aux [T, A, H], last [T, H]."""

    tokens: Tensor
    aux: Tensor
    last: Tensor


Write = Callable[[Sequence[Segment], Rows], None]
Failed = Callable[[Sequence[Segment], Exception], None]


class Copier:
    """Takes batches from one thread, the scheduler's, and calls `write(segments, rows)` from others.

    write   is given the rows of several segments, one after the other; may raise: they are then reported
    failed  hears of the segments that did not arrive, and why; must not raise

    A scheduler with nothing to do polls without a pause, and holds the interpreter while it does. Python would take it
    away every 5 ms only, and a thread that writes needs it a dozen times: the last rows came seconds late.
    """

    def __init__(self, device: torch.device, *, write: Write, failed: Failed) -> None:
        sys.setswitchinterval(HAND_OVER_SECONDS)
        self._device, self._write, self._failed = device, write, failed
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._free: queue.LifoQueue[Tensor] = queue.LifoQueue()  # the last one given back is still in the cache
        self._full: queue.SimpleQueue[tuple] = queue.SimpleQueue()
        for _ in range(NUM_BLOCKS):
            self._free.put(torch.empty(BLOCK_BYTES, dtype=torch.uint8, pin_memory=self._stream is not None))
        for number in range(NUM_WRITERS):
            threading.Thread(target=self._work, name=f"eyas-writer-{number}", daemon=True).start()

    def submit(self, columns: Sequence[Tensor], tokens: Tensor, segments: Sequence[Segment]) -> None:
        """Gathers the segments' rows of a batch and returns as soon as the device has its orders.

        columns  A + 1 of [N, H] or more rows: the boundaries in their order, then last; overwritten by the next forward
        tokens   [N] or more

        Raises TimeoutError if no block comes free in time; pieces submitted before it still arrive.
        """
        dtype, hidden_size = columns[0].dtype, columns[0].shape[-1]
        row_bytes = len(columns) * hidden_size * dtype.itemsize + 4
        for piece in pieces_of(segments, most_rows=(BLOCK_BYTES - 8) // row_bytes):
            try:
                block = self._free.get(timeout=STALL_SECONDS)
            except queue.Empty:
                raise TimeoutError(f"no room for captured rows in {STALL_SECONDS:.0f} s: the spool is too slow") from None
            try:
                rows, done = self._gather(block, columns, tokens, piece)
            except BaseException:
                self._free.put(block)
                raise
            self._full.put((block, rows, done, piece))

    def _gather(
        self, block: Tensor, columns: Sequence[Tensor], tokens: Tensor, piece: Sequence[Segment]
    ) -> tuple[Rows, torch.cuda.Event | None]:
        """Orders the copies into `block`: the rows as they will be there, and the event after which they are."""
        num_rows, dtype, hidden_size = sum(s.count for s in piece), columns[0].dtype, columns[0].shape[-1]
        size = num_rows * len(columns) * hidden_size * dtype.itemsize
        size += -size % 8 + 4 * num_rows
        # On a GPU first within its own memory: the columns may belong to a graph that the next forward replays.
        staged = block[:size] if self._stream is None else torch.empty(size, dtype=torch.uint8, device=self._device)
        rows = _view(staged, num_rows, num_columns=len(columns), hidden_size=hidden_size, dtype=dtype)
        offset = 0
        for first, count in runs_of(piece):
            here, there = slice(offset, offset + count), slice(first, first + count)
            torch.stack([column[there] for column in columns[:-1]], dim=1, out=rows.aux[here])
            rows.last[here] = columns[-1][there]
            rows.tokens[here] = tokens[there]
            offset += count
        if self._stream is None:
            return rows, None
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            block[:size].copy_(staged, non_blocking=True)
            done = torch.cuda.Event(blocking=True)  # a thread that waits for it leaves its core to others
            done.record(self._stream)
        staged.record_stream(self._stream)
        return _view(block[:size], num_rows, num_columns=len(columns), hidden_size=hidden_size, dtype=dtype), done

    def _work(self) -> None:
        while True:
            block, rows, done, piece = self._full.get()
            try:
                if done is not None:
                    done.synchronize()
                self._write(piece, rows)
            except Exception as error:
                self._failed(piece, error)
            finally:
                self._free.put(block)


def _view(memory: Tensor, num_rows: int, *, num_columns: int, hidden_size: int, dtype: torch.dtype) -> Rows:
    """Bytes as rows: all of aux, all of last, then the tokens."""
    aux_bytes = num_rows * (num_columns - 1) * hidden_size * dtype.itemsize
    states_bytes = num_rows * num_columns * hidden_size * dtype.itemsize
    return Rows(
        tokens=memory[states_bytes + -states_bytes % 8 :].view(torch.int32),
        aux=memory[:aux_bytes].view(dtype).view(num_rows, num_columns - 1, hidden_size),
        last=memory[aux_bytes:states_bytes].view(dtype).view(num_rows, hidden_size),
    )


def pieces_of(segments: Sequence[Segment], *, most_rows: int) -> list[list[Segment]]:
    """The segments in groups of at most `most_rows` rows; only one that is longer than that is cut."""
    pieces: list[list[Segment]] = []
    room = 0
    for segment in segments:
        for begin in range(0, segment.count, most_rows):
            count = min(most_rows, segment.count - begin)
            if count > room:
                pieces.append([])
                room = most_rows
            pieces[-1].append(Segment(segment.rid, segment.first + begin, count, segment.start + begin))
            room -= count
    return pieces


def runs_of(piece: Sequence[Segment]) -> list[tuple[int, int]]:
    """(first row, number of rows) of the batch, adjacent segments as one: a copy each."""
    runs: list[tuple[int, int]] = []
    for segment in piece:
        if runs and sum(runs[-1]) == segment.first:
            runs[-1] = (runs[-1][0], runs[-1][1] + segment.count)
        else:
            runs.append((segment.first, segment.count))
    return runs
