"""Which steps an epoch has, also when its records are still being written (`follow=true`).

The first epoch then comes in parts: as many whole steps as the shards that are finished give, and so on until the
dataset says that it is complete. Where each part ended is kept in the checkpoint, so that a resumed run uses every
record once; later epochs are planned over everything, as without follow.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

from data.manifest import Manifest
from data.shards import ShardReader
from data.storage import local_folder
from data.stream import Step, plan_epoch
from train.config import TrainConfig

POLL_SECONDS = 2.0


class Planner:
    """Steps of every epoch. Every process makes the same ones.

    arrived  of RunState: records that were there at the end of each part; grows here
    agree    int of this process and of the others: what the first one says
    """

    def __init__(self, config: TrainConfig, reader: ShardReader, *, arrived: list[int], agree: Callable[[int], int]):
        self.config, self.reader, self.arrived, self.agree = config, reader, arrived, agree
        for count in arrived[-1:]:
            self._wait_for(count)

    def total_steps(self) -> int:
        """Of all epochs; with follow an estimate until the last part of the first one is there."""
        per_step = self.config.batch.conversations_per_step
        if per_step is None:  # every epoch is packed anew
            return sum(len(self._plan(0, len(self.reader), epoch=epoch)) for epoch in range(self.config.epochs))
        if not self.config.follow:
            return self.config.epochs * -(-len(self.reader) // per_step)
        records = self.agree(records_to_come(self.reader, self.config.follow_conversations))
        return self.config.epochs * -(-records // per_step)

    def parts(self, epoch: int) -> Iterator[list[Step]]:
        """The steps of an epoch, in one part, or with follow in the first epoch in several; waits for each."""
        if not self.config.follow or epoch > 0:
            yield self._plan(0, len(self.reader), epoch=epoch)
            return
        start = 0
        for stop in self.arrived:
            yield self._plan(start, stop, epoch=epoch)
            start = stop
        while start < (stop := self._next_stop(start)):
            self.arrived.append(stop)
            yield self._plan(start, stop, epoch=epoch)
            start = stop

    def _next_stop(self, start: int) -> int:
        """Records in the part that begins at `start`: whole steps, and at the end what is left. Waits for one step."""
        per_step = self.config.batch.conversations_per_step
        while True:
            self.reader.refresh()
            count = len(self.reader)
            stop = count if self.reader.complete else start + (count - start) // per_step * per_step
            stop = self.agree(stop if stop > start or self.reader.complete else -1)  # the first process decides
            if stop >= 0:
                self._wait_for(stop)
                return stop
            time.sleep(POLL_SECONDS)

    def _wait_for(self, count: int) -> None:
        """Until this process, too, sees `count` records: on a network's file system that may take a moment."""
        while len(self.reader) < count:
            if self.reader.refresh() == 0:
                if self.reader.complete:
                    raise ValueError(
                        f"{self.reader.path} is complete with {len(self.reader)} records, of which this run has seen "
                        f"{count}: it is another dataset now, choose another out="
                    )
                time.sleep(POLL_SECONDS)

    def _plan(self, start: int, stop: int, *, epoch: int) -> list[Step]:
        """Of the records start .. stop-1, under their own numbers."""
        batch = self.config.batch
        steps = plan_epoch(
            self.reader.lengths[start:stop],
            seed=self.config.seed + start,
            epoch=epoch,
            tokens_per_pack=batch.tokens_per_pack,
            conversations_per_step=batch.conversations_per_step,
            packs_per_step=batch.packs_per_step,
        )
        return [[[piece._replace(index=piece.index + start) for piece in pack] for pack in step] for step in steps]


def records_to_come(reader: ShardReader, expected: int) -> int:
    """Of a dataset that may still grow: as many as are expected, unless there are more, or it is complete."""
    return len(reader) if reader.complete else max(len(reader), expected)


def wait_for_shards(shards: str) -> Path:
    """The folder of a dataset, as `local_folder` gives it, once there is a first shard to train on, or none to come."""
    said = False
    while True:
        try:
            folder = local_folder(shards)
            manifest = Manifest.load(folder)
            if manifest.complete or any(shard.split == "train" for shard in manifest.shards):
                return folder
            missing = "no shard is finished"
        except ValueError as error:  # nothing there yet; said once, so that a wrong address is seen
            missing = str(error)
        if not said:
            print(f"follow: waiting for {shards} ({missing})", flush=True)
            said = True
        time.sleep(POLL_SECONDS)
