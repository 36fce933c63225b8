"""The plugin's own arithmetic, and the spool that it writes: no server needed."""

from __future__ import annotations

import errno
import json
import os
import struct
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from extract import copier, plugin, spool
from extract.fetch import read_drafter_feed
from extract.memory import Memory, _class_of
from extract.rows import read_rows


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


def test_rows_of_ours_reach_the_spool_with_their_tokens(capture, tmp_path):
    hidden = torch.arange(5.0)[:, None].expand(5, 4)
    capture.take(batch(), hidden, [hidden + 10])
    capture.take(batch(prefix=(3, 0)), hidden + 3, [hidden + 13])  # the next chunk of the prompt
    wait_for(lambda: len(spool.list_rows(tmp_path, "eyas-a")) == 2)
    assert spool.list_rows(tmp_path, "eyas-a") == [(0, 0, 3), (0, 3, 3)]
    rows = read_rows(tmp_path, "eyas-a")[0]
    assert rows.tokens.tolist() == [100, 101, 102] * 2
    assert (rows.aux[:, 0, 0].tolist(), rows.last[:, 0].tolist()) == ([10, 11, 12, 13, 14, 15], [0, 1, 2, 3, 4, 5])
    assert [path.name for path in tmp_path.iterdir()] == ["eyas-a"]


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
    assert [path.name for path in (tmp_path / "eyas-a").iterdir()] == ["error.json"]


def test_an_error_that_cannot_even_be_told_is_not_raised(capture, tmp_path):
    (tmp_path / "eyas-a").write_text("a file where a folder must be")
    capture.take(batch(), torch.zeros(2, 4), [torch.zeros(2, 4)])


def test_other_ranks_write_only_where_ranks_are_compared(tmp_path, monkeypatch):
    capture = prepared(tmp_path, monkeypatch, rank=1)
    capture.take(batch(rids=("eyas-a", "eyas-all-b")), torch.zeros(5, 4), [torch.zeros(5, 4)])
    assert wait_for(lambda: spool.list_rows(tmp_path, "eyas-all-b")) == [(1, 0, 2)]
    assert [path.name for path in tmp_path.iterdir()] == ["eyas-all-b"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_part_is_a_safetensors_file_and_outlives_it(tmp_path, dtype):
    aux, last = torch.randn(3, 2, 4).to(dtype), torch.randn(3, 4).to(dtype)
    tokens = torch.tensor([5, 6, 7], dtype=torch.int32)
    spool.write_part(tmp_path, "eyas-a", start=0, rank=2, tokens=tokens, aux=aux, last=last)
    (file,) = (tmp_path / "eyas-a").iterdir()
    read = load_file(file)
    assert torch.equal(read["aux"], aux) and torch.equal(read["last"], last) and torch.equal(read["tokens"], tokens)
    rows = read_rows(tmp_path, "eyas-a")[2]
    file.unlink()
    assert torch.equal(rows.aux, aux) and torch.equal(rows.last, last) and torch.equal(rows.tokens, tokens)


def test_parts_become_one_block_of_rows_whatever_their_sizes(tmp_path):
    generator = torch.Generator().manual_seed(0)
    aux, last = torch.randn(23, 2, 5, generator=generator).bfloat16(), torch.randn(23, 5, generator=generator).bfloat16()
    tokens, given = torch.arange(23, dtype=torch.int32), []
    for start, stop in ((0, 1), (1, 8), (8, 23)):
        part = {"tokens": tokens[start:stop], "aux": aux[start:stop], "last": last[start:stop]}
        spool.write_part(tmp_path, "eyas-a", start=start, rank=0, **part)
        spool.write_part(tmp_path, "eyas-a", start=start, rank=1, **{**part, "last": -part["last"]})

    def memory(size: int) -> np.ndarray:
        given.append(np.empty(size, dtype=np.uint8))
        return given[-1]

    ranks = read_rows(tmp_path, "eyas-a", memory=memory)
    for rank, sign in ((0, 1), (1, -1)):
        rows = ranks[rank]
        assert torch.equal(rows.tokens, tokens) and torch.equal(rows.aux, aux) and torch.equal(rows.last, sign * last)
        assert rows.aux.data_ptr() == given[rank].ctypes.data  # nothing was copied
    assert len(given) == 2


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda folder: (folder / "00000002-00000004.r0.safetensors").unlink(), "rows 2 .. 3 are missing"),
        (lambda folder: (folder / "00000000-00000002.r0.safetensors").unlink(), "rows 0 .. 1 are missing"),
        (lambda folder: os.truncate(folder / "00000004-00000006.r0.safetensors", 300), "ends before its rows do"),
        (lambda folder: os.truncate(folder / "00000000-00000002.r0.safetensors", 5), "8 bytes"),
        (
            lambda folder: (folder / "00000002-00000004.r0.safetensors").rename(folder / "00000002-00000003.r0.safetensors"),
            "00000002-00000003.r0.safetensors holds",
        ),
    ],
)
def test_rows_that_are_missing_or_damaged_are_an_error(tmp_path, harm, message):
    for start in (0, 2, 4):
        states = torch.zeros(2, 1, 6)
        tokens = torch.zeros(2, dtype=torch.int32)
        spool.write_part(tmp_path, "eyas-a", start=start, rank=0, tokens=tokens, aux=states, last=states[:, 0])
    harm(tmp_path / "eyas-a")
    if "holds" in message:  # the name says one row less than it has, and the next one begins there
        (tmp_path / "eyas-a/00000004-00000006.r0.safetensors").rename(
            tmp_path / "eyas-a/00000003-00000005.r0.safetensors"
        )
    with pytest.raises((ValueError, struct.error), match=message):
        read_rows(tmp_path, "eyas-a")


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


def test_kinds_of_parts_do_not_mix_and_unfinished_files_are_not_seen(tmp_path):
    tokens, states = torch.zeros(2, dtype=torch.int32), torch.zeros(2, 1, 6)
    spool.write_part(tmp_path, "eyas-a", start=0, rank=0, tokens=tokens, aux=states, last=None, kind=spool.FEED)
    spool.append_line(tmp_path / "eyas-a" / spool.STEPS, {"position": 9, "tokens": [1, 2]})
    (tmp_path / "eyas-a" / ".00000000-00000002.r0.safetensors.1.tmp").write_bytes(b"half")
    assert read_rows(tmp_path, "eyas-a") == {}
    feed = read_drafter_feed(tmp_path, "eyas-a")
    assert feed.features.shape == (2, 6) and feed.steps == [(9, [1, 2])]
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


def test_emptying_the_spool_leaves_what_is_not_ours(tmp_path):
    spool.append_line(tmp_path / "eyas-a" / spool.STEPS, {})
    spool.write_json(tmp_path / "server-7.json", {})
    (tmp_path / "holiday").mkdir()
    (tmp_path / "letter.txt").write_text("dear")
    spool.empty(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["holiday", "letter.txt"]
