"""The quickstart's promises, kept and broken, and its picture; the run itself is tests/test_launch_end_to_end.py."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch
from hydra.core.override_parser.overrides_parser import OverridesParser

from data.config import TargetConfig
from data.signals import told_to_end
from launch.config import QuickstartConfig, StageOptions
from launch.figure import draw, running_mean
from launch.quickstart import EXAMPLES, plan, report, require_held_out, run, target_options
from tests.records import dataset_of, record_of


def config(out: Path, **more: list[str]) -> QuickstartConfig:
    target = TargetConfig(
        name="smollm2_135m", path="models/smollm2_135m", source=None, boundaries=[2, 15, 27], dtype="bfloat16",
        trust_remote_code=False,
    )  # fmt: skip
    options = StageOptions(**{"data": [], "extract": [], "train": [], "evaluate": [], "bench": [], **more})
    return QuickstartConfig(
        target=target, out=str(out), conversations="rows.jsonl", experiment="quickstart", validation_fraction=0.1,
        options=options,
    )  # fmt: skip


def write(folder: Path, name: str, content: dict | list[dict]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    lines = content if isinstance(content, list) else [content]
    (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture
def finished_run(tmp_path: Path) -> tuple[QuickstartConfig, dict[str, Path]]:
    """The summaries that the five stages leave, of a run in which all went well."""
    settings = config(tmp_path / "out")
    _, folders = plan(settings)
    write(folders["data"], "summary.json", {"kept": 6})
    write(folders["extract"], "summary.json", {"probe_passed": True})
    dataset_of(folders["extract"], [record_of(f"row-{i}") for i in range(6)])
    sources = {"facts": {"tau": 1.25}, "maths": {"tau": 1.5}}
    write(folders["evaluate"], "summary.json", {"tau": 1.30, "by_source": sources})
    live = {
        "tau": 1.29, "by_source": sources, "outputs_identical": True, "num_drafts": 3, "tokens_per_second": 60.0,
        "tokens_per_second_without": 50.0,
    }  # fmt: skip
    write(folders["bench"], "summary.json", live)
    steps = [{"step": step, "loss": 9 - step, "acc": [0.1 * step, 0.05 * step]} for step in (1, 2, 3)]
    write(folders["train"], "metrics.jsonl", [*steps, {"step": 3, "tau": 1.3, "validation": {}}])
    exported = {"eyas": {"boundaries": [2, 15, 27]}, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 14, 26]}}
    write(folders["train"] / "export", "config.json", exported)
    return settings, folders


SECONDS = {"data": 2, "extract": 90, "train": 200, "evaluate": 5, "bench": 80}


def test_a_good_run_is_summed_up(finished_run):
    summary = report(*finished_run, SECONDS)
    asked = ("conversations_kept records probe_passed offline_tau live_tau outputs_identical boundaries engine_ids "
             "seconds_by_stage").split()  # fmt: skip
    assert {name: summary[name] for name in asked} == {
        "conversations_kept": 6, "records": 6, "probe_passed": True, "offline_tau": 1.30, "live_tau": 1.29,
        "outputs_identical": True, "boundaries": [2, 15, 27], "engine_ids": [1, 14, 26], "seconds_by_stage": SECONDS,
    }  # fmt: skip
    assert all(summary["promises"].values())


def test_of_other_conversations_no_more_is_promised_than_that_something_is_learned(finished_run):
    settings, folders = finished_run
    for stage in ("evaluate", "bench"):
        found = json.loads((folders[stage] / "summary.json").read_text())
        write(folders[stage], "summary.json", {**found, "tau": 1.1})
    assert all(report(settings, folders, SECONDS)["promises"].values())
    settings.conversations = str(EXAMPLES)
    with pytest.raises(ValueError, match="offline tau > 1.15"):
        report(settings, folders, SECONDS)
    for stage in ("evaluate", "bench"):
        found = json.loads((folders[stage] / "summary.json").read_text())
        write(folders[stage], "summary.json", {**found, "tau": 1.0})
    settings.conversations = "rows.jsonl"
    with pytest.raises(ValueError, match="offline tau > 1.0"):
        report(settings, folders, SECONDS)


@pytest.mark.parametrize(
    ("stage", "found", "promise"),
    [
        ("data", {"kept": 7}, "records = conversations kept"),
        ("extract", {"probe_passed": False}, "wiring probe passed"),
        ("evaluate", {"tau": 1.1}, "offline tau > 1.15"),
        ("bench", {"tau": 1.25}, "live tau within 2 % of offline"),
        ("bench", {"outputs_identical": False}, "outputs identical"),
    ],
)
def test_a_broken_promise_ends_the_run_with_its_name(finished_run, stage: str, found: dict, promise: str):
    settings, folders = finished_run
    settings.conversations = str(EXAMPLES)
    before = json.loads((folders[stage] / "summary.json").read_text())
    write(folders[stage], "summary.json", {**before, **found})
    with pytest.raises(ValueError, match=promise):
        report(settings, folders, SECONDS)
    written = json.loads((Path(settings.out) / "summary.json").read_text())
    assert [name for name, kept in written["promises"].items() if not kept and promise in name]


def test_a_bench_without_a_baseline_is_summed_up_too(finished_run, capsys):
    settings, folders = finished_run
    before = json.loads((folders["bench"] / "summary.json").read_text())
    write(folders["bench"], "summary.json", {**before, "tokens_per_second_without": None, "outputs_identical": None})
    with pytest.raises(ValueError, match="outputs identical"):
        report(settings, folders, SECONDS)
    assert "60.0 tokens/s with drafts, not measured without" in capsys.readouterr().out


def test_conversations_of_which_none_is_held_out_are_refused_before_a_server_starts():
    """tau is measured on those, and would be missed after hours of extraction and training."""
    require_held_out({"kept": 300, "validation": 1})
    with pytest.raises(ValueError, match="none of the 3 conversations is held out.*validation_fraction="):
        require_held_out({"kept": 3, "validation": 0})


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_quickstart_that_is_told_to_end_lets_its_stage_save_and_leaves_no_process(tmp_path: Path, capsys, number: int):
    """The stage's launcher dies at once, as Accelerate's; what it launched takes its time, and is told once."""
    stage = tmp_path / "stage.py"
    stage.write_text(f"""
