"""Both halves of the format: complete or absent, damaged files named, readable by plain WebDataset."""

from __future__ import annotations

import errno
import gc
import hashlib
import io
import json
import os
import pickle
import resource
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from dataclasses import replace
from pathlib import Path

import blake3
import pytest
import safetensors.torch
import torch
import webdataset

from data import mapped
from data.manifest import Manifest, finished_ids, mark_complete
from data.schema import Record
from data.shards import ShardReader, ShardWriter
from tests.records import PROVENANCE, dataset_of, record_of

ROOT = Path(__file__).resolve().parent.parent


def writer_of(folder: Path, *, shard_bytes: int = 1 << 20, split: str = "train", provenance=PROVENANCE) -> ShardWriter:
    return ShardWriter(folder, provenance=provenance, split=split, shard_bytes=shard_bytes)


def names(folder: Path) -> set[str]:
    """Everything but the lock files."""
    return {file.name for file in folder.iterdir() if not file.name.endswith(".lock")}


@pytest.mark.parametrize("codec", ["bf16", "fp32"])
def test_what_was_written_is_read(tmp_path: Path, codec: str):
    records = [record_of(f"id/{i}.x", num_tokens=1 + i) for i in range(9)]
    reader = ShardReader(dataset_of(tmp_path, records, shard_bytes=4000, codec=codec), split="train")
    assert len(reader) == 9 and len(reader.shards) > 1
    assert reader.lengths.tolist() == [1 + i for i in range(9)] and reader.lengths.dtype == "int64"
    for written, read in zip(records, reader, strict=True):
        assert (read.id, read.source, read.split) == (written.id, "test", "train")
        assert torch.equal(read.tokens, written.tokens.int()) and torch.equal(read.loss_mask, written.loss_mask.byte())
        assert torch.equal(read.aux, written.aux.to(read.aux.dtype)) and read.aux.shape == written.aux.shape
        assert torch.equal(read.last, written.last.to(read.last.dtype))
    reader.verify()


def test_plain_webdataset_reads_a_dataset(tmp_path: Path):
    records = [record_of(f"id/{i}.x", num_tokens=4) for i in range(5)]
    dataset_of(tmp_path, records, shard_bytes=3000)
    shards = sorted(str(file) for file in tmp_path.glob("*.tar"))
    assert len(shards) > 1
    samples = list(webdataset.WebDataset(shards, shardshuffle=False))
    for record, sample in zip(records, samples, strict=True):
        assert json.loads(sample["json"]) == {
            "id": record.id, "source": "test", "split": "train", "num_tokens": 4, "num_supervised": 2
        }  # fmt: skip
        assert torch.equal(safetensors.torch.load(sample["safetensors"])["aux"], record.aux.bfloat16())


@pytest.mark.parametrize(
    ("codec", "sha256"),
    [
        ("bf16", "26fc25c4335b329dd24e435f5e57a888c893a5381cadadecea5e106d146e10ad"),
        ("fp8+bf16", "0999543183c15b6307a6a057355098c489ec1c09f3c32619c7aa2ebe5dd02812"),
    ],
)
def test_a_shards_bytes_are_those_of_its_schema_version(tmp_path: Path, codec: str, sha256: str):
    """As the first writer of version 1 made them: two machines that write the same records write the same shard."""
    records = []
    for i, num_tokens in enumerate((1, 9, 120)):
        values = torch.arange(num_tokens * 4 * 8).view(num_tokens, 4, 8) / 16
        records.append(
            Record(
                id=f"record {i}", source="test", split="train", tokens=torch.arange(num_tokens),
                loss_mask=torch.arange(num_tokens) % 2, aux=values[:, :3], last=values[:, 3],
            )
        )  # fmt: skip
    dataset_of(tmp_path, records, codec=codec)
    assert hashlib.sha256((tmp_path / "train-000000.tar").read_bytes()).hexdigest() == sha256


def test_plain_tar_reads_a_shard_and_members_are_not_compressed(tmp_path: Path):
    dataset_of(tmp_path, [record_of("a")])
    with tarfile.open(tmp_path / "train-000000.tar", "r:") as tar:
        assert tar.getnames() == ["a.json", "a.safetensors"]


