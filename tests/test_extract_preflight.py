"""What an extraction takes: computed before it starts, and what was then written is no more than that."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from data.prompts import Prompt, PromptSet, part_of
from data.shards import ShardReader
from extract import preflight
from extract.agreement import VOCAB_AT_A_TIME, likeliest, measure
from extract.preflight import Forecast, Plan, choose_spool, duration, record_bytes, size
from extract.run import shards_of_changed
from launch import disk
from tests.records import PROVENANCE, dataset_of, record_of
from tests.targets import ROOT


def prompt(id: str, num_tokens: int) -> Prompt:
    return Prompt(id, "test", "train", np.zeros(num_tokens, np.int32), np.ones(num_tokens, np.uint8))


@pytest.mark.parametrize("codec", ["bf16", "fp32", "fp8", "fp8+bf16"])
def test_what_is_written_is_what_was_planned(tmp_path, codec):
    """Within the 3 kB that a record may take beside its states."""
    lengths = [1, 30, 200, 1000]
    dataset_of(tmp_path / "data", [record_of(f"r{n}", num_tokens=n) for n in lengths], codec=codec)
    written = sum(file.stat().st_size for file in (tmp_path / "data").glob("*.tar"))
    planned = [record_bytes(n, codec, num_boundaries=3, hidden_size=8) for n in lengths]
    assert sum(planned) - 3072 * len(lengths) <= written <= sum(planned)


def test_kimis_bytes_per_token_are_57344_and_a_third_of_it_with_fp8_and_top_64():
    """61 layers of 7168: three boundaries and last in bf16 are 4 * 7168 * 2 bytes; in a record, 5 more."""
    tokens = 10**6
    full = record_bytes(tokens, "bf16", num_boundaries=3, hidden_size=7168) / tokens
    assert round(full) == 57344 + 5
    lean = record_bytes(tokens, "fp8+topk64", num_boundaries=3, hidden_size=7168) / tokens
    assert round(lean) == 3 * 7168 + 3 * 4 + 64 * 8 + 4 + 5 and lean / full < 0.4


def test_the_guides_disk_table_is_what_the_codecs_take():
    guide = (ROOT / "docs/extraction.md").read_text()
    assert f"\n{disk.table()}\n" in guide, "python launch/disk.py prints it"
    assert disk.bytes_per_token("bf16", 4096) == 4 * 4096 * 2 + 5
    traces = 10_000 * 8_000
    for codec, words in {"bf16": "4.6 TB in bf16", "fp8+topk64": "1.8 TB in `fp8+topk64`"}.items():
        assert f"{size(disk.bytes_per_token(codec, 7168) * traces)} in" == words[:9] and words in guide


def test_a_disk_that_cannot_hold_it_is_refused_naming_both_sizes_and_the_ways_out(tmp_path, monkeypatch):
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda path: type("", (), {"free": 10**6})())
    rows = [prompt(str(i), 1000) for i in range(100)]
    plan = Plan.of(rows, PROVENANCE, out=tmp_path, done=7, shard_bytes=10**5, keep_local=True)
    assert (plan.records, plan.tokens, plan.done) == (100, 100_000, 7)
    with pytest.raises(ValueError, match=r"has 1\.0 MB free and 7\.\d MB are needed for 100,000 tokens: .*codec=.*part=i/n"):
        plan.require_room()
    Plan.of(rows[:9], PROVENANCE, out=tmp_path, done=7, shard_bytes=10**5, keep_local=True).require_room()
    Plan.of(rows, PROVENANCE, out=tmp_path, done=7, shard_bytes=10**5, keep_local=False).require_room()


def test_the_time_left_is_told_after_a_minute_and_remembered_for_the_next_plan(tmp_path, monkeypatch, capsys):
    clock = [1000.0]
    monkeypatch.setattr(preflight.time, "monotonic", lambda: clock[0])
    forecast = Forecast(1_000_000, out=tmp_path)
    for _ in range(7):  # 10,000 tokens every ten seconds
        clock[0] += 10
        forecast.add(10_000)
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and "1,000 tokens/s, 16 min to go, done at about" in told
    clock[0] += 600
    forecast.add(10_000)
    assert "tokens/s" in capsys.readouterr().err
    forecast.end()
    plan = Plan.of([prompt("a", 1194)], PROVENANCE, out=tmp_path, done=0, shard_bytes=1, keep_local=True)
    assert "about 10 s at 119 tokens/s as before" in plan.line, plan.line


def test_as_long_as_nothing_is_captured_no_rate_is_told(tmp_path, monkeypatch, capsys):
    """The first prompts may fail, each tried four times, for more than a minute."""
    clock = [0.0]
    monkeypatch.setattr(preflight.time, "monotonic", lambda: clock[0])
    forecast = Forecast(1_000_000, out=tmp_path)
    clock[0] = 100.0
    forecast.add(0)
    assert capsys.readouterr().err == ""
    forecast.add(10_000)
    assert "extract: 100 tokens/s" in capsys.readouterr().err


def test_sizes_and_durations_read_as_people_say_them():
    assert [size(n) for n in (999, 12_345, 4_700_000_000_000)] == ["999 bytes", "12.3 kB", "4.7 TB"]
    assert [duration(s) for s in (40, 61, 11_520)] == ["40 s", "1 min", "3 h 12 min"]


def test_the_spool_is_on_tmpfs_where_there_is_room_and_is_the_same_folder_in_the_next_run(tmp_path, monkeypatch):
    assert choose_spool("/somewhere", out=tmp_path, in_flight_bytes=1) == Path("/somewhere")
    free = {"free": 10**9}
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda path: type("", (), free)())
    chosen = choose_spool(None, out=tmp_path, in_flight_bytes=10**8)
    assert chosen.parent == Path("/dev/shm") and chosen == choose_spool(None, out=tmp_path, in_flight_bytes=10**8)
    assert chosen != choose_spool(None, out=tmp_path / "other", in_flight_bytes=10**8)
    free["free"] = 10**8
    assert choose_spool(None, out=tmp_path, in_flight_bytes=10**8) == tmp_path / "spool"


def test_what_a_killed_run_has_left_on_tmpfs_does_not_send_the_next_one_elsewhere(tmp_path, monkeypatch):
    """There it is removed; beside another spool it would stay."""
    monkeypatch.setattr(preflight, "SHARED_MEMORY", tmp_path / "shm")
    (tmp_path / "shm").mkdir()
    spool = choose_spool(None, out=tmp_path, in_flight_bytes=1)
    spool.mkdir()
    (spool / "piece-r-1-000000001.safetensors").write_bytes(bytes(60_000))
    free = {"free": 100_000}
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda path: type("", (), free)())
    assert choose_spool(None, out=tmp_path, in_flight_bytes=100_000) == spool
    free["free"] = 80_000
    assert choose_spool(None, out=tmp_path, in_flight_bytes=100_000) == tmp_path / "spool"


def test_parts_are_disjoint_and_together_all_prompts_and_do_not_follow_the_split():
    rows = PromptSet.collect(prompt(f"talk/{i}", 2) for i in range(500))
    parts = [rows.part(i, 3) for i in range(3)]
    assert sorted(id for part in parts for id in part.ids) == sorted(rows.ids)
    assert all(130 < len(part) < 210 for part in parts)
    assert [part_of("talk/1", 3), part_of("talk/2", 3)] == [part_of("talk/1", 3), part_of("talk/2", 3)]


def test_a_prompt_that_changed_under_its_id_is_found_in_its_shard(tmp_path):
    """One record a shard. Another length, other tokens, another mask; one that is as it was; one that is not asked for."""
    records = [record_of(name) for name in "abcde"]
    out = dataset_of(tmp_path / "data", records, shard_bytes=1)
    prompts = [
        Prompt(r.id, "test", "train", r.tokens.to(torch.int32).numpy(), r.loss_mask.to(torch.uint8).numpy()) for r in records[:4]
    ]
    assert shards_of_changed(out, PromptSet.collect(prompts)) == set()
    changed = [
        replace(prompts[0], tokens=np.append(prompts[0].tokens, 3).astype(np.int32), loss_mask=np.append(prompts[0].loss_mask, 1).astype(np.uint8)),
        replace(prompts[1], tokens=(prompts[1].tokens + 1).astype(np.int32)),
        replace(prompts[2], loss_mask=np.roll(prompts[2].loss_mask, 1)),
        prompts[3],
    ]  # fmt: skip
    shards = [shard["name"] for shard in json.loads((out / "manifest.json").read_text())["shards"]]
    assert shards_of_changed(out, PromptSet.collect(changed)) >= set(shards[:2])
    assert set(shards[3:]).isdisjoint(shards_of_changed(out, PromptSet.collect(changed)))
    assert shards_of_changed(tmp_path / "nowhere", PromptSet.collect(changed)) == set()


def test_the_share_of_the_targets_own_words_by_hand(tmp_path):
    """The head picks the largest of eight numbers; of the supervised tokens half are put where it points."""
    head = torch.zeros(512, 8)
    head[:8] = 20 * torch.eye(8)
    records = []
    for name in "abcd":
        record = record_of(name, num_tokens=41)
        likely = record.last.argmax(-1)
        tokens = torch.full_like(record.tokens, 300)
        tokens[2::4] = likely[1:-1:4].to(tokens.dtype)
        records.append(replace(record, tokens=tokens, loss_mask=(torch.arange(41) % 2 == 0).to(torch.int64)))
    out = dataset_of(tmp_path / "data", records)
    found = measure(out, head)
    assert found.tokens == 4 * 20 and found.share == pytest.approx(0.5, abs=0.06) and found.expected > 0.9
    assert not found.is_own and "let it answer these questions itself" in found.warning
    choices = [(r.last @ head.T).argmax(-1)[:-1] for r in records]  # where all eight are negative, none of the eight
    own = [replace(r, tokens=torch.cat([r.tokens[:1], c.to(r.tokens.dtype)])) for r, c in zip(records, choices)]
    found = measure(dataset_of(tmp_path / "own", own, codec="fp32"), head)
    assert found.share == 1.0 and found.warning == ""
    assert len(ShardReader(out, split="validation")) == 0


def test_the_likeliest_tokens_over_a_vocabulary_in_parts_are_those_of_one_softmax_in_float64():
    """A head of two and a half parts, in bfloat16; two tokens of different parts are alike, and the lower id wins."""
    generator = torch.Generator().manual_seed(0)
    vocab = 2 * VOCAB_AT_A_TIME + VOCAB_AT_A_TIME // 2
    head = torch.randn(vocab, 16, generator=generator).bfloat16()
    last = torch.randn(40, 16, generator=generator).bfloat16()
    head[-3] = head[5] = 4 * last[0]
    tokens, probability = likeliest(last, head)
    expected = (last.double() @ head.double().T).softmax(-1)
    assert torch.equal(tokens, expected.argmax(-1)) and tokens[0] == 5
    assert torch.allclose(probability.double(), expected.max(-1).values, rtol=1e-5)
    assert len({int(token) // VOCAB_AT_A_TIME for token in tokens}) == 3, "each part has some"
