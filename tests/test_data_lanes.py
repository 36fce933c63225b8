"""Several shards written at a time give the dataset that one at a time gives, byte for byte."""

from __future__ import annotations

import errno
import os
import tarfile
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from data import lanes
from data.lanes import OpenShard, member, padding
from data.manifest import finished_ids
from data.shards import ShardReader, ShardWriter
from tests.records import PROVENANCE, no_room_for, record_of


def write(folder: Path, *, lanes: int, count: int = 24, at_once: int = 1, seconds_each: float = 0.0) -> Path:
    with ShardWriter(folder, provenance=PROVENANCE, split="train", shard_bytes=9000, lanes=lanes) as writer:
        for i in range(0, count, at_once):
            writer.submit(record_of(f"r{j}", num_tokens=3 + j % 7) for j in range(i, min(i + at_once, count)))
            time.sleep(seconds_each)
    return folder


@pytest.mark.parametrize("at_once", [1, 5, 24])
def test_lanes_change_no_byte_though_later_shards_are_ready_first(tmp_path, monkeypatch, at_once):
    """The first shard's records take longest; those submitted at once may be of several shards."""
    one = write(tmp_path / "one", lanes=1)
    add = OpenShard.add

    def slow(self, planned):
        time.sleep(0.05 if self.name.endswith("000000.tar") else 0.0)
        add(self, planned)

    monkeypatch.setattr(OpenShard, "add", slow)
    four = write(tmp_path / "four", lanes=4, at_once=at_once)
    files = sorted(file.name for file in one.iterdir() if not file.name.startswith("."))
    assert files == sorted(file.name for file in four.iterdir() if not file.name.startswith(".")) and len(files) > 8
    assert all((one / name).read_bytes() == (four / name).read_bytes() for name in files)


@pytest.mark.parametrize("found", ["at the end", "by a later submit"])
def test_a_shard_that_cannot_be_written_takes_the_later_ones_with_it(tmp_path, monkeypatch, found):
    """Else a dataset would have a hole where its order says there is none."""
    no_room_for("r9", monkeypatch)
    with pytest.raises(ValueError, match="No space left on device.*free some space"):
        write(tmp_path, lanes=4, seconds_each=0.02 if found == "by a later submit" else 0.0)
    kept = finished_ids(tmp_path)
    assert kept and kept == {f"r{i}" for i in range(len(kept))} and len(kept) <= 9
    assert not [file.name for file in tmp_path.iterdir() if file.name.endswith(".tmp")]
    monkeypatch.undo()
    with ShardWriter(tmp_path, provenance=PROVENANCE, split="train", shard_bytes=9000, lanes=4) as writer:
        for i in range(len(kept), 24):
            writer.submit([record_of(f"r{i}", num_tokens=3 + i % 7)])
    assert finished_ids(tmp_path) == {f"r{i}" for i in range(24)}


def test_shards_that_had_all_their_records_when_another_failed_are_finished(tmp_path, monkeypatch):
    """A run has gigabytes in them. The first is held up until the fourth has failed, and removed what it had written."""
    failed, add, index = threading.Event(), OpenShard.add, lanes.write_index
    nothing_left: list[bool] = []

    def full(self, planned):
        add(self, planned)
        if self.name.endswith("000003.tar"):
            raise OSError(errno.ENOSPC, "No space left on device")

    def late(out, name, entries):
        assert failed.wait(30)
        nothing_left.append(not (tmp_path / ".train-000003.tar.tmp").exists())
        return index(out, name, entries)

    monkeypatch.setattr(OpenShard, "add", full)
    monkeypatch.setattr(lanes, "write_index", late)
    with pytest.raises(ValueError, match="No space left on device.*3 finished records are kept"):
        with ShardWriter(tmp_path, provenance=PROVENANCE, split="train", shard_bytes=1, lanes=4) as writer:
            *_, broken = [writer.submit([record_of(f"r{i}")])[0] for i in range(4)]
            with pytest.raises(OSError) as full_disk:
                broken.result(30)
            threading.Timer(0.2, failed.set).start()
            writer.fail(full_disk.value)
    assert finished_ids(tmp_path) == {"r0", "r1", "r2"} and all(nothing_left)
    assert not list(tmp_path.glob(".*.tmp"))


