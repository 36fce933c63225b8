"""Stage 1 on the command line: files in, prompts out, every bad input one clear error."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from data.config import TargetConfig
from data.prepare import prepare_answers
from data.prompts import PromptSet
from data.vocab import Vocabulary

ROOT = Path(__file__).resolve().parent.parent
HELLO = [{"role": "user", "content": "What does the hawk see?"}, {"role": "assistant", "content": "It sees the hare."}]
ROWS = [{"id": f"row-{i}", "messages": HELLO} for i in range(40)]


def run(target: TargetConfig, folder: Path, rows: list, *options: str) -> subprocess.CompletedProcess:
    """python data/main.py on a file of these rows (text as it is), into folder/out."""
    file = folder / "conversations.jsonl"
    file.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return subprocess.run(
        [sys.executable, "data/main.py", "target=tiny_llama", f"target.path={target.path}", f"conversations={file}",
         f"out={folder / 'out'}", *options],
        cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True,
    )  # fmt: skip


def error_of(process: subprocess.CompletedProcess) -> str:
    assert process.returncode == 2, process.stderr
    lines = process.stderr.splitlines()
    assert lines[-1].startswith("error: ") and "Traceback" not in process.stderr
    return lines[-1]


def test_the_stage_from_conversations_to_prompts(tiny_llama: TargetConfig, tmp_path: Path):
    rows = [*ROWS, {"id": "b", "messages": [{"role": "bot", "content": "x"}]}]
    process = run(tiny_llama, tmp_path, rows, "validation_fraction=0.3")
    assert process.returncode == 0, process.stderr
    assert "refused 1: unknown role 'bot' (row 41)" in process.stderr
    assert process.stdout.splitlines()[-1].startswith("data: 41 rows = 40 kept + 1 refused, ")

    out = tmp_path / "out"
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["rows"], summary["kept"], summary["refused"]) == (41, 40, 1)
    assert summary["refused_by_reason"] == {"unknown role 'bot'": {"count": 1, "first_rows": [41]}}
    prompts = PromptSet.load(out)
    assert summary["train"] + summary["validation"] == len(prompts) == 40
    assert summary["validation"] == prompts.splits.count("validation") > 0
    vocabulary = Vocabulary.load(out)
    assert vocabulary.tokenizer_hash == summary["tokenizer_hash"]
    per_row = prompts[0].loss_mask.sum()
    assert vocabulary.counts.sum() == per_row * summary["train"]

    before = {file.name: file.stat().st_mtime_ns for file in out.glob("*.*") if file.name != "data.log"}
    again = run(tiny_llama, tmp_path, rows, "validation_fraction=0.3")
    assert again.stdout.startswith("data: nothing to do")
    assert {file.name: file.stat().st_mtime_ns for file in out.glob("*.*") if file.name != "data.log"} == before

    other = run(tiny_llama, tmp_path, rows, "validation_fraction=0")
    assert other.stdout.startswith("data: 41 rows")


def test_what_no_server_of_the_target_takes_is_refused(tiny_llama: TargetConfig, tmp_path: Path):
    """Its context has 2048 tokens; that a server takes 2041 of them, and no more: tests/test_extract_capture.py."""
    rows = [{"tokens": [5] * length, "loss_mask": [1] * length} for length in (2041, 2042)]
    process = run(tiny_llama, tmp_path, rows)
    assert "refused 1: longer than 2041 tokens (cut_long=true would cut it) (row 2)" in process.stderr
    assert len(PromptSet.load(tmp_path / "out")) == 1


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        ([], [], "holds no conversation"),
        ([ROWS[0], '{"id": '], [], "conversations.jsonl line 2 is not JSON"),
        ([{"text": "a long story " * 9}], ["max_tokens=8"], "none of 1 rows"),
        ([{"tokens": [1, 2], "loss_mask": [0, 0]}], [], "none of 1 rows"),
        (ROWS, ["max_token=8"], "no option max_token: did you mean max_tokens"),
        (ROWS, ["target=null"], "Config group override must be a string or a list"),
    ],
)
def test_bad_input_is_one_clear_error(
    tiny_llama: TargetConfig, tmp_path: Path, rows: list, options: list[str], message: str
):
    assert message in error_of(run(tiny_llama, tmp_path, rows, *options))
    assert not (tmp_path / "out" / "summary.json").exists()


@pytest.mark.parametrize("killed", ["data.prompts.save", "data.prepare.Vocabulary.save"])
def test_what_is_killed_leaves_nothing_of_earlier_prompts_beside_its_own(
    tiny_llama: TargetConfig, tmp_path: Path, monkeypatch, killed: str
):
    """Else extraction would capture the tokens of one file under the ids of another."""

    def dies(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    first, second, out = tmp_path / "first.jsonl", tmp_path / "second.jsonl", tmp_path / "out"
    for file in (first, second):
        file.write_text("".join(json.dumps({**row, "id": f"{file.stem}-{row['id']}"}) + "\n" for row in ROWS))
    prepare_answers(tiny_llama, first, out)
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(killed, dies)
        prepare_answers(tiny_llama, second, out)
    with pytest.raises(ValueError, match="holds no prompts|vocabulary.safetensors is missing"):
        PromptSet.load(out), Vocabulary.load(out)
    prepare_answers(tiny_llama, second, out)
    assert PromptSet.load(out).ids[0] == "second-row-0"


def test_a_target_without_a_chat_template_is_one_clear_error(tiny_llama: TargetConfig, tmp_path: Path):
    shutil.copytree(tiny_llama.path, tmp_path / "target")
    (tmp_path / "target" / "chat_template.jinja").unlink()
    process = run(tiny_llama, tmp_path, ROWS, f"target.path={tmp_path / 'target'}")
    assert f"the tokenizer in {tmp_path / 'target'} has no chat template" in error_of(process)


def test_the_trace_is_there_if_asked_for(tiny_llama: TargetConfig, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("EYAS_TRACE", "1")
    process = run(tiny_llama, tmp_path, [])
    assert process.returncode != 0 and "Traceback" in process.stderr and "holds no conversation" in process.stderr


def test_help_says_what_it_does_and_how():
    process = subprocess.run([sys.executable, "data/main.py", "--help"], cwd=ROOT, capture_output=True, text=True)
    assert process.returncode == 0
    assert "python data/main.py target=smollm2_135m conversations=FILE.jsonl out=DIR" in process.stdout
    for option in ("max_tokens", "cut_long", "validation_fraction", "rewritten_history"):
        assert option in process.stdout
