"""Parts become one dataset, or it is said why not; a codec becomes another."""

from __future__ import annotations

import json
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from data.codecs import Codec, TeacherHead
from data.manifest import Manifest, finished_ids, mark_complete, remove_shards
from data.shards import ShardReader, ShardWriter
from data.vocab import Vocabulary
from launch.merge import main as main_of_merge
from launch.merge import merge
from launch.recode import main as main_of_recode
from launch.recode import recode
from launch.verify import verify
from tests.datasets import write_dataset
from tests.records import PROVENANCE, record_of


def part_of(folder: Path, part: str | None, ids: str, *, provenance=PROVENANCE, complete: bool = True) -> Path:
    """A shard for each of `ids`, the last of the validation split."""
    for split, chosen in (("train", ids[:-1]), ("validation", ids[-1:])):
        with ShardWriter(folder, provenance=provenance, split=split, shard_bytes=1, part=part) as writer:
            for id in chosen:
                writer.write(record_of(id, split=split))
    if complete:
        mark_complete(folder)
    counts = torch.bincount(torch.tensor([ord(id) for id in ids]), minlength=512)
    Vocabulary(counts, torch.tensor([0]), tokenizer_hash="t", data_hash=ids).save(folder)
    return folder


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    return [
        part_of(tmp_path / name, f"{i}/3", ids)
        for i, (name, ids) in enumerate([("a", "abc"), ("b", "de"), ("c", "fgh")])
    ]


@pytest.mark.parametrize("how", ["link", "copy", "move"])
def test_parts_merge_in_the_order_of_their_numbers_whatever_order_they_are_given_in(parts, tmp_path: Path, how: str):
    inodes = {os.stat(part / "train-000000.tar").st_ino for part in parts}
    merged = merge([parts[2], parts[0], parts[1]], tmp_path / "all", how=how)
    assert merged == Manifest.load(tmp_path / "all") and merged.complete and merged.part is None
    assert [record.id for record in ShardReader(tmp_path / "all", split="train")] == list("abdfg")
    assert [record.id for record in ShardReader(tmp_path / "all", split="validation")] == list("ceh")
    assert verify(tmp_path / "all").problems == {} and verify(tmp_path / "all").records == 8
    counts = Vocabulary.load(tmp_path / "all").counts
    assert counts.sum() == 8 and counts[[ord(id) for id in "abcdefgh"]].tolist() == [1] * 8
    now = {os.stat(file).st_ino for file in (tmp_path / "all").glob("*.tar")}
    assert (inodes <= now) == (how != "copy")
    for part in parts:
        assert [file.name for file in part.glob("*.tar")] == [] if how == "move" else verify(part).problems == {}


def test_parts_that_share_a_vocabulary_keep_it(parts, tmp_path: Path):
    for part in parts[1:]:
        Vocabulary.load(parts[0]).save(part)
    merge(parts, tmp_path / "all", how="link")
    assert torch.equal(Vocabulary.load(tmp_path / "all").counts, Vocabulary.load(parts[0]).counts)


def test_a_merged_dataset_trains_no_further_part(parts, tmp_path: Path):
    merge(parts, tmp_path / "all", how="link")
    with pytest.raises(ValueError, match="already holds a dataset"):
        merge(parts, tmp_path / "all", how="link")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: p[:2], r"part\(s\) 2/3 are missing: expected all 3"),
        (lambda p: [p[0], p[0], p[1], p[2]], "part 0/3 is there twice"),
        (lambda p: [*p[:2], part_of(p[0].parent / "x", None, "xy")], "x is no part of a dataset"),
        (lambda p: [*p[:2], part_of(p[0].parent / "x", "2/4", "xy")], "the parts are of .3, 4."),
        (lambda p: [*p[:2], part_of(p[0].parent / "x", "2/3", "xy", complete=False)], "x is not complete: .*part=2/3"),
        (lambda p: [*p[:2], part_of(p[0].parent / "x", "2/3", "xa")], "record a is in .*/a and in .*/x: .*same n"),
        (
            lambda p: [*p[:2], part_of(p[0].parent / "x", "2/3", "xy", provenance=replace(PROVENANCE, codec="fp32"))],
            "x holds fp32 records, .*/a bf16: .*recode",
        ),
        (
            lambda p: [
                *p[:2],
                part_of(p[0].parent / "x", "2/3", "xy", provenance=replace(PROVENANCE, boundaries=(1, 2, 3))),
            ],
            r"x was captured at boundaries \[1, 2, 3\], this run asks for \[2, 3, 5\]",
        ),
    ],
)
def test_what_is_no_whole_dataset_is_refused_before_anything_is_touched(parts, tmp_path: Path, change, message: str):
    with pytest.raises(ValueError, match=message):
        merge(change(parts), tmp_path / "all", how="move")
    assert not (tmp_path / "all" / "manifest.json").exists()
    assert all(verify(part).problems == {} for part in parts)


