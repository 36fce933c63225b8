"""Configuration: every YAML composes, misspelt keys are errors, errors are one line."""

from __future__ import annotations

import importlib
import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.errors import ConfigCompositionException
from omegaconf import OmegaConf

from data.config import (
    DataConfig,
    TargetConfig,
    fingerprint,
    finished,
    folders_are_values,
    stage,
    typed,
    write_atomically,
)
from train.config import EvaluateConfig

ROOT = Path(__file__).resolve().parent.parent
CONF = ROOT / "conf"
STAGES = {
    "data": ("data.config", "DataConfig"),
    "extract": ("extract.config", "ExtractConfig"),
    "train": ("train.config", "TrainConfig"),
    "evaluate": ("train.config", "EvaluateConfig"),
    "export": ("train.config", "ExportConfig"),
    "quickstart": ("launch.config", "QuickstartConfig"),
    "serve": ("launch.config", "ServeConfig"),
    "bench": ("launch.config", "BenchConfig"),
    "merge": ("launch.merge", "MergeConfig"),
    "recode": ("launch.recode", "RecodeConfig"),
    "verify": ("launch.verify", "VerifyConfig"),
}
NEEDED = {
    "extract": ["prompts=given", "out=given"],
    "evaluate": ["drafter=given", "shards=given"],
    "bench": ["drafter=given", "prompts=given"],
    "merge": ["parts=[given]", "out=given"],
    "recode": ["codec=fp8"],
}  # where missing_keys does not suffice: options made of others, or needed by mode
SERVES = {"extract", "serve", "bench"}  # their engine is a server, the others' spreads training over processes
CHOICES = sorted(f"{file.parent.name}={file.stem}" for file in CONF.glob("*/*.yaml"))


def stages_with(group: str) -> list[str]:
    """Stages whose defaults list has the group."""
    defaults = {file.stem: OmegaConf.to_object(OmegaConf.load(file).defaults) for file in CONF.glob("*.yaml")}
    return [name for name, entries in defaults.items() if any(group in entry for entry in entries if entry != "_self_")]


def composed(name: str, *overrides: str):
    module, cls = STAGES[name]
    cls = getattr(importlib.import_module(module), cls)
    with initialize_config_dir(str(CONF), version_base=None), folders_are_values(cls, CONF / f"{name}.yaml"):
        cfg = compose(name, overrides=[*NEEDED.get(name, []), *overrides])
    for key in OmegaConf.missing_keys(cfg):
        OmegaConf.update(cfg, key, "given")
    return typed(cls, cfg)


def test_every_stage_with_a_yaml_is_listed_here():
    assert {file.stem for file in CONF.glob("*.yaml")} == set(STAGES)


@pytest.mark.parametrize("name", sorted(file.stem for file in CONF.glob("*.yaml")))
def test_every_stage_composes(name: str):
    composed(name)


@pytest.mark.parametrize("choice", CHOICES)
def test_every_file_of_every_group_composes(choice: str):
    group = choice.partition("=")[0]
    names = stages_with(group)
    if group == "engine":
        names = [name for name in names if (name in SERVES) == (choice == "engine=sglang")]
    assert names, f"no stage takes conf/{group}/"
    beside = ["optim=adamw"] if choice.startswith("engine=zero") else []  # Muon needs whole matrices
    for name in names:
        composed(name, choice, *beside)


@pytest.mark.parametrize("name", sorted(STAGES))
def test_a_misspelt_key_is_an_error(name: str):
    with pytest.raises(ConfigCompositionException, match="bogus_key"):
        composed(name, "bogus_key=1")
    with pytest.raises(ValueError, match="there is no option bogus_key"):
        composed(name, "+bogus_key=1")


TARGET = dict(name="t", path="p", source=None, boundaries=[1, 2], dtype="float32", trust_remote_code=False)


def test_a_near_miss_is_pointed_out():
    with pytest.raises(ValueError, match="no option boundries: did you mean boundaries"):
        typed(TargetConfig, OmegaConf.create({**TARGET, "boundries": [1]}))


