"""What the processes of a run read: every record once an epoch, and as many steps each."""

from __future__ import annotations

import multiprocessing
import subprocess
import time
from collections import Counter

import psutil
import pytest
import torch

from data.shards import ShardReader
from data.stream import plan_epoch
from train.config import BatchConfig
from train.feed import Ahead, StepFeed, _end_only_by_parent

CPU = torch.device("cpu")


def batch_config(**changes) -> BatchConfig:
    settings = dict(tokens_per_pack=48, conversations_per_step=5, packs_per_step=None, pad_packs=False, num_workers=0)
    return BatchConfig(**{**settings, **changes})


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


def test_the_workers_outlive_a_sigterm_that_is_not_their_runs(shards):
    """A launcher sends it to the whole process group; the run goes on to the end of its step."""
    reader = ShardReader(shards, split="train")
    feed = StepFeed(
        reader, plan(reader), config=batch_config(num_workers=1), depths=3, bucket=1, rank=0, num_ranks=1, device=CPU
    )
    before = {child.pid for child in psutil.Process().children()}
    steps = iter(feed)
    found = [feed.next_batch() for _ in range(next(steps)[0])]  # a worker has started
    (worker,) = [child for child in psutil.Process().children() if child.pid not in before]
    for name in ("TERM", "TERM", "INT", "HUP"):
        subprocess.run(["kill", f"-{name}", str(worker.pid)], check=True)
    found += [feed.next_batch() for num, _ in steps for _ in range(num)]
    assert Counter(id for one in found for id in one.batch.ids) == Counter(entry.id for entry in reader.entries)
    feed.close()
    worker.wait(10)


def test_a_worker_ends_when_its_run_does():
    """Also one that is not told in the loader's own way: Python sends SIGTERM at its exit, and waits."""
    loader = torch.utils.data.DataLoader(range(8), batch_size=None, num_workers=1, worker_init_fn=_end_only_by_parent)
    batches = iter(loader)
    next(batches)
    (worker,) = [child for child in multiprocessing.active_children() if child.pid in {w.pid for w in batches._workers}]
    worker.terminate()
    worker.join(10)
    assert worker.exitcode == 0


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
