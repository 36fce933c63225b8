"""The plugin's own arithmetic, and the spool that it writes: no server needed."""

from __future__ import annotations

import errno
import json
import os
import struct
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from extract import copier, plugin, spool
from extract.fetch import read_drafter_feed
from extract.memory import Memory, _class_of
from extract.rows import Piece, read_piece


def test_segments_follow_the_order_of_the_batch_and_are_ours_only():
    segments = plugin.segments_of(
        ["eyas-1", "HEALTH_CHECK_0", "eyas-all-2", "8f3c", "eyas-3"], [2, 1, 3, 4, 0], [5, 0, 0, 7, 1]
    )
    assert [(s.rid, s.first, s.count, s.start) for s in segments] == [("eyas-1", 0, 2, 5), ("eyas-all-2", 3, 3, 0)]


@pytest.mark.parametrize("packed", [False, True])
def test_columns_are_the_boundaries_in_their_order_and_then_last(packed):
    boundaries = [torch.full((6, 4), float(b)) for b in (2, 3)]
    aux = torch.cat(boundaries, dim=-1) if packed else boundaries
    columns = plugin.columns_of(torch.full((6, 4), 9.0), aux, num_rows=5, num_aux=2)
    assert [column.shape for column in columns] == [(6, 4)] * 3
    assert [column.unique().tolist() for column in columns] == [[2], [3], [9]]


def test_a_model_that_hands_out_something_else_than_asked_is_an_error():
    hidden, aux = torch.zeros(4, 8), [torch.zeros(4, 8)]
    for words, options in {
        "no residual stream": dict(aux=None, num_rows=4, num_aux=1),
        "at 1 layers, not 2": dict(aux=aux, num_rows=4, num_aux=2),
        "4 rows for 5 tokens": dict(aux=aux, num_rows=5, num_aux=1),
        "of different kinds": dict(aux=[aux[0].bfloat16()], num_rows=4, num_aux=1),
    }.items():
        with pytest.raises(ValueError, match=words):
            plugin.columns_of(hidden, **options)


def batch(*, mode="EXTEND", rids=("eyas-a", "other"), lens=(3, 2), prefix=(0, 0)):
    return SimpleNamespace(
        forward_mode=SimpleNamespace(name=mode), rids=list(rids), extend_seq_lens_cpu=list(lens),
        extend_prefix_lens_cpu=list(prefix), input_ids=torch.arange(100, 100 + sum(lens)),
    )  # fmt: skip


@pytest.fixture
def capture(tmp_path, monkeypatch):
    return prepared(tmp_path, monkeypatch, rank=0)


def prepared(folder, monkeypatch, *, rank):
    monkeypatch.setattr(plugin, "attention_rank", lambda: rank)
    monkeypatch.setattr(copier, "BLOCK_BYTES", 4096)
    capture = plugin.Capture(folder, layer_ids=[1])
    capture.prepare(torch.device("cpu"))
    return capture


def wait_for(found):
    deadline = time.monotonic() + 5
    while not found():
        assert time.monotonic() < deadline, "nothing came"
        time.sleep(0.01)
    return found()


def pieces(folder: Path, run: str) -> list[Piece]:
    return [read_piece(folder / name, memory=Memory().take) for name in sorted(spool.pieces(folder, run))]


def test_rows_of_ours_reach_the_spool_with_their_tokens(capture, tmp_path):
    hidden = torch.arange(5.0)[:, None].expand(5, 4)
    capture.take(batch(prefix=(7, 0)), hidden, [hidden + 10])
    (piece,) = wait_for(lambda: pieces(tmp_path, "a"))
    (rows,) = piece.segments
    assert (piece.rank, rows.rid, rows.start, rows.tokens.tolist(), rows.finite) == (0, "eyas-a", 7, [100, 101, 102], True)
    assert (rows.aux[:, 0, 0].tolist(), rows.last[:, 0].tolist()) == ([10, 11, 12], [0, 1, 2])
    assert len(list(tmp_path.iterdir())) == 1


def test_what_is_prefilled_together_is_a_piece_for_each_run_that_asked(capture, tmp_path):
    """Two extractors may ask the same server; each takes its own pieces out of the spool."""
    hidden = torch.arange(5.0)[:, None].expand(5, 4)
    capture.take(batch(rids=("eyas-a-1", "eyas-b-1")), hidden, [hidden])
    capture.take(batch(rids=("eyas-a-2", "eyas-a-3")), hidden, [hidden])
    wait_for(lambda: len(list(tmp_path.iterdir())) == 3)
    found = [[(rows.rid, rows.tokens.tolist()) for rows in piece.segments] for piece in pieces(tmp_path, "a")]
    assert sorted(found) == [
        [("eyas-a-1", [100, 101, 102])], [("eyas-a-2", [100, 101, 102]), ("eyas-a-3", [103, 104])],
    ]  # fmt: skip
    assert [[rows.rid for rows in piece.segments] for piece in pieces(tmp_path, "b")] == [["eyas-b-1"]]


