"""follow=true: training on shards while they are written, here and on S3."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import time
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
from accelerate.state import AcceleratorState
from hydra import compose, initialize_config_dir

from data import vocab
from data.config import typed
from data.manifest import mark_complete
from data.shards import ShardReader, ShardWriter
from data.storage import Uploader
from tests.conftest import CONF
from tests.launched import losses, options, same, tensors
from train import follow, loop, main
from train.config import BatchConfig, TrainConfig
from train.follow import Planner


def copy(source: Path, out: Path, records: range, *, split: str = "train", on_finished=lambda: None) -> None:
    """Finishes a shard of `out` with some records of `source`."""
    reader = ShardReader(source, split=split)
    with ShardWriter(
        out, provenance=reader.provenance, split=split, shard_bytes=1 << 30, on_finished=on_finished
    ) as writer:
        for i in records:
            writer.write(reader.read(i).decoded())


def copy_in_parts(source: Path, out: Path, *, sizes: list[int]) -> list:
    """Functions that each finish one shard of `out`, with so many records of `source`; the last says it is complete."""
    edges = [0, *accumulate(sizes)]

    def part(start: int, stop: int) -> None:
        copy(source, out, range(start, stop))
        if stop == edges[-1]:
            mark_complete(out)

    return [partial(part, start, stop) for start, stop in pairwise(edges)]


def following(reader: ShardReader, arrived: list[int], agree=lambda stop: stop) -> Planner:
    batch = BatchConfig(
        tokens_per_pack=48, conversations_per_step=5, packs_per_step=None, pad_packs=False, num_workers=0
    )
    config = SimpleNamespace(seed=0, epochs=2, follow=True, follow_conversations=24, batch=batch)
    return Planner(config, reader, arrived=arrived, agree=agree)


def indices(steps: list) -> list[int]:
    return [piece.index for step in steps for pack in step for piece in pack]


def test_training_starts_on_what_is_there_and_uses_every_record_once(shards, tmp_path, monkeypatch):
    """24 records, five a step, in shards of 7, 2 and 15: one step of five, then four when the dataset is complete."""
    monkeypatch.setattr(follow, "POLL_SECONDS", 0.01)
    parts = copy_in_parts(shards, tmp_path, sizes=[7, 2, 15])
    parts[0]()
    reader, arrived = ShardReader(tmp_path, split="train"), []
    planner = following(reader, arrived)
    assert planner.total_steps() == 2 * 5, "an estimate, from follow_conversations"
    growing = planner.parts(0)
    first = next(growing)
    assert len(first) == 1 and sorted(indices(first)) == [0, 1, 2, 3, 4]
    later = threading.Timer(0.1, lambda: [parts[1](), time.sleep(0.1), parts[2]()])
    later.start()
    rest = list(growing)
    later.join()
    assert sorted(indices(first) + [i for steps in rest for i in indices(steps)]) == list(range(24))
    assert all(len(step) for steps in rest for step in steps) and arrived[0] == 5 and arrived[-1] == 24
    assert sorted(indices([step for part in planner.parts(1) for step in part])) == list(range(24))


def test_a_continued_run_follows_the_parts_of_the_one_before(shards, tmp_path, monkeypatch):
    """By then there is more: the parts that were begun stay as they were, the rest is planned over what is there."""
    monkeypatch.setattr(follow, "POLL_SECONDS", 0.01)
    parts = copy_in_parts(shards, tmp_path, sizes=[12, 12])
    parts[0]()
    arrived: list[int] = []
    before = next(following(ShardReader(tmp_path, split="train"), arrived).parts(0))
    parts[1]()
    again = list(following(ShardReader(tmp_path, split="train"), list(arrived)).parts(0))
    assert again[0] == before
    assert sorted(i for steps in again for i in indices(steps)) == list(range(24))


def test_the_first_process_decides_and_another_waits_until_it_sees_as_much(shards, tmp_path, monkeypatch):
    monkeypatch.setattr(follow, "POLL_SECONDS", 0.01)
    parts = copy_in_parts(shards, tmp_path, sizes=[5, 19])
    parts[0]()
    behind = following(ShardReader(tmp_path, split="train"), [], agree=lambda stop: 20)  # sees 5, is told 20
    threading.Timer(0.1, parts[1]).start()
    assert sorted(indices(next(behind.parts(0)))) == list(range(20))


def test_all_processes_plan_as_many_steps_as_the_first_one_expects(shards, tmp_path):
    """It saw the dataset before it was complete, another one after: 24 expected at five a step, 12 there."""
    copy(shards, tmp_path, range(12))
    first = ShardReader(tmp_path, split="train")
    mark_complete(tmp_path)
    later = ShardReader(tmp_path, split="train")
    assert following(first, []).total_steps() == 2 * 5 and following(later, []).total_steps() == 2 * 3
    assert following(later, [], agree=lambda records: 24).total_steps() == 2 * 5


def test_more_conversations_than_were_expected_are_planned_for_as_they_come(shards, tmp_path, monkeypatch):
    monkeypatch.setattr(follow, "POLL_SECONDS", 0.01)
    parts = copy_in_parts(shards, tmp_path, sizes=[20, 4])
    parts[0]()
    planner = following(ShardReader(tmp_path, split="train"), [])
    planner.config.follow_conversations = 10
    growing = planner.parts(0)
    assert len(next(growing)) == 4 and planner.total_steps() == 2 * 4
    parts[1]()
    assert len(next(growing)) == 1 and planner.total_steps() == 2 * 5


def test_a_run_that_has_seen_more_than_a_complete_dataset_has_does_not_wait_for_it(shards, tmp_path):
    copy(shards, tmp_path, range(12))
    mark_complete(tmp_path)
    with pytest.raises(ValueError, match="complete with 12 records, of which this run has seen 20"):
        following(ShardReader(tmp_path, split="train"), [5, 20])


def train(overrides: list[str]) -> dict:
    """The stage in this process, without the launcher; its summary."""
    with initialize_config_dir(str(CONF), version_base=None):
        config = typed(TrainConfig, compose("train", overrides=overrides))
    try:
        return main.main.__wrapped__(config)
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.timeout(120)
def test_a_run_that_is_told_to_end_before_its_first_step_goes_on_as_if_it_was_not(
    shards, tiny_llama, tmp_path, monkeypatch
):
    """Three records are less than a step: it waits, and is told to end. And once more at its end, with its checkpoint lost."""
    copy(shards, tmp_path / "shards", range(3))
    shutil.copy(shards / vocab.FILE, tmp_path / "shards")
    changes = {"follow": "true", "follow_conversations": 24, "epochs": 2, "optim.ema": 0.9}
    run = tmp_path / "run"
    refresh = ShardReader.refresh
    monkeypatch.setattr(ShardReader, "refresh", lambda self: os.kill(os.getpid(), signal.SIGTERM) or refresh(self))
    with pytest.raises(SystemExit, match="143"):
        train(options(tmp_path / "shards", run, tiny_llama, **changes))
    monkeypatch.undo()
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-000000"]
    copy(shards, tmp_path / "shards", range(3, 24))
    copy(shards, tmp_path / "shards", range(6), split="validation")
    mark_complete(tmp_path / "shards")
    train(options(tmp_path / "shards", run, tiny_llama, **changes))
    train(options(tmp_path / "shards", tmp_path / "whole", tiny_llama, **changes))
    last = "checkpoints/step-000010"
    assert same(tensors(run / last), tensors(tmp_path / "whole" / last))

    shutil.rmtree(run / last)
    (run / "summary.json").unlink(missing_ok=True)
    train(options(tmp_path / "shards", run, tiny_llama, **changes))
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "validation" in line] == [5, 10]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_ctrl_c_and_a_closed_terminal_save_as_sigterm_does(shards, tiny_llama, tmp_path, monkeypatch, capsys, number):
    """And Ctrl-C once more, while it saves, ends it at once."""
    step, went_on = loop.Trainer._step, []

    def told(self, *arguments):
        os.kill(os.getpid(), number)
        return step(self, *arguments)

    def told_again(self):
        os.kill(os.getpid(), signal.SIGINT)
        went_on.append(True)

    monkeypatch.setattr(loop.Trainer, "_step", told)
    with pytest.raises(SystemExit, match=str(128 + number)):
        train(options(shards, tmp_path / "run", tiny_llama, epochs=1))
    assert [path.name for path in (tmp_path / "run/checkpoints").iterdir()] == ["step-000001"]
    monkeypatch.setattr(loop.Trainer, "_save", told_again)
    with pytest.raises(SystemExit, match="130"):
        train(options(shards, tmp_path / "again", tiny_llama, epochs=1))
    assert not went_on and "ended by SIGINT: checkpoints that it saved are kept" in capsys.readouterr().err


def test_a_complete_dataset_without_a_train_split_is_not_waited_for(shards, tiny_llama, tmp_path):
    copy(shards, tmp_path / "shards", range(6), split="validation")
    mark_complete(tmp_path / "shards")
    for changes in ({}, {"follow": "true", "follow_conversations": 24}):
        with pytest.raises(ValueError, match="shards has no records of the train split"):
            train(options(tmp_path / "shards", tmp_path / "run", tiny_llama, **changes))


@pytest.mark.timeout(120)
def test_a_run_that_expected_more_plans_and_logs_the_steps_that_there_are(shards, tiny_llama, tmp_path, capfd):
    copy(shards, tmp_path / "shards", range(24))
    mark_complete(tmp_path / "shards")
    shutil.copy(shards / vocab.FILE, tmp_path / "shards")
    changes = {"follow": "true", "follow_conversations": 100, "epochs": 1, "log_every_steps": 3}
    summary = train(options(tmp_path / "shards", tmp_path / "run", tiny_llama, **changes))
    assert "5 in 1 epochs" in capfd.readouterr().out and summary["steps"] == 5
    supervised = sum(entry.num_supervised for entry in ShardReader(shards, split="train").entries)
    assert summary["supervised_tokens"] == supervised


def test_without_follow_the_steps_are_counted_once(shards, tiny_llama, tmp_path, monkeypatch):
    """To count them, every epoch is packed: of a million conversations that takes seconds each."""
    packed, plan_epoch = [], follow.plan_epoch
    monkeypatch.setattr(follow, "plan_epoch", lambda *a, epoch, **options: packed.append(epoch) or plan_epoch(*a, epoch=epoch, **options))
    packs = {"batch.conversations_per_step": "null", "batch.packs_per_step": 4, "epochs": 2}
    train(options(shards, tmp_path / "run", tiny_llama, **packs))
    assert packed == [0, 1, 0, 1], "counted, then done"


@pytest.mark.timeout(120)
def test_a_run_follows_a_dataset_on_s3_from_before_its_first_shard_to_its_end(
    bucket, shards, tiny_llama, tmp_path, monkeypatch, capfd
):
    """24 conversations, five a step: one step of the first shard's seven, four once the rest has arrived; two epochs."""
    monkeypatch.setattr(follow, "POLL_SECONDS", 0.05)
    here, run = tmp_path / "here", tmp_path / "run"

    def extract() -> None:
        here.mkdir()
        shutil.copy(shards / vocab.FILE, here)
        with Uploader(here, bucket, keep_local=False) as uploader:
            send = partial(copy, shards, here, on_finished=uploader.send)
            time.sleep(0.3)
            send(range(7))
            while not (run / "metrics.jsonl").exists() or not losses(run):
                time.sleep(0.05)
            send(range(7, 9))
            send(range(9, 24))
            send(range(6), split="validation")
            mark_complete(here)

    extraction = threading.Thread(target=extract, daemon=True)
    extraction.start()
    changes = {"follow": "true", "follow_conversations": 24, "epochs": 2, "evaluate_every_epochs": 0}
    summary = train(options(bucket, run, tiny_llama, **changes))
    extraction.join()
    assert f"follow: waiting for {bucket}" in capfd.readouterr().out
    supervised = sum(entry.num_supervised for entry in ShardReader(shards, split="train").entries)
    assert (summary["steps"], summary["supervised_tokens"]) == (10, 2 * supervised)
    assert summary["documents"] == 6, "of the validation split, which came last"
    arrived = json.loads((run / "checkpoints" / "step-000010" / "state.json").read_text())["arrived"]
    assert arrived[0] == 5 and arrived[-1] == 24
    assert (run / "export" / "config.json").exists()
    assert not list(tmp_path.rglob("*.tar")), "all of them were sent away, and streamed back"
