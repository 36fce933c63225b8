"""Datasets on S3: a real server of that protocol on loopback. Written here, complete there, streamed or kept."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import fsspec
import pytest
import torch
from torch.utils.data import DataLoader

from data import storage
from data.manifest import Manifest, finished_ids, mark_complete
from data.packing import Piece
from data.shards import ShardReader, ShardWriter
from data.storage import Remote, Unreachable, Uploader, local_folder
from data.stream import PackDataset
from launch.merge import merge
from launch.verify import verify
from tests.records import PROVENANCE, dataset_of, record_of


def write(
    out: Path, url: str, ids: str, *, keep_local: bool = True, shard_bytes: int = 1, provenance=PROVENANCE
) -> None:
    """A shard for each letter of `ids`."""
    uploader = Uploader(out, url, keep_local=keep_local)
    try:
        with ShardWriter(
            out, provenance=provenance, split="train", shard_bytes=shard_bytes, on_finished=uploader.send
        ) as writer:
            for id in ids:
                writer.write(record_of(id, num_tokens=4 + ord(id) % 3))
    finally:
        uploader.close()


def there(s3, url: str) -> set[str]:
    s3.invalidate_cache()
    return {file.rpartition("/")[2] for file in s3.ls(url.removeprefix("s3://"))}


def same(reader: ShardReader, ids: str) -> bool:
    return [entry.id for entry in reader.entries] == list(ids) and all(
        torch.equal(record.aux, record_of(record.id, num_tokens=record.num_tokens).aux.bfloat16()) for record in reader
    )


def test_what_was_sent_is_streamed_in_ranges_and_no_shard_comes_here(bucket: str, s3, tmp_path: Path):
    write(tmp_path / "out", bucket, "abc")
    files = {f"train-00000{i}.{end}" for i in range(3) for end in ("tar", "index.json")}
    assert there(s3, bucket) == {"manifest.json", *files}
    folder = local_folder(bucket)
    reader = ShardReader(folder, split="train")
    assert same(reader, "abc") and reader.lengths.tolist() == [4 + ord(id) % 3 for id in "abc"]
    assert reader.read(2).id == "c" and reader.read(0).id == "a"
    assert folder.is_relative_to(tmp_path / "home" / ".cache" / "eyas") and not list(folder.rglob("*.tar"))


def test_worker_processes_stream_too(bucket: str, tmp_path: Path):
    write(tmp_path / "out", bucket, "abcd")
    reader = ShardReader(local_folder(bucket), split="train")
    reader.read(0)  # the parent has its own connection by then
    packs = [[Piece(i, 0, int(reader.lengths[i]))] for i in (3, 1, 2, 0)]
    batches = list(DataLoader(PackDataset(reader, packs, pad_to=None), batch_size=None, num_workers=2))
    assert [batch.ids for batch in batches] == [("d",), ("b",), ("c",), ("a",)]


def test_with_a_cache_a_shard_comes_once_and_is_then_mapped(bucket: str, s3, tmp_path: Path, monkeypatch):
    write(tmp_path / "out", bucket, "abc")
    monkeypatch.setenv("EYAS_CACHE", str(tmp_path / "cache"))
    folder = local_folder(bucket)
    reader = ShardReader(folder, split="train")
    reader.read(1)
    assert [file.name for file in folder.glob("*.tar")] == ["train-000001.tar"]
    assert same(reader, "abc")
    monkeypatch.setattr(storage.fsspec.core, "url_to_fs", lambda url: pytest.fail("the network is not needed now"))
    assert same(ShardReader(folder, split="train"), "abc") and not list(folder.glob(".*.tmp"))


def test_a_shard_that_changed_on_the_way_is_not_kept(bucket: str, s3, tmp_path: Path, monkeypatch):
    write(tmp_path / "out", bucket, "a")
    name = f"{bucket}/train-000000.tar"
    content = bytearray(s3.cat_file(name))
    content[-700] ^= 1
    s3.pipe_file(name, bytes(content))
    monkeypatch.setenv("EYAS_CACHE", str(tmp_path / "cache"))
    folder = local_folder(bucket)
    with pytest.raises(ValueError, match=f"{name} is corrupt"):
        ShardReader(folder, split="train").read(0)
    assert not list(folder.glob("*.tar")) and not list(folder.glob(".*.tmp"))


def test_a_full_disk_of_the_cache_says_what_to_do(bucket: str, tmp_path: Path, monkeypatch):
    write(tmp_path / "out", bucket, "a")
    monkeypatch.setenv("EYAS_CACHE", str(tmp_path / "cache"))
    folder = local_folder(bucket)

    def full(self, *arguments, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(
        Path, "open", lambda self, *a, **o: full(self) if self.suffix == ".tmp" else open(self, *a, **o)
    )
    with pytest.raises(ValueError, match="cannot keep .*No space left.*unset EYAS_CACHE to stream"):
        ShardReader(folder, split="train").read(0)


def test_a_place_that_ends_in_the_midst_of_a_shard_is_not_taken_for_a_full_disk(tmp_path: Path, monkeypatch):
    files = fsspec.filesystem("memory")
    folder = dataset_of(tmp_path, [record_of("a")])
    files.put(str(folder / "train-000000.tar"), "/ending/train-000000.tar")
    (tmp_path / "cache").mkdir()

    def ends(*arguments):
        raise PermissionError("The provided token has expired.")

    monkeypatch.setattr("fsspec.implementations.memory.MemoryFile.read", ends)
    with pytest.raises(Unreachable, match="memory://ending cannot be used .*token has expired"):
        Remote("memory://ending", keep=True, mirror=True).download(Manifest.load(folder).shards[0], tmp_path / "cache")


@pytest.mark.parametrize("place", ["s3://there-is-no-such-bucket/toy", "empty"])
def test_a_place_without_a_dataset_is_named(bucket: str, place: str):
    place = bucket if place == "empty" else place
    with pytest.raises(ValueError, match=f"{place} has no manifest.json|{place} cannot be used"):
        local_folder(place)


def test_a_server_that_is_not_there_is_named(bucket: str, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    fsspec.filesystem("s3").clear_instance_cache()
    with pytest.raises(ValueError, match=f"{bucket} cannot be used .*Could not connect"):
        local_folder(bucket)
    fsspec.filesystem("s3").clear_instance_cache()


def test_sent_shards_may_leave_and_the_writer_goes_on(bucket: str, s3, tmp_path: Path):
    """The disk holds two shards at a time; what was written is still known, and still readable."""
    out = tmp_path / "out"
    write(out, bucket, "ab", keep_local=False)
    assert not list(out.glob("*.tar")) and finished_ids(out) == {"a", "b"}
    with pytest.raises(ValueError, match="record a is already in"):
        write(out, bucket, "a", keep_local=False)
    write(out, bucket, "c", keep_local=False)
    assert same(ShardReader(out, split="train"), "abc")
    assert same(ShardReader(local_folder(bucket), split="train"), "abc")
    assert verify(out).problems == {} and verify(bucket).records == 3


def test_what_a_killed_run_did_not_send_is_sent_by_the_next(bucket: str, s3, tmp_path: Path, monkeypatch):
    out, put = tmp_path / "out", storage._put

    def breaks_at_the_second_shard(files, source, target):
        if source.name == "train-000001.tar":
            raise OSError("connection reset")
        put(files, source, target)

    monkeypatch.setattr(storage, "_put", breaks_at_the_second_shard)
    with pytest.raises(ValueError, match="cannot be used .OSError: connection reset"):
        write(out, bucket, "abc")
    listed = Manifest.load(local_folder(bucket)).shards
    assert [shard.name for shard in listed] == ["train-000000.tar"], "nothing is listed that has not arrived"
    monkeypatch.undo()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    write(out, bucket, "z")
    assert verify(bucket).problems == {}
    assert (
        {entry.id for entry in ShardReader(local_folder(bucket), split="train").entries}
        == finished_ids(out)
        >= {"a", "b", "z"}
    )


def test_a_folder_that_was_lost_is_taken_up_from_there(bucket: str, tmp_path: Path):
    write(tmp_path / "first", bucket, "ab")
    write(tmp_path / "second", bucket, "c")
    assert same(ShardReader(local_folder(bucket), split="train"), "abc")


def test_another_dataset_is_not_overwritten(bucket: str, s3, tmp_path: Path):
    write(tmp_path / "first", bucket, "a")
    (tmp_path / "second").mkdir()
    Manifest(provenance=replace(PROVENANCE, boundaries=(2, 3, 4))).save(tmp_path / "second")
    with pytest.raises(ValueError, match=rf"{bucket} was captured at boundaries \[2, 3, 5\], this run asks for"):
        Remote(bucket, keep=False, mirror=False).push(tmp_path / "second", keep_local=True)
    assert same(ShardReader(local_folder(bucket), split="train"), "a")


def test_a_reader_sees_shards_arrive(bucket: str, tmp_path: Path):
    out = tmp_path / "out"
    write(out, bucket, "a")
    reader = ShardReader(local_folder(bucket), split="train")
    write(out, bucket, "b")
    assert len(reader) == 1 and reader.refresh() == 1 and same(reader, "ab") and not reader.complete
    mark_complete(out)
    Uploader(out, bucket, keep_local=True).close()
    assert reader.refresh() == 0 and reader.complete


def test_of_two_processes_that_look_the_slower_one_takes_nothing_back(bucket: str, tmp_path: Path, monkeypatch):
    """It has read the manifest when a second shard arrives, and writes it once another process has looked again."""
    out, parse, started, may_go_on = tmp_path / "out", Manifest.parse, threading.Event(), threading.Event()
    write(out, bucket, "a")
    readers = [ShardReader(local_folder(bucket), split="train") for _ in range(2)]

    def slow(text: str, *, file: str) -> Manifest:
        if threading.current_thread() is slower and not started.is_set():
            started.set()
            assert may_go_on.wait(10)
        return parse(text, file=file)

    monkeypatch.setattr(Manifest, "parse", slow)
    slower, faster = (threading.Thread(target=reader.refresh) for reader in readers)
    slower.start()
    assert started.wait(10)
    write(out, bucket, "b")
    faster.start()
    faster.join(0.5)  # where nothing holds it back it is done by now
    may_go_on.set()
    slower.join()
    faster.join()
    assert len(Manifest.load(readers[0].path).shards) == 2
    assert [reader.refresh() for reader in readers] == [1, 0] and len(readers[0]) == 2


def test_a_dataset_that_was_replaced_is_not_read_from_the_cache(bucket: str, s3, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("EYAS_CACHE", str(tmp_path / "cache"))
    write(tmp_path / "first", bucket, "a")
    assert same(ShardReader(local_folder(bucket), split="train"), "a")
    s3.rm(bucket, recursive=True)
    write(tmp_path / "second", bucket, "b")
    assert same(ShardReader(local_folder(bucket), split="train"), "b")


def test_a_shared_file_system_sees_only_whole_files(tmp_path: Path, monkeypatch):
    shared, seen = tmp_path / "shared", []
    rename = storage.LocalFileSystem.mv

    def look(self, source, target, **options):
        seen.append({file.name for file in shared.iterdir()})
        rename(self, source, target, **options)

    monkeypatch.setattr(storage.LocalFileSystem, "mv", look)
    write(tmp_path / "out", str(shared), "ab")
    assert {".train-000000.tar.tmp", "train-000000.index.json"} <= seen[1] and "train-000000.tar" not in seen[1]
    assert same(ShardReader(local_folder(shared), split="train"), "ab") and verify(shared).problems == {}


def test_parts_on_s3_are_merged_by_the_store_itself(bucket: str, s3, tmp_path: Path):
    for i, ids in enumerate(("ab", "c")):
        out, url = tmp_path / str(i), f"{bucket}-{i}"
        with Uploader(out, url, keep_local=False) as uploader:
            with ShardWriter(
                out, provenance=PROVENANCE, split="train", shard_bytes=1, part=f"{i}/2", on_finished=uploader.send
            ) as writer:
                for id in ids:
                    writer.write(record_of(id, num_tokens=4 + ord(id) % 3))
            mark_complete(out)
    with pytest.raises(ValueError, match="train-000000.tar is not in .*/0: give the place where its shards were sent"):
        merge([tmp_path / "0", tmp_path / "1"], tmp_path / "all", how="link")
    with pytest.raises(ValueError, match="is not where out=.* is: give both on one file system, or both on S3"):
        merge([f"{bucket}-0", f"{bucket}-1"], tmp_path / "all", how="link")
    merge([f"{bucket}-1", f"{bucket}-0/"], bucket, how="link")
    assert same(ShardReader(local_folder(bucket), split="train"), "abc") and verify(bucket).complete
