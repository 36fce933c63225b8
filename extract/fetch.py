"""One request and what the plugin captured of it: tokens out over HTTP, rows back through the spool."""

from __future__ import annotations

import asyncio
import json
import struct
import time
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from data.codecs import is_finite
from extract import spool
from extract.capture import Captured
from extract.client import Client, RequestFailed
from extract.memory import Memory
from extract.rows import Rows, read_rows, take_whole

RUN = uuid.uuid4().hex[:8]  # of this process, in its rids: rows that an earlier run asked for are not this one's
ROWS_SECONDS = 120.0  # longest wait for rows after the answer: the server's writers may be behind a slow disk
_READERS = ThreadPoolExecutor(4, "spool-reader")  # with 8 the interpreter changes hands twice as often, and all is slower
_MEMORY = Memory()  # of the rows that are read


def rid_of(name: str, *, all_ranks: bool = False) -> str:
    """A request id that the plugin captures; with `all_ranks` from every rank of the server."""
    return f"{spool.ALL_RANKS_PREFIX if all_ranks else spool.RID_PREFIX}{RUN}-{name}"


async def fetch(
    client: Client, folder: Path, tokens: Tensor, *, rid: str, max_new_tokens: int = 0, num_ranks: int = 1
) -> dict[int, Captured]:
    """Prefills `tokens` [T] on the server: what each rank captured of them. The spool is empty of `rid` afterwards.

    num_ranks  that must have written; above 1 only for rids with the prefix eyas-all-
    Raises RequestFailed if rows are missing or are not of these tokens, ServerGone, RequestRefused.
    """
    try:
        answer = await client.generate(tokens.tolist(), rid=rid, max_new_tokens=max_new_tokens, uncached=True)
        await _rows_are_here(folder, rid, num_tokens=len(tokens), num_ranks=num_ranks, until=time.monotonic() + ROWS_SECONDS)
        next_token = answer.output_ids[0] if answer.output_ids else None
        return await asyncio.to_thread(_read, folder, rid, tokens, next_token=next_token)  # others go on meanwhile
    finally:
        spool.forget(folder, [rid])


async def fetch_together(
    client: Client, folder: Path, prompts: Sequence[Tensor], *, rids: Sequence[str]
) -> list[Captured | RequestFailed]:
    """Prefills the prompts, [T] each, in one request: what rank 0 captured of each, or why it is not there.

    The spool is empty of the rids afterwards. Raises ServerGone, and RequestFailed or RequestRefused of all.
    """
    found: dict[int, Captured | RequestFailed] = {}
    try:
        answers = await client.prefill([tokens.tolist() for tokens in prompts], rids=rids)
        until, loop = time.monotonic() + ROWS_SECONDS, asyncio.get_running_loop()
        found = {i: answer for i, answer in enumerate(answers) if isinstance(answer, RequestFailed)}
        while left := [i for i in range(len(prompts)) if i not in found]:
            try:  # they come in this order, so that the last one is the one to look for
                await _rows_are_here(folder, rids[left[-1]], num_tokens=len(prompts[left[-1]]), num_ranks=1, until=until)
            except RequestFailed as error:
                found[left[-1]] = error
            asked = [(i, rids[i], prompts[i]) for i in left if i not in found]
            found |= await loop.run_in_executor(_READERS, _read_those_here, folder, asked)
        return [found[i] for i in range(len(prompts))]
    finally:
        spool.forget(folder, [rid for i, rid in enumerate(rids) if not isinstance(found.get(i), Captured)])


def _read_those_here(folder: Path, asked: list[tuple[int, str, Tensor]]) -> dict[int, Captured | RequestFailed]:
    """In a thread: of each (i, rid, tokens) whose rows are here i -> what was captured, or why it failed."""
    found: dict[int, Captured | RequestFailed] = {}
    for i, rid, tokens in asked:
        try:
            with _unreadable_is_failed():
                rows = take_whole(folder, rid, len(tokens), memory=_MEMORY.take)
            if rows is not None:
                found[i] = _checked(rows, tokens)
            elif _is_here(folder, rid, num_tokens=len(tokens), num_ranks=1):
                found[i] = _read(folder, rid, tokens)[0]
                spool.forget(folder, [rid])
        except RequestFailed as error:
            found[i] = error
    return found


