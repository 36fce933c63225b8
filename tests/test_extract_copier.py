"""The way of captured rows off the device: nothing lost, mixed up or overwritten, and bounded. No server needed."""

from __future__ import annotations

import sys
import threading
import time

import pytest
import torch

from extract import copier, spool
from extract.copier import Copier, Segment, pieces_of, runs_of

CPU = torch.device("cpu")
NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
HIDDEN, COLUMNS = 4, 3
ROW_BYTES = COLUMNS * HIDDEN * 4 + 4


def test_a_piece_holds_whole_segments_and_only_a_longer_one_is_cut():
    """Six rows a piece; rows of others, 5 to 9, are left out."""
    segments = [Segment("a", 0, 5, 0), Segment("b", 10, 2, 7), Segment("c", 12, 14, 3)]
    pieces = pieces_of(segments, most_rows=6)
    assert [[(s.rid, s.first, s.count, s.start) for s in piece] for piece in pieces] == [
        [("a", 0, 5, 0)],
        [("b", 10, 2, 7)],
        [("c", 12, 6, 3)],
        [("c", 18, 6, 9)],
        [("c", 24, 2, 15)],
    ]


def test_adjacent_segments_are_copied_as_one():
    segments = [Segment("a", 2, 3, 0), Segment("b", 5, 1, 0), Segment("c", 9, 2, 0)]
    assert runs_of(segments) == [(2, 4), (9, 2)]


class Arrived:
    """What a copier has delivered, by (rid, start): tokens, aux and last as they were at that moment."""

    def __init__(self, *, seconds: float = 0.0) -> None:
        self.rows, self.failed, self._seconds = {}, [], seconds

    def write(self, segments, rows):
        time.sleep(self._seconds)
        if any(segment.rid == "bad" for segment in segments):
            raise OSError("no")
        first = 0
        for segment in segments:
            here = slice(first, first + segment.count)
            self.rows[segment.rid, segment.start] = [tensor[here].clone() for tensor in rows]
            first += segment.count
        assert first == len(rows.tokens)

    def fail(self, segments, error):
        self.failed += [(segment.rid, type(error)) for segment in segments]

    def wait(self, count):
        deadline = time.monotonic() + 10
        while len(self.rows) + len(self.failed) < count:
            assert time.monotonic() < deadline
            time.sleep(0.005)


def batch_of(num_rows: int, *, seed: int) -> tuple[list[torch.Tensor], torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    columns = [torch.randn(num_rows + 2, HIDDEN, generator=generator) for _ in range(COLUMNS)]  # two rows of padding
    return columns, torch.arange(num_rows + 2) + 1000 * seed


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NEEDS_GPU)])
def test_rows_arrive_as_they_were_when_submitted_though_the_next_forward_overwrites_them(monkeypatch, device):
    """40 batches of three requests through blocks that hold 16 rows, into a writer that is slower than they come."""
    monkeypatch.setattr(copier, "BLOCK_BYTES", 16 * ROW_BYTES + 8)
    arrived = Arrived(seconds=0.001)
    way = Copier(torch.device(device), write=arrived.write, failed=arrived.fail)
    expected = {}
    for seed in range(40):
        columns, tokens = batch_of(30, seed=seed)
        segments = [Segment(f"a{seed}", 1, 4, 9), Segment(f"b{seed}", 5, 20, 0), Segment(f"c{seed}", 27, 3, 2)]
        for rid, first, count, start in [("a", 1, 4, 9), ("b", 5, 16, 0), ("b", 21, 4, 16), ("c", 27, 3, 2)]:
            rows = slice(first, first + count)
            aux = torch.stack([column[rows] for column in columns[:-1]], dim=1)
            expected[f"{rid}{seed}", start] = [tokens[rows].int(), aux, columns[-1][rows].clone()]
        columns, tokens = [column.to(device) for column in columns], tokens.to(device)
        way.submit(columns, tokens, segments)
        for tensor in (*columns, tokens):
            tensor.zero_()
    arrived.wait(len(expected))
    assert arrived.failed == [] and arrived.rows.keys() == expected.keys()
    for key, rows in expected.items():
        assert all(torch.equal(found, wanted) for found, wanted in zip(arrived.rows[key], rows)), key


def test_a_piece_that_cannot_be_written_is_reported_and_its_neighbours_arrive(monkeypatch):
    monkeypatch.setattr(copier, "BLOCK_BYTES", 2 * ROW_BYTES + 8)  # a segment each
    arrived = Arrived()
    way = Copier(CPU, write=arrived.write, failed=arrived.fail)
    columns, tokens = batch_of(6, seed=0)
    for _ in range(copier.NUM_BLOCKS + 1):  # more often than there are blocks: each comes back
        way.submit(columns, tokens, [Segment("a", 0, 2, 0), Segment("bad", 2, 2, 0), Segment("c", 4, 2, 0)])
    deadline = time.monotonic() + 10
    while len(arrived.failed) <= copier.NUM_BLOCKS:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    assert set(arrived.failed) == {("bad", OSError)} and set(arrived.rows) == {("a", 0), ("c", 0)}


def test_a_forward_waits_for_a_slow_disk_and_gives_up_before_the_servers_watchdog_would(monkeypatch):
    monkeypatch.setattr(copier, "BLOCK_BYTES", 4096)
    monkeypatch.setattr(copier, "STALL_SECONDS", 0.2)
    gate = threading.Event()
    way = Copier(CPU, write=lambda segment, rows: gate.wait(10), failed=lambda segments, error: None)
    columns, tokens = batch_of(4, seed=0)
    for _ in range(copier.NUM_BLOCKS):
        way.submit(columns, tokens, [Segment("a", 0, 4, 0)])
    began = time.monotonic()
    with pytest.raises(TimeoutError, match="the spool is too slow"):
        way.submit(columns, tokens, [Segment("a", 0, 4, 0)])
    assert time.monotonic() - began >= 0.2
    gate.set()
    time.sleep(0.1)
    way.submit(columns, tokens, [Segment("a", 0, 4, 0)])
    assert copier.STALL_SECONDS < 300


def test_rows_come_soon_though_the_scheduler_polls_and_never_pauses(tmp_path, monkeypatch):
    """As SGLang's does when it has nothing to do. With Python's own interval these took four seconds."""
    monkeypatch.setattr(copier, "BLOCK_BYTES", ROW_BYTES + 8)
    interval, written = sys.getswitchinterval(), []
    try:

        def write(segments, rows):
            whose = [(segment.rid, segment.start, segment.count) for segment in segments]
            number = int(segments[0].rid.rpartition("-")[2])
            spool.write_piece(tmp_path, whose, number=number, rank=0, tokens=rows.tokens, aux=rows.aux, last=rows.last)
            written.append(segments[0].rid)

        way = Copier(CPU, write=write, failed=lambda segments, error: written.append(repr(error)))
        columns, tokens = batch_of(400, seed=0)
        began = time.monotonic()
        for first in range(0, 400, 8):
            way.submit(columns, tokens, [Segment(f"eyas-run-{i}", i, 1, 0) for i in range(first, first + 8)])
            while len(written) < first + 8:
                assert time.monotonic() < began + 2
        assert sorted(written) == sorted(f"eyas-run-{i}" for i in range(400)) and len(spool.pieces(tmp_path, "run")) == 400
    finally:
        sys.setswitchinterval(interval)
