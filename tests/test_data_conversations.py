"""Every input format -> one Conversation; what cannot be used is refused with its reason."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from data.conversations import Refused, conversation_of, count_rows, read_rows

HELLO = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]


def of(**row):
    return conversation_of(7, row, file_name="file")


def test_openai_messages_are_kept():
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    conversation = of(id="a", source="s", messages=HELLO, tools=tools)
    assert (conversation.id, conversation.source, conversation.row) == ("a", "s", 7)
    assert conversation.messages == HELLO and conversation.tools == tools


def test_thinking_and_tool_calls_are_kept():
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    conversation = of(
        messages=[
            {"role": "system", "content": [{"type": "text", "text": "be "}, {"type": "text", "text": "brief"}]},
            {"role": "user", "content": "1+1"},
            {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [call]},
            {"role": "tool", "content": "2", "tool_call_id": "c1"},
            {"role": "assistant", "content": "2"},
        ]
    )
    system, _, assistant, tool, _ = conversation.messages
    assert system["content"] == "be brief"
    assert assistant == {
        "role": "assistant", "content": "", "reasoning_content": "hm",
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}],
    }  # fmt: skip
    assert tool == {"role": "tool", "content": "2", "tool_call_id": "c1"}


def test_sharegpt_becomes_messages():
    conversation = of(
        system="be brief",
        tools="[]",
        conversations=[
            {"from": "human", "value": "hi"},
            {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 1}}'},
            {"from": "observation", "value": "2"},
            {"from": "gpt", "value": "two"},
        ],
    )
    roles = [message["role"] for message in conversation.messages]
    assert roles == ["system", "user", "assistant", "tool", "assistant"]
    assert conversation.messages[2]["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1}}
    assert conversation.messages[-1]["content"] == "two" and conversation.tools is None


def test_openai_messages_under_sharegpts_name_are_understood():
    assert of(conversations=HELLO).messages == HELLO


def test_token_ids_win_over_messages():
    conversation = of(prompt_ids=[1, 2], response_ids=[3, 4, 5], messages=HELLO)
    assert conversation.tokens == [1, 2, 3, 4, 5] and conversation.loss_mask == [0, 0, 1, 1, 1]
    assert conversation.messages == []


@pytest.mark.parametrize("name", ["tokens", "input_ids"])
def test_tokens_come_with_their_mask(name: str):
    conversation = of(**{name: [1, 2, 3]}, loss_mask=[0, True, 1])
    assert conversation.tokens == [1, 2, 3] and conversation.loss_mask == [0, 1, 1]


def test_plain_text_is_kept():
    assert of(text="once").text == "once"


@pytest.mark.parametrize("row", [{"prompt": "a"}, {"turns": ["a"]}])
def test_a_question_alone_is_a_user_turn(row: dict):
    assert of(**row).messages == [{"role": "user", "content": "a"}]


def test_a_row_without_an_id_is_named_by_its_content():
    a, b, again = of(messages=HELLO), of(messages=HELLO[:1]), of(messages=HELLO, source="elsewhere")
    assert a.id == again.id != b.id
    assert a.source == "file" and again.source == "elsewhere"


def test_an_id_that_is_a_number_becomes_text():
    assert of(id=0, messages=HELLO).id == "0"


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"messages": [{"role": "bot", "content": "x"}]}, "unknown role 'bot'"),
        ({"conversations": [{"from": "alien", "value": "x"}]}, "unknown role 'alien'"),
        ({"messages": [{"content": "x"}]}, "unknown role 'None'"),
        ({"messages": ["x"]}, "a message is not a JSON object"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "content that is not text"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "c"}]}]}, "a tool call without a function name"),
        ({"messages": [{"role": "assistant", "tool_calls": True}]}, "tool_calls that are not a list"),
        ({"messages": [{"role": "user", "content": "a hawk \ud83e"}]}, "half a character"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": r'["\ud83e"]'}]}]}, "half a character"),
        ({"text": "\udd85"}, "half a character"),
        ({"id": "\ud83e", "tokens": [1], "loss_mask": [1]}, "half a character"),
        ({"messages": HELLO, "tools": "{"}, "tools that are not JSON"),
        ({"tokens": [1, 2]}, "tokens without a loss_mask"),
        ({"tokens": [1, 2], "loss_mask": [1]}, "tokens without a loss_mask of as many"),
        ({"tokens": [1, 2], "loss_mask": [1, 2]}, "zeros and ones"),
        ({"tokens": [1.5], "loss_mask": [1]}, "token ids that are not a list of numbers"),
        ({"prompt_ids": "12", "response_ids": [1]}, "token ids that are not a list of numbers"),
        ({"question": "x"}, "no known format"),
    ],
)
def test_what_cannot_be_used_is_refused_with_its_reason(row: dict, reason: str):
    with pytest.raises(Refused, match=reason):
        of(**row)


def test_what_is_null_is_not_there():
    """A table's rows have every column of all of them."""
    nulls = dict.fromkeys(("tokens", "input_ids", "loss_mask", "prompt_ids", "response_ids", "text", "id", "source"))
    assert of(messages=HELLO, **nulls).messages == of(messages=HELLO).messages
    assert of(conversations=[{"from": "human", "value": "x"}], messages=None).messages == [{"role": "user", "content": "x"}]


def test_a_row_that_is_no_object_is_refused():
    with pytest.raises(Refused, match="not a JSON object"):
        conversation_of(1, [1])


def write(path: Path, *lines: str) -> Path:
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def test_rows_carry_the_number_of_their_line(tmp_path: Path):
    path = write(tmp_path / "c.jsonl", '{"a": 1}', "", '{"b": 2}')
    assert list(read_rows(path)) == [(1, {"a": 1}), (3, {"b": 2})]
    assert count_rows(path) == 3


def test_a_json_list_is_a_file_too(tmp_path: Path):
    path = write(tmp_path / "c.json", json.dumps([{"a": 1}, {"b": 2}]))
    assert list(read_rows(path)) == [(1, {"a": 1}), (2, {"b": 2})]


def test_a_row_that_is_not_json_stops_with_its_line_number(tmp_path: Path):
    path = write(tmp_path / "c.jsonl", '{"a": 1}', '{"a": ')
    with pytest.raises(ValueError, match=f"{path} line 2 is not JSON"):
        list(read_rows(path))


@pytest.mark.parametrize("content", [[], ["", "  "]])
def test_an_empty_file_is_an_error(tmp_path: Path, content: list[str]):
    path = write(tmp_path / "c.jsonl", *content)
    with pytest.raises(ValueError, match=f"{path} holds no conversation"):
        list(read_rows(path))


def test_a_missing_file_is_an_error(tmp_path: Path):
    with pytest.raises(ValueError, match="there is no file"):
        list(read_rows(tmp_path / "c.jsonl"))
