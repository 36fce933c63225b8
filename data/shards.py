"""ShardWriter and ShardReader: both halves of the format on disk. docs/design.md, "The record".

<out>/manifest.json              provenance, and the shards that are complete: data/manifest.py
<out>/train-000000.tar           WebDataset: <key>.json and <key>.safetensors of every sample
<out>/train-000000.index.json    where each record lies in the tar, so that it is mapped, not searched
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from data.checksums import is_unchanged
from data.lanes import Lanes, OpenShard, Planned
from data.manifest import FILE, Entry, Manifest, ShardInfo, claim_split, finished_ids, is_written, manifest_lock
from data.mapped import Shard, read_ahead
from data.schema import SPLITS, Provenance, Record, check_record, check_same
from data.storage import Remote

class ShardWriter:
    """Writes one split of a dataset, shard by shard; continues what is there.

    out          folder; may hold earlier shards of the same provenance
    shard_bytes  a shard is finished once it is this large
    part         "i/n" if n servers make the dataset, each a part of it
    lanes        shards that are written at a time, a thread each
    on_finished  called after every shard that was finished, like Uploader.send

    A shard gets its name when it is complete and on disk, and then a line in the manifest: after a
    crash or an exception every finished shard counts, and the unfinished one is gone. Raises
    ValueError if the folder holds another provenance, another process writes this split, an id comes
    twice, or the disk is full.
    """

    def __init__(
        self,
        out: Path | str,
        *,
        provenance: Provenance,
        split: str,
        shard_bytes: int,
        part: str | None = None,
        lanes: int = 1,
        on_finished: Callable[[], None] = lambda: None,
    ) -> None:
        if split not in SPLITS:
            raise ValueError(f"split={split}: expected {' or '.join(SPLITS)}")
        self.out, self.provenance, self.split, self.shard_bytes = Path(out), provenance, split, shard_bytes
        self._on_finished = on_finished
        self.out.mkdir(parents=True, exist_ok=True)
        self._lock = claim_split(self.out, split)
        try:
            with manifest_lock(self.out):
                found = Manifest.load(self.out) if (self.out / FILE).exists() else None
                if found and (found.shards or is_written(self.out, without=split)):
                    self._check(found, part)
                else:  # nothing, or what a run that captured nothing has left
                    Manifest(provenance=provenance, part=part).save(self.out)
                leftovers = [*self.out.glob(f".{split}-*.tmp"), *self.out.glob(f".{FILE}.*.tmp")]
                for leftover in leftovers:  # whoever wrote them was killed: we hold both locks
                    leftover.unlink()
            self._ids = finished_ids(self.out)
            self._number = self._first_free_number()
        except BaseException:
            self._lock.close()
            raise
        self._lanes: Lanes | None = Lanes(lanes, committed=self._commit)
        self._shard: OpenShard | None = None

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if kind is None:
            self.close()
        elif self._lanes is not None and isinstance(error, OSError) and error is self._lanes.failure:
            self.fail(error)  # `submit` raised it
        else:
            self.abandon()

    def write(self, record: Record) -> None:
        """Adds one record to the shard at hand, and finishes the shard if it is large enough.

        The record's memory may be written with a later one's: do not change it.
        """
        try:
            shard = self._shard_for(record)
            try:
                self._lanes.add_here(shard, record)
            except ValueError:  # nothing of it is in the file
                self._ids.remove(record.id)
                raise
            if self._is_full():
                self._close_shard()
                self._lanes.wait()
        except OSError as error:
            self.fail(error)

    def submit(self, records: Iterable[Record]) -> list[Future]:
        """`write` of each without waiting: done when they are in their shards' files; `close` says whether all went well.

        Raises ValueError if a record does not belong here, and what an earlier shard could not be finished for, an
        OSError if the disk is full; so do the futures. The writer's `with` block turns that into what to do.
        """
        written: list[Future] = []
        planned: list[Planned] = []
        try:
            for record in records:
                planned.append(self._shard_for(record).plan(record))
                if self._is_full():
                    written.append(self._lanes.add(self._shard, planned))
                    planned = []
                    self._close_shard()
        finally:
            if planned:
                written.append(self._lanes.add(self._shard, planned))
        return written

    def _shard_for(self, record: Record) -> OpenShard:
        """The shard at hand, a new one if there was none: this record's. Raises what `submit` raises."""
        if self._lanes.failure is not None:
            raise self._lanes.failure
        check_record(record, self.provenance)
        if record.split != self.split:
            raise ValueError(f"record {record.id} is of split {record.split}, this writer's is {self.split}")
        if record.id in self._ids:
            raise ValueError(f"record {record.id} is already in {self.out}: ids are unique in a dataset")
        if self._shard is None:
            name, self._number = f"{self.split}-{self._number:06d}.tar", self._number + 1
            self._shard = OpenShard(self.out, name, split=self.split, provenance=self.provenance)
            self._lanes.open(self._shard)
        self._ids.add(record.id)
        return self._shard

    def _is_full(self) -> bool:
        return self._shard.planned_bytes >= self.shard_bytes

    def close(self) -> None:
        """Finishes the shards at hand; the writer cannot be used after that."""
        if self._lanes is None:
            return
        try:
            self.finish()
        except OSError as error:
            self.fail(error)
        finally:
            self.abandon()

    def finish(self) -> None:
        """Waits until the shards at hand are finished, what `on_finished` does included. Raises what `submit` raises."""
        if self._shard is not None:
            self._close_shard()
        self._lanes.wait()

    def abandon(self) -> None:
        """Removes the unfinished shard; those that have all their records are finished, if they can be, and stay."""
        if self._lanes is not None:
            self._lanes.end(self._shard)
            self._lanes = None
        self._lock.close()

    def _close_shard(self) -> None:
        self._lanes.close(self._shard)
        self._shard = None

    def _check(self, manifest: Manifest, part: str | None) -> None:
        check_same(manifest.provenance, self.provenance, where=str(self.out))
        if manifest.provenance.codec != self.provenance.codec:
            raise ValueError(
                f"{self.out} holds {manifest.provenance.codec} records, this run writes {self.provenance.codec}: "
                f"set codec={manifest.provenance.codec}, or choose another out="
            )
        if manifest.part != part:
            raise ValueError(
                f"{self.out} is part={manifest.part}, this run makes part={part}: every part has a folder of its own"
            )

    def _first_free_number(self) -> int:
        names = [shard.name for shard in Manifest.load(self.out).shards if shard.split == self.split]
        numbers = [int(re.search(r"(\d+)\.tar$", name)[1]) for name in names]  # a bad shard may have been taken out
        return max(numbers, default=-1) + 1

    def _commit(self, info: ShardInfo) -> None:
        """A shard is on the disk under its name: now it counts. Called in the shards' order."""
        try:
            with manifest_lock(self.out):
                manifest = Manifest.load(self.out)
                replace(manifest, shards=(*manifest.shards, info), complete=False).save(self.out)
        except ValueError:
            (self.out / info.name).unlink()  # its space may be what is missing
            raise
        self._on_finished()

    def fail(self, error: OSError) -> NoReturn:
        """Abandons, and raises ValueError with what to do about a disk that does not take any more."""
        self.abandon()
        raise ValueError(
            f"cannot write {self.split} shards in {self.out}: {error.strerror or error}; {len(finished_ids(self.out))} "
            f"finished records are kept: free some space and run again, it continues there"
        ) from error


