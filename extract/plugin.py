"""Runs inside SGLang's scheduler processes (entry point `sglang.srt.plugins`) and captures what a prefill computes.

Nothing happens unless the environment says EYAS_CAPTURE={"spool": folder, "layer_ids": [...] or null,
"feed": bool}. Then the target hands out its residual stream at `layer_ids`, as it would for an EAGLE-3
drafter, and each prefilled row of a request of ours goes to the spool, with the token it belongs to.
SGLang's control flow stays as it is: hooks look, call the original, and never raise.

Where it looks: `LogitsProcessor.forward`, because on CUDA a prefill replays a graph of the transformer
body that bypasses hooks on layers; its inputs are then padded to the graph's size. Needs torch only.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import queue
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable

import torch
from torch import Tensor

from extract import spool

VARIABLE = "EYAS_CAPTURE"
NUM_BUFFERS = 6  # batches on their way from the device to the spool; a slow disk then holds up the next forward
NUM_WRITERS = 4  # threads; one wrote 2.5 GB/s less than an H200 prefills, four kept up

logger = logging.getLogger("eyas")
_capture: Capture | None = None


def register() -> None:
    """SGLang calls this in every process; only a scheduler's gets hooks, and only if a capture is asked for."""
    asked = os.environ.get(VARIABLE)
    if not asked or "sglang.srt.managers.scheduler" not in sys.modules:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    global _capture
    options = json.loads(asked)
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
    if runner.is_draft_worker:
        return
    about = {"pid": os.getpid(), "layer_ids": _capture.layer_ids}
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
    outer, _capture.batch = _capture.batch, None if runner.is_draft_worker else forward_batch
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


@dataclass(frozen=True)
class Segment:
    """Rows [first, first + count) of a batch are a request's rows from `start`."""

    rid: str
    first: int
    count: int
    start: int


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
        self._copier: DeviceCopier | None = None

    def take(self, batch: Any, hidden: Tensor, aux: Any) -> None:
        """Sends this batch's prefilled rows of ours to the spool; an error goes there instead, never to the server."""
        segments: list[Segment] = []
        try:
            if batch.forward_mode.name not in ("EXTEND", "MIXED") or not batch.rids:
                return
            counts = list(batch.extend_seq_lens_cpu)
            segments = segments_of(batch.rids, counts, list(batch.extend_prefix_lens_cpu))
            rank = attention_rank()
            if rank:
                segments = [segment for segment in segments if segment.rid.startswith(spool.ALL_RANKS_PREFIX)]
            if not segments:
                return
            states = stack_states(hidden, aux, num_rows=sum(counts), num_aux=len(self.layer_ids))
            tokens = batch.input_ids[: sum(counts)].to(torch.int32)
            write = functools.partial(self._write, segments=segments, rank=rank)
            if states.is_cuda:
                self._copier = self._copier or DeviceCopier(states.device)
                self._copier.submit(states, tokens, write=write)
            else:
                write(states, tokens)
        except Exception as error:
            self._report(segments, error)

    def _write(self, states: Tensor, tokens: Tensor, *, segments: list[Segment], rank: int) -> None:
        try:
            for segment in segments:
                rows = slice(segment.first, segment.first + segment.count)
                spool.write_part(
                    self.spool, segment.rid, start=segment.start, rank=rank, tokens=tokens[rows], states=states[rows]
                )
        except Exception as error:
            self._report(segments, error)

    def _report(self, segments: list[Segment], error: Exception) -> None:
        logger.exception("Eyas could not capture a batch")
        for segment in segments:
            try:
                spool.write_json(self.spool / segment.rid / "error.json", {"error": f"{type(error).__name__}: {error}"})
            except OSError:
                logger.exception("nor say so in the spool: the extractor's time limit will")


def stack_states(hidden: Tensor, aux: Any, *, num_rows: int, num_aux: int) -> Tensor:
    """The first `num_rows` rows of the aux states and of the final one, as [T, A+1, H].

    aux is a list of [T, H], or one [T, A*H] (DeepSeek since SGLang 0.5.2x); rows past num_rows are padding.
    Raises ValueError if the model handed out something else than was asked for.
    """
    if aux is None:
        raise ValueError("the model handed out no residual stream")
    columns = [*(aux.split(hidden.shape[-1], dim=-1) if isinstance(aux, Tensor) else aux), hidden]
    if len(columns) != num_aux + 1:
        raise ValueError(f"the model handed out its residual stream at {len(columns) - 1} layers, not {num_aux}")
    fewest = min(column.shape[0] for column in columns)
    if fewest < num_rows:
        raise ValueError(f"the model handed out {fewest} rows for {num_rows} tokens")
    return torch.stack([column[:num_rows] for column in columns], dim=1)


class DeviceCopier:
    """Copies batches to pinned memory on a stream of its own while the next forward runs; threads write them."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._free: queue.Queue[Tensor | None] = queue.Queue()  # pinned bytes, made and grown on demand
        self._full: queue.Queue[tuple] = queue.Queue()
        for _ in range(NUM_BUFFERS):
            self._free.put(None)
        for number in range(NUM_WRITERS):
            threading.Thread(target=self._work, name=f"eyas-writer-{number}", daemon=True).start()

    def submit(self, states: Tensor, tokens: Tensor, *, write: Callable[[Tensor, Tensor], None]) -> None:
        """Waits for a free buffer, starts the copies, returns; `write(states, tokens)` runs in a thread."""
        num_bytes = states.numel() * states.element_size()
        buffer = self._free.get()
        try:
            if buffer is None or buffer.numel() < num_bytes:
                buffer = torch.empty(num_bytes + num_bytes // 4, dtype=torch.uint8, pin_memory=True)
            host = buffer[:num_bytes].view(states.dtype).view(states.shape)
            self._stream.wait_stream(torch.cuda.current_stream(states.device))
            with torch.cuda.stream(self._stream):
                host.copy_(states, non_blocking=True)
                host_tokens = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
                host_tokens.copy_(tokens, non_blocking=True)
                done = torch.cuda.Event()
                done.record(self._stream)
            for tensor in (states, tokens):
                tensor.record_stream(self._stream)
        except BaseException:
            self._free.put(buffer)
            raise
        self._full.put((buffer, host, host_tokens, done, write))

    def _work(self) -> None:
        while True:
            buffer, host, host_tokens, done, write = self._full.get()
            try:
                done.synchronize()
                write(host, host_tokens)
            finally:
                self._free.put(buffer)
