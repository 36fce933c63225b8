"""Every command in the READMEs and in docs/ is a command: it exists, and its options compose. `make` ones name real targets.
Every option and file that the text names in passing exists, too.

The quickstart's test runs the stages themselves, in tests/test_launch_end_to_end.py; tests/test_docs.py has what the guides
start through sbatch.
"""

from __future__ import annotations

import dataclasses
import re
import shlex
import subprocess
import sys
import typing
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from data.config import DataConfig, folders_are_values, typed
from extract.config import ExtractConfig
from hydra_plugins.accelerate_launcher import AccelerateLauncherConf
from launch.config import BenchConfig, QuickstartConfig, ServeConfig
from launch.merge import MergeConfig
from launch.recode import RecodeConfig
from launch.verify import VerifyConfig
from train.config import EvaluateConfig, ExportConfig, TrainConfig

ROOT = Path(__file__).resolve().parent.parent
STAGES = {
    "data/main.py": ("data", DataConfig),
    "extract/main.py": ("extract", ExtractConfig),
    "train/main.py": ("train", TrainConfig),
    "train/evaluate.py": ("evaluate", EvaluateConfig),
    "train/export.py": ("export", ExportConfig),
    "launch/bench.py": ("bench", BenchConfig),
    "launch/serve.py": ("serve", ServeConfig),
    "launch/quickstart.py": ("quickstart", QuickstartConfig),
    "launch/merge.py": ("merge", MergeConfig),
    "launch/recode.py": ("recode", RecodeConfig),
    "launch/verify.py": ("verify", VerifyConfig),
}
ELSEWHERE = {  # docs/, and the quickstart, which `make quickstart` starts
    "launch/quickstart.py", "launch/merge.py", "launch/recode.py", "launch/verify.py",
}  # fmt: skip
READMES = ["README.md", "data/examples/README.md"]
DOCS = sorted(str(file.relative_to(ROOT)) for file in (ROOT / "docs").glob("*.md") if file.name != "LOG.md")