def test_an_interrupted_merge_loses_nothing_and_can_be_done_again(parts, tmp_path: Path, monkeypatch):
    link, calls = os.link, []

    def breaks(source, target):
        calls.append(source)
        if len(calls) == 4:
            raise OSError(28, "No space left on device")
        link(source, target)

    monkeypatch.setattr(os, "link", breaks)
    with pytest.raises(ValueError, match="No space left on device"):
        merge(parts, tmp_path / "all", how="move")
    assert all(verify(part).problems == {} for part in parts)
    monkeypatch.undo()
    merge(parts, tmp_path / "all", how="move")
    assert verify(tmp_path / "all").records == 8 and verify(tmp_path / "all").problems == {}


def test_a_merge_that_was_killed_while_it_emptied_the_parts_is_said_to_be_done(parts, tmp_path: Path, monkeypatch):
    """Not that a part is incomplete: its command would capture everything again."""

    def interrupted(folder: Path, names: set[str]) -> None:
        remove_shards(folder, names)
        raise KeyboardInterrupt

    (tmp_path / "all").mkdir()
    (tmp_path / "all" / ".manifest.json.99.tmp").write_text("of a merge before it")
    with monkeypatch.context() as killed, pytest.raises(KeyboardInterrupt):
        killed.setattr("launch.merge.remove_shards", interrupted)
        merge(parts, tmp_path / "all", how="move")
    with pytest.raises(ValueError, match="already holds a dataset"):
        merge(parts, tmp_path / "all", how="move")
    assert verify(tmp_path / "all").problems == {} and verify(tmp_path / "all").records == 8


def test_the_command_merges(parts, tmp_path: Path, monkeypatch, capsys):
    options = [f"parts=[{','.join(map(str, parts))}]", f"out={tmp_path / 'all'}"]
    monkeypatch.setattr(sys, "argv", ["launch/merge.py", *options])
    main_of_merge()
    assert "merge: 8 records, 40 tokens of 3 parts in" in capsys.readouterr().out
    assert json.loads((tmp_path / "all" / "summary.json").read_text())["shards"] == 8
    assert verify(tmp_path / "all").problems == {}


@pytest.fixture(scope="module")
def captured(tmp_path_factory, tiny_llama) -> Path:
    return write_dataset(
        tmp_path_factory.mktemp("fp32"), Path(tiny_llama.path), name="tiny_llama", train=5, validation=2
    )


def test_the_command_recodes(captured: Path, tiny_llama, tmp_path: Path, monkeypatch, capsys):
    """The head is the target's own: of the top k, the first is the token that Hugging Face generated greedily next."""
    monkeypatch.setenv("EYAS_MODELS", str(Path(tiny_llama.path).parent))
    options = ["target=tiny_llama", f"shards={captured}", f"out={tmp_path}", "codec=fp8+topk8"]
    monkeypatch.setattr(sys, "argv", ["launch/recode.py", *options])
    main_of_recode()
    assert "as fp8+topk8 in" in capsys.readouterr().out
    assert verify(tmp_path).problems == {} and verify(tmp_path).records == 7
    hits = total = 0
    for before, after in zip(ShardReader(captured, split="train"), ShardReader(tmp_path, split="train"), strict=True):
        assert torch.equal(before.tokens, after.tokens) and torch.equal(before.loss_mask, after.loss_mask)
        torch.testing.assert_close(after.decoded().aux.float(), before.aux, rtol=2**-4, atol=1e-2)
        answer = before.loss_mask[1:] == 1
        hits += (after.top_ids[:-1, 0] == before.tokens[1:])[answer].sum()
        total += answer.sum()
    assert hits == total > 30
    assert torch.equal(Vocabulary.load(tmp_path).counts, Vocabulary.load(captured).counts)