def test_a_value_that_was_not_given_is_asked_for():
    with pytest.raises(ValueError, match=r"name=\.\.\. is missing"):
        typed(TargetConfig, OmegaConf.create({**TARGET, "name": "???"}))
    with pytest.raises(ValueError, match=r"name=\.\.\. is missing"):  # and not path, which is made of it
        typed(TargetConfig, OmegaConf.create({**TARGET, "name": "???", "path": "models/${name}"}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"boundaries": "x"}, "boundaries"),
        ({"boundaries": [3, 1]}, r"target.boundaries=\[3, 1\]: expected ascending"),
        ({"boundaries": []}, "expected ascending"),
        ({"dtype": "int8"}, "target.dtype=int8: expected one of bfloat16"),
        ({"source": "gpt2"}, "target.source=gpt2: expected null or one of smollm2"),
    ],
)
def test_a_target_that_cannot_be_is_refused(change: dict, message: str):
    with pytest.raises(ValueError, match=message):
        typed(TargetConfig, OmegaConf.create({**TARGET, **change}))


@pytest.mark.parametrize(
    "override",
    ["validation_fraction=1", "validation_fraction=-0.1", "max_tokens=1", "min_supervised=0", "rewritten_history=x"],
)
def test_a_data_run_that_cannot_be_is_refused(override: str):
    with pytest.raises(ValueError, match=f"{override.partition('=')[0]}=.*: expected"):
        composed("data", override)


def run_stage(function, monkeypatch, tmp_path, *arguments: str):
    """A stage on the command line, in this process, with conf/data.yaml."""
    monkeypatch.setattr(sys, "argv", ["main.py", f"out={tmp_path}", "conversations=FILE", *arguments])
    stage("data")(function)()


def test_a_stage_ends_with_a_line_and_a_summary(monkeypatch, tmp_path, capsys):
    def main(config: DataConfig) -> dict:
        return {"rows": 3, "line": "three rows"}

    run_stage(main, monkeypatch, tmp_path)
    assert capsys.readouterr().out.splitlines()[-1] == f"data: three rows (summary: {tmp_path / 'summary.json'})"
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["stage"], summary["rows"]) == ("data", 3)


@pytest.mark.parametrize("error", [ValueError("x=1: expected 2"), PermissionError("not yours")])
def test_a_users_error_is_one_line_and_status_2(error: Exception, monkeypatch, tmp_path, capsys):
    def main(config: DataConfig) -> dict:
        raise error

    with pytest.raises(SystemExit) as caught:
        run_stage(main, monkeypatch, tmp_path)
    assert caught.value.code == 2
    assert capsys.readouterr().err == f"error: {error}\n"
    assert not (tmp_path / "summary.json").exists()


def test_our_own_mistake_keeps_its_trace(monkeypatch, tmp_path):
    def main(config: DataConfig) -> dict:
        raise AssertionError("ours")

    with pytest.raises(AssertionError, match="ours"):
        run_stage(main, monkeypatch, tmp_path)


@pytest.mark.parametrize(
    ("argument", "message"),
    [("max_token=3", "no option max_token: did you mean max_tokens"), ("target=gpt2", "Could not find 'target/gpt2'")],
)
def test_a_command_line_that_does_not_compose_is_one_line(argument: str, message: str, monkeypatch, tmp_path, capsys):
    def main(config: DataConfig) -> dict:
        raise AssertionError("not reached")

    with pytest.raises(SystemExit):
        run_stage(main, monkeypatch, tmp_path, argument)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and message in line


def test_jobs_of_a_sweep_that_would_write_to_one_folder_are_refused(monkeypatch, tmp_path, capsys):
    def main(config: EvaluateConfig) -> dict:
        return {"line": f"{config.depths} depths"}

    told = ["drafter=given", "shards=given", f"hydra.sweep.dir={tmp_path}", "hydra.sweep.subdir=."]

    def sweep(out: str) -> None:
        monkeypatch.setattr(sys, "argv", ["main.py", "-m", *told, "depths=2,3", f"out={out}"])
        stage("evaluate")(main)()

    with pytest.raises(SystemExit):
        sweep(f"{tmp_path}/one")
    said = capsys.readouterr().err
    assert f"out={tmp_path}/one is an earlier job's of this sweep: give each its own, such as 'out={tmp_path}/one/${{NAME}}'" in said
    assert json.loads((tmp_path / "one" / "summary.json").read_text())["line"] == "2 depths"
    sweep(f"{tmp_path}/two/${{depths}}")
    assert json.loads((tmp_path / "two" / "3" / "summary.json").read_text())["line"] == "3 depths"


def test_only_rank_0_speaks(monkeypatch, tmp_path, capsys):
    def main(config: DataConfig) -> dict:
        return {"line": "done"}

    monkeypatch.setenv("RANK", "1")
    run_stage(main, monkeypatch, tmp_path)
    assert capsys.readouterr().out == ""
    assert not (tmp_path / "summary.json").exists()