def commands(file: str) -> list[list[str]]:
    """The words of every line of every ```sh block that is not a comment."""
    blocks = re.findall(r"^```sh\n(.*?)^```", (ROOT / file).read_text(), re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    lines = [line for line in lines if "sbatch " not in line]  # tests/test_docs.py
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def stage_commands(file: str) -> list[list[str]]:
    """[stage, options...] of the commands that start a stage."""
    found = []
    for words in commands(file):
        places = [i for i, word in enumerate(words) if word in STAGES]
        found += [words[place:] for place in places[:1]]
    return found


def as_test(words: list[str]) -> str:
    return " ".join(words)[:70]


def one_value(option: str) -> str:
    """Of the values that an option sweeps over the first."""
    key, _, value = option.partition("=")
    if interval := re.search(r"interval\(([^,]+)", value):
        return f"{key}={interval[1]}"
    return option if "[" in value else f"{key}={value.split(',')[0]}"


@pytest.mark.parametrize("words", [one for file in READMES + DOCS for one in stage_commands(file)], ids=as_test)
def test_the_options_of_every_command_compose(words: list[str]):
    name, config_class = STAGES[words[0]]
    yaml = ROOT / "conf" / f"{name}.yaml"
    told = [one_value(word) for word in words[1:] if word != "-m"]
    with initialize_config_dir(str(ROOT / "conf"), version_base=None), folders_are_values(config_class, yaml):
        typed(config_class, compose(name, overrides=told))


@pytest.mark.parametrize("stage", sorted(set(STAGES) - ELSEWHERE))
def test_the_readme_shows_every_stage(stage: str):
    assert stage in {words[0] for words in stage_commands("README.md")}


def test_every_stage_is_shown_somewhere():
    assert {words[0] for file in READMES + DOCS for words in stage_commands(file)} | {"launch/quickstart.py"} == set(STAGES)


@pytest.mark.parametrize("file", READMES + DOCS)
def test_no_command_is_one_that_does_not_exist(file: str):
    for words in commands(file):
        words = [word for word in words if not re.match(r"[A-Z_]+=", word)]  # environment variables
        known = {
            "make": lambda rest: set(rest) <= make_targets(),
            "python": lambda rest: rest[0] in STAGES or (ROOT / rest[0]).is_file() or rest[:2] == ["-m", "pytest"],
            "accelerate": lambda rest: rest[0] == "launch" and any(word in STAGES for word in rest),
            "sort": lambda rest: True, "head": lambda rest: True, "pip": lambda rest: rest[0] == "install",
        }  # fmt: skip
        assert words[0] in known and known[words[0]](words[1:]), words


def make_targets() -> set[str]:
    return set(re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[1].split())


def test_an_environment_whose_making_was_interrupted_is_made_again(tmp_path: Path):
    """Python stands in it before pip does; PIP=true installs nothing."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    told = [f"VENV={tmp_path / 'venv'}", f"PYTHON={sys.executable}", "PLATFORM=cpu", "PIP=true"]
    done = subprocess.run(["make", "install", *told], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "== making" in done.stdout, done.stdout + done.stderr
    assert subprocess.run([tmp_path / "venv" / "bin" / "python", "-m", "pip", "--version"]).returncode == 0


def test_every_default_that_yaml_leaves_open_is_asked_for():
    """Every stage's required options (??? in its YAML) stand in the README's command for it."""
    for words in stage_commands("README.md"):
        name, config_class = STAGES[words[0]]
        required = re.findall(r"^(\w+): \?\?\?", (ROOT / "conf" / f"{name}.yaml").read_text(), re.MULTILINE)
        given = {word.split("=")[0] for word in words[1:]}
        assert set(required) <= given, words
        assert set(required) <= set(typing.get_type_hints(config_class))


def spans(file: str) -> list[str]:
    """What the text, outside of its blocks, has between backticks."""
    text = re.sub(r"^```.*?^```", "", (ROOT / file).read_text(), flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"`([^`\n]+)`", text)


def options(config: type, prefix: str = "") -> set[str]:
    """Every option of a configuration, dotted."""
    found = set()
    for name, hint in typing.get_type_hints(config).items():
        inner = [part for part in (hint, *typing.get_args(hint)) if dataclasses.is_dataclass(part)]
        found |= {prefix + name}.union(*(options(part, f"{prefix}{name}.") for part in inner))
    return found


@pytest.mark.parametrize("file", READMES + DOCS)
def test_every_option_that_is_named_exists(file: str):
    """As `key=value`; and of a group the choice that is named. Environment variables and placeholders are in capitals."""
    known = set().union(*(options(config) for _, config in STAGES.values()))
    known |= options(AccelerateLauncherConf, "hydra.launcher.") | {"hydra/launcher", "hydra/sweeper"}
    labels = {"lr", "depths"}  # of the runs of a sweep
    for span in spans(file):
        for key, value in re.findall(r"(?:^|[ (])([a-z][\w./]*)=(\S*)", span):
            assert key in known | labels, f"{file}: `{span}`"
            choices = {choice.stem for choice in (ROOT / "conf" / key).glob("*.yaml")}
            if choices and re.fullmatch(r"[a-z]\w*", value):
                assert value in choices | {"vllm"}, f"{file}: `{span}`"  # engine=vllm, of train/export.py, is a value


def test_every_file_that_is_named_is_there():
    folders = "data|extract|train|launch|conf|docs|tests|benchmarks|requirements"
    named = {(file, name) for file in READMES + DOCS for span in spans(file)
             for name in re.findall(rf"(?<![\w./$])(?:{folders})/[\w./*-]*[\w*]", span)}  # fmt: skip
    assert len(named) > 20
    assert [(file, name) for file, name in sorted(named) if not list(ROOT.glob(name))] == []


def test_every_link_leads_somewhere():
    for file in READMES + DOCS:
        for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", (ROOT / file).read_text()):
            assert ((ROOT / file).parent / link).exists(), (file, link)
