"""One conversation with the target, turn by turn, in token ids as the server produced them.

A later turn's prompt is the ids of the turn before, its answer's ids, and what the template adds: an answer is not
tokenized a second time, so every answer of a conversation can be learnt from. Where the template shows an earlier answer
otherwise than it was written (dropped thinking, trimmed space), the prompt is rendered anew and only the last answer
counts; the row then says so by `earlier_answers: []`.
"""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass, field
from typing import Any

from data.conversations import Conversation, Refused
from data.prompts import NOT_SERVED
from data.rendering import Renderer
from extract.client import Answer, Client, RequestFailed
from extract.config import SamplingConfig

THINK, THOUGHT = "<think>", "</think>"
# GPT-OSS names what follows instead, in special tokens: analysis is thinking, final the answer
_CHANNEL = re.compile(r"<\|channel\|>(\w+).*?<\|message\|>(.*?)(?=<\|(?:end|return|call|start|channel)\|>|$)", re.DOTALL)


@dataclass
class _Talk:
    """What has been said so far.

    text, ids   of the last prompt and its answer, where the next prompt may go on; empty before the first
    answers     [start, end) of the earlier answers in `ids`, as the server produced them
    """

    messages: list[dict[str, Any]] = field(default_factory=list)
    text: str = ""
    ids: list[int] = field(default_factory=list)
    answers: list[tuple[int, int]] = field(default_factory=list)


class Converser:
    """Asks a target's server.

    context  longest prompt and answer together, tokens        retries  of a request that failed
    """

    def __init__(self, renderer: Renderer, sampling: SamplingConfig, *, context: int, retries: int) -> None:
        self._renderer, self._sampling, self._context, self._retries = renderer, sampling, context, retries

    async def converse(self, conversation: Conversation, client: Client) -> dict[str, Any]:
        """Answers every turn that waits for one.

        prompt_ids, response_ids  the last turn's         earlier_answers  [start, end) of the others in prompt_ids
        finished                  it ended by itself      messages, tools  the whole, as text, reasoning by itself

        Raises Refused, RequestRefused, RequestFailed, ServerGone.
        """
        given = list(conversation.messages)
        while given and given[-1]["role"] == "assistant":
            given.pop()
        talk, row = _Talk(), {}
        for i, message in enumerate(given):
            talk.messages.append(message)
            waits = message["role"] in ("user", "tool")
            if waits and (i + 1 == len(given) or given[i + 1]["role"] == "user"):
                row = await self._answer(conversation, talk, client)
        if not row:
            raise Refused("it does not end with a user's turn")
        return row | {"messages": talk.messages} | ({"tools": conversation.tools} if conversation.tools else {})

    async def _answer(self, conversation: Conversation, talk: _Talk, client: Client) -> dict[str, Any]:
        """One turn; `talk` has it afterwards."""
        tokenizer = self._renderer.tokenizer
        text = self._renderer.text(talk.messages, tools=conversation.tools, add_generation_prompt=True)
        if talk.ids and text.startswith(talk.text):
            prompt_ids = talk.ids + tokenizer(text[len(talk.text) :], add_special_tokens=False)["input_ids"]
        else:
            prompt_ids, talk.answers = tokenizer(text, add_special_tokens=False)["input_ids"], []
        room = self._context - NOT_SERVED - len(prompt_ids)  # so that what comes of it can be captured
        if room < 1:
            raise Refused(f"{len(prompt_ids)} tokens leave no room in a context of {self._context}")
        answer = await self._ask(client, prompt_ids, conversation, turn=len(talk.messages), room=room)
        row = {
            "prompt_ids": prompt_ids,
            "response_ids": answer.output_ids,
            "earlier_answers": list(talk.answers),
            "finished": answer.finished,
        }
        plain, marked = (tokenizer.decode(answer.output_ids, skip_special_tokens=skip) for skip in (True, False))
        talk.messages.append(message_of(text, plain, marked=marked))
        talk.text = text + marked
        talk.ids = prompt_ids + answer.output_ids
        talk.answers.append((len(prompt_ids), len(talk.ids)))
        return row

    async def _ask(
        self, client: Client, prompt_ids: list[int], conversation: Conversation, *, turn: int, room: int
    ) -> Answer:
        sampling, name = self._sampling, f"{conversation.row}-{turn}"
        for attempt in range(self._retries + 1):
            try:
                return await client.generate(
                    prompt_ids, rid=f"generate-{os.getpid()}-{name}-{attempt}",
                    max_new_tokens=min(room, sampling.max_new_tokens), temperature=sampling.temperature,
                    top_p=sampling.top_p, seed=seed_of(sampling.seed, conversation.id, turn),
                )  # fmt: skip
            except RequestFailed:
                if attempt == self._retries:
                    raise
        raise AssertionError("unreachable: the last attempt returns or raises")


def seed_of(seed: int | None, id: str, turn: int) -> int | None:
    """Of one answer: another for every conversation and turn, the same in every run."""
    if seed is None:
        return None
    return int.from_bytes(hashlib.sha256(f"{seed} {turn} {id}".encode()).digest()[:4], "big") >> 1


def message_of(prompt: str, text: str, *, marked: str) -> dict[str, Any]:
    """An answer as a message; marked: with its special tokens. What it thought stands by itself: between <think>, which may
    be the prompt's last word, and </think>, or in a channel."""
    if channels := _CHANNEL.findall(marked):
        content, reasoning = ("\n".join(said for name, said in channels if name == wanted) for wanted in ("final", "analysis"))
        return {"role": "assistant", "content": content} | ({"reasoning_content": reasoning} if reasoning else {})
    thinks = prompt.rstrip().endswith(THINK) or text.lstrip().startswith(THINK)
    if not thinks:
        return {"role": "assistant", "content": text}
    reasoning, thought, content = text.partition(THOUGHT)
    reasoning = reasoning.strip().removeprefix(THINK).strip("\n")
    return {"role": "assistant", "content": content.lstrip("\n") if thought else "", "reasoning_content": reasoning}
