"""What a live server is asked: prompts as token ids, with the answer that came with them where there is one.

From a folder that data/main.py wrote, its validation split: every turn of the assistant is one question, as
train/evaluate.py walks every turn. From a conversation file, every row's last question.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data.boundaries import text_config
from data.config import TargetConfig
from data.conversations import Conversation, Refused, conversation_of, read_rows
from data.prompts import PromptSet
from data.rendering import Renderer
from data.tokenizing import load_tokenizer
from data.vocab import check_tokenizer


@dataclass(frozen=True)
class Question:
    """prompt_ids: token ids to send; answer_ids: the answer on record, None where there is none."""

    id: str
    source: str
    prompt_ids: list[int]
    answer_ids: list[int] | None

    def num_tokens(self, limit: int | None) -> int:
        """The longest answer to ask for. Raises ValueError where nothing says how long it may be."""
        if self.answer_ids is not None:
            return len(self.answer_ids) if limit is None else min(limit, len(self.answer_ids))
        if limit is None:
            raise ValueError(f"{self.id} has no answer whose length could be taken: set max_new_tokens=128")
        return limit


def load_questions(path: Path, *, target: TargetConfig, target_path: Path) -> list[Question]:
    """The questions of a prompts folder or a conversation file. Raises ValueError if there is none."""
    if path.is_dir():
        questions = _from_prompts(PromptSet.load(path))
        check_tokenizer(path, target_path)
        empty = "its validation split is empty: run data/main.py with a larger validation_fraction="
    else:
        questions = _from_file(path, target=target, target_path=target_path)
        empty = "no row has a question"
    if not questions:
        raise ValueError(f"{path} has nothing to ask: {empty}")
    return questions


def _from_prompts(prompts: PromptSet) -> list[Question]:
    questions = []
    for prompt in prompts:
        if prompt.split != "validation":
            continue
        edges = np.flatnonzero(np.diff(np.concatenate([[0], prompt.loss_mask.astype(np.int8), [0]])))
        tokens = prompt.tokens.tolist()
        for turn, (start, stop) in enumerate(edges.reshape(-1, 2).tolist()):
            if start > 0:
                name = f"{prompt.id}/{turn}" if len(edges) > 2 else prompt.id
                questions.append(Question(name, prompt.source, tokens[:start], tokens[start:stop]))
    return questions


def _from_file(path: Path, *, target: TargetConfig, target_path: Path) -> list[Question]:
    tokenizer = load_tokenizer(target_path, trust_remote_code=target.trust_remote_code)
    renderer = Renderer(tokenizer, options={}, rewritten_history="last_turn")
    vocab_size = text_config(target_path)["vocab_size"]
    questions: dict[str, Question] = {}
    for row, value in read_rows(path):
        try:
            conversation = conversation_of(row, value, file_name=path.stem)
            question = _ask(conversation, value, renderer)
            if not question.prompt_ids:
                raise Refused("its prompt has no token")
            if not 0 <= min(question.prompt_ids) <= max(question.prompt_ids) < vocab_size:
                raise Refused(f"a token id outside the target's vocabulary of {vocab_size}")
        except Refused as reason:
            raise ValueError(f"{path} line {row}: {reason}: remove it, or give a file of conversations") from reason
        if question.id in questions:
            raise ValueError(f"{path} line {row}: the id {question.id!r} stands twice: ids must be unique")
        questions[question.id] = question
    return list(questions.values())


def _ask(conversation: Conversation, value: dict, renderer: Renderer) -> Question:
    """The row's own prompt_ids where it has them, else its messages up to the last question.

    Of several questions without any answer between them only the first is asked.
    """
    if value.get("prompt_ids") is not None:
        prompt, answer = value["prompt_ids"], value.get("response_ids")
        return Question(conversation.id, conversation.source, prompt, answer or None)
    roles = [message["role"] for message in conversation.messages]
    if "assistant" in roles:
        end = len(roles) - 1 - roles[::-1].index("assistant")
        end = len(roles) if roles[-1] != "assistant" else end
    elif "user" in roles:
        end = roles.index("user") + 1
    else:
        raise Refused(f"no question in {json.dumps(value)[:60]}")
    text = renderer.text(conversation.messages[:end], tools=conversation.tools, add_generation_prompt=True)
    ids = renderer.tokenizer(text, add_special_tokens=False)["input_ids"]
    return Question(conversation.id, conversation.source, ids, None)
