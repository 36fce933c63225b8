"""What the processes of a run read: every record once an epoch, as many steps each, whatever arrives and whenever."""

from __future__ import annotations

import threading
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from data.manifest import mark_complete
from data.shards import ShardReader, ShardWriter
from data.stream import plan_epoch
from tests.datasets import write_dataset
from train import follow
from train.config import BatchConfig
from train.feed import Ahead, StepFeed
from train.follow import Planner

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def shards(tmp_path_factory, tiny_llama) -> Path:
    return write_dataset(tmp_path_factory.mktemp("data") / "shards", Path(tiny_llama.path), name="tiny_llama")


def batch_config(**changes) -> BatchConfig:
    settings = dict(tokens_per_pack=48, conversations_per_step=5, packs_per_step=None, pad_packs=False, num_workers=0)
    return BatchConfig(**{**settings, **changes})


def run_config(**changes) -> SimpleNamespace:
    return SimpleNamespace(**{"seed": 0, "epochs": 2, "follow": False, "batch": batch_config(), **changes})


def plan(reader: ShardReader) -> list:
    return plan_epoch(
        reader.lengths, seed=0, epoch=0, tokens_per_pack=48, conversations_per_step=5, packs_per_step=None
    )


def feed_of(reader: ShardReader, steps: list, *, rank: int, num_ranks: int) -> StepFeed:
    return StepFeed(
        reader, steps, config=batch_config(), depths=3, bucket=1, rank=rank, num_ranks=num_ranks, device=CPU
    )


def read(reader: ShardReader, steps: list, *, num_ranks: int) -> tuple[list[str], list[torch.Tensor]]:
    """Ids that all processes together saw, and the counted rows of each step."""
    seen, counts = [], []
    for rank in range(num_ranks):
        feed = feed_of(reader, steps, rank=rank, num_ranks=num_ranks)
        mine = []
        for num_batches, counted in feed:
            mine.append(counted)
            seen += [id for _ in range(num_batches) for id in feed.next_batch().batch.ids]
        counts.append(mine)
    assert len({len(mine) for mine in counts}) == 1, "a process has fewer steps than another"
    return seen, [sum(step) for step in zip(*counts, strict=True)]


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_every_record_is_used_once_and_rows_add_up_to_those_of_one_process(shards, num_ranks):
    reader = ShardReader(shards, split="train")
    seen, counts = read(reader, plan(reader), num_ranks=num_ranks)
    assert Counter(seen) == Counter(entry.id for entry in reader.entries)
    _, alone = read(reader, plan(reader), num_ranks=1)
    assert all(torch.equal(a, b) for a, b in zip(counts, alone, strict=True))


def test_two_steps_on_three_processes_and_the_rest_on_two_use_every_record_once(shards):
    reader = ShardReader(shards, split="train")
    steps = plan(reader)
    before, _ = read(reader, steps[:2], num_ranks=3)
    after, _ = read(reader, steps[2:], num_ranks=2)
    assert Counter(before + after) == Counter(entry.id for entry in reader.entries)


def test_the_workers_make_what_one_process_makes(shards):
    reader = ShardReader(shards, split="train")
    alone = feed_of(reader, plan(reader), rank=0, num_ranks=1)
    first = [alone.next_batch() for num, _ in alone for _ in range(num)]
    workers = StepFeed(
        reader, plan(reader), config=batch_config(num_workers=1), depths=3, bucket=1, rank=0, num_ranks=1, device=CPU
    )
    second = [workers.next_batch() for num, _ in workers for _ in range(num)]
    for a, b in zip(first, second, strict=True):
        assert a.batch.ids == b.batch.ids
        assert torch.equal(a.batch.aux, b.batch.aux) and torch.equal(a.counted, b.counted)
        assert torch.equal(a.documents.active, b.documents.active)


def test_a_thread_runs_ahead_by_its_depth_and_no_further():
    made = []

    def items():
        for i in range(100):
            made.append(i)
            yield i

    ahead = Ahead(items(), 2)
    deadline = time.monotonic() + 10
    while len(made) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.05)
    assert made == [0, 1, 2], "two wait, one is in the thread's hands"
    assert [next(ahead) for _ in range(4)] == [0, 1, 2, 3]
    ahead.close()
    assert not ahead.thread.is_alive() and len(made) < 100


def test_what_goes_wrong_in_the_thread_is_raised_where_the_item_is_asked_for():
    def items():
        yield 1
        raise ValueError("train-000000.tar is corrupt")

    ahead = Ahead(items(), 2)
    assert next(ahead) == 1
    with pytest.raises(ValueError, match="corrupt"):
        next(ahead)


# ---- follow=true --------------------------------------------------------------------------------


def copy_in_parts(source: Path, out: Path, *, sizes: list[int]) -> list:
    """Functions that each finish one shard of `out`, with so many records of `source`; the last says it is complete."""
    reader = ShardReader(source, split="train")
    records = [reader.read(i).decoded() for i in range(len(reader))]
    edges = [0]
    for size in sizes:
        edges.append(edges[-1] + size)

    def part(start: int, stop: int) -> None:
        with ShardWriter(out, provenance=reader.provenance, split="train", shard_bytes=1 << 30) as writer:
            for record in records[start:stop]:
                writer.write(record)
        if stop == len(records):
            mark_complete(out)

    assert edges[-1] == len(records)
    return [lambda start=start, stop=stop: part(start, stop) for start, stop in zip(edges, edges[1:])]


def following(reader: ShardReader, arrived: list[int], agree=lambda stop: stop) -> Planner:
    return Planner(run_config(follow=True, follow_conversations=24), reader, arrived=arrived, agree=agree)


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
