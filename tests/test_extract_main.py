"""The stage as a user runs it: killed twice, continued twice, compared with Hugging Face; and mode=generate."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

from data.embedded import TINY_TEXT
from data.locks import claim, is_claimed
from data.manifest import claim_split
from data.prompts import PromptSet
from data.shards import ShardReader, finished_ids
from extract.capture import Reference
from extract.main import main
from extract.preflight import choose_spool
from tests.targets import ROOT, serve
from tests.warm import warm_python

NUM_ROWS = 300
OTHER = "was captured at boundaries [2, 3, 5], this run asks for [1, 2, 3]: set target.boundaries=[2,3,5]"


@pytest.fixture(scope="module")
def environment(tiny_llama):
    return {**os.environ, "EYAS_MODELS": str(Path(tiny_llama.path).parent), "PYTHONUNBUFFERED": "1"}


def command(*options: str) -> list[str]:
    warm = [f"engine.python={warm_python()}", "engine.device=cpu"]  # the whole start is in test_launch_end_to_end.py
    return [sys.executable, "extract/main.py", "target=tiny_llama", "engine.max_total_tokens=4096", *warm, *options]


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


def kill_scheduler(spool: Path) -> None:
    for file in spool.glob("server-*.json"):
        psutil.Process(json.loads(file.read_text())["pid"]).kill()


def test_a_run_killed_twice_continues_and_every_conversation_is_in_one_record(
    prompts, environment, tiny_llama, tmp_path
):
    """First the extractor is killed, then the server's scheduler; the third run attaches to a server and finishes."""
    out = tmp_path / "shards"
    options = [f"prompts={prompts}", f"out={out}", "shard_bytes=300000"]
    spool = tmp_path / "spool"
    slowly = [*options, "in_flight_bytes=1", f"server.spool={spool}"]  # one at a time: there is a middle to be killed in

    status, _ = interrupted(
        slowly, out, environment, kill=lambda extractor: extractor.kill(), until=lambda: len(finished_ids(out)) > 0
    )
    first = len(finished_ids(out))
    assert status == -9 and 0 < first < NUM_ROWS

    status, output = interrupted(
        slowly, out, environment, kill=lambda _: kill_scheduler(spool), until=lambda: len(finished_ids(out)) > first
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
    assert summary["supervised_is_argmax"] < 0.1 and "let it answer these questions itself" in done.stderr
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


@pytest.mark.parametrize(("number", "until"), [(signal.SIGTERM, "train-*.tar"), (signal.SIGINT, "server/server.log")])
def test_a_run_that_is_told_to_end_says_so_in_a_line_and_leaves_nothing_in_memory(
    prompts, environment, tmp_path, number, until
):
    """While it captures, and while its server starts, as users start it."""
    out = tmp_path / "shards"
    spool = choose_spool(None, out=out, in_flight_bytes=1)
    status, output = interrupted(
        [f"prompts={prompts}", f"out={out}", "shard_bytes=300000", "in_flight_bytes=1", "engine.python=null"],
        out, environment,
        kill=lambda extractor: extractor.send_signal(number),
        until=lambda: spool.exists() and any(path.stat().st_size for path in out.glob(until)),
    )  # fmt: skip
    assert status == 128 + number and "Traceback" not in output, output
    kept = len(finished_ids(out))
    assert output.splitlines()[-1] == f"ended by {number.name}: {kept} records in finished shards are kept, the same command continues"
    assert spool.parent == Path("/dev/shm") and not spool.exists()
    assert not is_claimed(out / "server/.lock"), "its server is gone"


@pytest.mark.parametrize(("shard_bytes", "until"), [(300_000, "train-*.tar"), (1 << 30, "validation-*.tar")])
def test_a_run_that_is_told_to_end_while_it_sends_a_shard_lets_its_server_go_first(
    prompts, environment, tmp_path, shard_bytes, until
):
    """While it captures more, and while it waits for the last shard's turn.

    What is sent may take longer than SLURM waits; no server holds its GPUs meanwhile, and nothing is left in memory.
    """
    out, there = tmp_path / "shards", tmp_path / "there"
    spool = choose_spool(None, out=out, in_flight_bytes=1)
    never = "import time\nfrom fsspec.implementations.local import LocalFileSystem\nLocalFileSystem.put_file = lambda *_, **__: time.sleep(600)\n"
    (tmp_path / "sitecustomize.py").write_text(never)
    seen = []

    def tell(extractor: psutil.Process) -> None:
        extractor.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + 60
        while spool.exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        seen.append((spool.exists(), extractor.is_running()))
        extractor.kill()

    _, output = interrupted(
        [f"prompts={prompts}", f"out={out}", f"upload={there}", f"shard_bytes={shard_bytes}", "in_flight_bytes=1"],
        out, {**environment, "PYTHONPATH": str(tmp_path)}, kill=tell, until=lambda: any(out.glob(until)),
    )  # fmt: skip
    assert seen == [(False, True)], output


def test_a_plan_says_what_is_to_do_and_starts_nothing_and_a_disk_too_small_is_refused(prompts, environment, tmp_path):
    wanted = PromptSet.load(prompts)
    halves = [run(f"prompts={prompts}", f"out={tmp_path}/{i}", "plan=true", f"part={i}/2", environment=environment) for i in (0, 1)]
    assert [half.returncode for half in halves] == [0, 0], halves[0].stderr
    plans = [json.loads((tmp_path / str(i) / "summary.json").read_text()) for i in (0, 1)]
    assert [plan["records"] > 0 for plan in plans] == [True, True]
    assert sum(plan["records"] for plan in plans) == len(wanted)
    assert sum(plan["tokens"] for plan in plans) == len(wanted.tokens)
    assert "to capture:" in halves[0].stdout and "its time shows in the first minute" in halves[0].stdout
    assert not (tmp_path / "0/server").exists()
    enormous = run(f"prompts={prompts}", f"out={tmp_path}/large", "engine.extra_args=[--nonsense]", environment={
        **environment, "PYTHONPATH": str(small_disk(tmp_path)),
    })  # fmt: skip
    assert enormous.returncode == 2 and "has 1.0 MB free and" in enormous.stderr and "a smaller codec=" in enormous.stderr


def test_a_plan_may_be_asked_for_while_a_run_is_at_work(prompts, models, tmp_path, monkeypatch, capsys):
    """Nothing of the run's is changed."""
    monkeypatch.setenv("EYAS_MODELS", str(models))
    monkeypatch.setattr(sys, "argv", ["extract/main.py", "target=tiny_llama", f"prompts={prompts}", f"out={tmp_path}", "plan=true"])
    with claim(tmp_path / ".run.lock", taken="", cure=""), claim_split(tmp_path, "train"):
        main()
        assert f"to capture: {NUM_ROWS} records" in capsys.readouterr().out
        (tmp_path / "summary.json").write_text('{"stage": "extract", "records": 7}')
        main()
    assert json.loads((tmp_path / "summary.json").read_text())["records"] == 7, "which is of what was done"
    assert not (tmp_path / "manifest.json").exists() and not (tmp_path / "vocabulary.safetensors").exists()


def small_disk(folder: Path) -> Path:
    """A folder for PYTHONPATH that makes every disk one of 1 MB."""
    text = "import shutil, types\nshutil.disk_usage = lambda path: types.SimpleNamespace(total=10**6, used=0, free=10**6)\n"
    (folder / "sitecustomize.py").write_text(text)
    return folder


def test_one_start_of_the_server_generates_and_then_captures(environment, tiny_llama, tmp_path):
    """Two turns; both answers are supervised, in the server's own ids, and all of them are its own first choice."""
    asked, out = tmp_path / "asked.jsonl", tmp_path / "shards"
    asked.write_text("".join(json.dumps({"id": f"q{i}", "turns": [f"What does the hawk see {i}?", "And then?"]}) + "\n" for i in range(6)))
    options = ["mode=generate_and_extract", f"conversations={asked}", f"out={out}", "sampling.temperature=0", "sampling.max_new_tokens=9"]
    done = run(*options, environment=environment)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("server: starting") == 1
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["answers"]["answered"], summary["records"], summary["supervised_is_argmax"]) == (6, 6, 1.0)
    answers = {row["id"]: row for row in map(json.loads, (out / "conversations.jsonl").read_text().splitlines())}
    for split in ("train", "validation"):
        for record in ShardReader(out, split=split):
            row = answers[record.id]
            assert record.tokens.tolist() == row["prompt_ids"] + row["response_ids"]
            ((start, end),) = row["earlier_answers"]
            expected = [start <= i < end or i >= len(row["prompt_ids"]) for i in range(record.num_tokens)]
            assert record.loss_mask.bool().tolist() == expected
    again = run(*options, environment=environment)
    assert "nothing to do" in again.stdout and "server: starting" not in again.stderr