def test_reading_copies_nothing(tmp_path: Path):
    reader = ShardReader(dataset_of(tmp_path, [record_of("a")]), split="train")
    assert reader.read(0).aux.data_ptr() == reader.read(0).aux.data_ptr()


def test_the_manifest_counts_what_is_there(tmp_path: Path):
    dataset_of(tmp_path, [record_of("a", num_tokens=5), record_of("b", num_tokens=4)])
    (shard,) = Manifest.load(tmp_path).shards
    assert (shard.name, shard.split) == ("train-000000.tar", "train")
    assert (shard.samples, shard.tokens, shard.supervised) == (2, 9, 4)
    assert shard.checksum == f"blake3:{blake3.blake3((tmp_path / shard.name).read_bytes()).hexdigest()}"
    assert (tmp_path / shard.name).stat().st_size == shard.bytes


def test_both_splits_share_a_folder(tmp_path: Path):
    with writer_of(tmp_path) as train, writer_of(tmp_path, split="validation") as validation:
        train.write(record_of("a"))
        validation.write(record_of("b", split="validation"))
    assert [r.id for r in ShardReader(tmp_path, split="train")] == ["a"]
    assert [r.id for r in ShardReader(tmp_path, split="validation")] == ["b"]
    assert finished_ids(tmp_path) == {"a", "b"}


def test_a_record_of_the_other_split_is_refused(tmp_path: Path):
    with writer_of(tmp_path) as writer, pytest.raises(ValueError, match="is of split validation"):
        writer.write(record_of("a", split="validation"))


def test_a_dataset_is_continued(tmp_path: Path):
    dataset_of(tmp_path, [record_of("a")])
    dataset_of(tmp_path, [record_of("b")])
    assert [r.id for r in ShardReader(tmp_path, split="train")] == ["a", "b"]


@pytest.mark.parametrize("sitting", ["same", "next"])
def test_an_id_that_comes_twice_is_refused(tmp_path: Path, sitting: str):
    writer = writer_of(tmp_path)
    writer.write(record_of("a"))
    if sitting == "next":
        writer.close()
        writer = writer_of(tmp_path)
    with writer, pytest.raises(ValueError, match="record a is already in"):
        writer.write(record_of("a"))


def test_another_provenance_does_not_join_a_dataset(tmp_path: Path):
    dataset_of(tmp_path, [record_of("a")])
    with pytest.raises(ValueError, match=r"at boundaries \[2, 3, 5\], this run asks for \[2, 3, 4\]"):
        writer_of(tmp_path, provenance=replace(PROVENANCE, boundaries=(2, 3, 4)))
    with pytest.raises(ValueError, match="holds bf16 records, this run writes fp32"):
        writer_of(tmp_path, provenance=replace(PROVENANCE, codec="fp32"))


def test_what_a_run_that_wrote_nothing_has_left_is_no_dataset_of_another_kind(tmp_path: Path):
    """Unless somebody is about to write to it."""
    other = replace(PROVENANCE, codec="fp32", boundaries=(2, 3, 4))
    writer_of(tmp_path).close()
    with writer_of(tmp_path, split="validation"), pytest.raises(ValueError, match="at boundaries"):
        writer_of(tmp_path, provenance=other)
    writer_of(tmp_path, provenance=other).close()
    assert Manifest.load(tmp_path).provenance == other


def test_a_second_writer_of_a_split_is_refused(tmp_path: Path):
    with writer_of(tmp_path), pytest.raises(ValueError, match=rf"another process writes to .* \(process {os.getpid()} on "):
        writer_of(tmp_path)
    writer_of(tmp_path).close()


def test_an_exception_removes_the_unfinished_shard_and_keeps_the_others(tmp_path: Path):
    with pytest.raises(KeyboardInterrupt), writer_of(tmp_path, shard_bytes=1) as writer:
        writer.write(record_of("a"))
        writer.shard_bytes = 1 << 20
        writer.write(record_of("b"))
        raise KeyboardInterrupt
    assert names(tmp_path) == {"manifest.json", "train-000000.tar", "train-000000.index.json"}
    assert finished_ids(tmp_path) == {"a"}
    dataset_of(tmp_path, [record_of("b")])
    assert [r.id for r in ShardReader(tmp_path, split="train")] == ["a", "b"]


