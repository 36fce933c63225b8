"""Several shards written at a time give the dataset that one at a time gives, byte for byte."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from data.lanes import OpenShard
from data.manifest import finished_ids
from data.schema import encode, encoded_bytes
from data.shards import ShardWriter
from tests.records import PROVENANCE, no_room_for, record_of


def write(folder: Path, *, lanes: int, count: int = 24, seconds_each: float = 0.0) -> Path:
    with ShardWriter(folder, provenance=PROVENANCE, split="train", shard_bytes=9000, lanes=lanes) as writer:
        for i in range(count):
            writer.submit(record_of(f"r{i}", num_tokens=3 + i % 7))
            time.sleep(seconds_each)
    return folder


def test_lanes_change_no_byte_though_later_shards_are_ready_first(tmp_path, monkeypatch):
    """The first shard's records take longest."""
    one = write(tmp_path / "one", lanes=1)
    add = OpenShard.add

    def slow(self, record):
        time.sleep(0.05 if self.name.endswith("000000.tar") else 0.0)
        add(self, record)

    monkeypatch.setattr(OpenShard, "add", slow)
    four = write(tmp_path / "four", lanes=4)
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
            writer.submit(record_of(f"r{i}", num_tokens=3 + i % 7))
    assert finished_ids(tmp_path) == {f"r{i}" for i in range(24)}


@pytest.mark.parametrize("num_tokens", [1, 9, 10, 1000])
def test_the_size_of_a_record_is_known_before_it_is_encoded(num_tokens):
    header, tensors = encode(record_of("a", num_tokens=num_tokens), PROVENANCE.codec)
    size = len(header) + sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    assert encoded_bytes(num_tokens, PROVENANCE) == size
