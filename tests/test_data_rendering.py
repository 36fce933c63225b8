"""What the assistant wrote, found in the rendered text: templates of several kinds, on a real tokenizer."""

from __future__ import annotations

from pathlib import Path

import pytest

from data.config import TargetConfig
from data.conversations import Refused, conversation_of
from data.rendering import Renderer
from data.tokenizing import load_tokenizer

CHATML = (
    "{% for m in messages %}<s>{{ m.role }}\n{{ m.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
MARKED = (
    "{% for m in messages %}<s>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "{% endgeneration %}{% else %}{{ m.content }}{% endif %}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
# like Qwen3: thinking stays in the last turn, and is dropped from earlier ones
THINKING = (
    "{% for m in messages %}<s>{{ m.role }}\n"
    "{% if m.reasoning_content and loop.last %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}</s>\n{% endfor %}{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
# like DeepSeek-R1: the prompt for an answer opens the thinking
OPENED = (
    "{% for m in messages %}<s>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}<think>\n{{ m.reasoning_content or '' }}</think>{% endif %}"
    "{{ m.content }}</s>\n{% endfor %}{% if add_generation_prompt %}<s>assistant\n<think>\n{% endif %}"
)
# like GPT-OSS: another name for the thinking
CHANNELS = (
    "{% for m in messages %}<s>{{ m.role }}"
    "{% if 'thinking' in m %}|analysis|{{ m.thinking }}</s><s>assistant{% endif %}|final|{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant{% endif %}"
)
BARE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
UPPER = CHATML.replace("{{ m.content }}", "{{ m.content | upper }}")
USER, ANSWER = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}
TWO_TURNS = [USER, ANSWER, {"role": "user", "content": "more"}, {"role": "assistant", "content": "bye"}]


@pytest.fixture
def tokenizer(tiny_llama: TargetConfig):
    return load_tokenizer(tiny_llama.path, trust_remote_code=False)


def spans(tokenizer, template: str, messages: list[dict], *, rewritten_history: str = "refuse", **row) -> list[str]:
    tokenizer.chat_template = template
    renderer = Renderer(tokenizer, options={}, rewritten_history=rewritten_history)
    text, found = renderer.render(conversation_of(1, {"messages": messages, **row}))
    return [text[start:end] for start, end in found]


@pytest.mark.parametrize("template", [CHATML, MARKED])
def test_every_answer_with_its_end_of_turn_and_not_the_newline_after(tokenizer, template: str):
    assert spans(tokenizer, template, TWO_TURNS) == ["hello</s>", "bye</s>"]


def test_a_template_without_special_tokens_ends_a_turn_as_it_does(tokenizer):
    """The newline is all that tells the end of an answer there."""
    assert spans(tokenizer, BARE, TWO_TURNS) == ["hello\n", "bye\n"]


def test_white_space_of_the_answer_is_the_assistants(tokenizer):
    assert spans(tokenizer, CHATML, [USER, {"role": "assistant", "content": "  a \n\n"}]) == ["  a \n\n</s>"]


def test_a_system_turn_and_what_comes_after_the_answer_are_not(tokenizer):
    messages = [{"role": "system", "content": "be brief"}, USER, ANSWER, {"role": "user", "content": "bye"}]
    assert spans(tokenizer, CHATML, messages) == ["hello</s>"]


def test_two_answers_in_a_row_are_two_spans(tokenizer):
    assert spans(tokenizer, CHATML, [USER, ANSWER, ANSWER]) == ["hello</s>", "hello</s>"]


def test_thinking_that_the_template_shows_is_the_assistants(tokenizer):
    assert spans(tokenizer, THINKING, [USER, {**ANSWER, "reasoning_content": "hm"}]) == ["<think>hm</think>hello</s>"]


def test_thinking_opened_by_the_prompt_begins_after_it(tokenizer):
    """At serving the model starts after `<think>`: so does the mask."""
    assert spans(tokenizer, OPENED, [USER, {**ANSWER, "reasoning_content": "hm"}]) == ["hm</think>hello</s>"]


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_thinking_has_the_name_that_the_template_gives_it(tokenizer, name):
    found = spans(tokenizer, CHANNELS, [USER, {**ANSWER, name: "hm"}])
    assert found == ["|analysis|hm</s><s>assistant|final|hello</s>"]


def test_rewritten_history_is_refused(tokenizer):
    turns = [{**m, "reasoning_content": "hm"} if m["role"] == "assistant" else m for m in TWO_TURNS]
    with pytest.raises(Refused, match="rewrites history"):
        spans(tokenizer, THINKING, turns)


def test_rewritten_history_can_be_learned_from_by_its_last_answer(tokenizer):
    turns = [{**m, "reasoning_content": "hm"} if m["role"] == "assistant" else m for m in TWO_TURNS]
    assert spans(tokenizer, THINKING, turns, rewritten_history="last_turn") == ["<think>hm</think>bye</s>"]


def test_tools_and_tool_calls_go_through_the_template(tokenizer, tiny_llama):
    """The tiny target's own template."""
    template = (Path(tiny_llama.path) / "chat_template.jinja").read_text()
    call = {"id": "c", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [
        USER, {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "2", "tool_call_id": "c"}, ANSWER,
    ]  # fmt: skip
    first, second = spans(tokenizer, template, messages, tools=[{"type": "function", "function": {"name": "add"}}])
    assert '"name": "add", "arguments": {"a": 1}' in first and first.endswith("</s>")
    assert second == "hello</s>"


def test_a_template_that_wants_arguments_as_text_gets_them(tokenizer):
    """DeepSeek's adds strings: an object would be a type error."""
    template = CHATML.replace(
        "{{ m.content }}",
        "{{ m.content }}{% for c in m.tool_calls %}{{ c.function.name + ' ' + c.function.arguments }}{% endfor %}",
    )
    call = {"function": {"name": "add", "arguments": {"a": 1}}}
    messages = [USER, {"role": "assistant", "content": "", "tool_calls": [call]}]
    assert spans(tokenizer, template, messages) == ['add {"a": 1}</s>']


def test_an_answer_that_the_template_changes_is_refused(tokenizer):
    with pytest.raises(Refused, match="does not hold what the assistant said"):
        spans(tokenizer, UPPER, [USER, ANSWER])


def test_a_marker_that_leaves_an_answer_out_is_refused(tokenizer):
    template = MARKED.replace("m.role == 'assistant'", "m.role == 'assistant' and loop.last")
    assert spans(tokenizer, template, [USER, ANSWER]) == ["hello</s>"]
    with pytest.raises(Refused, match="does not hold what the assistant said"):
        spans(tokenizer, template, TWO_TURNS)


@pytest.mark.parametrize(
    ("messages", "reason"),
    [([USER], "no assistant turn"), ([ANSWER], "starts with the assistant"), ([], "no assistant turn")],
)
def test_a_conversation_without_a_question_and_an_answer_is_refused(tokenizer, messages: list[dict], reason: str):
    with pytest.raises(Refused, match=reason):
        spans(tokenizer, CHATML, messages)


def test_what_the_template_refuses_is_refused_in_its_words(tokenizer):
    template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(Refused, match="the chat template refuses it: roles must alternate"):
        spans(tokenizer, template, [USER, ANSWER])


def test_options_reach_the_template(tokenizer):
    tokenizer.chat_template = "{{ mood }}" + CHATML
    renderer = Renderer(tokenizer, options={"mood": "calm"}, rewritten_history="refuse")
    assert renderer.render(conversation_of(1, {"messages": [USER, ANSWER]}))[0].startswith("calm<s>user")


def test_a_tokenizer_without_a_chat_template_is_an_error(tokenizer):
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="has no chat template: put a chat_template.jinja there"):
        Renderer(tokenizer, options={}, rewritten_history="refuse")