def test_write_and_submit_keep_the_records_order(tmp_path):
    """`write` works in the caller's thread, and waits there for what was submitted before."""
    one = write(tmp_path / "one", lanes=1)
    mixed = tmp_path / "mixed"
    with ShardWriter(mixed, provenance=PROVENANCE, split="train", shard_bytes=9000, lanes=2) as writer:
        for i in range(24):
            record = record_of(f"r{i}", num_tokens=3 + i % 7)
            writer.write(record) if i % 3 == 2 else writer.submit([record])
    for file in one.glob("*.*"):
        assert (mixed / file.name).read_bytes() == file.read_bytes()


def test_a_record_that_write_refused_can_be_mended_and_written(tmp_path):
    provenance = replace(PROVENANCE, codec="fp8")
    good = record_of("a")
    bad = replace(good, aux=torch.full_like(good.aux, float("nan")))
    with ShardWriter(tmp_path, provenance=provenance, split="train", shard_bytes=1 << 20) as writer:
        with pytest.raises(ValueError, match="not finite"):
            writer.write(bad)
        writer.write(good)
    reader = ShardReader(tmp_path, split="train")
    assert [record.id for record in reader] == ["a"]
    reader.verify()


def test_of_records_submitted_at_once_those_that_can_be_stored_are(tmp_path):
    """One cannot be, which its future says, and one does not belong here, which `submit` does."""
    records = [record_of(f"r{i}") for i in range(5)]
    records[1] = replace(records[1], aux=torch.full_like(records[1].aux, float("nan")))
    records[3] = replace(records[3], split="validation")
    provenance = replace(PROVENANCE, codec="fp8")
    with ShardWriter(tmp_path, provenance=provenance, split="train", shard_bytes=1 << 20, lanes=2) as writer:
        (future,) = writer.submit(records[:3])
        with pytest.raises(ValueError, match="not finite"):
            future.result()
        with pytest.raises(ValueError, match="r3 is of split validation"):
            writer.submit([records[4], records[3]])
    assert [record.id for record in ShardReader(tmp_path, split="train")] == ["r0", "r2", "r4"]


def test_a_flush_that_failed_is_not_forgotten_for_a_later_one(tmp_path, monkeypatch):
    """A file system without room may say so once, when it is told to write, and drop what it held."""
    flushes = []

    def full_once(descriptor):
        flushes.append(descriptor)
        if len(flushes) == 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("data.growing._GATHER_BYTES", 1)
    monkeypatch.setattr("data.growing._FLUSH_BYTES", 1)
    monkeypatch.setattr(os, "fdatasync", full_once)
    with pytest.raises(ValueError, match="No space left on device.*free some space"):
        write(tmp_path, lanes=1, seconds_each=0.01)
    assert finished_ids(tmp_path) == set()


def test_a_shard_that_was_interrupted_in_a_record_is_not_finished(tmp_path, monkeypatch):
    """Ctrl-C stops the caller between any two of its steps; who catches it and closes gets the shards before."""
    os_write = os.write

    def interrupted(descriptor, chunk):
        os_write(descriptor, memoryview(chunk)[:7])
        raise KeyboardInterrupt

    writer = ShardWriter(tmp_path, provenance=PROVENANCE, split="train", shard_bytes=1)
    writer.write(record_of("a"))
    monkeypatch.setattr("data.growing._GATHER_BYTES", 1)
    monkeypatch.setattr(os, "write", interrupted)
    writer.shard_bytes = 1 << 20
    with pytest.raises(KeyboardInterrupt):
        writer.write(record_of("b"))
    monkeypatch.undo()
    with pytest.raises(KeyboardInterrupt):
        writer.close()
    assert finished_ids(tmp_path) == {"a"}
    assert not [file.name for file in tmp_path.iterdir() if file.name.endswith(".tmp")]


@pytest.mark.parametrize("name", ["a.json", "record-000123.safetensors", "x" * 77 + ".safetensors"])
@pytest.mark.parametrize("size", [0, 1, 511, 512, 123_456_789, 8**11 - 1])
def test_the_header_of_a_member_is_tarfiles(name, size):
    info = tarfile.TarInfo(name)
    info.size, info.mode = size, 0o644
    assert member(name, size) == info.tobuf(tarfile.USTAR_FORMAT)
    assert (size + len(padding(size))) % 512 == 0 and len(padding(size)) < 512


def test_a_record_too_large_for_a_tar_is_refused():
    """ustar has eleven octal digits for a size."""
    with pytest.raises(ValueError, match="has 8589934592 bytes, a tar holds files below 8 GiB"):
        member("a.safetensors", 8**11)
