"""From prompts to shards, with a stand-in for the server that can fail in every way a request can."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from aiohttp import web

from data.codecs import TeacherHead
from data.manifest import Manifest, finished_ids
from data.prompts import Prompt
from data.schema import Provenance
from data.shards import ShardReader
from data.signals import told_to_end
from data.storage import Uploader
from extract import fetch, groups, sink, spool
from extract.client import Client
from extract.sink import extract
from tests.records import no_room_for

HIDDEN, BOUNDARIES = 8, (1, 2)
ROW_BYTES = (len(BOUNDARIES) + 1) * HIDDEN * 4
PROVENANCE = Provenance(
    target="toy", config_hash="c", weights_fingerprint="w", tokenizer_hash="t", chat_template_hash="m",
    boundaries=BOUNDARIES, num_layers=4, hidden_size=HIDDEN, vocab_size=1000, codec="fp32", engine="sglang",
    engine_version="0.5.23",
)  # fmt: skip


class StandIn:
    """Serves /generate in a thread. `behaviour(rid, attempt)` says how a request goes; states are token + 1000 * column."""

    def __init__(self, folder: Path, behaviour=lambda name, attempt: "fine") -> None:
        self.capturing, self.config = SimpleNamespace(spool=folder), SimpleNamespace(answer_timeout_seconds=30)
        self.state_bytes, self.behaviour = 4, behaviour
        self.asked: list[str] = []
        self.bytes_out = self.most_bytes_out = self.most_together = self.requests_out = self.most_requests_out = 0
        self._ready, self._numbers = threading.Event(), itertools.count()

    def failure(self, what: str, *, cure: str) -> ValueError:
        return ValueError(f"{what}: {cure}")

    def stop(self) -> None:
        pass

    def __enter__(self) -> StandIn:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def __exit__(self, *error: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        application = web.Application()
        application.router.add_post("/generate", self._generate)
        runner = web.AppRunner(application)
        self._loop.run_until_complete(runner.setup())
        self._site = web.TCPSite(runner, "127.0.0.1", 0)
        self._loop.run_until_complete(self._site.start())
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        self._ready.set()
        self._loop.run_forever()
        self._loop.run_until_complete(runner.cleanup())

    async def _generate(self, request: web.Request) -> web.Response:
        """One prompt, or several: one that a real server refuses, or cannot take, is the end of all."""
        said = await request.json()
        together = isinstance(said["rid"], list)
        rids, prompts = (said["rid"], said["input_ids"]) if together else ([said["rid"]], [said["input_ids"]])
        assert not together or len(said["extra_key"]) == len(rids) == len(prompts)
        self.most_together = max(self.most_together, len(rids))
        size = sum(map(len, prompts)) * ROW_BYTES
        self.bytes_out, self.requests_out = self.bytes_out + size, self.requests_out + 1
        self.most_bytes_out = max(self.most_bytes_out, self.bytes_out)
        self.most_requests_out = max(self.most_requests_out, self.requests_out)
        names = [rid.removeprefix(f"eyas-{fetch.RUN}-").rsplit("-", 1) for rid in rids]
        how = [self.behaviour(name, int(attempt)) for name, attempt in names]
        self.asked += [name for name, _ in names]
        await asyncio.sleep(0.05 if "slow" in how else 0.005)
        self.bytes_out, self.requests_out = self.bytes_out - size, self.requests_out - 1
        answers = []
        for one, rid, tokens in zip(how, rids, prompts):
            if one == "refuses":
                return web.Response(status=400, text="Input length (9000 tokens) exceeds the maximum allowed length")
            if one == "fails":
                return web.Response(status=500, text="oops")
            if one == "drops":
                request.transport.close()
            if one == "dies":  # it takes no more connections, and this one ends without an answer
                await self._site.stop()
                request.transport.close()
            self._capture(rid, torch.tensor(tokens, dtype=torch.int32), one)
            ended = {"type": "abort", "message": "waited too long"} if one == "aborts" else {"type": "length", "length": 0}
            answers.append({"output_ids": [], "meta_info": {"finish_reason": ended}})
        return web.json_response(answers if together else answers[0])

    def _capture(self, rid: str, tokens: torch.Tensor, how: str) -> None:
        if how == "cannot":
            spool.write_json(self.capturing.spool / rid / "error.json", {"error": "ValueError: no residual stream"})
            return
        echoed = tokens + 1 if how == "confuses" else tokens
        states = tokens.float()[:, None, None] + torch.tensor([0.0, 1000, 2000])[:, None]
        states = states.expand(-1, -1, HIDDEN).contiguous()
        if how == "breaks":
            states[-1, 0, 0] = float("inf")
        half = len(tokens) // 2  # as a chunked prefill, the later chunk first
        for rows in (slice(half, None), slice(0, half)):
            if len(tokens[rows]) and not (how == "loses" and rows.start == 0):
                spool.write_piece(
                    self.capturing.spool,
                    [(rid, rows.start, len(tokens[rows]))],
                    number=next(self._numbers),
                    rank=0,
                    tokens=echoed[rows],
                    aux=states[rows, :-1].contiguous(),
                    last=states[rows, -1].contiguous(),
                )


def prompts(count: int = 12, *, split: str = "train") -> list[Prompt]:
    return [
        Prompt(
            id=f"{split}-{i}", source="toy", split=split, tokens=np.arange(i, 2 * i + 2, dtype=np.int32),
            loss_mask=np.ones(i + 2, dtype=np.uint8),
        )
        for i in range(count)
    ]  # fmt: skip


def run(server: StandIn, out: Path, rows: list[Prompt], provenance=PROVENANCE, **changes) -> sink.Extracted:
    options = dict(shard_bytes=1 << 30, in_flight_bytes=1 << 20, retries=2) | changes
    return extract(rows, server=server, out=out, provenance=provenance, **options)


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(fetch, "ROWS_SECONDS", 0.3)


def test_records_hold_each_prompts_states_in_the_prompts_order_whatever_order_answers_come_in(tmp_path):
    rows = prompts() + prompts(3, split="validation")
    with StandIn(tmp_path / "spool", lambda name, attempt: "slow" if name == "train-0" else "fine") as server:
        extracted = run(server, tmp_path / "shards", rows)
    assert (extracted.records, extracted.tokens, extracted.failed) == (15, sum(len(row.tokens) for row in rows), {})
    for split in ("train", "validation"):
        reader = ShardReader(tmp_path / "shards", split=split)
        assert [entry.id for entry in reader.entries] == [row.id for row in rows if row.split == split]
        for record, row in zip(reader, [row for row in rows if row.split == split]):
            assert record.tokens.tolist() == row.tokens.tolist() and record.loss_mask.tolist() == row.loss_mask.tolist()
            assert record.aux[:, :, 0].tolist() == [[t, t + 1000] for t in row.tokens]
            assert record.last[:, 3].tolist() == [t + 2000 for t in row.tokens]
    assert list((tmp_path / "spool").iterdir()) == [] and reader.complete


@pytest.mark.parametrize("how", ["fails", "drops", "cannot", "loses", "confuses", "breaks", "aborts"])
def test_a_request_that_fails_is_tried_again_and_no_wrong_row_is_kept(tmp_path, how):
    def once(name, attempt):
        return how if name == "train-3" and attempt == 0 else "fine"

    with StandIn(tmp_path / "spool", once) as server:
        run(server, tmp_path / "shards", prompts())
    assert server.asked.count("train-3") == 2
    record = ShardReader(tmp_path / "shards", split="train").read(3)
    assert record.last[:, 0].tolist() == [2003, 2004, 2005, 2006, 2007]


def test_a_prompt_that_always_fails_is_named_with_its_reason_and_the_others_are_kept(tmp_path):
    def always(name, attempt):
        return {"train-3": "cannot", "train-5": "refuses"}.get(name, "fine")

    with StandIn(tmp_path / "spool", always) as server:
        with pytest.raises(
            ValueError, match="2 of 12 prompts could not be captured: train-3 .*no residual stream"
        ) as caught:
            run(server, tmp_path / "shards", prompts())
        assert "train-5 (refused by the server" in str(caught.value) and "exceeds the maximum" in str(caught.value)
        assert "tries again; the 1 that the server refuses it will refuse again: leave them out in stage 1" in str(caught.value)
        assert (server.asked.count("train-3"), server.asked.count("train-5")) == (4, 2)  # once with others, then alone
        assert list((tmp_path / "spool").iterdir()) == [], "nor of those that were asked for beside it"
        server.behaviour, server.asked = (lambda name, attempt: "fine"), []
        extracted = run(server, tmp_path / "shards", prompts())
    assert (extracted.earlier, extracted.records, len(server.asked)) == (10, 2, 2)
    assert finished_ids(tmp_path / "shards") == {f"train-{i}" for i in range(12)}


def test_a_server_that_dies_leaves_what_was_captured_and_the_same_call_continues(tmp_path):
    with StandIn(tmp_path / "spool", lambda name, attempt: "dies" if name == "train-6" else "fine") as server:
        with pytest.raises(ValueError, match="the server ended while extracting.*and kept: the same command continues"):
            run(server, tmp_path / "shards", prompts(), in_flight_bytes=1)
        assert finished_ids(tmp_path / "shards") == {f"train-{i}" for i in range(6)}
    with StandIn(tmp_path / "spool") as server:
        assert run(server, tmp_path / "shards", prompts()).records == 6
    assert not list((tmp_path / "shards").glob(".*.tmp"))


@pytest.mark.parametrize("limit", [1, 20 * ROW_BYTES, 1 << 20])
def test_bytes_in_flight_stay_below_the_limit_or_are_one_request(tmp_path, limit):
    rows = prompts()
    with StandIn(tmp_path / "spool") as server:
        run(server, tmp_path / "shards", rows, in_flight_bytes=limit)
    largest = max(len(row.tokens) for row in rows) * ROW_BYTES
    assert server.most_bytes_out <= max(limit, largest)
    if limit == 1 << 20:
        assert server.most_bytes_out > largest, "many requests are in flight at once"


def test_prompts_are_asked_for_in_groups_that_are_small_beside_what_may_be_in_flight(tmp_path):
    rows = prompts(40)
    with StandIn(tmp_path / "spool") as server:
        run(server, tmp_path / "shards", rows)
        assert server.most_together == groups.PROMPTS
        server.most_together, limit = 0, 8 * 50 * ROW_BYTES
        run(server, tmp_path / "small", rows, in_flight_bytes=limit)
        assert 2 <= server.most_together <= 50 // 2
    found = list(groups.groups_of(rows, most_tokens=50))
    assert [one for group in found for one in group] == list(enumerate(rows))
    assert all(groups.tokens_of(group) <= 50 for group in found) and max(map(len, found)) < groups.PROMPTS
    assert [len(group) for group in groups.groups_of(rows[:3], most_tokens=1)] == [1, 1, 1]


def test_a_prompt_that_fails_in_every_group_does_not_end_a_run_in_which_the_others_are_captured(tmp_path, monkeypatch):
    """MAX_IN_A_ROW is for prompts that fail one after the other."""
    monkeypatch.setattr(groups, "MAX_IN_A_ROW", 3)
    rows = prompts(12)

    async def capture() -> list:
        async with Client(server.url, timeout_seconds=10) as client:
            asker = groups.Asker(client, tmp_path / "spool", retries=0)
            return [one for i in range(0, 12, 2) for one in await asker.capture(list(enumerate(rows))[i : i + 2])]

    with StandIn(tmp_path / "spool", lambda name, attempt: "fine" if int(name[6:]) % 2 else "cannot") as server:
        found = asyncio.run(capture())
    assert [isinstance(one, str) for one in found] == [True, False] * 6


def test_where_every_group_fails_at_once_their_prompts_are_not_all_asked_at_once(tmp_path, monkeypatch):
    """A spool that was full for a moment: two thousand connections are more files than a process may open."""
    monkeypatch.setattr(groups, "MOST_ALONE", 20)
    rows = prompts(400)
    with StandIn(tmp_path / "spool", lambda name, attempt: "fails" if attempt == 0 else "slow") as server:
        assert run(server, tmp_path / "out", rows, in_flight_bytes=1 << 24).records == 400
    assert 20 <= server.most_requests_out <= 20 + -(-400 // groups.PROMPTS)


def test_a_run_that_is_told_to_end_keeps_what_has_arrived(tmp_path):
    """Though its shard is far from full; the same call continues."""
    rows = prompts(40)

    def said(name: str, attempt: int) -> str:
        if name == "train-30":
            os.kill(os.getpid(), signal.SIGTERM)
        return "fine"

    with StandIn(tmp_path / "spool", said) as server:
        with pytest.raises(SystemExit, match="143"), told_to_end("it is kept"):
            run(server, tmp_path / "shards", rows, in_flight_bytes=1)
    kept = finished_ids(tmp_path / "shards")
    assert kept == {f"train-{i}" for i in range(len(kept))} and 10 < len(kept) < 40
    with StandIn(tmp_path / "spool") as server:
        extracted = run(server, tmp_path / "shards", rows)
    assert (extracted.earlier, extracted.records) == (len(kept), 40 - len(kept))


def test_a_full_disk_ends_the_run_with_its_own_error_and_not_in_a_hang(tmp_path, monkeypatch):
    no_room_for("train-4", monkeypatch)
    with StandIn(tmp_path / "spool") as server:
        with pytest.raises(ValueError, match="No space left on device"):
            run(server, tmp_path / "shards", prompts(), shard_bytes=1)
    assert finished_ids(tmp_path / "shards") == {f"train-{i}" for i in range(4)}


def test_the_codec_topk_asks_the_targets_head_as_it_writes(tmp_path):
    """Every state of a row of `last` is 2000 + its token: with this head the logit of token v is that times v / 1000."""
    weight = (torch.arange(PROVENANCE.vocab_size) / PROVENANCE.vocab_size)[:, None].expand(-1, HIDDEN) / HIDDEN
    provenance = replace(PROVENANCE, codec="fp8+topk3")
    with StandIn(tmp_path / "spool") as server:
        run(server, tmp_path / "shards", prompts(3), provenance, head=TeacherHead(weight, device="cpu"))
    for record, row in zip(ShardReader(tmp_path / "shards", split="train"), prompts(3), strict=True):
        assert record.last is None and record.top_ids.tolist() == [[999, 998, 997]] * len(row.tokens)
        logits = (2000 + torch.from_numpy(row.tokens).double())[:, None] * torch.arange(1000) / 1000
        expected = logits.log_softmax(-1)[:, [999, 998, 997]]
        torch.testing.assert_close(record.top_log_probs.double(), expected, rtol=0, atol=2e-3)
        decoded = record.decoded().aux[:, 0, 0].double()
        torch.testing.assert_close(decoded, torch.from_numpy(row.tokens).double(), rtol=2**-4, atol=0)


def test_shards_are_sent_as_they_are_finished_and_the_next_run_sends_what_the_last_did_not(tmp_path):
    out, there = tmp_path / "shards", tmp_path / "there"
    with StandIn(tmp_path / "spool", lambda name, attempt: "refuses" if name == "train-5" else "fine") as server:
        with (
            pytest.raises(ValueError, match="1 of 12 prompts"),
            Uploader(out, str(there), keep_local=False) as uploader,
        ):
            run(server, out, prompts(), shard_bytes=1, uploader=uploader)
        server.behaviour = lambda name, attempt: "fine"
        with Uploader(out, str(there), keep_local=False) as uploader:
            assert run(server, out, prompts(), shard_bytes=1, uploader=uploader).earlier == 11
    assert not list(out.glob("*.tar")) and len(list(there.glob("*.tar"))) == 12
    assert {record.id for record in ShardReader(there, split="train")} == {f"train-{i}" for i in range(12)}
    assert Manifest.load(there) == Manifest.load(out) and Manifest.load(there).complete
