"""Every command in the READMEs is a command: it exists, and its options compose. `make` ones name real targets.

The quickstart's test runs the stages themselves, in tests/test_launch_end_to_end.py.
"""

from __future__ import annotations

import re
import shlex
import typing
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from data.config import DataConfig, folders_are_values, typed
from extract.config import ExtractConfig
from launch.config import BenchConfig, QuickstartConfig, ServeConfig
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
}


def commands(file: str) -> list[list[str]]:
    """The words of every line of every ```sh block that is not a comment."""
    blocks = re.findall(r"^```sh\n(.*?)^```", (ROOT / file).read_text(), re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
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


@pytest.mark.parametrize("words", stage_commands("README.md") + stage_commands("data/examples/README.md"), ids=as_test)
def test_the_options_of_every_command_compose(words: list[str]):
    name, config_class = STAGES[words[0]]
    yaml = ROOT / "conf" / f"{name}.yaml"
    with initialize_config_dir(str(ROOT / "conf"), version_base=None), folders_are_values(config_class, yaml):
        typed(config_class, compose(name, overrides=words[1:]))


@pytest.mark.parametrize("stage", STAGES)
def test_the_readme_shows_every_stage(stage: str):
    """All but the quickstart, which `make quickstart` starts, stand there with their options."""
    shown = {words[0] for words in stage_commands("README.md")} | {"launch/quickstart.py"}
    assert stage in shown


def test_nothing_in_the_readme_is_a_command_that_does_not_exist():
    for words in commands("README.md") + commands("data/examples/README.md"):
        words = [word for word in words if not re.match(r"[A-Z_]+=", word)]  # environment variables
        known = {
            "make": lambda rest: set(rest) <= make_targets(),
            "python": lambda rest: rest[0] in STAGES,
            "accelerate": lambda rest: rest[0] == "launch" and any(word in STAGES for word in rest),
            "sort": lambda rest: True,
        }
        assert words[0] in known and known[words[0]](words[1:]), words


def make_targets() -> set[str]:
    return set(re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[1].split())


def test_every_default_that_yaml_leaves_open_is_asked_for():
    """Every stage's required options (??? in its YAML) stand in the README's command for it."""
    for words in stage_commands("README.md"):
        name, config_class = STAGES[words[0]]
        required = re.findall(r"^(\w+): \?\?\?", (ROOT / "conf" / f"{name}.yaml").read_text(), re.MULTILINE)
        given = {word.split("=")[0] for word in words[1:]}
        assert set(required) <= given, words
        assert set(required) <= set(typing.get_type_hints(config_class))
