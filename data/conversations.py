"""Every accepted input format -> one Conversation type. The format is detected row by row.

    {"messages": [{"role": "user", "content": ...}, ...], "tools": [...]}     OpenAI
    {"conversations": [{"from": "human", "value": ...}, ...], "system": ...}  ShareGPT
    {"prompt_ids": [...], "response_ids": [...]}                              tokenized, the response is supervised, and
                                                                              "earlier_answers": [[start, end], ...] of it
    {"tokens" or "input_ids": [...], "loss_mask": [...]}                      tokenized
    {"text": ...}                                                             every token after the first is supervised
    {"prompt": ...}, {"turns": [...]}                                         questions only, for extract/generate.py

Token ids win over messages where a row has both. `id` and `source` are kept.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROLES = ("system", "developer", "user", "assistant", "tool")
_SHAREGPT_ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "chatgpt": "assistant",
    "model": "assistant", "system": "system", "tool": "tool", "observation": "tool", "function_response": "tool",
    "function_call": "assistant",
}  # fmt: skip


class Refused(Exception):
    """This row cannot be used; the text says why, and is what rows are counted by."""


@dataclass(frozen=True)
class Conversation:
    """One row: messages, or text, or tokens with their mask.

    row       number of its line in the file, from 1
    messages  as chat templates take them: role, content (text), reasoning_content, tool_calls
    tokens, loss_mask  ids and 0/1, of equal length
    """

    id: str
    source: str
    row: int
    messages: list[dict[str, Any]] = field(default_factory=list)
    tools: list[dict[str, Any]] | None = None
    text: str | None = None
    tokens: list[int] | None = None
    loss_mask: list[int] | None = None

    def __post_init__(self) -> None:
        """Raises Refused for half a character, as of an emoji that was cut: JSON has it, tokenizers and files cannot."""
        try:
            json.dumps([self.id, self.source, self.messages, self.tools, self.text], ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise Refused("half a character (a surrogate without the other)") from None


def read_rows(path: Path | str) -> Iterator[tuple[int, Any]]:
    """(line number from 1, JSON value) of every line that is not blank; a .json file is one list.

    Raises ValueError naming file and line if something is not JSON, and if there is no row at all:
    such a file is damaged, and what else it has lost cannot be known.
    """
    path = Path(path)
    count_rows(path)
    count = 0
    if path.suffix == ".json":
        for count, value in enumerate(_whole_file(path), start=1):
            yield count, value
    else:
        with path.open("rb") as file:
            for row, line in enumerate(file, start=1):
                if line.strip():
                    count += 1
                    yield row, _parse(line, where=f"{path} line {row}")
    if count == 0:
        raise ValueError(f"{path} holds no conversation: expected one JSON object a line")


def count_rows(path: Path | str) -> int | None:
    """Lines of the file, blank ones too, for a progress bar; None for a .json file. Raises ValueError if missing."""
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"there is no file {path}: set conversations= to a file of one JSON object a line")
    if path.suffix == ".json":
        return None
    with path.open("rb") as file:
        return sum(block.count(b"\n") for block in iter(lambda: file.read(1 << 20), b""))


def conversation_of(row: int, value: Any, *, file_name: str = "") -> Conversation:
    """The Conversation of one row; `file_name` is the source of rows that name none. Raises Refused."""
    if not isinstance(value, dict):
        raise Refused("not a JSON object")
    content = {k: v for k, v in value.items() if k not in ("id", "source")}
    id = value.get("id")
    if id is None or id == "":
        id = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]
    common = dict(id=str(id), source=str(value.get("source") or file_name), row=row)
    value = {name: found for name, found in value.items() if found is not None}  # columns of a table's other rows
    if "tokens" in value or "input_ids" in value:
        tokens = _ids(value.get("tokens", value.get("input_ids")))
        return Conversation(**common, tokens=tokens, loss_mask=_mask(value.get("loss_mask"), len(tokens)))
    if "prompt_ids" in value and "response_ids" in value:
        prompt, response = _ids(value["prompt_ids"]), _ids(value["response_ids"])
        loss_mask = [0] * len(prompt) + [1] * len(response)
        for start, end in _spans(value.get("earlier_answers") or [], len(prompt)):
            loss_mask[start:end] = [1] * (end - start)
        return Conversation(**common, tokens=prompt + response, loss_mask=loss_mask)
    tools = _tools(value.get("tools"))
    if isinstance(value.get("messages"), list):
        return Conversation(**common, messages=[_message(m) for m in value["messages"]], tools=tools)
    if isinstance(value.get("conversations"), list):
        messages = [_sharegpt_message(m) for m in value["conversations"]]
        system = value.get("system")
        if isinstance(system, str) and system and messages and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": system})
        return Conversation(**common, messages=messages, tools=tools)
    if isinstance(value.get("text"), str):
        return Conversation(**common, text=value["text"])
    turns = value.get("turns", value.get("prompt"))
    turns = [turns] if isinstance(turns, str) else turns
    if isinstance(turns, list) and turns and all(isinstance(turn, str) for turn in turns):
        return Conversation(**common, messages=[{"role": "user", "content": turn} for turn in turns], tools=tools)
    raise Refused("no known format (expected messages, conversations, tokens, prompt_ids + response_ids, or text)")


def _whole_file(path: Path) -> list[Any]:
    rows = _parse(path.read_bytes(), where=str(path))
    if not isinstance(rows, list):
        raise ValueError(f"{path} is not a list of conversations: expected [ {{...}}, ... ], or a .jsonl file")
    return rows


def _parse(content: bytes, *, where: str) -> Any:
    try:
        return json.loads(content)
    except ValueError as error:
        raise ValueError(f"{where} is not JSON ({error}): fix or remove it") from error


def _message(message: Any) -> dict[str, Any]:
    """An OpenAI message, cleaned: text content, thinking under one name, tool arguments as objects."""
    if not isinstance(message, dict):
        raise Refused("a message is not a JSON object")
    role = message.get("role")
    role = "tool" if role == "function" else role
    if role not in ROLES:
        raise Refused(f"unknown role {str(role)[:40]!r}")
    clean: dict[str, Any] = {"role": role, "content": _text(message.get("content"))}
    reasoning = message.get("reasoning_content") or message.get("reasoning") or message.get("thinking")
    if reasoning and role == "assistant":
        clean["reasoning_content"] = _text(reasoning)
    if calls := message.get("tool_calls"):
        if not isinstance(calls, list):
            raise Refused("tool_calls that are not a list")
        clean["tool_calls"] = [_tool_call(call) for call in calls]
    for key in ("name", "tool_call_id"):
        if message.get(key):
            clean[key] = message[key]
    return clean


def _sharegpt_message(message: Any) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise Refused("a message is not a JSON object")
    if "from" not in message:  # OpenAI messages under ShareGPT's name
        return _message(message)
    role = _SHAREGPT_ROLES.get(str(message["from"]).lower())
    if role is None:
        raise Refused(f"unknown role {str(message['from'])[:40]!r}")
    value = message.get("value")
    if message["from"] == "function_call":
        try:
            call = json.loads(value) if isinstance(value, str) else value
            return {"role": role, "content": "", "tool_calls": [_tool_call(call)]}
        except ValueError:
            raise Refused("a function_call is not JSON") from None
    return _message({**message, "role": role, "content": value})


def _text(content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [content]
    if all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in parts):
        return "".join(part["text"] for part in parts)
    raise Refused("content that is not text")


def _tool_call(call: Any) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise Refused("a tool call without a function name")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except ValueError:
            pass  # not JSON: the template shows it as it is
    result = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    return {"id": call["id"], **result} if call.get("id") else result


def _tools(tools: Any) -> list[dict[str, Any]] | None:
    if isinstance(tools, str) and tools.strip():
        try:
            tools = json.loads(tools)
        except ValueError:
            raise Refused("tools that are not JSON") from None
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise Refused("tools that are not a list of JSON objects")
    return tools


def _ids(ids: Any) -> list[int]:
    if not isinstance(ids, list) or not all(type(token) is int for token in ids):
        raise Refused("token ids that are not a list of numbers")
    return ids


def _spans(spans: Any, length: int) -> list[list[int]]:
    pairs = isinstance(spans, list) and all(isinstance(span, list) and len(span) == 2 for span in spans)
    if not pairs or not all(type(n) is int for span in spans for n in span):
        raise Refused("earlier_answers that are not [start, end) pairs")
    if not all(0 <= start <= end <= length for start, end in spans):
        raise Refused("earlier_answers outside prompt_ids")
    return spans


def _mask(mask: Any, length: int) -> list[int]:
    if not isinstance(mask, list) or len(mask) != length or not all(value in (0, 1) for value in mask):
        raise Refused("tokens without a loss_mask of as many zeros and ones")
    return [int(value) for value in mask]
