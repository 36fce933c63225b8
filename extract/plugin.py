"""Runs inside SGLang's scheduler processes (entry point `sglang.srt.plugins`) and captures what a prefill computes.

Nothing happens unless the environment says EYAS_CAPTURE={"spool": folder, "layer_ids": [...] or null,
"feed": bool}. Then the target hands out its residual stream at `layer_ids`, as it would for an EAGLE-3
drafter, and each prefilled row of a request of ours goes to the spool, with the token it belongs to.
SGLang's control flow stays as it is: hooks look, call the original with the same arguments, and never raise. What
they cannot capture they report to the requests it concerns, which then fail and are tried again.

Where it looks: `LogitsProcessor.forward`, because on CUDA a prefill replays a graph of the transformer
body that bypasses hooks on layers; its inputs are then padded to the graph's size. Needs torch only.
"""

from __future__ import annotations

import itertools
import json
import logging
import multiprocessing
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from extract import spool
from extract.copier import Copier, Rows, Segment

VARIABLE = "EYAS_CAPTURE"

logger = logging.getLogger("eyas")
_capture: Capture | None = None


def register() -> None:
    """SGLang calls this in every process; only a scheduler's gets hooks, and only if a capture is asked for."""
    asked = os.environ.get(VARIABLE)
    if not asked:
        return
    options = json.loads(asked)
    if multiprocessing.parent_process() is None:  # the server's first process: no scheduler has written yet
        with suppress(OSError):
            spool.forget_servers(Path(options["spool"]))
    if "sglang.srt.managers.scheduler" not in sys.modules:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    global _capture
    _capture = Capture(Path(options["spool"]), layer_ids=options["layer_ids"])
    runner = "sglang.srt.model_executor.model_runner.ModelRunner"
    if options["layer_ids"] is not None:
        HookRegistry.register(f"{runner}.load_model", _after_load_model, HookType.AFTER)
        HookRegistry.register(f"{runner}.forward", _around_forward, HookType.AROUND)
        processor = "sglang.srt.layers.logits_processor.LogitsProcessor.forward"
        HookRegistry.register(processor, _around_logits, HookType.AROUND)
    if options["feed"]:
        from extract import feed

        feed.register(Path(options["spool"]))


def attention_rank() -> int:
    """This process' rank among those that hold the same rows."""
    from sglang.srt.runtime_context import get_parallel

    return get_parallel().attn_tp_rank


def _after_load_model(result: Any, runner: Any, *args: Any, **kwargs: Any) -> None:
    if getattr(runner, "is_draft_worker", False):
        return
    about: dict[str, Any] = {"pid": os.getpid(), "layer_ids": _capture.layer_ids, "format": spool.FORMAT}
    try:
        import sglang

        config = getattr(runner.model_config, "hf_text_config", runner.model_config.hf_config)
        about |= {
            "engine_version": sglang.__version__,
            "architecture": runner.model_config.hf_config.architectures[0],
            "num_layers": config.num_hidden_layers,
            "hidden_size": config.hidden_size,
            "vocab_size": config.vocab_size,
            "dtype": str(runner.dtype).removeprefix("torch."),
            "rank": attention_rank(),
        }
        _capture.prepare(torch.device(runner.device))
        runner.model.set_eagle3_layers_to_capture(_capture.layer_ids)
    except Exception as error:
        logger.exception("Eyas cannot capture from this model")
        about["error"] = f"{type(error).__name__}: {error}"
    try:
        spool.write_json(_capture.spool / f"server-{os.getpid()}.json", about)
    except OSError:
        logger.exception("Eyas cannot write to its spool")