@pytest.mark.parametrize("mode", ["DECODE", "IDLE", "TARGET_VERIFY", "DRAFT_EXTEND_V2"])
def test_only_prefills_are_captured(capture, tmp_path, mode):
    capture.take(batch(mode=mode), torch.zeros(5, 4), [torch.zeros(5, 4)])
    assert list(tmp_path.iterdir()) == []


def test_an_error_is_told_to_the_requests_it_concerns_and_not_raised(capture, tmp_path):
    capture.take(batch(), torch.zeros(2, 4), [torch.zeros(2, 4)])
    assert "2 rows for 5 tokens" in spool.read_error(tmp_path, "eyas-a")
    assert spool.read_error(tmp_path, "other") is None


def test_a_full_disk_is_told_to_the_requests_it_concerns(capture, tmp_path, monkeypatch):
    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(spool.os, "replace", full)
    capture.take(batch(), torch.zeros(5, 4), [torch.zeros(5, 4)])
    assert wait_for(lambda: spool.read_error(tmp_path, "eyas-a")) == f"there is no room in {tmp_path}"
    assert [path.name for path in tmp_path.rglob("*")] == ["eyas-a", "error.json"]


def test_an_error_that_cannot_even_be_told_is_not_raised(capture, tmp_path):
    (tmp_path / "eyas-a").write_text("a file where a folder must be")
    capture.take(batch(), torch.zeros(2, 4), [torch.zeros(2, 4)])


def test_other_ranks_write_only_where_ranks_are_compared(tmp_path, monkeypatch):
    capture = prepared(tmp_path, monkeypatch, rank=1)
    capture.take(batch(rids=("eyas-a", "eyas-all-b")), torch.zeros(5, 4), [torch.zeros(5, 4)])
    (piece,) = wait_for(lambda: pieces(tmp_path, "b"))
    assert piece.rank == 1 and [(rows.rid, rows.start, len(rows.tokens)) for rows in piece.segments] == [("eyas-all-b", 0, 2)]
    assert len(list(tmp_path.iterdir())) == 1


def a_piece(folder: Path, *, dtype: torch.dtype = torch.float32, run: str = "r") -> tuple[Path, list[torch.Tensor]]:
    """Rows 0 .. 2 of one request and 5 .. 8 of another: the file, and its tokens, aux and last."""
    generator = torch.Generator().manual_seed(0)
    aux, last = (torch.randn(7, *shape, generator=generator).to(dtype) for shape in ((2, 5), (5,)))
    tokens = torch.arange(7, dtype=torch.int32)
    whose = [(f"eyas-{run}-1", 0, 3), (f"eyas-{run}-2", 5, 4)]
    spool.write_piece(folder, whose, number=0, rank=2, tokens=tokens, aux=aux, last=last)
    return folder / spool.pieces(folder, run)[0], [tokens, aux, last]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_piece_is_a_safetensors_file_and_outlives_it(tmp_path, dtype):
    file, (tokens, aux, last) = a_piece(tmp_path, dtype=dtype)
    read = load_file(file)
    assert torch.equal(read["aux"], aux) and torch.equal(read["last"], last) and torch.equal(read["tokens"], tokens)
    memory = Memory()
    piece = read_piece(file, memory=memory.take)
    file.unlink()
    assert piece.rank == 2 and [(rows.rid, rows.start, rows.finite) for rows in piece.segments] == [
        ("eyas-r-1", 0, True), ("eyas-r-2", 5, True),
    ]  # fmt: skip
    for rows, here in zip(piece.segments, (slice(0, 3), slice(3, 7))):
        assert torch.equal(rows.tokens, tokens[here]) and torch.equal(rows.aux, aux[here]) and torch.equal(rows.last, last[here])


def test_of_a_piece_that_nobody_wants_no_row_is_read(tmp_path):
    file, _ = a_piece(tmp_path)

    def memory(size: int) -> np.ndarray:
        raise AssertionError("nothing is to be read")

    assert read_piece(file, memory=memory, wanted=lambda rid: rid == "eyas-r-3") is None


def test_of_a_piece_only_the_requests_with_a_value_that_is_not_finite_are_said_to_have_one(tmp_path):
    states = torch.zeros(4, 1, 6)
    states[2, 0, 3] = float("nan")
    whose = [("eyas-r-1", 0, 2), ("eyas-r-2", 0, 1), ("eyas-r-3", 0, 1)]
    tokens = torch.zeros(4, dtype=torch.int32)
    spool.write_piece(tmp_path, whose, number=0, rank=0, tokens=tokens, aux=states, last=torch.zeros(4, 6))
    piece = read_piece(tmp_path / spool.pieces(tmp_path, "r")[0], memory=Memory().take)
    assert [rows.finite for rows in piece.segments] == [True, False, True]


@pytest.mark.parametrize(("size", "message"), [(5, "8 bytes"), (200, "line 1 column"), (-1, "ends before its rows do")])
def test_a_piece_that_is_cut_off_is_an_error(tmp_path, size, message):
    file, _ = a_piece(tmp_path)
    os.truncate(file, size if size > 0 else file.stat().st_size + size)
    with pytest.raises((ValueError, struct.error), match=message):
        read_piece(file, memory=Memory().take)


