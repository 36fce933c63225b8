"""Chat template -> text, and the spans of it that the assistant wrote."""

from __future__ import annotations

import json
import re
from typing import Any

import jinja2

from data.conversations import Conversation, Refused

Span = tuple[int, int]  # characters [start, end) of the rendered text

_GENERATION_MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")


class Renderer:
    """Renders conversations with a tokenizer's chat template.

    options            extra variables of the template
    rewritten_history  what to do where the template renders an earlier answer differently once the
                       conversation goes on: refuse the row, or supervise its last_turn only

    Raises ValueError if the tokenizer has no chat template.
    """

    def __init__(self, tokenizer: Any, *, options: dict[str, Any], rewritten_history: str) -> None:
        self.tokenizer, self.options, self.rewritten_history = tokenizer, options, rewritten_history
        try:
            template = tokenizer.get_chat_template()
        except ValueError:
            raise ValueError(
                f"the tokenizer in {tokenizer.name_or_path} has no chat template: put a chat_template.jinja there, or "
                f"give rows with tokens or text"
            ) from None
        self.marks_generation = bool(_GENERATION_MARKER.search(template))
        special = tokenizer.added_tokens_decoder.values()
        self.special = tuple(str(token) for token in special if token.special) or tuple(tokenizer.all_special_tokens)

    def render(self, conversation: Conversation) -> tuple[str, list[Span]]:
        """The whole conversation as text, and the assistant's spans: each with its end-of-turn token.

        Raises Refused if there is no answer, the template refuses, or the spans cannot be told safely.
        """
        if not any(message["role"] == "assistant" for message in conversation.messages):
            raise Refused("no assistant turn")
        text = self.text(conversation.messages, tools=conversation.tools, add_generation_prompt=False)
        find = self._marked_spans if self.marks_generation else self._spans_by_prefix
        spans = [self._to_end_of_turn(text, span) for span in find(conversation, text)]
        self._check(conversation, text, spans)
        return text, spans

    def text(self, messages: list[dict[str, Any]], *, tools: list | None, add_generation_prompt: bool) -> str:
        """`messages` as the template shows them. Raises Refused if it cannot."""
        render = lambda messages: self.tokenizer.apply_chat_template(  # noqa: E731
            _with_both_names(messages), tools=tools, tokenize=False, add_generation_prompt=add_generation_prompt, **self.options
        )
        try:
            return render(messages)
        except (jinja2.TemplateError, TypeError, ValueError, KeyError) as error:
            if any("tool_calls" in message for message in messages):
                try:  # templates disagree: most want a call's arguments as an object, some as JSON text
                    return render([_with_text_arguments(message) for message in messages])
                except (jinja2.TemplateError, TypeError, ValueError, KeyError):
                    pass
            raise Refused(f"the chat template refuses it: {str(error)[:100]}") from error

    def _marked_spans(self, conversation: Conversation, text: str) -> list[Span]:
        """From the template's own {% generation %} marker."""
        from data.hugging_face import transformers

        try:
            rendered, spans = transformers.utils.chat_template_utils.render_jinja_template(
                conversations=[_with_both_names(conversation.messages)],
                tools=conversation.tools,
                chat_template=self.tokenizer.get_chat_template(tools=conversation.tools),
                return_assistant_tokens_mask=True,
                **{**self.tokenizer.special_tokens_map, **self.options},
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError) as error:
            raise Refused(f"the chat template refuses it: {str(error)[:100]}") from error
        if rendered != [text]:
            raise Refused("the template's generation marker changes the text")
        return [(start, end) for start, end in spans[0] if start < end]

    def _spans_by_prefix(self, conversation: Conversation, text: str) -> list[Span]:
        """An answer is what the text gains from the prompt for it to the text that ends with it."""
        messages, tools = conversation.messages, conversation.tools
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        spans = []
        for i in turns:
            if i == 0:
                raise Refused("the conversation starts with the assistant")
            prompt = self.text(messages[:i], tools=tools, add_generation_prompt=True)
            last = i + 1 == len(messages)
            after = text if last else self.text(messages[: i + 1], tools=tools, add_generation_prompt=False)
            if text.startswith(after) and after.startswith(prompt):
                spans.append((len(prompt), len(after)))
            elif self.rewritten_history == "refuse" or i == turns[-1]:
                raise Refused(
                    "the chat template rewrites history (rewritten_history=last_turn would learn from the last answer)"
                )
        return spans

    def _to_end_of_turn(self, text: str, span: Span) -> Span:
        """Ends the span with its end-of-turn token: adds the one that follows, drops white space after it."""
        start, end = span
        eos = self.tokenizer.eos_token
        if eos and not text[start:end].rstrip().endswith(self.special) and text.startswith(eos, end):
            return start, end + len(eos)
        stripped = text[start:end].rstrip()
        return (start, start + len(stripped)) if stripped.endswith(self.special) else span

    def _check(self, conversation: Conversation, text: str, spans: list[Span]) -> None:
        """Refuses the row unless the spans hold what the assistant said: all of it, or the last answer."""
        answers = [message for message in conversation.messages if message["role"] == "assistant"]
        if self.rewritten_history == "last_turn":
            answers = answers[-1:]
        position, written = 0, [text[start:end] for start, end in spans]
        for answer in answers:
            while position < len(written) and not _holds(written[position], answer):
                position += 1
            if position == len(written):
                raise Refused("the mask does not hold what the assistant said")
            position += not self.marks_generation  # a marked span may hold several messages


def _holds(written: str, answer: dict[str, Any]) -> bool:
    content = answer["content"].strip()
    names = [call["function"]["name"] for call in answer.get("tool_calls", ())]
    after_thinking = content.rsplit("</think>", 1)[-1].strip()  # some templates parse thinking out of the content
    return (content in written or after_thinking in written) and all(name in written for name in names)


def _with_both_names(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What was thought, as most templates call it and as GPT-OSS's does."""
    thought = "reasoning_content"
    return [{**message, "thinking": message[thought]} if thought in message else message for message in messages]


def _with_text_arguments(message: dict[str, Any]) -> dict[str, Any]:
    calls = []
    for call in message.get("tool_calls", ()):
        function = call["function"]
        arguments = function["arguments"]
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        calls.append({**call, "function": {**function, "arguments": text}})
    return {**message, "tool_calls": calls} if calls else message
