"""The stage as a user runs it: killed twice, continued twice, compared with Hugging Face; and mode=generate."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from data.embedded import TINY_TEXT
from data.shards import ShardReader, finished_ids
from extract.capture import Reference
from extract.main import main
from tests.targets import ROOT, serve

NUM_ROWS = 300
OTHER = "was captured at boundaries [2, 3, 5], this run asks for [1, 2, 3]: set target.boundaries=[2,3,5]"


@pytest.fixture(scope="module")
def environment(tiny_llama):
    return {**os.environ, "EYAS_MODELS": str(Path(tiny_llama.path).parent), "PYTHONUNBUFFERED": "1"}


def command(*options: str) -> list[str]:
    return [sys.executable, "extract/main.py", "target=tiny_llama", "engine.max_total_tokens=4096", *options]


def run(*options: str, environment) -> subprocess.CompletedProcess:
    return subprocess.run(command(*options), cwd=ROOT, env=environment, capture_output=True, text=True)


@pytest.fixture(scope="module")
def conversations(tmp_path_factory) -> Path:
    words, dice = TINY_TEXT.split(), random.Random(0)
    file = tmp_path_factory.mktemp("text") / "conversations.jsonl"
    rows = [
        {"id": f"talk/{i}.a", "messages": [
            {"role": "user", "content": " ".join(dice.choices(words, k=dice.randint(1, 12)))},
            {"role": "assistant", "content": " ".join(dice.choices(words, k=dice.randint(1, 20)))},
        ]}
        for i in range(NUM_ROWS)
    ]  # fmt: skip
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.fixture(scope="module")
def prompts(conversations, environment, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("prompts")
    line = [sys.executable, "data/main.py", "target=tiny_llama", f"conversations={conversations}", f"out={out}"]
    subprocess.run(line, cwd=ROOT, env=environment, check=True, capture_output=True)
    return out


def interrupted(options: list[str], out: Path, environment, *, kill, until) -> tuple[int, str]:
    """Starts the stage, kills what `kill(process)` names once `until()` holds; exit status and output."""
    process = subprocess.Popen(
        command(*options), cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    deadline = time.monotonic() + 300
    while not until() and time.monotonic() < deadline:
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.02)
    kill(psutil.Process(process.pid))
    output, _ = process.communicate(timeout=60)
    return process.returncode, output


def kill_scheduler(extractor: psutil.Process) -> None:
    for child in extractor.children(recursive=True):
        if child.name().startswith("sglang::schedul"):
            child.kill()


def test_a_run_killed_twice_continues_and_every_conversation_is_in_one_record(
    prompts, environment, tiny_llama, tmp_path
):
    """First the extractor is killed, then the server's scheduler; the third run attaches to a server and finishes."""
    out = tmp_path / "shards"
    options = [f"prompts={prompts}", f"out={out}", "shard_bytes=300000"]
    slowly = [*options, "in_flight_bytes=1"]  # one at a time, so that there is a middle to be killed in

    status, _ = interrupted(
        slowly, out, environment, kill=lambda extractor: extractor.kill(), until=lambda: len(finished_ids(out)) > 0
    )
    first = len(finished_ids(out))
    assert status == -9 and 0 < first < NUM_ROWS

    status, output = interrupted(
        slowly, out, environment, kill=kill_scheduler, until=lambda: len(finished_ids(out)) > first
    )
    second = len(finished_ids(out))
    assert status == 2 and "the server ended while extracting" in output, output
    assert "are in finished shards" in output and "the same command continues there" in output
    assert first < second < NUM_ROWS

    with serve(Path(tiny_llama.path), tmp_path / "elsewhere", boundaries=[2, 3, 5]) as server:
        attached = [f"server.url={server.url}", f"server.spool={server.capturing.spool}"]
        done = run(*options, *attached, environment=environment)
        assert server.is_alive() and not [path for path in server.capturing.spool.iterdir() if path.is_dir()]
    assert done.returncode == 0, done.stderr
    summary = json.loads((out / "summary.json").read_text())
    assert summary["records"] == NUM_ROWS and summary["records_earlier"] == second
    assert summary["records_now"] == NUM_ROWS - second
    assert summary["probe_passed"] is True
    assert (summary["boundaries"], summary["engine_ids"]) == ([2, 3, 5], [1, 2, 4])
    assert "wiring probe passed" in done.stdout and "boundary 2" in done.stdout and "reference" in done.stdout

    readers = [ShardReader(out, split=split) for split in ("train", "validation")]
    ids = [entry.id for reader in readers for entry in reader.entries]
    assert sorted(ids) == sorted(f"talk/{i}.a" for i in range(NUM_ROWS))
    reference = Reference(Path(tiny_llama.path))
    for reader in readers:
        reader.verify()
        for index in range(0, len(reader), 40):
            record = reader.read(index)
            expected = reference.states(record.tokens)
            for column, boundary in enumerate([2, 3, 5]):
                torch.testing.assert_close(
                    record.aux[:, column].float(), expected.residual[boundary], rtol=1e-2, atol=1e-2
                )
            torch.testing.assert_close(record.last.float(), expected.last, rtol=1e-2, atol=1e-2)
    assert (out / "vocabulary.safetensors").read_bytes() == (prompts / "vocabulary.safetensors").read_bytes()
    assert not list(out.glob(".*.tmp"))

    for asked, words in {"target.boundaries=[2,3,5]": "nothing to do", "target.boundaries=[1,2,3]": OTHER}.items():
        again = run(*options, asked, environment=environment)
        assert words in again.stdout + again.stderr


