"""Inside SGLang: what the serving engine feeds an EAGLE-3 drafter, and what the drafter proposes.

For requests of ours only, and only if EYAS_CAPTURE asks for it: the wiring check before serving and
the train-serve parity test read it. It copies to the CPU as it goes, so it is not for production.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, Callable

import torch
from torch import Tensor

from extract import spool
from extract.plugin import attention_rank, segments_of

logger = logging.getLogger("eyas")
_spool: Path


def register(folder: Path) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    global _spool
    _spool = folder
    worker = "sglang.srt.speculative.eagle_worker_v2.EagleDraftWorker"
    HookRegistry.register(f"{worker}._draft_extend_for_prefill", _around_prefill, HookType.AROUND)
    HookRegistry.register(f"{worker}.draft", _around_draft, HookType.AROUND)


def _around_prefill(original: Callable, worker: Any, batch: Any, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
    """The drafter's own prefill: row p gets the target's states of token p and, as its token, the one after."""
    try:
        rids, counts, starts = [req.rid for req in batch.reqs], list(batch.extend_lens), list(batch.prefix_lens)
    except Exception:
        logger.exception("Eyas could not read the drafter's prefill")
        return original(worker, batch, hidden, *args, **kwargs)
    result = original(worker, batch, hidden, *args, **kwargs)
    try:
        if attention_rank() == 0:
            for segment in segments_of(rids, counts, starts):
                rows = slice(segment.first, segment.first + segment.count)
                spool.write_feed(
                    _spool, segment.rid, start=segment.start,
                    tokens=batch.input_ids[rows].to("cpu", torch.int32),  # the worker shifted them by one
                    features=hidden[rows].cpu().contiguous(),
                )  # fmt: skip
    except Exception:
        logger.exception("Eyas could not write the drafter's prefill")
    return result


def _around_draft(original: Callable, worker: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    """A chain of drafts per request: the target's own last token, then the proposals that the target is to verify."""
    positions = None
    try:
        positions = batch.seq_lens.tolist()
    except Exception:
        logger.exception("Eyas could not read the drafter's positions")
    result = original(worker, batch, *args, **kwargs)
    try:
        verify = result[0] if isinstance(result, tuple) else result
        if positions and attention_rank() == 0:
            chains = verify.draft_token.view(len(positions), -1).tolist()
            for req, position, chain in zip(batch.reqs, positions, chains):
                if req.rid.startswith(spool.RID_PREFIX):
                    step = {"position": position, "tokens": chain}
                    spool.append_line(_spool / req.rid / spool.STEPS, step)
    except Exception:
        logger.exception("Eyas could not write the drafter's proposals")
    return result
