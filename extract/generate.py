"""mode=generate: the target answers the conversations of a file, so that a drafter learns from its own words.

Every user turn without an answer is answered; of a conversation that ends with an answer, that one is
written anew. How one is asked turn by turn: extract/converse.py. Answers go to disk one by one as they come,
many are in flight, and the same call continues: what is answered stays, unless its question has changed.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from tqdm import tqdm

from data.boundaries import text_config
from data.config import write_atomically
from data.conversations import Conversation, Refused, conversation_of, read_rows
from data.fingerprints import chat_template_hash, config_hash, tokenizer_hash, weights_fingerprint
from data.rendering import Renderer
from data.tokenizing import Account, load_tokenizer
from extract.client import Client, RequestFailed, RequestRefused, ServerGone
from extract.config import ExtractConfig, SamplingConfig
from extract.converse import Converser
from extract.server import Server

FILE, MADE_WITH = "conversations.jsonl", "made_with.json"
MAX_LISTED = 100  # conversations that are not answered, in the summary by id


def generate(config: ExtractConfig, target: Path, *, start: Callable[[], Server]) -> dict[str, Any]:
    """Appends to <out>/conversations.jsonl what is not in it yet; the same call continues.

    start  gives a server that is starting; called only if there is something to ask

    Raises ValueError if the server ends, no row of the file can be asked, or <out> has answers that were made
    otherwise: by another target, or with other sampling.
    """
    out = Path(config.out)
    tokenizer = load_tokenizer(target, trust_remote_code=config.target.trust_remote_code)
    renderer = Renderer(tokenizer, options={}, rewritten_history="last_turn")
    account, questions = _read(Path(config.conversations))
    for line in account.lines():
        print(line, file=sys.stderr)
    if not questions:
        raise ValueError(f"none of {account.rows} rows of {config.conversations} can be asked, see the reasons above")
    _check_made_with(out, target, config.sampling)
    done = _finished(out / FILE, {question.id: digest_of(question) for question in questions})
    missing = [conversation for conversation in questions if conversation.id not in done]
    not_answered: dict[str, str] = {}
    if missing:
        context = config.engine.context_length or text_config(target)["max_position_embeddings"]
        converser = Converser(renderer, config.sampling, context=context, retries=config.retries)
        session = _Session(start().ready(), converser, out / FILE, earlier=len(questions) - len(missing))
        asyncio.run(session.run(missing, max_requests=config.sampling.max_requests))
        not_answered = session.not_answered
    rows = [json.loads(line) for line in (out / FILE).read_bytes().splitlines()]
    num_tokens = sum(len(row["response_ids"]) for row in rows)
    left = f", {len(not_answered)} not (see not_answered in the summary)" if not_answered else ""
    return {
        "target": config.target.name,
        "rows": account.rows,
        "answered": len(rows),
        "refused": account.num_refused,
        "refused_by_reason": account.refused,
        "num_not_answered": len(not_answered),
        "not_answered": dict(list(not_answered.items())[:MAX_LISTED]),
        "finished": sum(row["finished"] for row in rows),
        "answer_tokens": num_tokens,
        "line": f"{len(rows)} of {account.rows} conversations answered{left}, {num_tokens} tokens, in {out / FILE}",
    }


def digest_of(question: Conversation) -> str:
    """Changes with what is asked."""
    content = json.dumps([question.messages, question.tools], sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def _read(path: Path) -> tuple[Account, list[Conversation]]:
    """What can be asked, and where every row of the file went."""
    account, questions, seen = Account(), [], set()
    for row, value in read_rows(path):
        account.rows += 1
        try:
            conversation = conversation_of(row, value, file_name=path.stem)
            if not conversation.messages and isinstance(value.get("messages"), list):  # it has ids too: ask the text
                conversation = conversation_of(row, {k: value.get(k) for k in ("id", "source", "messages", "tools")})
            if conversation.id in seen:
                raise Refused("duplicate id")
            if not any(message["role"] == "user" for message in conversation.messages):
                raise Refused("no user turn to answer")
        except Refused as reason:
            account.refuse(row, str(reason))
            continue
        seen.add(conversation.id)
        questions.append(conversation)
    return account, questions


def _check_made_with(out: Path, target: Path, sampling: SamplingConfig) -> None:
    """Answers in `out` are of one target and one way of sampling. Raises ValueError naming both sides."""
    hashes = [config_hash(target), weights_fingerprint(target), tokenizer_hash(target), chat_template_hash(target)]
    asked = {name: getattr(sampling, name) for name in ("temperature", "top_p", "max_new_tokens", "seed")}
    asked["target"] = "-".join(hashes)
    file = out / MADE_WITH
    if (out / FILE).exists() and file.exists():
        found = json.loads(file.read_text())
        for name, value in asked.items():
            if found.get(name) != value:
                option = "target" if name == "target" else f"sampling.{name}"
                raise ValueError(
                    f"{out / FILE} was made with {option}={found.get(name)}, this run asks for {value}: choose another "
                    f"out=, or ask as before"
                )
    out.mkdir(parents=True, exist_ok=True)
    write_atomically(file, json.dumps(asked, indent=1) + "\n")


def _finished(file: Path, questions: dict[str, str]) -> set[str]:
    """Ids of the answers in `file`. What a kill has left of a last line, and answers to other questions, are taken out.

    questions  id -> digest of what is asked now
    """
    if not file.exists():
        return set()
    content = file.read_bytes()
    lines = content[: content.rfind(b"\n") + 1].splitlines(keepends=True)
    kept, ids = [], set()
    for line in lines:
        row = json.loads(line)
        if row["id"] in questions and row.get("question", questions[row["id"]]) != questions[row["id"]]:
            continue
        kept.append(line)
        ids.add(row["id"])
    if b"".join(kept) != content:
        if len(kept) < len(lines):
            print(f"{len(lines) - len(kept)} questions have changed and are asked again", file=sys.stderr)
        write_atomically(file, b"".join(kept))
    return ids


def append(file: BinaryIO, line: bytes) -> None:
    """All of `line`, or nothing of it; `file` is unbuffered. Raises OSError if the disk is full."""
    end, left = file.seek(0, os.SEEK_END), memoryview(line)
    try:
        while left:
            left = left[file.write(left) :]
    except OSError:
        file.truncate(end)
        raise


class _Session:
    """Many conversations with one server, their answers appended to `file`."""

    def __init__(self, server: Server, converser: Converser, file: Path, *, earlier: int) -> None:
        self._server, self._converser, self._file, self._earlier = server, converser, file, earlier
        self._answered = self._tokens = 0
        self.not_answered: dict[str, str] = {}  # id -> why

    async def run(self, conversations: list[Conversation], *, max_requests: int) -> None:
        slots = asyncio.Semaphore(max_requests)
        timeout = self._server.config.answer_timeout_seconds
        progress = tqdm(
            desc="generate", unit=" answers", total=self._earlier + len(conversations), initial=self._earlier,
            mininterval=0.5 if sys.stderr.isatty() else 30.0,
        )  # fmt: skip
        try:
            with progress, self._file.open("ab", buffering=0) as lines:
                async with Client(self._server.url, timeout_seconds=timeout) as client, asyncio.TaskGroup() as group:
                    for conversation in conversations:
                        await slots.acquire()
                        task = group.create_task(self._converse(conversation, client, lines, progress))
                        task.add_done_callback(lambda _: slots.release())
        except* (ServerGone, OSError) as ended:
            error, kept = ended.exceptions[0], f"the {self._earlier + self._answered} answers in {self._file} are kept"
            if isinstance(error, OSError):
                raise ValueError(
                    f"cannot write {self._file}: {error.strerror or error}; {kept}: free some space and run again, it "
                    f"continues there"
                ) from error
            raise self._server.failure(
                f"the server ended while generating ({error}); {kept}", cure="the same command continues there"
            ) from None

    async def _converse(self, conversation: Conversation, client: Client, lines: BinaryIO, progress: tqdm) -> None:
        """Answers one conversation and writes it; one that cannot be answered is told, and stands in the summary."""
        try:
            row = await self._converser.converse(conversation, client)
        except (Refused, RequestRefused, RequestFailed) as error:
            tqdm.write(f"{conversation.id} (row {conversation.row}) is not answered: {error}", file=sys.stderr)
            self.not_answered[conversation.id] = str(error)
            return
        about = {"id": conversation.id, "source": conversation.source, "question": digest_of(conversation), **row}
        line = json.dumps(about, ensure_ascii=False).encode() + b"\n"
        append(lines, line)
        self._answered += 1
        self._tokens += len(row["response_ids"])
        progress.set_postfix(tokens=self._tokens, refresh=False)
        progress.update()
