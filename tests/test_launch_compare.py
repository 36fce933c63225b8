"""Runs side by side, without a network: what differs, what came of it, and a picture that can be looked at."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from launch.compare import Run, differing, draw, find, label, table

ROOT = Path(__file__).resolve().parent.parent


def write_run(folder: Path, *, config: dict, taus: list[float], summary: dict | None = None) -> Path:
    """A run folder as train/main.py leaves it: two lines of the log, then a validation, as often as there are taus."""
    folder.mkdir(parents=True)
    rows = []
    for i, tau in enumerate(taus, start=1):
        for step in (2 * i - 1, 2 * i):
            rows.append({"step": step, "loss": 5.0 / step, "acc": [0.5, 0.4], "tokens_per_second": 1000.0 * step,
                         "supervised_tokens": 1000 * step, "seconds": 90.0 * step})  # fmt: skip
        rows.append({"step": 2 * i, "tau": tau, "validation": {"acc": [0.1 * i, float("nan")]},
                     "supervised_tokens": 2000 * i, "seconds": 180.0 * i})  # fmt: skip
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "run.json").write_text(json.dumps(config))
    if summary is not None:
        (folder / "summary.json").write_text(json.dumps(summary))
    return folder


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    """Three runs; the last is still training."""
    for i, (lr, taus) in enumerate([(1e-3, [1.5, 1.75]), (3e-3, [1.25, 2.0, 1.9]), (1e-2, [])]):
        config = {"optim": {"lr": lr}, "drafter": {"depths": 2}, "out": f"run{i}", "seed": 0,
                  "tracker": {"run_name": f"lr={lr}", "group": "s"}, "git": {"commit": str(i)}}  # fmt: skip
        summary = {"best_tau": max(taus), "train_seconds": 7200.0, "dollars": 2.5} if taus else None
        write_run(tmp_path / "sweep" / f"{i:02d}", config=config, taus=taus, summary=summary)
    return tmp_path / "sweep"


def test_a_sweeps_folder_is_all_of_its_runs(sweep):
    runs = find(sweep)
    assert [run.name for run in runs] == ["lr=0.001", "lr=0.003", "lr=0.01"]
    assert [run.tau for run in runs] == [1.75, 2.0, None], "the best validation, not the last"
    assert find(sweep / "01")[0].rows == runs[1].rows


def test_only_what_makes_another_run_is_said_to_differ(sweep):
    """Not the folder, nor the commit, nor the tracker's names."""
    runs = find(sweep)
    assert differing(runs) == ["optim.lr"]
    assert label(runs[1], ["optim.lr"]) == "lr=0.003"
    assert label(runs[1], []) == "lr=0.003", "where nothing differs, the name"


def test_options_that_end_alike_keep_their_whole_name():
    runs = [Run("a", {"x.name": 1, "y.name": 1}, [], {}), Run("b", {"x.name": 2, "y.name": 2}, [], {})]
    assert label(runs[1], differing(runs)) == "x.name=2, y.name=2"


def test_the_table_has_the_best_run_first_and_its_figures_by_hand(sweep):
    """Run 01: best at its second validation, accuracy there 0.2; lines of 1000 .. 6000 tokens/s, the first left out."""
    header, rows = table(find(sweep))
    assert header == ["run", "lr", "tau", "acc 1", "acc 2", "tokens/s", "hours", "dollars"]
    assert rows[0] == ["lr=0.003", "0.003", "2.000", "20.0", "nan", "4,000", "2.00", "2.5"]
    assert [row[0] for row in rows] == ["lr=0.003", "lr=0.001", "lr=0.01"]
    assert rows[2] == ["lr=0.01", "0.01", "-", "", "", "-", "-", "-"]