def test_a_killed_writer_leaves_only_finished_shards(tmp_path: Path):
    code = (
        "import os, signal, sys; from tests.records import *\n"
        f"w = ShardWriter({str(tmp_path)!r}, provenance=PROVENANCE, split='train', shard_bytes=1)\n"
        "w.write(record_of('a')); w.shard_bytes = 1 << 20; w.write(record_of('b'))\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == -signal.SIGKILL
    assert any(name.endswith(".tmp") for name in names(tmp_path))
    assert finished_ids(tmp_path) == {"a"} and len(ShardReader(tmp_path, split="train")) == 1
    dataset_of(tmp_path, [record_of("b")])
    assert not any(name.endswith(".tmp") for name in names(tmp_path))
    assert finished_ids(tmp_path) == {"a", "b"}


@pytest.mark.parametrize("call", ["os.write", "os.fsync", "os.replace"])
def test_a_full_disk_is_one_clear_error_and_loses_nothing_finished(tmp_path: Path, monkeypatch, call: str):
    dataset_of(tmp_path, [record_of("a")])
    writer = writer_of(tmp_path)

    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(call, full)
    with pytest.raises(ValueError, match="No space left on device.*free some space"), writer:
        writer.write(record_of("b"))
    monkeypatch.undo()
    assert {name for name in names(tmp_path) if name.endswith((".tar", ".tmp"))} == {"train-000000.tar"}
    assert finished_ids(tmp_path) == {"a"}
    dataset_of(tmp_path, [record_of("b")])
    assert finished_ids(tmp_path) == {"a", "b"}


def test_a_write_in_several_parts_is_whole(tmp_path: Path, monkeypatch):
    """os.write may write less than it was given."""
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, chunk: write(descriptor, memoryview(chunk)[:7]))
    record = record_of("a")
    reader = ShardReader(dataset_of(tmp_path, [record]), split="train")
    reader.verify()
    assert torch.equal(reader.read(0).aux, record.aux.bfloat16())


def test_a_truncated_shard_is_named(tmp_path: Path):
    dataset_of(tmp_path, [record_of(f"{i}") for i in range(4)], shard_bytes=1500)
    shard = tmp_path / "train-000001.tar"
    os.truncate(shard, shard.stat().st_size - 1024)
    with pytest.raises(ValueError, match=f"{shard} is truncated: .* bytes, the manifest says"):
        ShardReader(tmp_path, split="train")


@pytest.mark.parametrize("name", ["train-000000.tar", "train-000000.index.json"])
def test_a_missing_file_is_named(tmp_path: Path, name: str):
    dataset_of(tmp_path, [record_of("a")])
    (tmp_path / name).unlink()
    with pytest.raises(ValueError, match=f"{tmp_path / name} is missing"):
        ShardReader(tmp_path, split="train")


def flip(file: Path, position: int) -> None:
    content = bytearray(file.read_bytes())
    content[position] ^= 0xFF
    file.write_bytes(content)


def test_a_flipped_bit_in_a_tensor_is_found_by_verify(tmp_path: Path):
    reader = ShardReader(dataset_of(tmp_path, [record_of("a")]), split="train")
    entry = reader.entries[0]
    flip(tmp_path / "train-000000.tar", entry.offset + entry.size - 1)
    reader = ShardReader(tmp_path, split="train")
    with pytest.raises(ValueError, match="train-000000.tar is corrupt"):
        reader.verify()


@pytest.mark.parametrize("position", [0, 7, 8, 20])
def test_a_damaged_record_header_is_named_when_it_is_read(tmp_path: Path, position: int):
    reader = ShardReader(dataset_of(tmp_path, [record_of("a"), record_of("b")]), split="train")
    flip(tmp_path / "train-000000.tar", reader.entries[1].offset + position)
    reader = ShardReader(tmp_path, split="train")
    assert reader.read(0).id == "a"
    with pytest.raises(ValueError, match="train-000000.tar is corrupt at record b"):
        reader.read(1)