def test_a_header_may_be_longer_than_most(tmp_path):
    whose = [(f"eyas-r-{i:032d}", 0, 1) for i in range(300)]
    states, tokens = torch.randn(300, 1, 2), torch.arange(300, dtype=torch.int32)
    spool.write_piece(tmp_path, whose, number=0, rank=0, tokens=tokens, aux=states, last=states[:, 0].contiguous())
    piece = read_piece(tmp_path / spool.pieces(tmp_path, "r")[0], memory=Memory().take)
    assert [(rows.rid, rows.start, int(rows.tokens)) for rows in piece.segments] == [(rid, 0, i) for i, (rid, _, _) in enumerate(whose)]


def test_memory_is_given_out_again_once_nothing_refers_to_it():
    memory = Memory(keep_bytes=1 << 20)
    first = memory.take(100_000)
    address, part = first.ctypes.data, torch.frombuffer(memoryview(first), dtype=torch.int16, count=9, offset=4).view(3, 3)
    del first
    other = memory.take(100_000)
    assert other.ctypes.data != address, "a view of it is still there"
    part = memoryview(part[1].numpy())
    assert memory.take(100_000).ctypes.data != address, "and one of that"
    del part
    again = memory.take(90_000)  # of the same size when rounded up
    assert again.ctypes.data == address and len(again) == 90_000
    del again, other
    assert memory.take(10).ctypes.data != address, "a block is not given for a tenth of it"
    large = [memory.take(1 << 20) for _ in range(3)]
    del large
    assert sum(size * len(blocks) for size, blocks in memory._free.items()) <= 1 << 20


@pytest.mark.parametrize("size", [1, 65_536, 65_537, 8 << 20, (8 << 20) + 1, 3_000_000_000])
def test_memory_is_rounded_up_by_little(size):
    assert size <= _class_of(size) <= max(1.25 * size, size + (1 << 16))
    assert _class_of(_class_of(size)) == _class_of(size)


def test_what_a_drafter_was_fed_is_read_in_the_prompts_order(tmp_path):
    tokens, features = torch.arange(5, dtype=torch.int32), torch.randn(5, 6)
    for rows in (slice(2, 5), slice(0, 2)):
        spool.write_feed(tmp_path, "eyas-a", start=rows.start, tokens=tokens[rows], features=features[rows])
    spool.append_line(tmp_path / "eyas-a" / spool.STEPS, {"position": 9, "tokens": [1, 2]})
    (tmp_path / "eyas-a" / ".feed-00000005-00000006.safetensors.1.tmp").write_bytes(b"half")
    feed = read_drafter_feed(tmp_path, "eyas-a")
    assert torch.equal(feed.features, features) and torch.equal(feed.tokens, tokens) and feed.steps == [(9, [1, 2])]
    with pytest.raises(ValueError, match="no drafter feed"):
        read_drafter_feed(tmp_path, "eyas-b")


def test_without_the_variable_nothing_is_hooked(monkeypatch):
    monkeypatch.delenv(plugin.VARIABLE, raising=False)
    monkeypatch.setattr(plugin, "_capture", None)
    plugin.register()
    assert plugin._capture is None


def test_outside_a_scheduler_nothing_is_hooked(monkeypatch):
    monkeypatch.setenv(plugin.VARIABLE, json.dumps({"spool": "/nowhere", "layer_ids": [1], "feed": False}))
    monkeypatch.setattr(plugin, "_capture", None)
    plugin.register()
    assert plugin._capture is None


@pytest.mark.parametrize(("parent", "left"), [(None, ["letter.txt"]), ("a process", ["letter.txt", "server-7.json"])])
def test_a_server_that_starts_forgets_what_one_before_it_said(tmp_path, monkeypatch, parent, left):
    """Its first process does, and not a scheduler, which starts beside others."""
    monkeypatch.setenv(plugin.VARIABLE, json.dumps({"spool": str(tmp_path), "layer_ids": [1], "feed": False}))
    monkeypatch.setattr(plugin.multiprocessing, "parent_process", lambda: parent)
    spool.write_json(tmp_path / "server-7.json", {"error": "of the boundaries that were asked for then"})
    (tmp_path / "letter.txt").write_text("dear")
    plugin.register()
    assert sorted(path.name for path in tmp_path.iterdir()) == left


def test_emptying_the_spool_leaves_what_is_not_ours(tmp_path):
    spool.append_line(tmp_path / "eyas-a" / spool.STEPS, {})
    spool.write_json(tmp_path / "server-7.json", {})
    a_piece(tmp_path)
    (tmp_path / ".piece-r-1-000000007.safetensors.1.tmp").write_bytes(b"half")
    (tmp_path / "holiday").mkdir()
    (tmp_path / "letter.txt").write_text("dear")
    spool.empty(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["holiday", "letter.txt"]
