"""What a step eats: micro-batches on the device before they are asked for.

A process's micro-batches are read, packed, looked through and pinned by the loader (in its workers, where there are
some), and copied to the GPU on a stream of their own, all by a thread that runs ahead of the step. On the CPU the same
is done when the loop asks.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import queue
import signal
import threading
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from itertools import islice
from typing import Any, Callable

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from data.batch import Batch
from data.shards import ShardReader
from data.stream import PackDataset, Step, rank_packs
from train.attention import Documents
from train.config import BatchConfig
from train.unroll import counted_rows

AHEAD = 2  # micro-batches that wait on the device


@dataclass(frozen=True)
class MicroBatch:
    """One pack, and what training looks up in it. The numbers are without padding, as train/plan.py counts work."""

    batch: Batch
    documents: Documents
    counted: Tensor  # [K, T] bool, from counted_rows
    num_tokens: int
    rows: int  # that ask
    pairs: int  # sum of train.plan.pairs_seen over the documents

    @classmethod
    def of(cls, batch: Batch, *, depths: int, bucket: int) -> MicroBatch:
        """On the CPU, where the loss mask is: nothing waits for a device."""
        counted = counted_rows(batch, depths=depths)
        documents = Documents.of(batch, counted=counted[0], bucket=bucket)
        real = len(batch.ids)
        asking, lengths = (edges.diff()[:real].long() for edges in (documents.cu_query, documents.cu_key))
        pairs = int((asking * (2 * lengths - asking)).sum())
        return cls(batch, documents, counted, int(batch.cu_seqlens[real]), int(asking.sum()), pairs)

    def pin_memory(self) -> MicroBatch:
        """Called by torch's DataLoader."""
        return _map(self, Tensor.pin_memory)

    def to(self, device: torch.device) -> MicroBatch:
        return replace(
            self,
            batch=self.batch.to(device),
            documents=self.documents.to(device),
            counted=self.counted.to(device, non_blocking=True),
        )


class MicroBatches(Dataset):
    """The packs of a reader as MicroBatch, for the loader's workers."""

    def __init__(self, packs: PackDataset, *, depths: int, bucket: int):
        self.packs, self.depths, self.bucket = packs, depths, bucket

    def __len__(self) -> int:
        return len(self.packs)

    def __getitem__(self, i: int) -> MicroBatch:
        return MicroBatch.of(self.packs[i], depths=self.depths, bucket=self.bucket)


def keep_freed_memory() -> None:
    """Let glibc keep what is freed, so that the next micro-batch is written to pages that exist already.

    One of Kimi's is 470 MB: fresh pages from the kernel cost several times the copy itself (docs/LOG.md).
    """
    with contextlib.suppress(AttributeError, OSError):  # a C library without it
        libc = ctypes.CDLL(None)
        libc.mallopt(-4, 0)  # M_MMAP_MAX: large blocks come from the heap
        libc.mallopt(-1, (1 << 31) - 1)  # M_TRIM_THRESHOLD: and the heap does not shrink


class StepFeed:
    """This process's share of some steps, in their order.

    Iterate: (micro-batches left to come, counted rows [K] int64 on the CPU) for every step, then ask `next_batch`
    that many times. `waited` is the seconds that the loop has waited for data; it may be set back.
    """

    def __init__(
        self,
        reader: ShardReader,
        steps: list[Step],
        *,
        config: BatchConfig,
        depths: int,
        bucket: int,
        rank: int,
        num_ranks: int,
        device: torch.device,
    ):
        self.device, self.waited = device, 0.0
        keep_freed_memory()
        self.mine = [rank_packs(step, rank=rank, world_size=num_ranks) for step in steps]
        packs = PackDataset(
            reader, [p for step in self.mine for p in step], pad_to=config.tokens_per_pack if config.pad_packs else None
        )
        self.loader = DataLoader(
            MicroBatches(packs, depths=depths, bucket=bucket),
            batch_size=None,
            num_workers=config.num_workers,
            prefetch_factor=4 if config.num_workers else None,
            worker_init_fn=_end_only_by_parent,
            pin_memory=device.type == "cuda",
        )
        items = self._items()
        self.items = Ahead(items, AHEAD) if device.type == "cuda" else items

    def __iter__(self) -> Iterator[tuple[int, Tensor]]:
        for step in self.mine:
            yield len(step), self._next()

    def next_batch(self) -> MicroBatch:
        """The step's next micro-batch, on the device."""
        item = self._next()
        if self.device.type == "cuda":
            item, arrived = item
            stream = torch.cuda.current_stream(self.device)
            stream.wait_event(arrived)
            _map(item, lambda tensor: tensor.record_stream(stream))  # or its memory is given away too early
        return item

    def close(self) -> None:
        """Ends the thread that runs ahead."""
        self.items.close()

    def _next(self) -> Any:
        asked = time.monotonic()
        item = next(self.items)
        self.waited += time.monotonic() - asked
        return item

    def _items(self) -> Generator[Any, None, None]:
        """Of every step the counted rows, then its micro-batches: a step's rows are known before its first one runs."""
        loader = iter(self.loader)
        stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        if stream is not None:  # a thread begins on the first GPU, where each process would leave half a GB of context
            torch.cuda.set_device(stream.device)
        for step in self.mine:
            batches: list[MicroBatch] = list(islice(loader, len(step)))
            yield torch.stack([batch.counted.sum(1) for batch in batches]).sum(0)
            for batch in batches:
                if stream is None:
                    yield batch.to(self.device)
                    continue
                with torch.cuda.stream(stream):
                    moved, arrived = batch.to(self.device), stream.record_event()
                yield moved, arrived


class Ahead:
    """An iterator whose items are made by a thread, up to `depth` of them before they are asked for."""

    def __init__(self, items: Generator[Any, None, None], depth: int):
        self.ready: queue.Queue = queue.Queue(depth)
        self.closed = threading.Event()
        self.thread = threading.Thread(target=self._run, args=(items,), name="feed", daemon=True)
        self.thread.start()

    def __next__(self) -> Any:
        item, error = self.ready.get()
        if error is not None:
            raise error
        return item

    def close(self) -> None:
        self.closed.set()
        while self.thread.is_alive():
            try:
                self.ready.get(timeout=0.05)
            except queue.Empty:
                pass

    def _run(self, items: Generator[Any, None, None]) -> None:
        try:
            for item in items:
                self.ready.put((item, None))
                if self.closed.is_set():
                    return
            self.ready.put((None, StopIteration()))
        except BaseException as error:  # raised where the item is asked for
            self.ready.put((None, error))
        finally:
            items.close()  # and with it the loader's workers


def _end_only_by_parent(worker: int) -> None:
    """A launcher, or a terminal, tells the loader's workers to end too, while the run still takes a step and saves."""

    def hear() -> None:
        while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
            pass
        os._exit(0)

    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    threading.Thread(target=hear, name="sigterm", daemon=True).start()


def _map(value: Any, function: Callable[[Tensor], Any]) -> Any:
    """A dataclass with `function` applied to every tensor in it, at any depth."""
    if isinstance(value, Tensor):
        return function(value)
    if is_dataclass(value):
        return replace(value, **{f.name: _map(getattr(value, f.name), function) for f in fields(value)})
    return value
