"""The launchers' options: what is refused before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from data.config import folders_are_values, typed
from launch.config import BenchConfig, QuickstartConfig, ServeConfig

CONF = Path(__file__).resolve().parent.parent / "conf"
NEEDED = {"bench": ["drafter=run/export", "prompts=prompts"], "serve": ["drafter=run/export"], "quickstart": []}
CLASSES = {"bench": BenchConfig, "serve": ServeConfig, "quickstart": QuickstartConfig}


def composed(name: str, *overrides: str):
    with initialize_config_dir(str(CONF), version_base=None), folders_are_values(CLASSES[name], CONF / f"{name}.yaml"):
        return typed(CLASSES[name], compose(name, overrides=[*NEEDED[name], *overrides]))


@pytest.mark.parametrize("name", CLASSES)
def test_the_defaults_are_valid(name: str):
    composed(name)


def test_a_drafters_folder_is_no_choice_of_the_group_of_that_name():
    """conf/drafter/ has the trainer's YAMLs; a launcher is given a folder."""
    config = composed("bench", "drafter=/somewhere/export")
    assert (config.drafter, config.out) == ("/somewhere/export", "/somewhere/export-bench")


def test_a_stage_of_the_quickstart_takes_more_options():
    assert composed("quickstart", 'options.train=["epochs=2"]').options.train == ["epochs=2"]


def test_the_target_is_still_a_choice():
    assert composed("bench", "target=tiny_llama").target.name == "tiny_llama"


@pytest.mark.parametrize(
    ("name", "override", "message"),
    [
        ("bench", "max_new_tokens=1", "max_new_tokens=1: expected null, or at least 2"),
        ("bench", "concurrency=0", "concurrency=0: expected at least 1"),
        ("bench", "limit=0", "limit=0: expected null or at least 1"),
        ("bench", "num_drafts=0", "num_drafts=0: expected null or at least 1"),
        ("serve", "num_drafts=0", "num_drafts=0: expected null or at least 1"),
        ("serve", "server.url=http://h:1", "server.url=http://h:1: expected null: the drafter is given to a server"),
    ],
)
def test_what_cannot_be_meant_is_refused(name: str, override: str, message: str):
    with pytest.raises(ValueError, match=message):
        composed(name, override)