def test_the_picture_is_wide_enough_to_read(sweep, tmp_path):
    with Image.open(draw(find(sweep), tmp_path / "a" / "picture.png")) as image:
        assert image.width >= 1600 and image.height >= 600
        colors = image.convert("RGB").getcolors(maxcolors=1 << 20)
    drawn = {color for _, color in colors}
    assert {(0x1F, 0x4E, 0x8C), (0xC8, 0x64, 0x2B)} <= drawn, "a line of its own for each run that was validated"


def test_the_command_prints_the_table_and_names_the_picture(sweep, tmp_path):
    command = [sys.executable, ROOT / "launch/compare.py", sweep / "00", sweep / "01", "--png", tmp_path / "p.png", "--json", tmp_path / "new/t.json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0].split() == ["run", "lr", "tau", "acc", "1", "acc", "2", "tokens/s", "hours", "dollars"]
    assert done.stdout.splitlines()[-1] == f"picture: {tmp_path / 'p.png'}"
    assert [row["tau"] for row in json.loads((tmp_path / "new/t.json").read_text())] == ["2.000", "1.750"]


def test_a_line_that_is_just_being_written_is_left_out(sweep):
    before = find(sweep / "01")[0].rows
    with (sweep / "01" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "loss": 0.')
    assert find(sweep / "01")[0].rows == before


def test_bytes_that_a_dying_disk_left_hide_no_other_run(sweep):
    before = find(sweep / "01")[0].rows
    for name in ("metrics.jsonl", "run.json"):
        with (sweep / "01" / name).open("ab") as file:
            file.write(b"\xff\xfe\n")
    assert [len(run.rows) for run in find(sweep)] == [6, len(before), 0]


def test_a_run_without_validation_figures_hides_no_other(sweep):
    """Its summary has null for what never happened."""
    write_run(sweep / "03", config={"tracker": {"run_name": "nothing held out"}}, taus=[], summary={"best_tau": None, "acc": [None, None]})
    (sweep / "03" / "metrics.jsonl").write_text("")
    _, rows = table(find(sweep))
    assert len(rows) == 4 and next(row for row in rows if row[0] == "nothing held out")[-4:-2] == ["-", "-"]


def test_a_validation_that_generated_nothing_is_not_the_best(sweep):
    with (sweep / "00" / "metrics.jsonl").open("r+") as file:
        rows = file.read()
        file.seek(0)
        file.write('{"step": 0, "tau": NaN, "validation": {"acc": [NaN]}}\n' + rows)
    assert [row[2] for row in table(find(sweep))[1]] == ["2.000", "1.750", "-"]


def test_wandbs_link_to_its_latest_run_is_no_other_run(tmp_path):
    folder = tmp_path / "wandb" / "offline-run-1-a"
    folder.mkdir(parents=True)
    (folder / "run-a.wandb").write_bytes(b":W&B\x2c\xbe\x00")
    (tmp_path / "wandb" / "latest-run").symlink_to(folder.name)
    assert [run.name for run in find(tmp_path / "wandb")] == ["offline-run-1-a"]


def test_a_damaged_run_of_wandb_is_named(tmp_path):
    record = b"\xff" * 20
    (tmp_path / "run-a.wandb").write_bytes(b":W&B\x2c\xbe\x00" + struct.pack("<IHB", 0, len(record), 1) + record)
    with pytest.raises(ValueError, match="run-a.wandb is damaged .*: give the run's own folder"):
        find(tmp_path)


@pytest.mark.parametrize(("option", "file"), [("--png", "picture.word"), ("--json", ".")])
def test_a_file_that_cannot_be_written_is_one_line(sweep, tmp_path, option, file):
    command = [sys.executable, ROOT / "launch/compare.py", sweep, option, tmp_path / file]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("error: ") and len(done.stderr.splitlines()) == 1


def test_a_folder_that_is_no_run_is_one_line(tmp_path):
    done = subprocess.run([sys.executable, ROOT / "launch/compare.py", tmp_path], capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("error: ") and len(done.stderr.splitlines()) == 1
