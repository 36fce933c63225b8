"""Prompts on their way to the server: a few to a request, and each alone where that failed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from data.prompts import Prompt
from extract import spool
from extract.capture import Captured
from extract.client import Client, RequestFailed, RequestRefused
from extract.fetch import fetch, fetch_together, rid_of

RETRY_SECONDS = 0.1  # before the second try, then twice as long each time
PROMPTS, TOKENS = 16, 8192  # of one request, at most: a GPU prefills as much at a time
MOST_ALONE = 128  # requests of one prompt at a time: each has a connection, and a process 1024 open files as a rule
MAX_IN_A_ROW = 64  # prompts that fail one after the other: what fails them will fail the rest, a full spool for one
REFUSED = "refused by the server"  # begins the reason of a prompt that no other try would help


class AllFail(Exception):
    """One prompt after the other fails, and none is captured."""


Group = list[tuple[int, Prompt]]  # each with its number in the split


def groups_of(prompts: Iterable[Prompt], *, most_tokens: int) -> Iterator[Group]:
    """The prompts in their order, as they are asked for; one that is larger than a group should be is one alone."""
    group: Group = []
    tokens, most_tokens = 0, min(most_tokens, TOKENS)
    for number, prompt in enumerate(prompts):
        if group and (len(group) == PROMPTS or tokens + len(prompt.tokens) > most_tokens):
            yield group
            group, tokens = [], 0
        group.append((number, prompt))
        tokens += len(prompt.tokens)
    if group:
        yield group


def tokens_of(group: Group) -> int:
    return sum(len(prompt.tokens) for _, prompt in group)


def _rid(number: int, prompt: Prompt, attempt: int) -> str:
    return rid_of(f"{prompt.split}-{number}-{attempt}")


class Asker:
    """Captures groups of prompts, several at a time.

    spool    of the server
    retries  of a prompt that fails; not of one that is refused
    """

    def __init__(self, client: Client, spool: Path, *, retries: int) -> None:
        self._client, self._spool, self._retries = client, spool, retries
        self._failed_in_a_row, self._free = 0, asyncio.Semaphore(MOST_ALONE)

    async def capture(self, group: Group) -> list[Captured | str]:
        """Of each prompt what was captured, or why nothing could be. Raises ServerGone, AllFail."""
        rids = [_rid(number, prompt, 0) for number, prompt in group]
        found: list[Captured | RequestFailed | RequestRefused]
        try:
            tokens = [torch.from_numpy(prompt.tokens) for _, prompt in group]
            found = await fetch_together(self._client, self._spool, tokens, rids=rids)
        except (RequestFailed, RequestRefused) as error:
            found = [error] * len(group)
        failed = {i: one for i, one in enumerate(found) if isinstance(one, Exception)}
        if len(failed) < len(group):
            self._failed_in_a_row = 0
        if not failed:
            return found
        again = {
            i: asyncio.create_task(self._alone(*group[i], error=error, lonely=len(group) == 1))
            for i, error in failed.items()
        }
        try:
            await asyncio.gather(*again.values())
            return [again[i].result() if i in again else one for i, one in enumerate(found)]
        finally:
            await cancel(list(again.values()))
            spool.forget(self._spool, rids)  # a server that refuses one may have begun with those before it

    async def _alone(
        self, number: int, prompt: Prompt, *, error: RequestFailed | RequestRefused, lonely: bool
    ) -> Captured | str:
        """A prompt of a group that failed with `error`, by itself. lonely: it was by itself before."""
        refused = isinstance(error, RequestRefused)
        if refused and lonely:
            return f"{REFUSED}: {error}"
        reason, tries = str(error), self._retries + refused  # which of a group was refused is not known
        for attempt in range(1, tries + 1):
            await asyncio.sleep(RETRY_SECONDS * 2 ** (attempt - 1))
            tokens, rid = torch.from_numpy(prompt.tokens), _rid(number, prompt, attempt)
            try:
                async with self._free:
                    captured = (await fetch(self._client, self._spool, tokens, rid=rid))[0]
                self._failed_in_a_row = 0
                return captured
            except RequestRefused as refusal:
                return f"{REFUSED}: {refusal}"
            except RequestFailed as failure:
                reason = str(failure)
        self._failed_in_a_row += 1
        reason = f"{self._retries + 1} times: {reason}"
        if self._failed_in_a_row >= MAX_IN_A_ROW:
            raise AllFail(reason)
        return reason


async def cancel(tasks: list[asyncio.Task]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
