"""benchmarks/shards.py runs, and says what its reader looks for. Its figures mean something only at full size."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import shards


def test_both_sides_write_and_read_the_same_records(tmp_path: Path):
    shape = shards.Shape("small", 16, 30, (3, 9))
    records = shards.numbered(shape.records(), 20_000, shape.bytes_per_token)
    shards.write_eyas(tmp_path / "eyas", records, shape.provenance())
    shards.write_webdataset(tmp_path / "webdataset", records)
    for read, other in (
        (shards.read_eyas, shards.read_webdataset),
        (shards.batch_eyas, shards.batch_webdataset),
    ):
        assert read(tmp_path / "eyas") == other(tmp_path / "webdataset") == len(records)
        assert other(tmp_path / "eyas") == len(records), "WebDataset reads what Eyas wrote"


def test_the_ratios_are_in_the_json(tmp_path: Path, monkeypatch, capsys):
    small = [shards.Shape(name, size, 30, (3, 9)) for name, size in (("small", 16), ("smaller", 8))]
    monkeypatch.setattr(shards, "SHAPES", small)
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
    each = found["gb_per_s"]
    assert set(each) == {"small", "smaller"}
    for what in ("write", "read"):
        assert found[f"{what}_ratio"] == min(shape[f"{what}_ratio"] for shape in each.values()) > 0
    assert "write_ratio" in capsys.readouterr().out
    assert [file.name for file in tmp_path.iterdir()] == ["found.json"]


def test_a_ratio_is_the_median_of_paired_turns(tmp_path: Path, monkeypatch):
    """By hand: Eyas takes 1, 1, 2 s, WebDataset beside it 2, 3, 8 s, that is 2, 3 and 4 times as long; GB/s are
    medians of each alone. The turn before them, with Eyas 100 s, does not count.
    """
    found, order = measured(tmp_path, monkeypatch, eyas=[100, 1, 1, 2], webdataset=[1, 2, 3, 8], others=[1, 0, 0, 0])
    assert found["write_ratio"] == 3.0 and found["write_ratio_range"] == [2.0, 4.0]
    assert found["eyas_write"] == pytest.approx(found["gigabytes"] / 1.0)
    assert found["webdataset_write"] == pytest.approx(found["gigabytes"] / 3.0)
    assert found["eyas_write_processor_seconds_per_gb"] == pytest.approx(3.0 / found["gigabytes"])
    assert order[1:] == ["ew", "we", "ew"], "nobody is always first"


def test_turns_that_others_disturbed_are_repeated_and_not_counted(tmp_path: Path, monkeypatch):
    """Of five turns two were disturbed, and there must be three that were not."""
    found, order = measured(
        tmp_path, monkeypatch, eyas=[1] * 6, webdataset=[1, 2, 9, 3, 9, 4], others=[0, 0, 1.5, 0, 0.5, 0.05]
    )
    assert (found["write_ratio"], found["write_others"], len(order)) == (3.0, 0, 6)


def test_a_machine_that_is_never_calm_does_not_hold_it_up(tmp_path: Path, monkeypatch):
    found, order = measured(
        tmp_path, monkeypatch, eyas=[1] * 7, webdataset=[2] * 7, others=[2, 2, 1.9, 1.8, 1.7, 1.6, 1.5]
    )
    assert (found["write_ratio"], found["write_others"], len(order)) == (2.0, 1.6, 7)


def measured(tmp_path: Path, monkeypatch, **given: list[float]) -> tuple[dict, list[str]]:
    """What `measure` makes of these seconds of writing, of a warm-up and the turns after it; and who came first."""
    seconds = {side: iter(given[side]) for side in ("eyas", "webdataset")}
    others = {side: iter(given["others"]) for side in seconds}
    order: list[str] = []

    def timed(function) -> shards.Took:
        function()
        (name,) = [name for name in function.__code__.co_names if name.startswith(("write", "read", "batch"))]
        what, side = name.split("_")
        if what != "write":
            return shards.Took(1.0, 1.0, 0.0)
        order.append(side[0])
        return shards.Took(next(seconds[side]), 3.0, next(others[side]))

    monkeypatch.setattr(shards, "timed", timed)
    found = shards.measure(shards.Shape("small", 16, 30, (3, 9)), tmp_path, num_bytes=20_000, repeats=3)
    assert not list(tmp_path.iterdir())
    return found, ["".join(pair) for pair in zip(order[::2], order[1::2], strict=True)]


def test_the_time_of_others_is_what_they_took(tmp_path: Path):
    """A process that does nothing but work takes up to one processor, and a turn of sleep takes none of its own."""
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        took = shards.timed(lambda: time.sleep(1.0))
    finally:
        busy.kill()
        busy.wait()
    assert took.seconds >= 1.0 and took.processor_seconds < 0.2 and took.others > 0.4
