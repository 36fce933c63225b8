"""mode=generate with a stand-in for the server: what is on disk of its answers, whatever ends it and whatever they hold."""

from __future__ import annotations

import asyncio
import errno
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from data.conversations import conversation_of
from extract import generate
from extract.client import Answer, ServerGone

EOS = 1


class Client:
    """Answers at once, with the same ids."""

    def __init__(self, url: str, *, timeout_seconds: float) -> None:
        pass

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *error: object) -> None:
        pass

    async def generate(self, input_ids: list[int], **options) -> Answer:
        return Answer([40, 41, EOS], {"finish_reason": {"type": "stop"}})


class Converser:
    async def converse(self, conversation, client) -> dict:
        answer = await client.generate([])
        return {"response_ids": answer.output_ids, "finished": answer.finished}


def session(file: Path) -> generate._Session:
    def failure(what: str, *, cure: str) -> ValueError:
        return ValueError(f"{what}: {cure}")

    server = SimpleNamespace(url="http://nowhere", config=SimpleNamespace(answer_timeout_seconds=1), failure=failure)
    return generate._Session(server, Converser(), file, earlier=0)


def questions(count: int) -> list:
    return [conversation_of(i, {"id": f"q{i}", "turns": ["Who?"]}) for i in range(count)]


class Disk:
    """An unbuffered file on a disk with `room` bytes, which takes what still fits of a line."""

    def __init__(self, file, room: int) -> None:
        self._file, self._room = file, room

    def write(self, content: bytes) -> int:
        fits = min(len(content), self._room)
        if not fits:
            raise OSError(errno.ENOSPC, "No space left on device")
        self._room -= fits
        return self._file.write(content[:fits])

    def __getattr__(self, name: str):
        return getattr(self._file, name)


def test_a_disk_that_is_full_is_one_clear_error_and_leaves_whole_lines_only(tmp_path, monkeypatch):
    """Two answers fit, and half of a third; with room again the others follow."""
    monkeypatch.setattr(generate, "Client", Client)
    file, append, disk = tmp_path / "conversations.jsonl", generate.append, []
    asyncio.run(session(file).run(questions(1), max_requests=4))
    length = file.stat().st_size
    file.unlink()

    def on_small_disk(lines, line):
        disk[:] = disk or [Disk(lines, 5 * length // 2)]
        append(disk[0], line)

    monkeypatch.setattr(generate, "append", on_small_disk)
    with pytest.raises(ValueError, match="cannot write .*No space left on device; the 2 answers in .* are kept: free some space"):
        asyncio.run(session(file).run(questions(9), max_requests=4))
    assert [json.loads(line)["id"] for line in file.read_bytes().splitlines()] == ["q0", "q1"]
    monkeypatch.setattr(generate, "append", append)
    asyncio.run(session(file).run(questions(9)[2:], max_requests=4))
    assert [json.loads(line)["id"] for line in file.read_bytes().splitlines()] == [f"q{i}" for i in range(9)]


def test_a_server_that_dies_leaves_the_answers_that_came(tmp_path, monkeypatch):
    async def generate_two(self, input_ids, **options):
        self.asked = getattr(self, "asked", 0) + 1
        if self.asked > 2:
            raise ServerGone("gone")
        return Answer([40, EOS], {"finish_reason": {"type": "stop"}})

    monkeypatch.setattr(Client, "generate", generate_two)
    monkeypatch.setattr(generate, "Client", Client)
    file = tmp_path / "conversations.jsonl"
    with pytest.raises(ValueError, match=r"the server ended while generating \(gone\); the 2 answers in .* are kept"):
        asyncio.run(session(file).run(questions(9), max_requests=1))
    assert len(file.read_bytes().splitlines()) == 2


def test_what_ends_a_line_of_text_does_not_end_a_row(tiny_llama, tmp_path):
    """U+2028, U+2029 and U+0085 stand in JSON as they are; there is nothing left to ask, so no server is started."""
    asked = {"id": "a", "turns": ["one\u2028two\u2029three\u0085four"]}
    conversations, out = tmp_path / "asked.jsonl", tmp_path / "answers"
    conversations.write_text(json.dumps(asked, ensure_ascii=False) + "\n")
    out.mkdir()
    messages = [{"role": "user", "content": asked["turns"][0]}, {"role": "assistant", "content": "five\u2028six"}]
    row = {"id": "a", "response_ids": [40, EOS], "finished": True, "messages": messages}
    (out / generate.FILE).write_text(json.dumps(row, ensure_ascii=False) + "\n")
    config = SimpleNamespace(
        target=tiny_llama, out=str(out), conversations=str(conversations),
        sampling=SimpleNamespace(temperature=0, top_p=1, max_new_tokens=8, seed=0),
    )  # fmt: skip
    summary = generate.generate(config, Path(tiny_llama.path), start=None)
    assert (summary["answered"], summary["answer_tokens"]) == (1, 2)
