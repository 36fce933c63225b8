"""A dataset is proved or the bad shard named: every kind of damage, made by hand."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import blake3
import pytest
import torch

from data.codecs import TeacherHead
from data.manifest import Manifest, index_name, mark_complete
from data.shards import ShardReader, ShardWriter
from data.storage import Remote
from launch import verify as verify_module
from launch.verify import main, verify
from tests.records import PROVENANCE, dataset_of, record_of

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """Six records in three shards, and one of the validation split."""
    folder = dataset_of(
        tmp_path / "shards", [record_of(f"id/{i}", num_tokens=4 + i) for i in range(6)], shard_bytes=5000
    )
    with ShardWriter(folder, provenance=PROVENANCE, split="validation", shard_bytes=1) as writer:
        writer.write(record_of("v", num_tokens=3, split="validation"))
    return folder


def bad(folder: Path) -> dict[str, str]:
    """Bad file -> its first problem."""
    return {file: problems[0] for file, problems in verify(folder).problems.items()}


def flip(file: Path, position: int) -> None:
    content = bytearray(file.read_bytes())
    content[position] ^= 0x41
    file.write_bytes(content)


def relist(folder: Path, name: str, **changes) -> None:
    """The manifest's line of a shard, changed."""
    manifest = Manifest.load(folder)
    shards = tuple(replace(shard, **changes) if shard.name == name else shard for shard in manifest.shards)
    replace(manifest, shards=shards).save(folder)


def now_listed(folder: Path, name: str) -> None:
    """As it is now, so that only the other checks are left to find a fault."""
    checksum = f"blake3:{blake3.blake3((folder / name).read_bytes()).hexdigest()}"
    index_sha256 = hashlib.sha256((folder / index_name(name)).read_bytes()).hexdigest()
    relist(folder, name, checksum=checksum, index_sha256=index_sha256)


def test_a_whole_dataset_is_counted(shards: Path):
    found = verify(shards)
    assert found.problems == {} and not found.complete
    assert (found.shards, found.records, found.tokens) == (4, 7, sum(range(4, 10)) + 3)
    assert found.supervised == 2 + 2 + 3 + 3 + 4 + 4 + 1
    assert found.bytes == sum(file.stat().st_size for file in shards.glob("*.tar"))
    mark_complete(shards)
    assert verify(shards).complete


@pytest.mark.parametrize("codec", ["fp32", "fp8", "fp8+topk4"])
def test_every_codec_is_checked(tmp_path: Path, codec: str):
    head = TeacherHead(torch.randn(512, 8), device="cpu")
    records = [replace(record := record_of(f"{i}"), **head.top_k(record.last, 4)) for i in range(3)]
    dataset_of(tmp_path, records, codec=codec)
    assert verify(tmp_path).problems == {} and verify(tmp_path).records == 3


