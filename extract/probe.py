"""The wiring probe of a live server: before the first shard, and before a drafter is served. docs/design.md

A fixed set of token sequences goes through the server; extract/wiring.py compares what comes back.
"""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import torch
from torch import Tensor

from data.boundaries import text_config
from data.schema import Record
from extract.capture import Captured, Reference, States, head_weight, reference_fits
from extract.client import Client, RequestFailed, RequestRefused, ServerGone
from extract.config import ProbeConfig
from extract.fetch import DrafterFeed, fetch, read_drafter_feed, rid_of
from extract.server import Server
from extract.wiring import TOLERANCE_16_BIT, Report, check_ranks, check_states

LENGTHS = (5, 24, 61)  # tokens of the probe's sequences
DRAFT_TOKENS = 8  # new tokens of a probe with a drafter


def probe_tokens(vocab_size: int) -> list[Tensor]:
    """The fixed sequences; from the middle of the vocabulary, since special tokens stand at its ends."""
    generator = torch.Generator().manual_seed(0)
    low, high = vocab_size // 8, vocab_size // 2
    return [torch.randint(low, high, (length,), generator=generator, dtype=torch.int32) for length in LENGTHS]


def load_reference(target: Path, config: ProbeConfig, *, trust_remote_code: bool = False) -> Reference | None:
    """The Hugging Face reference, where the config wants it and it fits in memory."""
    if config.reference == "off" or not reference_fits(target):
        return None
    return Reference(target, trust_remote_code=trust_remote_code)


def probe_server(server: Server, *, boundaries: list[int], reference: Reference | None, config: ProbeConfig) -> Report:
    """Captures the fixed sequences on every rank and compares them with the reference, if there is one.

    server  may still be starting: the reference computes meanwhile

    Prints the table. Raises ValueError if the wiring is wrong: which boundary the data really is, and the cure.
    """
    sequences = probe_tokens(text_config(server.target)["vocab_size"])
    expected = [reference.states(tokens) for tokens in sequences] if reference else None
    by_rank = asyncio.run(_capture(server.ready(), sequences))
    captured = [ranks[0] for ranks in by_rank]
    report = check_states(
        captured,
        expected,
        boundaries=boundaries,
        head=reference.head if reference else head_weight(server.target),
        where=f"the server at {server.url}",
        cure="its layer ids mean something else than data/boundaries.py says of this engine and version; "
        "set target.boundaries={found} to take it as it is, and please report it",
        tolerance=config.tolerance,
    )
    report.problems += [problem for ranks in by_rank for problem in check_ranks(ranks)]
    _show(report, against="Hugging Face and its own next tokens" if reference else "its own next tokens (no reference)")
    report.require_passed()
    return report


async def _capture(server: Server, sequences: list[Tensor]) -> list[dict[int, Captured]]:
    try:
        async with Client(server.url, timeout_seconds=server.config.answer_timeout_seconds) as client:
            return await asyncio.gather(
                *(
                    fetch(
                        client, server.capturing.spool, tokens, rid=rid_of(f"probe-{i}", all_ranks=True),
                        max_new_tokens=1, num_ranks=server.num_ranks,
                    )
                    for i, tokens in enumerate(sequences)
                )
            )  # fmt: skip
    except (ServerGone, RequestFailed, RequestRefused) as error:
        longer = "engine.max_total_tokens and engine.context_length must have room for some hundred tokens"
        cure = longer if "Input length" in str(error) else "see the server's log"
        raise server.failure(f"the wiring probe got no states ({error})", cure=cure) from error


def probe_drafter(
    server: Server,
    *,
    boundaries: list[int],
    reference: Reference | None,
    record: Record | None = None,
    config: ProbeConfig,
) -> Report:
    """What a serving engine feeds its drafter, against the boundaries that the checkpoint was trained on.

    server     started with a drafter and Capturing(feed=True)
    reference  Hugging Face; where it does not fit, `record` of the shards that the drafter learnt from

    Prints the table. Raises ValueError if the drafter is fed something else: what it is, and the cure.
    """
    tolerance = config.tolerance
    if reference is not None:
        sequences = probe_tokens(text_config(server.target)["vocab_size"])
        expected = [reference.states(tokens) for tokens in sequences]
    elif record is not None:
        sequences, tolerance = [record.tokens], tolerance or TOLERANCE_16_BIT  # shards are bf16
        residual = {boundary: record.aux[:, i].float() for i, boundary in enumerate(boundaries)}
        last = record.last if record.last is not None else torch.zeros_like(record.aux[:, 0])  # a codec without it
        expected = [States(residual=residual, last=last.float())]
    else:
        raise ValueError("nothing to compare with what the drafter is fed: give shards=, or probe.reference=auto")
    feeds = asyncio.run(_feeds(server, sequences))
    report = check_drafter_feed(
        feeds, sequences, expected, boundaries=boundaries, where=f"what {server.url} feeds its drafter",
        tolerance=tolerance,
    )  # fmt: skip
    _show(report, against="Hugging Face" if reference is not None else "the shards")
    report.require_passed()
    return report


async def _feeds(server: Server, sequences: list[Tensor]) -> list[DrafterFeed]:
    """One after the other, so that each sequence's drafts are those of a request alone."""
    feeds = []
    try:
        async with Client(server.url, timeout_seconds=server.config.answer_timeout_seconds) as client:
            for i, tokens in enumerate(sequences):
                rid = rid_of(f"feed-{i}")
                await client.generate(
                    tokens.tolist(), rid=rid, max_new_tokens=DRAFT_TOKENS, ignore_eos=True, uncached=True
                )
                feeds.append(read_drafter_feed(server.capturing.spool, rid))
                shutil.rmtree(server.capturing.spool / rid)
    except (ServerGone, RequestFailed, RequestRefused, ValueError) as error:
        raise server.failure(f"the drafter's feed was not captured ({error})", cure="see the server's log") from error
    return feeds


def check_drafter_feed(
    feeds: list[DrafterFeed],
    sequences: list[Tensor],
    expected: list[States],
    *,
    boundaries: list[int],
    where: str,
    tolerance: float | None = None,
) -> Report:
    """The comparison of `probe_drafter`: features against the boundaries, tokens against the prompt's, one ahead."""
    width = expected[0].last.shape[-1]
    captured = [
        Captured(tokens=feed.tokens, aux=feed.features.view(len(feed.tokens), -1, width), last=None) for feed in feeds
    ]
    report = check_states(
        captured,
        expected,
        boundaries=boundaries,
        head=None,
        where=where,
        cure=f"the drafter learnt boundaries {boundaries} and is served {{found}}; export it again for this engine "
        "and version, so that eagle_aux_hidden_state_layer_ids in its config.json are right",
        tolerance=tolerance,
    )
    for feed, tokens in zip(feeds, sequences):
        if not torch.equal(feed.tokens[:-1], tokens[1:].to(torch.int32)):
            report.problems.append(f"in {where}, row p is not fed token p + 1: this engine aligns drafters otherwise")
    return report


def _show(report: Report, *, against: str) -> None:
    print(report.table())
    print(f"wiring probe {'passed' if report.passed else 'FAILED'}: {report.num_tokens} tokens against {against}")
