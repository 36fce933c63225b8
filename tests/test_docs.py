"""The guides are true: their commands exist and compose, their numbers are those that the code works out."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from data.config import folders_are_values, typed
from launch import plan
from tests.test_readme import STAGES

ROOT = Path(__file__).resolve().parent.parent
GUIDES = ("docs/kimi-k25.md", "docs/sweeps.md", "docs/cluster.md")
BATCH = {"launch/slurm/train.sbatch": "train/main.py", "launch/slurm/extract.sbatch": "extract/main.py"}


def command_lines(file: str) -> list[str]:
    """Every line of every ```sh block; of `name=$(command)` the command."""
    blocks = re.findall(r"^```sh\n(.*?)^```", (ROOT / file).read_text(), re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines() if line.strip() and not line.startswith("#")]
    return [re.sub(r"^\w+=\$\((.*)\)$", r"\1", line) for line in lines]


def started(line: str) -> list[tuple[str, list[str]]]:
    """[(script, options)] of what a line starts, the command inside sbatch's --wrap too."""
    words = shlex.split(line)
    inner = [started(words[i + 1])[0] for i, word in enumerate(words) if word == "--wrap"]
    for place, word in enumerate(words):
        if re.fullmatch(r"\w+/(slurm/)?\w+\.(py|sbatch)", word) and "=" not in word:
            return [(word, words[place + 1 :]), *inner]
    return inner


COMMANDS = [(file, *one) for file in GUIDES for line in command_lines(file) for one in started(line)]


@pytest.mark.parametrize(("file", "script", "options"), COMMANDS, ids=lambda value: str(value)[:40])
def test_every_command_exists_and_its_options_compose(file: str, script: str, options: list[str]):
    assert (ROOT / script).is_file()
    script = BATCH.get(script, script)
    if script not in STAGES:
        return  # its options are argparse's, and its own tests'
    name, config_class = STAGES[script]
    yaml = ROOT / "conf" / f"{name}.yaml"
    told = [one_value(option) for option in options if "=" in option]
    with initialize_config_dir(str(ROOT / "conf"), version_base=None), folders_are_values(config_class, yaml):
        typed(config_class, compose(name, overrides=told))


def one_value(option: str) -> str:
    """The first of the values that an option sweeps over."""
    key, _, value = option.partition("=")
    if "interval(" in value:
        return f"{key}={re.search(r'interval.([^,]+)', value)[1]}"
    return f"{key}={value.split(',')[0]}" if "[" not in value and "{" not in value else option


def test_accelerates_files_exist():
    named = {word for file in GUIDES for word in re.findall(r"launch/accelerate/\w+\.yaml", (ROOT / file).read_text())}
    assert named and all((ROOT / file).is_file() for file in named), named


def test_the_guides_link_to_files_that_exist():
    for file in GUIDES:
        for link in re.findall(r"\]\(([\w.-]+\.md)\)", (ROOT / file).read_text()):
            assert (ROOT / "docs" / link).is_file(), (file, link)
        assert file in (ROOT / "README.md").read_text(), f"{file} is found from the README"


def test_every_number_of_kimis_plan_is_the_codes():
    """The tables are what `python launch/plan.py` prints, to the last digit."""
    text = (ROOT / "docs/kimi-k25.md").read_text()
    inside = text.split("<!-- python launch/plan.py -->\n", 1)[1].split("\n<!-- end -->", 1)[0]
    assert inside.strip() == plan.planned(plan.parser().parse_args([])).strip()


def test_what_kimis_plan_concludes_follows_from_its_numbers():
    """DDP with Muon fits 16,384 tokens; what it sends at a quarter of PCIe's rate is below a tenth of a step; bf16 shards
    are more than twice those of fp8+topk64."""
    text = plan.planned(plan.parser().parse_args([]))
    rows = {row.split("|")[1].strip(): [cell.strip() for cell in row.split("|")[2:-1]] for row in text.splitlines() if row.startswith("| ")}
    assert float(rows["16,384"][0]) < 0.75 * 96
    assert float(rows["DDP"][-1].removesuffix(" %")) < 10
    assert float(rows["bf16"][1]) > 2 * float(rows["fp8+topk64"][1])


def test_a_plan_for_a_gpu_that_is_not_known_asks_for_its_peak():
    with pytest.raises(ValueError, match="give --peak-tflops"):
        plan.planned(plan.parser().parse_args(["--gpu", "something"]))


@pytest.mark.parametrize("option", ["--gpus=0", "--tokens=0", "--link=0", "--conversations=-1"])
def test_a_plan_for_nothing_is_refused_by_name(option: str):
    with pytest.raises(ValueError, match=f"{option.partition('=')[0]}=.*: expected more than 0"):
        plan.planned(plan.parser().parse_args([option]))