def test_a_damaged_index_is_named(tmp_path: Path):
    dataset_of(tmp_path, [record_of("a")])
    flip(tmp_path / "train-000000.index.json", 3)
    with pytest.raises(ValueError, match="train-000000.index.json is corrupt"):
        ShardReader(tmp_path, split="train")


def test_a_folder_without_a_manifest_says_how_to_make_one(tmp_path: Path):
    with pytest.raises(ValueError, match="has no manifest.json: run python extract/main.py"):
        ShardReader(tmp_path, split="train")


def test_a_reader_travels_to_another_process(tmp_path: Path):
    reader = ShardReader(dataset_of(tmp_path, [record_of("a")]), split="train")
    reader.read(0)
    assert pickle.load(io.BytesIO(pickle.dumps(reader))).read(0).id == "a"


def test_a_dataset_may_have_more_shards_than_a_process_may_open_files(tmp_path: Path):
    ids = [f"r{i}" for i in range(400)]
    reader = ShardReader(dataset_of(tmp_path, [record_of(id) for id in ids], shard_bytes=1), split="train")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 150, hard))
    try:
        first = reader.read(0)
        assert [record.id for record in reader] == ids
        assert torch.equal(first.tokens, reader.read(0).tokens)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("ahead_bytes", [1, 3000, 1 << 28])
def test_a_scan_reads_every_record_in_its_order(tmp_path: Path, monkeypatch, ahead_bytes: int):
    """Of many shards, short and long ones mixed: no buffer is used again while its record is."""
    monkeypatch.setattr(mapped, "_AHEAD_BYTES", ahead_bytes)
    records = [record_of(f"r{i}", num_tokens=1 + 7 * i % 11) for i in range(40)]
    reader = ShardReader(dataset_of(tmp_path, records, shard_bytes=9000), split="train")
    assert len(reader.shards) > 4
    count = 0
    for written, read in zip(records, reader.scan(), strict=True):
        time.sleep(0.001)  # the readers are ahead
        assert (read.id, read.num_tokens) == (written.id, written.num_tokens)
        assert torch.equal(read.tokens, written.tokens.int()) and torch.equal(read.aux, written.aux.bfloat16())
        assert torch.equal(read.last, written.last.bfloat16())
        count += 1
    assert count == 40 and next(reader.scan()).id == "r0", "it may be left early"


def test_a_scan_that_is_left_waits_for_no_thread(tmp_path: Path, monkeypatch):
    """The garbage collector closes it in any thread, also in one that is just being started: to wait there never ends."""
    shutdown, waited = mapped.ThreadPoolExecutor.shutdown, []

    def watched(self, wait=True, *, cancel_futures=False):
        waited.append(wait)
        shutdown(self, wait, cancel_futures=cancel_futures)

    monkeypatch.setattr(mapped.ThreadPoolExecutor, "shutdown", watched)
    reader = ShardReader(dataset_of(tmp_path, [record_of(f"r{i}") for i in range(9)]), split="train")
    waited.clear()
    assert next(reader.scan()).id == "r0" and len(list(reader.scan())) == 9
    gc.collect()
    assert waited == [False, False]


def test_a_scan_keeps_no_long_records_buffer_for_short_ones(tmp_path: Path, monkeypatch):
    records = [record_of(f"r{i}", num_tokens=90 if i % 5 == 0 else 3) for i in range(40)]
    reader = ShardReader(dataset_of(tmp_path, records, shard_bytes=9000), split="train")
    read, sizes = mapped.Shard.read, []

    def watched(self, i, *, into):
        sizes.append((len(into), self.entries[i].size))
        return read(self, i, into=into)

    monkeypatch.setattr(mapped.Shard, "read", watched)
    assert len(list(reader.scan())) == 40 and all(size <= buffer <= 2 * size for buffer, size in sizes)
    assert len({size for _, size in sizes}) > 1


def test_a_scan_names_a_record_that_is_cut_off_and_others_can_be_read(tmp_path: Path):
    records = [record_of("a"), record_of("b", num_tokens=9), record_of("c")]
    reader = ShardReader(dataset_of(tmp_path, records, shard_bytes=1), split="train")
    os.truncate(tmp_path / "train-000001.tar", reader.entries[1].offset + 100)
    found = []
    for future in mapped.read_ahead((shard, 0) for shard in reader.shards):
        try:
            found.append(future.result().id)
        except ValueError as error:
            found.append(str(error))
    assert found[::2] == ["a", "c"]
    assert found[1].endswith("train-000001.tar is corrupt at record b (the file ends before it): extract again")