import signal, subprocess, sys, time, pathlib
if sys.argv[1:] == ["launcher"]:
    sys.exit(subprocess.Popen([sys.executable, __file__]).wait())
def save(*_):
    time.sleep(1)
    pathlib.Path({str(tmp_path / "saved")!r}).touch()
    sys.exit(143)
signal.signal(signal.SIGTERM, save)
pathlib.Path({str(tmp_path / "up")!r}).write_text(str(__import__("os").getpid()))
time.sleep(60)
""")

    def tell() -> None:
        while not (tmp_path / "up").exists():
            time.sleep(0.05)
        time.sleep(0.2)
        os.kill(os.getpid(), number)

    threading.Thread(target=tell, daemon=True).start()
    with pytest.raises(SystemExit) as stopped, told_to_end("what is finished is kept"):
        run("train", ["python", str(stage), "launcher"], position=3, of=5)
    assert stopped.value.code == 128 + number and (tmp_path / "saved").exists()
    pid = int((tmp_path / "up").read_text())
    assert [one.pid for one in psutil.process_iter() if one.pid == pid and one.status() != psutil.STATUS_ZOMBIE] == []
    assert capsys.readouterr().err.endswith(f"ended by {signal.Signals(number).name}: what is finished is kept\n")


@pytest.mark.parametrize(("gpu", "file"), [(False, "cpu.yaml"), (True, "gpu.yaml")])
def test_accelerate_is_told_everything(tmp_path: Path, monkeypatch, gpu: bool, file: str):
    """By a file: else it asks, or takes what the user once saved with `accelerate config`."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    commands, _ = plan(config(tmp_path))
    assert commands["train"][:4] == ["accelerate", "launch", "--config_file", f"launch/accelerate/{file}"]


def test_what_is_said_of_the_target_reaches_every_stage(tmp_path: Path):
    """Else the stages took the YAML's path and boundaries without a word."""
    changed = config(tmp_path)
    changed.target.boundaries, changed.target.path, changed.target.source = [3, 15, 27], "/a b/c", "smollm2"
    assert target_options(changed.target) == ["target=smollm2_135m", "target.path='/a b/c'", "target.boundaries=[3,15,27]"]
    commands, _ = plan(changed)
    assert all("target.boundaries=[3,15,27]" in command for command in commands.values())
    changed.target.name = "elsewhere"
    with pytest.raises(ValueError, match="there is no .*conf/target/elsewhere.yaml"):
        plan(changed)


def test_a_path_with_any_characters_reaches_every_stage(tmp_path: Path):
    """As a browser names what is downloaded twice."""
    changed = config(tmp_path / "mine, it's [1]")
    changed.conversations = "rows (1).jsonl"
    commands, folders = plan(changed)
    for name, command in commands.items():
        overrides = [word for word in command if "=" in word and not word.startswith("--")]
        told = {o.key_or_group: o.value() for o in OverridesParser.create().parse_overrides(overrides)}
        assert str(told["out"]) == str(folders[name])
        assert name != "data" or str(told["conversations"]) == "rows (1).jsonl"
        assert name != "bench" or str(told["prompts"]) == str(folders["data"])


def test_more_options_reach_the_stage_they_name(tmp_path: Path):
    commands, _ = plan(config(tmp_path, train=["epochs=2"]))
    assert commands["train"][-1] == "epochs=2" and "epochs=2" not in commands["data"]


def test_the_picture_is_a_png_that_is_not_blank(tmp_path: Path):
    from matplotlib.image import imread

    metrics = [{"step": step, "loss": 9 - step, "acc": [0.1 * step] * 7} for step in (1, 2, 3)]
    tau = {"tau": 1.3, "by_source": {"facts": {"tau": 1.2}}}
    pixels = imread(draw(tmp_path / "a.png", metrics=metrics, offline=tau, live=tau, title="seven drafts"))
    assert pixels.shape[0] > 500 and pixels.shape[1] > 1500
    assert 0.05 < 1 - (pixels[..., :3] > 0.99).all(-1).mean() < 0.5  # ink on white


def test_a_running_mean_leaves_out_what_was_not_counted():
    nan = float("nan")
    assert running_mean([1.0, nan, 3.0, 5.0], width=2) == [1.0, 1.0, 3.0, 4.0]
    assert str(running_mean([nan, 2.0], width=3)) == "[nan, 2.0]"