def test_generate_answers_and_continues_and_keeps_the_servers_own_ids(conversations, environment, tiny_llama, tmp_path):
    rows = [json.loads(line) for line in conversations.read_text().splitlines()[:6]]
    rows += [{"id": "asked", "turns": ["What does the hawk see?", "And then?"]}, {"id": "odd", "messages": [{"role": "user"}]}]
    rows += [{"id": "system", "messages": [{"role": "system", "content": "Be brief."}]}]
    asked = tmp_path / "asked.jsonl"
    asked.write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = tmp_path / "answers"
    out.mkdir()
    kept = {"id": rows[0]["id"], "response_ids": [1], "finished": True}
    (out / "conversations.jsonl").write_text(json.dumps(kept) + "\n" + '{"id": "talk/1.a", "resp')  # a killed run's
    options = ["mode=generate", f"conversations={asked}", f"out={out}", "sampling.temperature=0", "sampling.max_new_tokens=8"]
    done = run(*options, environment=environment)
    assert done.returncode == 0, done.stderr
    answers = {row["id"]: row for row in map(json.loads, (out / "conversations.jsonl").read_text().splitlines())}
    assert answers.pop(rows[0]["id"]) == kept
    assert "refused 1: no user turn to answer (row 9)" in done.stderr
    assert sorted(answers) == sorted([*(row["id"] for row in rows[1:6]), "asked", "odd"])
    reference = Reference(Path(tiny_llama.path))
    for id in ("talk/1.a", "asked"):
        tokens = list(answers[id]["prompt_ids"])
        for _ in answers[id]["response_ids"]:
            tokens.append(int((reference.states(torch.tensor(tokens)).last[-1] @ reference.head.T).argmax()))
        assert tokens[len(answers[id]["prompt_ids"]) :] == answers[id]["response_ids"]
        assert answers[id]["finished"] == (answers[id]["response_ids"][-1] == 1)
    assert [message["role"] for message in answers["asked"]["messages"]] == ["user", "assistant"] * 2
    assert answers["talk/1.a"]["messages"][0] == rows[1]["messages"][0]
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["rows"], summary["answered"], summary["refused"]) == (9, 8, 1)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["prompts=/nowhere"], "/nowhere holds no prompts"),
        ([], "mode=extract needs prompts=DIR"),
        (["mode=generate"], "needs conversations=FILE"),
        (["prompts=/nowhere", "target.source=null", "target.path=/nowhere/model"], "there is no target at /nowhere/model"),
        (["prompts=/nowhere", "target.boundaries=[2,3,6]"], "boundary 6"),
        (["prompts=/nowhere", "engine.device=tpu"], "engine.device=tpu"),
        (["prompts=/nowhere", "promts=x"], "promts"),
        (["prompts=/nowhere", "server.url=localhost:3000"], "server.url=localhost:3000"),
    ],
)
def test_bad_input_is_one_clear_line(options, words, models, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("EYAS_MODELS", str(models))
    monkeypatch.setattr(sys, "argv", ["extract/main.py", "target=tiny_llama", f"out={tmp_path}", *options])
    with pytest.raises(SystemExit) as ended:
        main()
    said = capsys.readouterr().err.strip().splitlines()
    assert ended.value.code == 2 and len(said) == 1 and words in said[0], said