def test_a_run_with_nothing_to_do_keeps_the_first_ones_summary(monkeypatch, tmp_path, capsys):
    inputs = fingerprint("same")

    def main(config: DataConfig) -> dict:
        if done := finished(tmp_path, inputs):
            return {**done, "line": "nothing to do"}
        return {"fingerprint": inputs, "rows": 3, "line": "three rows"}

    run_stage(main, monkeypatch, tmp_path)
    first = (tmp_path / "summary.json").read_bytes()
    run_stage(main, monkeypatch, tmp_path)
    assert capsys.readouterr().out.splitlines()[-1].startswith("data: nothing to do")
    assert (tmp_path / "summary.json").read_bytes() == first


def test_a_fingerprint_follows_the_bytes_of_files_and_the_values(tmp_path):
    (tmp_path / "a").write_text("1")
    before = fingerprint({"k": 1}, tmp_path / "a")
    assert before == fingerprint({"k": 1}, tmp_path / "a")
    assert before != fingerprint({"k": 2}, tmp_path / "a")
    (tmp_path / "a").write_text("2")
    assert before != fingerprint({"k": 1}, tmp_path / "a")


def test_a_half_written_summary_is_not_a_finished_run(tmp_path):
    (tmp_path / "summary.json").write_text('{"fingerprint": "x"')
    assert finished(tmp_path, "x") is None


def test_a_full_disk_leaves_the_old_file_and_no_temporary_one(tmp_path, monkeypatch):
    write_atomically(tmp_path / "f", "old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(ValueError, match="cannot write .*f: No space left on device"):
        write_atomically(tmp_path / "f", "new")
    assert [file.name for file in tmp_path.iterdir()] == ["f"] and (tmp_path / "f").read_text() == "old"


WAITS = """
import os, signal, sys, time
from data.signals import told_to_end
with told_to_end("all of it is kept"):
    os.kill(os.getpid(), int(sys.argv[1]))
    print("goes on", flush=True)
"""


SWALLOWS = """
import asyncio, os, signal
from data.signals import told_to_end

def callback():
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        print("the callback goes on", flush=True)
    except BaseException:
        pass

async def main():
    asyncio.get_running_loop().call_soon(callback)
    try:
        await asyncio.sleep(30)
    finally:
        print("cancelled", flush=True)

with told_to_end("all of it is kept"):
    asyncio.run(main())
"""


def test_what_is_told_to_end_while_a_library_catches_everything_ends_all_the_same():
    """aiohttp's parser takes what is raised in it for its connection's failure; the request would be tried again."""
    ended = subprocess.run([sys.executable, "-c", SWALLOWS], cwd=ROOT, capture_output=True, text=True, timeout=20)
    assert (ended.returncode, ended.stdout) == (128 + signal.SIGTERM, "the callback goes on\ncancelled\n"), ended.stderr
    assert ended.stderr == "ended by SIGTERM: all of it is kept\n"


TOO_LATE = """
import asyncio, os, signal
from data.signals import told_to_end
with told_to_end("all of it is kept"):
    loop = asyncio.new_event_loop()
    loop.call_soon(lambda: (os.kill(os.getpid(), signal.SIGTERM), loop.stop()))
    loop.run_forever()
    loop.close()
print("goes on")
"""


def test_what_is_told_to_end_as_its_loop_ends_is_not_forgotten():
    ended = subprocess.run([sys.executable, "-c", TOO_LATE], cwd=ROOT, capture_output=True, text=True, timeout=20)
    assert (ended.returncode, ended.stdout) == (128 + signal.SIGTERM, ""), ended.stderr
    assert ended.stderr == "ended by SIGTERM: all of it is kept\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_what_is_told_to_end_says_so_in_a_line_unless_its_caller_ignores_it(number):
    """As nohup does with the end of a terminal."""
    command = [sys.executable, "-c", WAITS, str(int(number))]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr, ended.stdout) == (128 + number, f"ended by {number.name}: all of it is kept\n", "")
    ignores = ["bash", "-c", 'trap "" "$1"; shift; exec "$@"', "bash", number.name, *command]
    ignored = subprocess.run(ignores, cwd=ROOT, capture_output=True, text=True)
    assert (ignored.returncode, ignored.stdout) == (0, "goes on\n"), ignored.stderr