def test_a_flipped_bit_anywhere_in_a_shard_is_found(shards: Path):
    """In a header, a state, the padding, and the end of the archive."""
    name = "train-000001.tar"
    content = (shards / name).read_bytes()
    for position in (0, 600, 1100, len(content) // 2, len(content) - 1):
        flip(shards / name, position)
        assert set(bad(shards)) == {name}
        (shards / name).write_bytes(content)
    assert bad(shards) == {}


def test_a_state_that_is_not_finite_is_found_even_where_the_checksum_fits(tmp_path: Path):
    for value in (float("nan"), float("inf"), -float("inf")):
        record = record_of("b")
        record.aux[2, 1, 3] = value
        folder = dataset_of(tmp_path / str(value), [record_of("a"), record])
        assert bad(folder) == {"train-000000.tar": "record b: aux holds values that are not finite"}
        assert verify(folder).records == 1


def test_a_nan_among_e4m3_is_found(tmp_path: Path):
    folder = dataset_of(tmp_path, [record_of("a")], codec="fp8")
    record = ShardReader(folder, split="train").read(0)
    position = (folder / "train-000000.tar").read_bytes().index(record.aux.view(torch.uint8).numpy().tobytes())
    content = bytearray((folder / "train-000000.tar").read_bytes())
    content[position + 7] = 0xFF
    (folder / "train-000000.tar").write_bytes(content)
    now_listed(folder, "train-000000.tar")
    assert bad(folder) == {"train-000000.tar": "record a: aux holds values that are not finite"}


@pytest.mark.parametrize("token", [512, -1])
def test_a_token_outside_the_vocabulary_is_found(tmp_path: Path, token: int):
    record = record_of("a")
    record.tokens[1] = token
    assert "the vocabulary has 512" in bad(dataset_of(tmp_path, [record]))["train-000000.tar"]


def test_probabilities_that_are_none_are_found(tmp_path: Path):
    record = record_of("a")
    top = TeacherHead(torch.randn(512, 8), device="cpu").top_k(record.last, 4)
    for name, log_probs in (("falling", top["top_log_probs"].flip(1)), ("sum", torch.zeros(5, 4))):
        folder = dataset_of(
            tmp_path / name, [replace(record, **{**top, "top_log_probs": log_probs})], codec="fp8+topk4"
        )
        assert "no log-probabilities in falling order" in bad(folder)["train-000000.tar"]


def test_an_id_in_two_shards_is_found(shards: Path):
    name = "train-000000.tar"
    for file in (name, index_name(name)):
        shutil.copy(shards / file, shards / file.replace("000000", "000003"))
    manifest = Manifest.load(shards)
    copy = replace(manifest.shards[0], name="train-000003.tar")
    replace(manifest, shards=(*manifest.shards, copy)).save(shards)
    assert bad(shards) == {"train-000003.tar": "record id/0 is also in train-000000.tar"}


@pytest.mark.parametrize("file", ["train-000001.tar", "train-000001.index.json"])
def test_a_missing_or_damaged_file_is_named_and_the_others_are_still_checked(shards: Path, file: str):
    (shards / file).unlink()
    flip(shards / "train-000002.tar", 700)
    found = bad(shards)
    assert set(found) == {"train-000001.tar", "train-000002.tar"} and "is missing" in found["train-000001.tar"]


def test_a_shard_that_is_cut_short_is_named(shards: Path):
    os.truncate(shards / "train-000000.tar", 3000)
    assert "is truncated: 3000 bytes" in bad(shards)["train-000000.tar"]


@pytest.mark.parametrize("field", ["samples", "tokens", "supervised"])
def test_counts_that_differ_from_the_manifests_are_found(shards: Path, field: str):
    relist(shards, "train-000001.tar", **{field: 1})
    assert "the manifest says" in bad(shards)["train-000001.tar"]


def test_an_index_that_names_other_records_is_found(shards: Path):
    name = "train-000000.tar"
    file = shards / index_name(name)
    index = json.loads(file.read_text())
    index["ids"][0] = "another"
    file.write_text(json.dumps(index))
    now_listed(shards, name)
    assert "not the 4 of the index in its order" in bad(shards)[name]


@pytest.mark.parametrize("name", [".train-000003.tar.tmp", ".manifest.json.17.tmp", "train-000009.tar"])
def test_what_a_killed_run_left_is_named(shards: Path, name: str):
    (shards / name).write_bytes(b"x")
    assert set(bad(shards)) == {name}


@pytest.mark.parametrize("name", [".summary.json.17.tmp", ".remote.json.17.tmp"])
def test_what_is_no_part_of_the_dataset_makes_it_no_worse(shards: Path, name: str):
    """No command removes it, so that none would ever pass."""
    (shards / name).write_bytes(b"x")
    assert bad(shards) == {}


def test_what_another_process_is_writing_is_no_leftover(shards: Path, monkeypatch):
    """A shard is finished while the others are read, and a next one is begun."""
    check, writers = verify_module._check_shard, []

    def and_writes(*arguments):
        if not writers:
            writers.append(ShardWriter(shards, provenance=PROVENANCE, split="train", shard_bytes=5000))
            for i in range(5):
                writers[0].write(record_of(f"new/{i}", num_tokens=8))
        check(*arguments)

    monkeypatch.setattr(verify_module, "_check_shard", and_writes)
    assert bad(shards) == {}
    assert list(shards.glob(".train-*.tmp")) and len(Manifest.load(shards).shards) > 4, "both were there meanwhile"
    writers[0].abandon()


def test_nothing_is_taken_out_of_what_another_process_is_writing(shards: Path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["verify.py", f"shards={shards}", f"out={shards.parent / 'log'}", "remove_bad=true"])
    flip(shards / "train-000001.tar", 1500)
    with ShardWriter(shards, provenance=PROVENANCE, split="train", shard_bytes=5000), pytest.raises(SystemExit):
        main()
    assert "another process writes to" in capsys.readouterr().err and (shards / "train-000001.tar").exists()


def test_a_disk_that_cannot_be_read_is_named_and_nothing_is_taken_out(shards: Path, monkeypatch, capsys):
    """Of a network's file system it may be a moment's fault."""
    monkeypatch.setattr(sys, "argv", ["verify.py", f"shards={shards}", f"out={shards.parent / 'log'}", "remove_bad=true"])
    listed = Manifest.load(shards)

    def broken(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patched, pytest.raises(SystemExit):
        patched.setattr(os, "preadv", broken)
        main()
    assert "train-000000.tar cannot be read ([Errno 5] Input/output error)" in capsys.readouterr().err
    assert Manifest.load(shards) == listed


def test_a_whole_dataset_from_which_bad_shards_should_be_taken_stays_as_it_is(shards: Path, monkeypatch):
    mark_complete(shards)
    monkeypatch.setattr(sys, "argv", ["verify.py", f"shards={shards}", f"out={shards.parent / 'log'}", "remove_bad=true"])
    main()
    assert Manifest.load(shards).complete


def test_a_place_that_does_not_answer_says_nothing_about_its_shards(shards: Path, monkeypatch, capsys):
    """The shards were sent away and the network is down: with remove_bad=true all of them would be captured again."""
    Remote("memory://nowhere", keep=False, mirror=False).save(shards)
    monkeypatch.setattr(sys, "argv", ["verify.py", f"shards={shards}", f"out={shards.parent / 'log'}", "remove_bad=true"])
    listed = Manifest.load(shards).shards
    for name in ("train-000000.tar", "train-000001.tar"):
        (shards / name).unlink()
    with monkeypatch.context() as down, pytest.raises(SystemExit):
        down.setattr("fsspec.core.url_to_fs", lambda url: (_ for _ in ()).throw(ConnectionError("no route to host")))
        main()
    assert "no route to host" in capsys.readouterr().err and Manifest.load(shards).shards == listed
    with pytest.raises(SystemExit):
        main()
    assert len(Manifest.load(shards).shards) == len(listed) - 2, "it answers, and has them not: now they are bad"


def test_shards_that_are_elsewhere_are_taken_out_where_they_were_made(shards: Path, monkeypatch, capsys):
    Remote("s3://bucket/path", keep=True, mirror=True).save(shards)
    monkeypatch.setattr(sys, "argv", ["verify.py", f"shards={shards}", f"out={shards.parent / 'log'}", "remove_bad=true"])
    with pytest.raises(SystemExit):
        main()
    assert "give the folder whose upload= it is" in capsys.readouterr().err


def test_the_same_command_clears_what_a_killed_run_left(shards: Path):
    for name in (".train-000003.tar.tmp", ".train-000003.index.json.17.tmp", ".manifest.json.17.tmp"):
        (shards / name).write_bytes(b"x")
    dataset_of(shards, [])
    assert bad(shards) == {}


def test_the_command_counts_a_whole_dataset(shards: Path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["launch/verify.py", f"shards={shards}", f"out={shards.parent / 'log'}"])
    main()
    assert "verify: 7 records, 42 tokens" in (said := capsys.readouterr().out)
    assert "(toy, bf16) hold; it is not complete" in said
    assert json.loads((shards.parent / "log" / "summary.json").read_text())["records"] == 7


def test_the_command_names_bad_shards_fails_and_takes_them_out_to_be_written_again(shards: Path):
    flip(shards / "train-000001.tar", 1500)
    lost = [entry.id for entry in ShardReader(shards, split="train").shards[1].entries]
    line = [sys.executable, ROOT / "launch" / "verify.py", f"shards={shards}", f"out={shards.parent / 'log'}"]
    found = subprocess.run([*line, "remove_bad=true"], capture_output=True, text=True, timeout=120)
    assert found.returncode != 0
    assert "BAD train-000001.tar: " in found.stdout and "train-000002" not in found.stdout
    held = sum(shard.samples for shard in Manifest.load(shards).shards)  # the others
    assert f"1 bad file(s) beside {held} records that hold" in found.stderr and "Traceback" not in found.stderr
    assert "verify: 100%" in found.stderr
    assert bad(shards) == {} and not (shards / "train-000001.tar").exists()
    dataset_of(shards, [record_of(id, num_tokens=4 + int(id[-1])) for id in lost])
    assert bad(shards) == {} and verify(shards).records == 7
    assert [shard.name for shard in Manifest.load(shards).shards if shard.split == "train"] == [
        "train-000000.tar", "train-000002.tar", "train-000003.tar",
    ]  # fmt: skip