def test_a_folder_takes_the_records_of_one_dataset_only(tmp_path: Path):
    """Else the next training learns from both."""
    one, other = (part_of(tmp_path / ids, None, ids) for ids in ("abc", "def"))
    recode(one, tmp_path / "fp8", codec=Codec.parse("fp8"), head=None, shard_bytes=1 << 20)
    with pytest.raises(ValueError, match="holds 3 records that .*/def has not, like a: .*choose another out="):
        recode(other, tmp_path / "fp8", codec=Codec.parse("fp8"), head=None, shard_bytes=1 << 20)
    assert finished_ids(tmp_path / "fp8") == set("abc")


def test_records_that_were_captured_again_with_other_tokens_are_not_taken_for_recoded(tmp_path: Path):
    source = part_of(tmp_path / "bf16", None, "ab")
    recode(source, tmp_path / "fp8", codec=Codec.parse("fp8"), head=None, shard_bytes=1)
    remove_shards(source, {"train-000000.tar"})
    with ShardWriter(source, provenance=PROVENANCE, split="train", shard_bytes=1) as writer:
        writer.write(record_of("a", num_tokens=9))
    with pytest.raises(ValueError, match="holds 1 records that .*/bf16 has not, like a: .*captured again; choose another out="):
        recode(source, tmp_path / "fp8", codec=Codec.parse("fp8"), head=None, shard_bytes=1)


def test_recoding_continues_and_takes_what_a_codec_has(tmp_path: Path):
    """fp8+topk5 has no last: fewer tokens can be kept of it, and states be stored wider; last cannot come back."""
    head = TeacherHead(torch.randn(512, 8, generator=torch.Generator().manual_seed(0)), device="cpu")
    source = part_of(tmp_path / "bf16", None, "abcd")
    with pytest.raises(KeyboardInterrupt):
        reading = ShardReader.__iter__

        def stops(self):
            for i, record in enumerate(reading(self)):
                if i == 2:
                    raise KeyboardInterrupt
                yield record

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(ShardReader, "__iter__", stops)
            recode(source, tmp_path / "topk", codec=Codec.parse("fp8+topk5"), head=head, shard_bytes=1)
    assert finished_ids(tmp_path / "topk") == {"a", "b"}
    recode(source, tmp_path / "topk", codec=Codec.parse("fp8+topk5"), head=head, shard_bytes=1)
    assert [record.id for record in ShardReader(tmp_path / "topk", split="train")] == ["a", "b", "c"]
    assert Manifest.load(tmp_path / "topk").complete
    recode(tmp_path / "topk", tmp_path / "fewer", codec=Codec.parse("bf16+topk3"), head=None, shard_bytes=1 << 20)
    for before, after in zip(*(ShardReader(tmp_path / name, split="train") for name in ("topk", "fewer")), strict=True):
        assert torch.equal(before.top_ids[:, :3], after.top_ids) and torch.equal(before.decoded().aux, after.aux)
    for codec, message in (("bf16", "has no last"), ("bf16+topk6", "codec bf16.topk6 stores more")):
        with pytest.raises(ValueError, match=message):
            recode(tmp_path / "topk", tmp_path / f"to-{codec}", codec=Codec.parse(codec), head=None, shard_bytes=1)
        assert not (tmp_path / f"to-{codec}").exists(), "another codec may be tried there"


@pytest.mark.parametrize(
    ("codec", "out", "options", "message"),
    [
        ("fp8+topk512", "out", [], "keeps all 512 tokens of tiny_llama, or more"),
        pytest.param(
            "fp8+topk8", "out", ["device=cuda"], "there is no GPU here",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is one"),
        ),
        ("fp8", "shards", [], "is the dataset itself: choose another out="),
        ("fp8", "none", ["shards=empty"], "empty has no records: nothing was recoded"),
    ],
)  # fmt: skip
def test_what_cannot_be_recoded_is_one_line(
    captured: Path, tiny_llama, tmp_path: Path, monkeypatch, capsys, codec: str, out: str, options: list[str], message: str
):
    monkeypatch.setenv("EYAS_MODELS", str(Path(tiny_llama.path).parent))
    shutil.copytree(captured, tmp_path / "shards")
    provenance = Manifest.load(captured).provenance
    ShardWriter(tmp_path / "empty", provenance=provenance, split="train", shard_bytes=1).close()
    monkeypatch.chdir(tmp_path)
    given = ["target=tiny_llama", "shards=shards", f"out={out}", f"codec={codec}"]
    monkeypatch.setattr(sys, "argv", ["launch/recode.py", *given, *options])
    with pytest.raises(SystemExit):
        main_of_recode()
    assert message in capsys.readouterr().err
