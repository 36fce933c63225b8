"""From prompts to shards: what is asked for is bounded in bytes, written in the prompts' order, and resumed."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterable, Iterator
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
from extract.client import Client, RequestFailed, RequestRefused, ServerGone
from extract.fetch import fetch, fetch_together, forget, rid_of
from extract.preflight import Forecast
from extract.server import Server

RETRY_SECONDS = 0.1  # before the second try, then twice as long each time
LANES = 4  # shards that are written at a time; one lane does 1 to 2 GB/s, an H200 prefills a small target's states at 4
GROUP_PROMPTS, GROUP_TOKENS = 16, 8192  # of one request, at most: a GPU prefills as much at a time
GROUPS_IN_FLIGHT = 8  # at least, whatever in_flight_bytes is
MAX_REQUESTS = 128  # in flight, whatever their size
MAX_IN_A_ROW = 64  # prompts that fail one after the other: what fails them will fail the rest, a full spool for one


class AllFail(Exception):
    """One prompt after the other fails, and none is captured."""


Group = list[tuple[int, Prompt]]  # each with its number in the split


def groups_of(prompts: Iterable[Prompt], *, most_tokens: int) -> Iterator[Group]:
    """The prompts in their order, as they are asked for: a prompt that is larger than a group should be is one alone."""
    group: Group = []
    tokens = 0
    for number, prompt in enumerate(prompts):
        if group and (len(group) == GROUP_PROMPTS or tokens + len(prompt.tokens) > most_tokens):
            yield group
            group, tokens = [], 0
        group.append((number, prompt))
        tokens += len(prompt.tokens)
    if group:
        yield group


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
                    asyncio.run(stream.run(missing, in_flight_bytes=in_flight_bytes))
        forecast.end()
    if extracted.failed:
        shown = "; ".join(f"{id} ({reason})" for id, reason in list(extracted.failed.items())[:3])
        raise ValueError(
            f"{len(extracted.failed)} of {len(prompts)} prompts could not be captured: {shown}. The "
            f"{extracted.earlier + extracted.records} others are in {out}; the same command tries again"
        )
    mark_complete(out)
    return extracted


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
        self._failed_in_a_row = 0

    async def run(self, prompts: list[Prompt], *, in_flight_bytes: int) -> None:
        budget, pending = ByteBudget(in_flight_bytes), asyncio.Queue(MAX_REQUESTS)
        provenance = self._writer.provenance
        row_bytes = (len(provenance.boundaries) + 1) * provenance.hidden_size * self._server.state_bytes
        groups = list(
            groups_of(prompts, most_tokens=min(GROUP_TOKENS, in_flight_bytes // row_bytes // GROUPS_IN_FLIGHT))
        )
        try:
            async with Client(self._server.url, timeout_seconds=self._server.config.answer_timeout_seconds) as client:
                feeder = asyncio.create_task(self._ask(groups, client, budget, pending, row_bytes=row_bytes))
                try:
                    async with asyncio.TaskGroup() as writing:
                        for group in groups:  # in their order: a dataset does not depend on the server's timing
                            records = await self._records(group, await (await pending.get()))
                            written = [asyncio.wrap_future(self._writer.submit(record)) for record in records]
                            writing.create_task(
                                self._count(records, written, budget, size=row_bytes * tokens_of(group))
                            )
                        await feeder
                finally:
                    await _cancel([feeder, *(pending.get_nowait() for _ in range(pending.qsize()))])
        except* ServerGone as gone:
            self._writer.close()  # what has arrived is complete
            kept = len(finished_ids(self._writer.out))
            error = gone.exceptions[0]
            raise self._server.failure(
                f"the server ended while extracting ({error}); the {kept} records captured so far are in finished "
                f"shards of {self._writer.out} and kept",
                cure="the same command continues there",
            ) from error
        except* AllFail as failed:
            self._writer.close()
            kept, spool = len(finished_ids(self._writer.out)), self._server.capturing.spool
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

    async def _ask(
        self,
        groups: list[Group],
        client: Client,
        budget: ByteBudget,
        pending: asyncio.Queue[asyncio.Task],
        *,
        row_bytes: int,
    ) -> None:
        for group in groups:
            await budget.take(row_bytes * tokens_of(group))
            await pending.put(asyncio.create_task(self._capture(group, client)))

    async def _capture(self, group: Group, client: Client) -> list[Captured | str]:
        """Of each prompt what was captured, or why nothing could be. Raises ServerGone, AllFail."""
        folder, rids = self._server.capturing.spool, [_rid(number, prompt, 0) for number, prompt in group]
        found: list[Captured | RequestFailed | RequestRefused]
        try:
            tokens = [torch.from_numpy(prompt.tokens) for _, prompt in group]
            found = await fetch_together(client, folder, tokens, rids=rids)
        except (RequestFailed, RequestRefused) as error:
            found = [error] * len(group)
        if not any(isinstance(one, Exception) for one in found):
            self._failed_in_a_row = 0
            return found
        again = {
            i: asyncio.create_task(self._alone(*group[i], client, error=one, lonely=len(group) == 1))
            for i, one in enumerate(found)
            if isinstance(one, Exception)
        }
        try:
            await asyncio.gather(*again.values())
            return [again[i].result() if i in again else one for i, one in enumerate(found)]
        finally:
            await _cancel(list(again.values()))
            forget(folder, rids)  # a server that refuses one may have begun with those before it

    async def _alone(
        self, number: int, prompt: Prompt, client: Client, *, error: RequestFailed | RequestRefused, lonely: bool
    ) -> Captured | str:
        """A prompt of a group that failed with `error`, by itself. lonely: it was by itself before."""
        refused = isinstance(error, RequestRefused)
        if refused and lonely:
            return f"refused by the server: {error}"
        reason, tries = str(error), self._retries + refused  # which of a group was refused is not known
        for attempt in range(1, tries + 1):
            await asyncio.sleep(RETRY_SECONDS * 2 ** (attempt - 1))
            tokens, rid = torch.from_numpy(prompt.tokens), _rid(number, prompt, attempt)
            try:
                captured = (await fetch(client, self._server.capturing.spool, tokens, rid=rid))[0]
                self._failed_in_a_row = 0
                return captured
            except RequestRefused as refusal:
                return f"refused by the server: {refusal}"
            except RequestFailed as failure:
                reason = str(failure)
        self._failed_in_a_row += 1
        reason = f"{self._retries + 1} times: {reason}"
        if self._failed_in_a_row >= MAX_IN_A_ROW:
            raise AllFail(reason)
        return reason

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


def tokens_of(group: Group) -> int:
    return sum(len(prompt.tokens) for _, prompt in group)


def _rid(number: int, prompt: Prompt, attempt: int) -> str:
    return rid_of(f"{prompt.split}-{number}-{attempt}")


async def _cancel(tasks: list[asyncio.Task]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
