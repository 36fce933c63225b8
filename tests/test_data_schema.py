"""What a record must be, and the provenance that data and runs must share."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from data.config import TargetConfig
from data.manifest import Manifest
from data.schema import Provenance, check_record, check_same, difference, safe_key
from tests.records import PROVENANCE, record_of


@pytest.mark.parametrize("id", ["mt_bench-0", "a.b", "a/b", "../../etc", "", "ü", "x" * 300, "two words"])
def test_a_key_is_a_file_name_without_a_dot(id: str):
    key = safe_key(id)
    assert key and len(key) < 80 and all(c.isascii() and (c.isalnum() or c in "_-") for c in key)


def test_ids_that_differ_only_where_a_key_may_not_keep_different_keys():
    assert len({safe_key(id) for id in ("a.b", "a/b", "a b", "a_b", "x" * 99, "x" * 98)}) == 6
    assert safe_key("a_b") == "a_b"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"aux": torch.zeros(5, 2, 8)}, r"record a: aux has shape \[5, 2, 8\], expected \[5, 3, 8\]"),
        ({"last": torch.zeros(4, 8)}, r"last has shape \[4, 8\]"),
        ({"split": "test"}, "split 'test', expected train or validation"),
    ],
)
def test_a_record_of_another_shape_is_refused(change: dict, message: str):
    with pytest.raises(ValueError, match=message):
        check_record(replace(record_of("a"), **change), PROVENANCE)


def test_other_boundaries_are_named_with_the_cure():
    """The error of docs/design.md's style: found, expected, cure."""
    kimi = replace(PROVENANCE, target="kimi", boundaries=(2, 30, 58), num_layers=61)
    with pytest.raises(ValueError) as caught:
        check_same(kimi, replace(kimi, boundaries=(3, 31, 59)), where="shards/kimi")
    assert str(caught.value) == (
        "shards/kimi was captured at boundaries [2, 30, 58], this run asks for [3, 31, 59]: "
        "set target.boundaries=[2,30,58], or extract again"
    )


@pytest.mark.parametrize(
    ("field", "value"),
    [("target", "x"), ("config_hash", "x"), ("weights_fingerprint", "x"), ("tokenizer_hash", "x"),
     ("chat_template_hash", "x"), ("hidden_size", 9), ("vocab_size", 9), ("num_layers", 9), ("last", "pre_norm")],
)  # fmt: skip
def test_whatever_changes_what_the_numbers_mean_is_refused(field: str, value):
    other = replace(PROVENANCE, **{field: value})
    words = difference(PROVENANCE, other)
    assert str(getattr(PROVENANCE, field)) in words and str(value) in words
    with pytest.raises(ValueError, match="extract again"):
        check_same(PROVENANCE, other, where="shards")


def test_engine_and_codec_may_differ():
    assert difference(PROVENANCE, replace(PROVENANCE, engine="vllm", engine_version="1", codec="fp32")) is None


def test_an_unknown_codec_is_refused():
    with pytest.raises(ValueError, match="codec=int3: expected one of bf16"):
        replace(PROVENANCE, codec="int3")


def provenance_of(path: Path) -> Provenance:
    return Provenance.of_target(
        path, name="tiny_llama", boundaries=[2, 3, 5], codec="bf16", engine="sglang", engine_version="0.5.23"
    )


def test_a_targets_provenance_follows_its_files(tiny_llama: TargetConfig, tmp_path: Path):
    before = provenance_of(Path(tiny_llama.path))
    assert (before.num_layers, before.hidden_size, before.vocab_size, before.last) == (6, 128, 512, "post_norm")
    copy = tmp_path / "copy"
    shutil.copytree(tiny_llama.path, copy)
    assert provenance_of(copy) == before

    weights = bytearray((copy / "model.safetensors").read_bytes())
    weights[-2] ^= 1
    (copy / "model.safetensors").write_bytes(weights)
    assert "with weights" in difference(before, provenance_of(copy))

    (copy / "chat_template.jinja").write_text("{{ messages }}")
    assert before.chat_template_hash != provenance_of(copy).chat_template_hash
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-5}))
    assert "with config" in difference(before, provenance_of(copy))


def test_a_config_saved_by_another_version_of_transformers_is_the_same(tiny_llama: TargetConfig, tmp_path: Path):
    shutil.copytree(tiny_llama.path, tmp_path / "copy")
    config = json.loads((tmp_path / "copy" / "config.json").read_text())
    (tmp_path / "copy" / "config.json").write_text(json.dumps({**config, "transformers_version": "9"}))
    assert provenance_of(tmp_path / "copy") == provenance_of(Path(tiny_llama.path))


@pytest.mark.parametrize("missing", ["tokenizer.json", "model.safetensors", "config.json"])
def test_a_target_without_a_part_is_named(missing: str, tiny_llama: TargetConfig, tmp_path: Path):
    shutil.copytree(tiny_llama.path, tmp_path / "copy")
    (tmp_path / "copy" / missing).unlink()
    with pytest.raises(ValueError, match=str(tmp_path / "copy")):
        provenance_of(tmp_path / "copy")


def test_a_manifest_survives_json(tmp_path: Path):
    manifest = Manifest(provenance=PROVENANCE)
    (tmp_path / "manifest.json").write_text(manifest.to_json())
    assert Manifest.load(tmp_path) == manifest


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "cannot be read"),
        ('{"schema_version": 99}', "has schema version 99, this Eyas reads 1 and 2"),
        ('{"schema_version": 2}', "lacks or adds a field"),
    ],
)
def test_a_manifest_that_is_not_ours_is_named(tmp_path: Path, content: str, message: str):
    (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(ValueError, match=f"{tmp_path}/manifest.json.*{message}"):
        Manifest.load(tmp_path)