def _around_forward(original: Callable, runner: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
    """Remembers the batch: under a CUDA graph the one that reaches the logits processor is the graph's own."""
    outer, _capture.batch = _capture.batch, None if getattr(runner, "is_draft_worker", True) else forward_batch
    try:
        return original(runner, forward_batch, *args, **kwargs)
    finally:
        _capture.batch = outer


def _around_logits(
    original: Callable,
    processor: Any,
    input_ids: Tensor,
    hidden_states: Tensor,
    lm_head: Any,
    logits_metadata: Any,
    aux_hidden_states: Any = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    if _capture.batch is not None:
        _capture.take(_capture.batch, hidden_states, aux_hidden_states)
    return original(processor, input_ids, hidden_states, lm_head, logits_metadata, aux_hidden_states, *args, **kwargs)


def segments_of(rids: list[str], counts: list[int], starts: list[int]) -> list[Segment]:
    """The segments of a packed batch that are ours."""
    segments, first = [], 0
    for rid, count, start in zip(rids, counts, starts):
        if rid.startswith(spool.RID_PREFIX) and count:
            segments.append(Segment(rid=rid, first=first, count=count, start=start))
        first += count
    return segments


class Capture:
    """The state of one scheduler process: the batch at hand, and the way to the spool."""

    def __init__(self, folder: Path, *, layer_ids: list[int] | None) -> None:
        self.spool, self.layer_ids = folder, layer_ids
        self.batch: Any = None  # of the target's forward that is running
        self._copier: Copier | None = None
        self._rank, self._numbers = 0, itertools.count()

    def prepare(self, device: torch.device) -> None:
        """Takes the memory that captured rows travel through, once the model is there and before graphs are made."""
        self._copier, self._rank = Copier(device, write=self._write, failed=self._report), attention_rank()

    def take(self, batch: Any, hidden: Tensor, aux: Any) -> None:
        """Sends this batch's prefilled rows of ours to the spool; an error goes there instead, never to the server."""
        segments: list[Segment] = []
        try:
            if batch.forward_mode.name not in ("EXTEND", "MIXED") or not batch.rids:
                return
            counts = list(batch.extend_seq_lens_cpu)
            segments = segments_of(batch.rids, counts, list(batch.extend_prefix_lens_cpu))
            if self._rank:
                segments = [segment for segment in segments if segment.rid.startswith(spool.ALL_RANKS_PREFIX)]
            if segments:
                columns = columns_of(hidden, aux, num_rows=sum(counts), num_aux=len(self.layer_ids))
                runs: dict[str, list[Segment]] = {}  # one, as a rule
                for segment in segments:
                    runs.setdefault(spool.run_of(segment.rid), []).append(segment)
                for own in runs.values():
                    self._copier.submit(columns, batch.input_ids, own)
        except Exception as error:
            self._report(segments, error)

    def _write(self, segments: Sequence[Segment], rows: Rows) -> None:
        """In one of the copier's threads: rows of several requests, as one file of the spool."""
        whose = [(segment.rid, segment.start, segment.count) for segment in segments]
        spool.write_piece(
            self.spool, whose, number=next(self._numbers), rank=self._rank, tokens=rows.tokens, aux=rows.aux, last=rows.last
        )

    def _report(self, segments: Sequence[Segment], error: Exception) -> None:
        """Never raises."""
        try:
            logger.error("Eyas could not capture %d requests' rows", len(segments), exc_info=error)
            for segment in segments:
                spool.write_error(self.spool, segment.rid, f"{type(error).__name__}: {error}")
        except Exception:
            logger.exception("nor say so in the spool: the extractor's time limit will")


def columns_of(hidden: Tensor, aux: Any, *, num_rows: int, num_aux: int) -> list[Tensor]:
    """The boundaries' states in their order and the final one, each [num_rows or more, H]; what is more is padding.

    aux is a list of [T, H], or one [T, A*H] (DeepSeek since SGLang 0.5.2x).
    Raises ValueError if the model handed out something else than was asked for.
    """
    if aux is None:
        raise ValueError("the model handed out no residual stream: is its two-batch overlap on?")
    columns = [*(aux.split(hidden.shape[-1], dim=-1) if isinstance(aux, Tensor) else aux), hidden]
    if len(columns) != num_aux + 1:
        raise ValueError(f"the model handed out its residual stream at {len(columns) - 1} layers, not {num_aux}")
    fewest = min(column.shape[0] for column in columns)
    if fewest < num_rows:
        raise ValueError(f"the model handed out {fewest} rows for {num_rows} tokens")
    if len({(column.shape[1:], column.dtype) for column in columns}) > 1:
        raise ValueError(f"the model handed out states of different kinds: {[(c.shape, c.dtype) for c in columns]}")
    return columns