class ShardReader:
    """Random access to the records of one split of a dataset, without a copy.

    path      folder with a manifest.json, for s3://… what data.storage.local_folder gives; split: train | validation
    lengths   int64 [n], tokens per record; entries [n]; provenance
    complete  everything that was asked for is here; else `refresh` may find more

    Raises ValueError naming the file if a shard is missing, shorter than the manifest says, or its
    index is damaged. Flipped bits inside tensors are found by `verify`. May be pickled and forked:
    files are opened where they are read.
    """

    def __init__(self, path: Path | str, *, split: str) -> None:
        if split not in SPLITS:
            raise ValueError(f"split={split}: expected {' or '.join(SPLITS)}")
        self.path, self.split = Path(path), split
        self.provenance = Manifest.load(self.path).provenance
        self.shards: list[Shard] = []
        self.entries: list[Entry] = []
        self._starts: list[int] = []  # [shards], number of the first record of each
        self._take_up()

    def refresh(self) -> int:
        """Takes up what was finished since; how many records are new. Those before keep their numbers.

        A dataset may be read while it is still written: a shard is in the manifest when it is complete.
        Raises ValueError if it was replaced by another.
        """
        if (remote := Remote.of(self.path)) and remote.mirror:
            remote.pull(self.path)
        return self._take_up()

    def _take_up(self) -> int:
        manifest = Manifest.load(self.path)
        infos = [info for info in manifest.shards if info.split == self.split]
        known = [shard.info for shard in self.shards]
        if infos[: len(known)] != known or manifest.provenance != self.provenance:
            raise ValueError(f"{self.path} was written anew while it was read: start again")
        before = len(self.entries)
        for info in infos[len(known) :]:
            shard = Shard(self.path, info, self.provenance)
            self._starts.append(len(self.entries))
            self.shards.append(shard)
            self.entries += shard.entries
        self.complete = manifest.complete
        self.lengths = np.array([entry.num_tokens for entry in self.entries], dtype=np.int64)
        return len(self.entries) - before

    def __len__(self) -> int:
        return len(self.entries)

    def read(self, i: int) -> Record:
        """Record i as it is stored (see `Record.decoded`); its tensors are views into the file: do not write to them.

        Raises ValueError naming the shard if the record in it is damaged.
        """
        i = range(len(self))[i]
        number = bisect.bisect_right(self._starts, i) - 1
        return self.shards[number].read(i - self._starts[number])

    def __iter__(self) -> Iterator[Record]:
        return (self.read(i) for i in range(len(self)))

    def scan(self) -> Iterator[Record]:
        """All records, read ahead by threads into buffers: a record holds only until the next is asked for."""
        places = ((shard, i) for shard in self.shards for i in range(len(shard.entries)))
        return (future.result() for future in read_ahead(places))

    def verify(self) -> None:
        """Compares every shard's checksum with the manifest's. Raises ValueError naming the first that differs."""
        for shard in self.shards:
            if not is_unchanged(self.path / shard.info.name, shard.info.checksum):
                raise ValueError(f"{self.path / shard.info.name} is corrupt (its checksum changed): extract again")
