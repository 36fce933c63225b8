"""mode=generate: the target answers the conversations of a file, so that a drafter learns from its own words.

Every user turn without an answer is answered; of a conversation that ends with an answer, that one is
written anew. Token ids are kept as the server produced them: nothing is tokenized a second time.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

from tqdm import tqdm

from data.boundaries import text_config
from data.conversations import Conversation, Refused, conversation_of, read_rows
from data.rendering import Renderer
from data.tokenizing import Account, load_tokenizer
from extract.client import Answer, Client, RequestFailed, RequestRefused, ServerGone
from extract.config import ExtractConfig
from extract.server import Server

FILE = "conversations.jsonl"
MAX_REQUESTS = 256  # in flight


def generate(config: ExtractConfig, target: Path) -> dict[str, Any]:
    """Appends to <out>/conversations.jsonl what is not in it yet; the same call continues.

    Raises ValueError if the server ends, or no row of the file can be asked.
    """
    out = Path(config.out)
    tokenizer = load_tokenizer(target, trust_remote_code=config.target.trust_remote_code)
    renderer = Renderer(tokenizer, options={}, rewritten_history="last_turn")
    account, questions = _read(Path(config.conversations))
    for line in account.lines():
        print(line, file=sys.stderr)
    if not questions:
        raise ValueError(f"none of {account.rows} rows of {config.conversations} can be asked, see the reasons above")
    done = _finished(out / FILE)
    missing = [conversation for conversation in questions if conversation.id not in done]
    if missing:
        with Server(
            target, engine=config.engine, config=config.server, out=out / "server",
            trust_remote_code=config.target.trust_remote_code,
        ) as server:  # fmt: skip
            session = _Session(server, renderer, config, context=text_config(target)["max_position_embeddings"])
            asyncio.run(session.run(missing, out / FILE, earlier=len(questions) - len(missing)))
    rows = [json.loads(line) for line in (out / FILE).read_text().splitlines()]
    num_tokens = sum(len(row["response_ids"]) for row in rows)
    return {
        "target": config.target.name,
        "rows": account.rows,
        "answered": len(rows),
        "refused": account.num_refused,
        "refused_by_reason": account.refused,
        "finished": sum(row["finished"] for row in rows),
        "answer_tokens": num_tokens,
        "line": f"{len(rows)} of {account.rows} conversations answered, {num_tokens} tokens, in {out / FILE}",
    }


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


def _finished(file: Path) -> set[str]:
    """Ids of the answers in `file`; what a kill has left of a last line is cut off."""
    if not file.exists():
        return set()
    content = file.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if len(whole) < len(content):
        with file.open("r+b") as opened:
            opened.truncate(len(whole))
    return {json.loads(line)["id"] for line in whole.splitlines()}


class _Session:
    """Many conversations with one server."""

    def __init__(self, server: Server, renderer: Renderer, config: ExtractConfig, *, context: int) -> None:
        self._server, self._renderer, self._sampling, self._context = server, renderer, config.sampling, context
        self._retries = config.retries
        self._answered = 0

    async def run(self, conversations: list[Conversation], file: Path, *, earlier: int) -> None:
        slots = asyncio.Semaphore(MAX_REQUESTS)
        timeout = self._server.config.answer_timeout_seconds
        progress = tqdm(
            desc="generate", unit=" answers", total=earlier + len(conversations), initial=earlier,
            mininterval=0.5 if sys.stderr.isatty() else 30.0,
        )  # fmt: skip
        try:
            with progress, file.open("ab", buffering=0) as lines:
                async with Client(self._server.url, timeout_seconds=timeout) as client, asyncio.TaskGroup() as group:
                    for conversation in conversations:
                        await slots.acquire()
                        task = group.create_task(self._converse(conversation, client, lines, progress))
                        task.add_done_callback(lambda _: slots.release())
        except* ServerGone as gone:
            raise self._server.failure(
                f"the server ended while generating ({gone.exceptions[0]}); the {earlier + self._answered} answers in "
                f"{file} are kept",
                cure="the same command continues there",
            ) from None

    async def _converse(self, conversation: Conversation, client: Client, lines: Any, progress: tqdm) -> None:
        """Answers one conversation and writes it; one that the server refuses is told and left out."""
        try:
            row = await self._answer_all(conversation, client)
        except (Refused, RequestRefused, RequestFailed) as error:
            tqdm.write(f"{conversation.id} (row {conversation.row}) is not answered: {error}", file=sys.stderr)
            return
        line = json.dumps(row, ensure_ascii=False).encode() + b"\n"
        os.write(lines.fileno(), line)
        self._answered += 1
        progress.update()

    async def _answer_all(self, conversation: Conversation, client: Client) -> dict[str, Any]:
        given = list(conversation.messages)
        while given and given[-1]["role"] == "assistant":
            given.pop()
        messages: list[dict[str, Any]] = []
        row: dict[str, Any] = {}
        for i, message in enumerate(given):
            messages.append(message)
            waits = message["role"] in ("user", "tool")
            if waits and (i + 1 == len(given) or given[i + 1]["role"] == "user"):
                row = await self._answer(conversation, messages, client)
                messages.append({"role": "assistant", "content": row.pop("text")})
        if not row:
            raise Refused("it does not end with a user's turn")
        about = {"id": conversation.id, "source": conversation.source, **row, "messages": messages}
        return about | ({"tools": conversation.tools} if conversation.tools else {})

    async def _answer(self, conversation: Conversation, messages: list[dict], client: Client) -> dict[str, Any]:
        """One turn: its ids, whether it ended by itself, and its text."""
        text = self._renderer.text(messages, tools=conversation.tools, add_generation_prompt=True)
        tokenizer = self._renderer.tokenizer
        prompt_ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        room = self._context - len(prompt_ids) - 1
        if room < 1:
            raise Refused(f"{len(prompt_ids)} tokens leave no room in a context of {self._context}")
        sampling = self._sampling
        answer = await self._ask(
            client, prompt_ids, name=f"{conversation.row}-{len(messages)}",
            max_new_tokens=min(room, sampling.max_new_tokens), temperature=sampling.temperature,
            top_p=sampling.top_p, seed=sampling.seed,
        )  # fmt: skip
        return {
            "prompt_ids": prompt_ids,
            "response_ids": answer.output_ids,
            "finished": answer.finished,
            "text": tokenizer.decode(answer.output_ids, skip_special_tokens=True),
        }

    async def _ask(self, client: Client, prompt_ids: list[int], *, name: str, **sampling: Any) -> Answer:
        for attempt in range(self._retries + 1):
            try:
                return await client.generate(prompt_ids, rid=f"generate-{os.getpid()}-{name}-{attempt}", **sampling)
            except RequestFailed:
                if attempt == self._retries:
                    raise
        raise AssertionError("unreachable: the last attempt returns or raises")
