"""benchmarks/shards.py runs, and says what its reader looks for. Its figures mean something only at full size."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import shards


def test_both_sides_write_and_read_the_same_records(tmp_path: Path):
    shape = shards.Shape("small", 16, 30, (3, 9))
    rows = shards.numbered(shape.records(), 20_000, shape.bytes_per_token)
    shards.write_eyas(tmp_path / "eyas", rows, shape.provenance())
    shards.write_webdataset(tmp_path / "webdataset", rows)
    for read, other in (
        (shards.read_eyas, shards.read_webdataset),
        (shards.batch_eyas, shards.batch_webdataset),
    ):
        assert read(tmp_path / "eyas") == other(tmp_path / "webdataset") == len(rows)
        assert other(tmp_path / "eyas") == len(rows), "WebDataset reads what Eyas wrote"


def test_the_ratios_are_in_the_json(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.setattr(shards, "SHAPES", (shards.Shape("small", 16, 30, (3, 9)),))
    arguments = [
        "--folder",
        str(tmp_path),
        "--gigabytes",
        "0.0001",
        "--repeats",
        "2",
        "--json",
        str(tmp_path / "found.json"),
    ]
    monkeypatch.setattr(sys, "argv", ["benchmarks/shards.py", *arguments])
    shards.main()
    found = json.loads((tmp_path / "found.json").read_text())
    small = found["gb_per_s"]["small"]
    assert found["write_ratio"] == pytest.approx(small["eyas_write"] / small["webdataset_write"], rel=0.1)
    assert found["read_ratio"] > 0 and "write_ratio" in capsys.readouterr().out
    assert [file.name for file in tmp_path.iterdir()] == ["found.json"]
