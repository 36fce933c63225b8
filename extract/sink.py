"""From prompts to shards: what is asked for is bounded in bytes, written in the prompts' order, and resumed."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from tqdm import tqdm

from data.prompts import Prompt
from data.schema import Provenance, Record
from data.codecs import Codec, TeacherHead
from data.manifest import finished_ids, mark_complete
from data.shards import ShardWriter
from data.storage import Uploader
from extract.capture import Captured
from extract.client import Client, ServerGone
from extract.groups import MAX_IN_A_ROW, REFUSED, AllFail, Asker, Group, cancel, groups_of, tokens_of
from extract.preflight import Forecast
from extract.server import Server

LANES = 8  # shards that are written at a time: 3.9 GB/s on two cores; an H200 prefills a small target's states at 3.7
LEAST_GROUPS, MOST_GROUPS = 8, 128  # that are in flight: so small are they made, and so many at most


class ByteBudget:
    """At most `limit` bytes are out at a time; one that is larger than that goes out alone."""

    def __init__(self, limit: int) -> None:
        self._limit, self._out, self._changed = limit, 0, asyncio.Condition()

    async def take(self, size: int) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: self._out == 0 or self._out + size <= self._limit)
            self._out += size

    async def give(self, size: int) -> None:
        async with self._changed:
            self._out -= size
            self._changed.notify_all()


@dataclass
class Extracted:
    """What became of the prompts: written now, finished by earlier runs, or failed with a reason."""

    records: int = 0
    tokens: int = 0
    earlier: int = 0
    failed: dict[str, str] = field(default_factory=dict)  # id -> reason


def extract(
    prompts: Iterable[Prompt],
    *,
    server: Server,
    out: Path,
    provenance: Provenance,
    shard_bytes: int,
    in_flight_bytes: int,
    retries: int,
    part: str | None = None,
    head: TeacherHead | None = None,
    uploader: Uploader | None = None,
) -> Extracted:
    """Captures every prompt that no finished shard holds yet, one split after the other.

    part      "i/n" if these prompts are one part of n, see data/manifest.py
    head      the target's, where the codec stores its most likely tokens
    uploader  where finished shards are sent

    Raises ValueError if the server ends, the disk is full, or, once all others are written, some
    prompts failed. Finished shards are kept in every case, and the same call continues.
    """
    done = finished_ids(out)
    prompts = list(prompts)
    total = sum(len(prompt.tokens) for prompt in prompts)
    extracted = Extracted(earlier=sum(prompt.id in done for prompt in prompts))
    with tqdm(
        total=total, desc="extract", unit=" tokens", unit_scale=True, mininterval=0.5 if sys.stderr.isatty() else 30.0
    ) as progress:
        progress.update(sum(len(prompt.tokens) for prompt in prompts if prompt.id in done))
        progress.unpause()  # the rate is this run's
        forecast = Forecast(total - progress.n, out=out)
        for split in sorted({prompt.split for prompt in prompts}):
            missing = [prompt for prompt in prompts if prompt.split == split and prompt.id not in done]
            if missing:
                with ShardWriter(
                    out,
                    provenance=provenance,
                    split=split,
                    shard_bytes=shard_bytes,
                    part=part,
                    lanes=LANES,
                    on_finished=uploader.send if uploader else lambda: None,
                ) as writer:
                    stream = _Stream(server, writer, extracted, progress, forecast, retries=retries, head=head)
                    try:
                        with ended_first(server):
                            asyncio.run(stream.run(missing, in_flight_bytes=in_flight_bytes))
                            writer.finish()
                    except SystemExit:  # told to end
                        writer.close()  # what has arrived is complete
                        raise
        forecast.end()
    if extracted.failed:
        shown = "; ".join(f"{id} ({reason})" for id, reason in list(extracted.failed.items())[:3])
        refused = sum(reason.startswith(REFUSED) for reason in extracted.failed.values())
        again = f"; the {refused} that the server refuses it will refuse again: leave them out in stage 1" if refused else ""
        raise ValueError(
            f"{len(extracted.failed)} of {len(prompts)} prompts could not be captured: {shown}. The "
            f"{extracted.earlier + extracted.records} others are in {out}; the same command tries again{again}"
        )
    mark_complete(out)
    return extracted


@contextmanager
def ended_first(server: Server) -> Iterator[None]:
    """Whatever ends a run ends its server, and then waits for what is on its way to the disk or elsewhere."""
    try:
        yield
    except BaseException:
        server.stop()
        raise


class _Stream:
    """One split on its way from the server to its writer."""

    def __init__(
        self,
        server: Server,
        writer: ShardWriter,
        extracted: Extracted,
        progress: tqdm,
        forecast: Forecast,
        *,
        retries: int,
        head: TeacherHead | None,
    ) -> None:
        self._server, self._writer, self._extracted, self._progress = server, writer, extracted, progress
        self._forecast = forecast
        self._retries, self._head, self._codec = retries, head, Codec.parse(writer.provenance.codec)

    async def run(self, prompts: list[Prompt], *, in_flight_bytes: int) -> None:
        budget, pending = ByteBudget(in_flight_bytes), asyncio.Queue(MOST_GROUPS)
        provenance = self._writer.provenance
        row_bytes = (len(provenance.boundaries) + 1) * provenance.hidden_size * self._server.state_bytes
        groups = list(groups_of(prompts, most_tokens=in_flight_bytes // row_bytes // LEAST_GROUPS))
        try:
            async with Client(self._server.url, timeout_seconds=self._server.config.answer_timeout_seconds) as client:
                asker = Asker(client, self._server.capturing.spool, retries=self._retries)
                feeder = asyncio.create_task(_ask(groups, asker, budget, pending, row_bytes=row_bytes))
                try:
                    async with asyncio.TaskGroup() as writing:
                        for group in groups:  # in their order: a dataset does not depend on the server's timing
                            records = await self._records(group, await (await pending.get()))
                            written = [asyncio.wrap_future(future) for future in self._writer.submit(records)]
                            writing.create_task(
                                self._count(records, written, budget, size=row_bytes * tokens_of(group))
                            )
                        await feeder
                finally:
                    await cancel([feeder, *(pending.get_nowait() for _ in range(pending.qsize()))])
        except* ServerGone as gone:
            kept = self._keep()
            error = gone.exceptions[0]
            raise self._server.failure(
                f"the server ended while extracting ({error}); the {kept} records captured so far are in finished "
                f"shards of {self._writer.out} and kept",
                cure="the same command continues there",
            ) from error
        except* AllFail as failed:
            kept, spool = self._keep(), self._server.capturing.spool
            raise self._server.failure(
                f"{MAX_IN_A_ROW} prompts in a row could not be captured, the last {failed.exceptions[0]}; the {kept} "
                f"records captured so far are in finished shards of {self._writer.out} and kept",
                cure=f"where {spool} is full, lower in_flight_bytes or set server.spool= to a larger disk; else see the "
                f"log; the same command continues there",
            ) from failed.exceptions[0]
        except* OSError as full:
            self._writer.fail(full.exceptions[0])
        except* ValueError as wrong:
            raise wrong.exceptions[0]

    def _keep(self) -> int:
        """Finishes what has arrived, which is complete, without the server; how many records there are then."""
        self._server.stop()
        self._writer.close()
        return len(finished_ids(self._writer.out))

    async def _records(self, group: Group, captured: list[Captured | str]) -> list[Record]:
        """Of those that were captured; the others are noted."""
        records = []
        for (_, prompt), one in zip(group, captured):
            if isinstance(one, str):
                self._extracted.failed[prompt.id] = one
            else:
                records.append(record_of(prompt, one))
        return await asyncio.to_thread(self._with_top_k, records) if self._codec.last == "topk" else records

    def _with_top_k(self, records: list[Record]) -> list[Record]:
        return [replace(record, **self._head.top_k(record.last, self._codec.top_k)) for record in records]

    async def _count(
        self, records: list[Record], written: list[asyncio.Future], budget: ByteBudget, *, size: int
    ) -> None:
        """Once the records are in their shards' files; requests go on while the disk works."""
        await asyncio.gather(*written)
        tokens = sum(record.num_tokens for record in records)
        self._extracted.records += len(records)
        self._extracted.tokens += tokens
        self._progress.update(tokens)
        self._forecast.add(tokens)
        await budget.give(size)


def record_of(prompt: Prompt, captured: Captured) -> Record:
    return Record(
        id=prompt.id, tokens=captured.tokens, loss_mask=torch.from_numpy(prompt.loss_mask), aux=captured.aux,
        last=captured.last, source=prompt.source, split=prompt.split,
    )  # fmt: skip


async def _ask(
    groups: list[Group], asker: Asker, budget: ByteBudget, pending: asyncio.Queue[asyncio.Task], *, row_bytes: int
) -> None:
    for group in groups:
        await budget.take(row_bytes * tokens_of(group))
        await pending.put(asyncio.create_task(asker.capture(group)))
