"""What the plugin must never do to a server: change an answer, take it down, or let a wrong record through."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import extract.server as server_module
import tests.test_extract_sink as sink_test
from data.manifest import finished_ids
from extract import fetch, groups
from extract.capture import Reference
from extract.client import Client, ServerGone
from tests.families import family
from tests.targets import serve
from tests.test_extract_matrix import CHUNKED, other_clients, prompts, records, relative

BOUNDARIES = [1, 2, 3, 4, 5]

# Loaded into the server's processes beside ours: what leads to the spool fails now and then, each time another way.
# Writes down what it did.
FAULTS = '''
import errno, itertools, os, random, torch
from extract import plugin, spool

dice, did = random.Random(0), open(os.path.join(os.path.dirname(__file__), "did.txt"), "a", buffering=1)
write_piece, columns_of = spool.write_piece, plugin.columns_of
ways = itertools.cycle(["no space", "a bug", "other tokens", "not finite", "rows lost", "rows twice"])

def fault(names):
    name = next(names) if dice.random() < 0.25 else None
    if name:
        print(name, file=did)
    return name

def bad_columns(hidden, aux, **options):
    if fault(iter(["columns"])):
        raise RuntimeError("injected: no columns")
    return columns_of(hidden, aux, **options)

def bad_write(folder, segments, *, number, rank, tokens, aux, last):
    name = fault(ways)
    segments = [tuple(segment) for segment in segments]
    if name == "no space":
        raise OSError(errno.ENOSPC, "injected: no space left")
    if name == "a bug":
        raise KeyError("injected: a bug")
    if name == "other tokens":
        tokens = tokens + 1
    if name == "not finite":
        aux = aux.clone()
        aux[-1, 0, 0] = float("nan")
    if name == "rows lost":
        rid, start, count = segments.pop()
        segments += [(rid, start, count - 1)] if count > 1 else []
        tokens, aux, last = tokens[:-1], aux[:-1], last[:-1]
        if not segments:
            return
    if name == "rows twice":
        shifted = [(rid, start + 1, count) for rid, start, count in segments]
        write_piece(folder, shifted, number=number + 10**8, rank=rank, tokens=tokens, aux=aux, last=last)
    write_piece(folder, segments, number=number, rank=rank, tokens=tokens, aux=aux, last=last)

def register():
    plugin.columns_of, spool.write_piece = bad_columns, bad_write
'''


def with_plugin(folder: Path, name: str, code: str) -> Path:
    """A folder for PYTHONPATH from which SGLang loads `code` as a plugin."""
    (folder / f"{name}-0.dist-info").mkdir(parents=True)
    (folder / f"{name}.py").write_text(code)
    (folder / f"{name}-0.dist-info/METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0\n")
    (folder / f"{name}-0.dist-info/entry_points.txt").write_text(f"[sglang.srt.plugins]\n{name} = {name}:register\n")
    return folder


def answers(url: str) -> list[dict]:
    """What /generate says to a few prompts, one after the other, every number of it."""
    said = []
    for i, prompt in enumerate(prompts()):
        asked = {
            "input_ids": prompt.tokens.tolist(), "rid": f"ordinary-{i}", "return_logprob": True, "top_logprobs_num": 5,
            "logprob_start_len": 0, "sampling_params": {"max_new_tokens": 6, "temperature": 0, "ignore_eos": True},
        }  # fmt: skip
        request = urllib.request.Request(f"{url}/generate", json.dumps(asked).encode(), {"Content-Type": "application/json"})
        answer = json.loads(urllib.request.urlopen(request, timeout=60).read())
        kept = ("input_token_logprobs", "output_token_logprobs", "input_top_logprobs", "output_top_logprobs")
        said.append({"ids": answer["output_ids"], **{name: answer["meta_info"][name] for name in kept}})
    return said


def test_answers_are_bit_equal_without_the_plugin_with_it_and_with_a_capture_asked_for(models, tmp_path, monkeypatch):
    """Three servers; tokens and every log-probability, of requests one after the other."""
    target = family("llama", models).folder
    monkeypatch.setenv("SGLANG_PLUGINS", "none of them")
    with serve(target, tmp_path / "without") as server:
        without = answers(server.url)
    monkeypatch.delenv("SGLANG_PLUGINS")
    with serve(target, tmp_path / "idle") as server:
        assert answers(server.url) == without
    with serve(target, tmp_path / "capturing", boundaries=BOUNDARIES) as server:
        assert answers(server.url) == without
    assert len(without) == len(prompts()) and all(len(said["ids"]) == 6 for said in without)


def test_whatever_fails_in_the_plugin_the_server_serves_on_and_every_record_is_right(models, tmp_path, monkeypatch):
    """Retried until it goes well: no record is missing, none is wrong, other clients notice nothing."""
    made = family("llama", models)
    faults = with_plugin(tmp_path / "faults", "faults", FAULTS)
    monkeypatch.setenv("PYTHONPATH", str(faults))
    monkeypatch.setattr(fetch, "ROWS_SECONDS", 0.7)
    monkeypatch.setattr(groups, "RETRY_SECONDS", 0.0)
    reference = Reference(made.reference)
    sent = [replace(prompt, id=f"{prompt.id}-{i}") for i in range(4) for prompt in prompts()]
    with serve(made.folder, tmp_path, boundaries=BOUNDARIES, **CHUNKED.engine) as server:
        with other_clients(server.url):
            found = records(server, made, tmp_path / "shards", in_flight_bytes=1 << 30, retries=30, sent=sent)
        assert server.is_alive()
        pid = json.loads(next(server.capturing.spool.glob("server-*.json")).read_text())["pid"]
        assert Path(f"/proc/{pid}").exists(), "the scheduler that was started is still the one that serves"
    did = (faults / "did.txt").read_text().split("\n")
    assert {"columns", "no space", "a bug", "other tokens", "not finite", "rows lost", "rows twice"} <= set(did)
    assert list(found) == [prompt.id for prompt in sent]
    for prompt in sent:
        record, expected = found[prompt.id], reference.states(torch.from_numpy(prompt.tokens))
        assert record.tokens.tolist() == prompt.tokens.tolist()
        for column, boundary in enumerate(BOUNDARIES):
            assert relative(record.aux[:, column], expected.residual[boundary]) <= 1e-5
        assert relative(record.last, expected.last) <= 1e-5


HANG = '''
import time
from extract import plugin

def stand_still(*arguments, **options):
    time.sleep(600)

def register():
    plugin.columns_of = stand_still
'''


def test_a_real_server_whose_forward_stands_still_is_told_of_ended_and_its_stack_names_the_place(
    models, tmp_path, monkeypatch, capsys
):
    """The scheduler sleeps within a forward, and /health hears nothing from it."""
    monkeypatch.setenv("PYTHONPATH", str(with_plugin(tmp_path / "hang", "hang", HANG)))
    monkeypatch.setattr(server_module, "HEALTH_SECONDS", 2.5)  # an answer takes it one
    server = serve(family("llama", models).folder, tmp_path, boundaries=BOUNDARIES)
    server.config.silence_seconds, server.config.hang_seconds = 2.0, 120.0

    async def ask():
        async with Client(server.url, timeout_seconds=60) as client:
            await fetch.fetch(client, server.capturing.spool, torch.arange(3, 40), rid=fetch.rid_of("hang"))

    with server:
        server._watch.hang_seconds = 4.0  # its start may take longer
        capsys.readouterr()
        with pytest.raises(ServerGone):
            asyncio.run(ask())
        error = str(server.failure("the server ended while extracting", cure="the same command continues there"))
    assert "it hung, silent for" in error and "/health does not answer" in error
    assert "the server has said nothing for" in capsys.readouterr().err
    stacks = sorted(tmp_path.glob("stacks-*.txt"))[-2:]  # as it was told, and as it was ended
    assert all("stand_still (hang.py:" in file.read_text() and "forward" in file.read_text() for file in stacks)


def test_a_spool_that_stays_full_ends_the_run_soon_and_keeps_what_has_come(tmp_path, monkeypatch):
    """After 64 prompts in a row, not after each of many thousand; the same call continues when there is room."""
    monkeypatch.setattr(groups, "RETRY_SECONDS", 0.0)
    out, rows = tmp_path / "shards", sink_test.prompts(300)
    with sink_test.StandIn(tmp_path / "spool", lambda name, attempt: "fine") as server:
        asked, write_piece = [], sink_test.spool.write_piece

        def no_room(folder, segments, **columns):
            asked.append(rid := segments[0][0])
            if len(set(asked)) > 100:
                sink_test.spool.write_error(folder, rid, "OSError: [Errno 28] No space left on device")
            else:
                write_piece(folder, segments, **columns)

        monkeypatch.setattr(sink_test.spool, "write_piece", no_room)
        with pytest.raises(ValueError, match="64 prompts in a row could not be captured, the last 3 times: .*No space left") as error:
            sink_test.run(server, out, rows, in_flight_bytes=20_000)
        assert "set server.spool= to a larger disk" in str(error.value) and "the same command continues" in str(error.value)
        assert len(server.asked) < 100 + 3 * (64 + 64), "the rest is not asked"
        kept = len(finished_ids(out))
        assert 30 <= kept <= 100
        monkeypatch.setattr(sink_test.spool, "write_piece", write_piece)
        assert sink_test.run(server, out, rows).records == 300 - kept
