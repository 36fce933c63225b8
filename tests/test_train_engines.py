"""The same answer from every engine on any number of processes, and any of them goes on where another stopped.

One process in float64 is the truth. Nine conversations a step make four or five packs, so that one process adds up all of
them, two hold unequal ones, and of four some have only padding; the last step has fewer. What is compared after the steps:
the loss of each, and all that a checkpoint holds, the moments (sums of gradients) among it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.launched import distance, losses, options, run, same, tensors

ENGINES = ("ddp", "zero1", "zero2", "zero3")


class Runs:
    """Runs in one folder, all of them asked for before they are started."""

    def __init__(self, folder: Path, shards: Path, target):
        self.folder, self.shards, self.target, self.asked = folder, shards, target, []

    def ask(self, processes: int, cases: dict[str, dict]) -> None:
        """The cases, one after the other, in a group of so many processes."""
        settings = {"epochs": 2, "evaluate_every_epochs": 0, "batch.conversations_per_step": 9}
        self.asked.append(
            [processes, [options(self.shards, self.folder / name, self.target, **{**settings, **changes})
                         for name, changes in cases.items()]]
        )  # fmt: skip

    def ask_copy(self, source: str, name: str) -> None:
        """As if the run had been killed after its first epoch."""
        self.asked.append({"copy": [str(self.folder / source), str(self.folder / name), 3]})

    def start(self) -> None:
        run([sys.executable, "tests/runs.py", json.dumps(self.asked)])

    def __getitem__(self, name: str) -> dict:
        return tensors(self.folder / name / "checkpoints" / "step-000006")  # two epochs of three steps

    def losses(self, name: str) -> list[float]:
        return losses(self.folder / name)


@pytest.fixture(scope="module")
def runs(tmp_path_factory, shards, tiny_llama) -> Runs:
    runs = Runs(tmp_path_factory.mktemp("engines"), shards, tiny_llama)
    double = {"precision": "fp64"}
    # DeepSpeed keeps tensors below a size whole under zero3; here all of them are cut
    engines = {name: {"engine": name} for name in ENGINES}
    engines["zero3"]["engine.deepspeed.zero_optimization.stage3_param_persistence_threshold"] = 0
    runs.ask(1, {"one": double, "one pack": {**double, "batch.tokens_per_pack": 480}, "one fp32": {}})
    runs.ask(2, {"ddp double 2": double, **{f"{name} 2": changes for name, changes in engines.items()}})
    runs.ask(2, {"zero3 compiled 2": {**engines["zero3"], "compile": True}})
    runs.ask(3, {f"{name} 3": changes for name, changes in engines.items()})
    for processes in (2, 3):
        for name in ENGINES:
            runs.ask_copy(f"{name} {processes}", f"{name} again {processes}")
        runs.ask(processes, {f"{name} again {processes}": changes for name, changes in engines.items()})
    runs.ask_copy("zero3 2", "zero1 after zero3 4")
    four = {"zero1 after zero3 4": engines["zero1"], "ddp double 4": double}
    runs.ask(4, four | {f"{name} 4": changes for name, changes in engines.items()})
    runs.start()
    return runs


def test_packs_may_be_cut_as_one_likes(runs):
    """One pack a step, or five that are added up."""
    assert runs.losses("one pack") == pytest.approx(runs.losses("one"), rel=1e-12)
    assert distance(runs["one"], runs["one pack"]) < 1e-9


@pytest.mark.parametrize("processes", [2, 4])
def test_processes_in_float64_have_the_answer_of_one(runs, processes):
    name = f"ddp double {processes}"
    assert runs.losses(name) == pytest.approx(runs.losses("one"), rel=1e-12)
    assert distance(runs["one"], runs[name]) < 1e-9


@pytest.mark.parametrize("processes", [2, 3, 4])
@pytest.mark.parametrize("engine", ENGINES)
def test_every_engine_has_the_answer_of_one_process(runs, engine, processes):
    name = f"{engine} {processes}"
    assert len(runs.losses(name)) == 6
    assert runs.losses(name) == pytest.approx(runs.losses("one"), rel=1e-5)
    assert distance(runs["one fp32"], runs[name]) < 1e-5


def test_compiled_code_sees_the_weights_that_zero3_puts_together(runs):
    """Between two calls of it a weight is an empty tensor."""
    assert runs.losses("zero3 compiled 2") == pytest.approx(runs.losses("one"), rel=1e-5)
    assert distance(runs["one fp32"], runs["zero3 compiled 2"]) < 1e-5


@pytest.mark.parametrize("processes", [2, 3])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_continued_run_is_the_same_bit_for_bit(runs, engine, processes):
    """Of three processes the sums depend on the order of their summands, and weights are cut into unequal parts."""
    again, whole = f"{engine} again {processes}", f"{engine} {processes}"
    assert runs.losses(again) == runs.losses(whole)
    assert same(runs[again], runs[whole])


def test_a_run_goes_on_under_another_engine_on_another_number_of_processes(runs):
    name = "zero1 after zero3 4"
    assert runs.losses(name)[:3] == runs.losses("zero3 2")[:3]
    assert runs.losses(name) == pytest.approx(runs.losses("one"), rel=1e-5)
    assert distance(runs["one fp32"], runs[name]) < 1e-5


@pytest.mark.parametrize("name", ["ddp double 2", "ddp double 4", "zero3 2", "zero3 4"])
def test_validation_is_that_of_one_process(runs, name):
    """Six conversations in three packs: of four processes one has none."""
    one, found = (json.loads((runs.folder / run / "validation.json").read_text()) for run in ("one", name))
    assert found["documents"] == one["documents"] == 6
    assert found["verification_steps"] == one["verification_steps"]
    assert found["loss"] == pytest.approx(one["loss"], rel=1e-5)