@pytest.mark.parametrize("checksum", ["xxh3:00", "0" * 64, "md5:" + "0" * 64, None])
def test_a_checksum_of_no_known_kind_is_refused_naming_the_manifest(tmp_path: Path, checksum):
    """And not found in the middle of a check, which would take the shard for a bad one."""
    dataset_of(tmp_path, [record_of("a")])
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    manifest["shards"][0]["checksum"] = checksum
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match="manifest.json has .* as the checksum of train-000000.tar"):
        ShardReader(tmp_path, split="train")


def test_a_dataset_of_schema_version_1_is_read_checked_and_continued(tmp_path: Path):
    """Its shards have a sha256; what is added has the checksum of today."""
    dataset_of(tmp_path, [record_of("a")])
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    manifest["schema_version"] = 1
    del manifest["shards"][0]["checksum"]
    digest = hashlib.sha256((tmp_path / "train-000000.tar").read_bytes()).hexdigest()
    manifest["shards"][0]["sha256"] = digest
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    ShardReader(tmp_path, split="train").verify()
    dataset_of(tmp_path, [record_of("b")])
    reader = ShardReader(tmp_path, split="train")
    reader.verify()
    kinds = [shard.info.checksum.partition(":") for shard in reader.shards]
    assert kinds[0] == ("sha256", ":", digest) and kinds[1][0] == "blake3"
    flip(tmp_path / "train-000000.tar", reader.entries[0].offset + reader.entries[0].size - 1)
    with pytest.raises(ValueError, match="train-000000.tar is corrupt .its checksum changed"):
        reader.verify()


def test_a_reader_sees_shards_appear_while_they_are_written(tmp_path: Path):
    with writer_of(tmp_path, shard_bytes=1) as writer:
        writer.write(record_of("a", num_tokens=3))
        reader = ShardReader(tmp_path, split="train")
        assert (len(reader), reader.complete, reader.refresh()) == (1, False, 0)
        writer.write(record_of("b", num_tokens=4))
        writer.write(record_of("c", num_tokens=5))
        writer.shard_bytes = 1 << 20
        writer.write(record_of("d"))  # is in no finished shard yet
        assert len(reader) == 1 and reader.refresh() == 2
    assert [reader.read(i).id for i in range(3)] == ["a", "b", "c"] and reader.lengths.tolist() == [3, 4, 5]
    mark_complete(tmp_path)
    assert (reader.refresh(), reader.complete) == (1, True)
    dataset_of(tmp_path, [record_of("e")])
    assert (reader.refresh(), reader.complete) == (1, False)


def test_a_dataset_that_was_replaced_while_it_was_read_is_refused(tmp_path: Path):
    reader = ShardReader(dataset_of(tmp_path / "a", [record_of("a")]), split="train")
    dataset_of(tmp_path / "b", [record_of("b")])
    shutil.rmtree(tmp_path / "a")
    (tmp_path / "b").rename(tmp_path / "a")
    with pytest.raises(ValueError, match="was written anew while it was read"):
        reader.refresh()


def test_a_part_is_continued_only_as_the_same_part(tmp_path: Path):
    with ShardWriter(tmp_path, provenance=PROVENANCE, split="train", shard_bytes=1, part="1/4") as writer:
        writer.write(record_of("a"))
    assert Manifest.load(tmp_path).part == "1/4"
    with pytest.raises(ValueError, match="is part=1/4, this run makes part=2/4"):
        ShardWriter(tmp_path, provenance=PROVENANCE, split="train", shard_bytes=1, part="2/4")
    with pytest.raises(ValueError, match="part=4/4: expected i/n with i = 0 .. n-1"):
        Manifest(provenance=PROVENANCE, part="4/4")


def test_a_reader_does_not_change_the_file(tmp_path: Path):
    reader = ShardReader(dataset_of(tmp_path, [record_of("a")]), split="train")
    reader.read(0).aux.zero_()
    reader.verify()