async def _rows_are_here(folder: Path, rid: str, *, num_tokens: int, num_ranks: int, until: float) -> None:
    """Returns once they are. Raises RequestFailed if they cannot be, or are not in time."""
    pause = 0.001
    while not _is_here(folder, rid, num_tokens=num_tokens, num_ranks=num_ranks):
        if time.monotonic() > until:
            raise RequestFailed(
                f"rows captured of {num_tokens} tokens, by rank: {_sizes(folder, rid)} after {ROWS_SECONDS:.0f} s"
            )
        await asyncio.sleep(pause)
        pause = min(2 * pause, 0.1)


def _is_here(folder: Path, rid: str, *, num_tokens: int, num_ranks: int) -> bool:
    """Whether the parts are as many rows as tokens, of every rank. Raises RequestFailed if they will not come."""
    sizes = _sizes(folder, rid)
    if len(sizes) >= num_ranks and all(size >= num_tokens for size in sizes.values()):
        return True
    if reason := spool.read_error(folder, rid):
        raise RequestFailed(f"the plugin could not capture it: {reason}")
    return False


def _sizes(folder: Path, rid: str) -> dict[int, int]:
    """rank -> number of its rows."""
    sizes: dict[int, int] = {}
    for rank, _, count in spool.list_rows(folder, rid):
        sizes[rank] = sizes.get(rank, 0) + count
    return sizes


def _read(folder: Path, rid: str, tokens: Tensor, *, next_token: int | None = None) -> dict[int, Captured]:
    """What each rank has left in the spool of `rid`. Raises RequestFailed as `fetch` does."""
    with _unreadable_is_failed():
        ranks = read_rows(folder, rid, memory=_MEMORY.take)
    return {rank: _checked(rows, tokens, next_token=next_token) for rank, rows in ranks.items()}


@contextmanager
def _unreadable_is_failed() -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, KeyError, struct.error) as error:
        raise RequestFailed(f"its rows cannot be read ({error})") from error


def _checked(rows: Rows, tokens: Tensor, *, next_token: int | None = None) -> Captured:
    """The rows of `tokens`, [T]; the server may have gone on. Raises RequestFailed if they are none of these."""
    if not torch.equal(rows.tokens[: len(tokens)], tokens.to(torch.int32)):
        raise RequestFailed("the server echoes other tokens than it was sent")
    if not is_finite(rows.states):
        raise RequestFailed("states that are not finite")
    echoed, aux, last = (column[: len(tokens)] for column in (rows.tokens, rows.aux, rows.last))
    return Captured(tokens=echoed, aux=aux, last=last, next_token=next_token)


@dataclass(frozen=True)
class DrafterFeed:
    """What the serving engine fed its drafter with a prompt of T tokens, and what the drafter then proposed.

    tokens    [T] int32: row p holds token p + 1; the last row the target's first new token
    features  [T, A*H]: the target's states of token p, side by side, before the drafter's fc
    steps     (position, chain) of every verified step, in order: chain[0] is the target's own token at `position`,
              chain[1:] the drafter's proposals for the positions after it
    """

    tokens: Tensor
    features: Tensor
    steps: list[tuple[int, list[int]]]


def read_drafter_feed(folder: Path, rid: str) -> DrafterFeed:
    """Reads what a server with `Capturing(feed=True)` and a drafter left in the spool for `rid`.

    Raises ValueError if there is nothing.
    """
    ranks = read_rows(folder, rid, kind=spool.FEED)
    if not ranks:
        raise ValueError(f"{folder / rid} holds no drafter feed: start the server with a drafter and feed=True")
    lines = (folder / rid / spool.STEPS).read_text().splitlines() if (folder / rid / spool.STEPS).exists() else []
    steps = [json.loads(line) for line in lines]
    return DrafterFeed(
        tokens=ranks[0].tokens,
        features=ranks[0].aux[:, 0],
        steps=[(step["position"], step["tokens"]) for step in steps],
    )