def test_generate_answers_and_continues_and_keeps_the_servers_own_ids(conversations, environment, tiny_llama, tmp_path):
    rows = [json.loads(line) for line in conversations.read_text().splitlines()[:6]]
    rows += [{"id": "asked", "turns": ["What does the hawk see?", "And then?"]}, {"id": "odd", "messages": [{"role": "user"}]}]
    rows += [{"id": "system", "messages": [{"role": "system", "content": "Be brief."}]}]
    asked = tmp_path / "asked.jsonl"
    asked.write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = tmp_path / "answers"
    out.mkdir()
    kept = {"id": rows[0]["id"], "response_ids": [1], "finished": True}
    changed = {"id": rows[2]["id"], "response_ids": [7], "finished": True, "question": "of something else"}
    (out / "conversations.jsonl").write_text(f"{json.dumps(kept)}\n{json.dumps(changed)}\n" + '{"id": "talk/1.a", "resp')  # a killed run's
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
    assert "1 questions have changed and are asked again" in done.stderr and answers[rows[2]["id"]]["response_ids"] != [7]
    warmer = run(*options, "sampling.temperature=0.5", environment=environment)
    assert "was made with sampling.temperature=0.0, this run asks for 0.5" in warmer.stderr


@pytest.mark.parametrize("mode", ["extract", "generate", "generate_and_extract"])
def test_of_two_runs_in_one_folder_the_second_is_refused_before_it_changes_anything(
    prompts, conversations, models, mode, tmp_path, monkeypatch, capsys
):
    """Also where neither starts a server of its own; an attached one answered both, and every answer was there twice."""
    monkeypatch.setenv("EYAS_MODELS", str(models))
    options = [f"mode={mode}", f"prompts={prompts}", f"conversations={conversations}", f"out={tmp_path}"]
    monkeypatch.setattr(sys, "argv", ["extract/main.py", "target=tiny_llama", *options])
    with claim(tmp_path / ".run.lock", taken="", cure=""):
        with pytest.raises(SystemExit):
            main()
    assert f"error: another run extracts into {tmp_path} (process {os.getpid()} on " in capsys.readouterr().err
    assert not list(tmp_path.glob("*.json*")) and not (tmp_path / "vocabulary.safetensors").exists()


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
        (["prompts=/nowhere", "part=4/4"], "part=4/4"),
        (["prompts=/nowhere", "codec=fp8+topk512"], "codec=fp8+topk512 keeps all 512 tokens of tiny_llama, or more"),
        (["mode=generate_and_extract"], "needs conversations=FILE"),
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
