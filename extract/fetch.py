"""One request and what the plugin captured of it: tokens out over HTTP, rows back through the spool."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from extract import spool
from extract.arrivals import RUN, Arrivals, Awaited
from extract.capture import Captured
from extract.client import Client, RequestFailed
from extract.rows import Segment, read_feed

ROWS_SECONDS = 120.0  # longest wait for rows after the answer: the server's writers may be behind a slow disk
LOOK_SECONDS = 0.1  # between two looks for what the plugin says of a request whose rows do not come


def rid_of(name: str, *, all_ranks: bool = False) -> str:
    """A request id that the plugin captures; with `all_ranks` from every rank of the server."""
    return f"{spool.ALL_RANKS_PREFIX if all_ranks else spool.RID_PREFIX}{RUN}-{name}"


async def fetch(
    client: Client, folder: Path, tokens: Tensor, *, rid: str, max_new_tokens: int = 0, num_ranks: int = 1
) -> dict[int, Captured]:
    """Prefills `tokens` [T] on the server: what each rank captured of them.

    num_ranks  that must have written; above 1 only for rids with the prefix eyas-all-
    Raises RequestFailed if rows are missing or are not of these tokens, ServerGone, RequestRefused.
    """
    try:
        with Arrivals.at(folder).awaiting({rid: len(tokens)}, num_ranks=num_ranks) as awaited:
            answer = await client.generate(tokens.tolist(), rid=rid, max_new_tokens=max_new_tokens, uncached=True)
            ranks = await _rows(folder, rid, awaited[rid], until=time.monotonic() + ROWS_SECONDS)
        next_token = answer.output_ids[0] if answer.output_ids else None
        return {rank: _checked(rows, tokens, next_token=next_token) for rank, rows in ranks.items()}
    except RequestFailed:
        spool.forget(folder, [rid])
        raise


async def fetch_together(
    client: Client, folder: Path, prompts: Sequence[Tensor], *, rids: Sequence[str]
) -> list[Captured | RequestFailed]:
    """Prefills the prompts, [T] each, in one request: what rank 0 captured of each, or why it is not there.

    Raises ServerGone, and RequestFailed or RequestRefused of all. What the plugin said of those that failed stays in the spool.
    """
    found: list[Captured | RequestFailed] = []
    with Arrivals.at(folder).awaiting({rid: len(tokens) for rid, tokens in zip(rids, prompts)}) as awaited:
        answers = await client.prefill([tokens.tolist() for tokens in prompts], rids=rids)
        until = time.monotonic() + ROWS_SECONDS
        for rid, tokens, answer in zip(rids, prompts, answers):
            try:
                if isinstance(answer, RequestFailed):
                    raise answer
                ranks = await _rows(folder, rid, awaited[rid], until=until)
                found.append(_checked(ranks[0], tokens))
            except RequestFailed as error:
                found.append(error)
    return found


async def _rows(folder: Path, rid: str, awaited: Awaited, *, until: float) -> dict[int, Segment]:
    """rank -> its rows, once they are here. Raises RequestFailed if they cannot be, or are not in time."""
    while not awaited.here.done():
        if reason := spool.read_error(folder, rid):
            raise RequestFailed(f"the plugin could not capture it: {reason}")
        if time.monotonic() > until:
            raise RequestFailed(
                f"rows captured of {awaited.num_tokens} tokens, by rank: {awaited.sizes} after {ROWS_SECONDS:.0f} s"
            )
        await asyncio.wait([awaited.here], timeout=LOOK_SECONDS)
    try:
        return await awaited.rows()
    except ValueError as error:
        raise RequestFailed(str(error)) from error


def _checked(rows: Segment, tokens: Tensor, *, next_token: int | None = None) -> Captured:
    """The rows of `tokens`, [T]; the server may have gone on. Raises RequestFailed if they are none of these."""
    echoed, aux, last = (column[: len(tokens)] for column in (rows.tokens, rows.aux, rows.last))
    if not torch.equal(echoed, tokens.to(torch.int32)):
        raise RequestFailed("the server echoes other tokens than it was sent")
    if not rows.finite:
        raise RequestFailed("states that are not finite")
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
    parts = [read_feed(path) for path in sorted((folder / rid).glob(f"{spool.FEED}*{spool.SUFFIX}"))]
    if not parts:
        raise ValueError(f"{folder / rid} holds no drafter feed: start the server with a drafter and feed=True")
    lines = (folder / rid / spool.STEPS).read_text().splitlines() if (folder / rid / spool.STEPS).exists() else []
    steps = [json.loads(line) for line in lines]
    return DrafterFeed(
        tokens=torch.cat([tokens for tokens, _ in parts]),
        features=torch.cat([features for _, features in parts]),
        steps=[(step["position"], step["tokens"]) for step in steps],
    )
