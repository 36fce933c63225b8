"""What the live server is asked, from a prompts folder and from files of every kind."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from data.config import TargetConfig
from data.fingerprints import tokenizer_hash
from data.prompts import Prompt, PromptSet
from data.tokenizing import load_tokenizer
from data.vocab import Vocabulary
from launch.questions import Question, load_questions


def prompt(id: str, *, tokens: list[int], mask: list[int], split: str = "validation") -> Prompt:
    return Prompt(id, "facts", split, np.array(tokens, np.int32), np.array(mask, np.uint8))


def save(prompts: list[Prompt], folder: Path, target: TargetConfig) -> None:
    """As data/main.py does, for this target."""
    PromptSet.collect(prompts).save(folder)
    counts, special = torch.zeros(512, dtype=torch.int64), torch.tensor([0, 1, 2])
    Vocabulary(counts, special, tokenizer_hash=tokenizer_hash(target.path), data_hash="d").save(folder)


def asked(path: Path, target: TargetConfig) -> list[Question]:
    return load_questions(path, target=target, target_path=Path(target.path))


def test_held_out_prompts_are_asked_and_training_prompts_are_not(tmp_path: Path, tiny_llama: TargetConfig):
    prompts = [
        prompt("a", tokens=[5, 6, 7, 8], mask=[0, 0, 1, 1]),
        prompt("b", tokens=[5, 6], mask=[0, 1], split="train"),
    ]
    save(prompts, tmp_path, tiny_llama)
    assert asked(tmp_path, tiny_llama) == [Question("a", "facts", [5, 6], [7, 8])]


def test_every_turn_of_the_assistant_is_a_question_of_its_own(tmp_path: Path, tiny_llama: TargetConfig):
    save([prompt("a", tokens=[5, 6, 7, 8, 9], mask=[0, 1, 0, 1, 1])], tmp_path, tiny_llama)
    assert asked(tmp_path, tiny_llama) == [
        Question("a/0", "facts", [5], [6]),
        Question("a/1", "facts", [5, 6, 7], [8, 9]),
    ]


def test_an_empty_validation_split_says_what_to_do(tmp_path: Path, tiny_llama: TargetConfig):
    save([prompt("b", tokens=[5, 6], mask=[0, 1], split="train")], tmp_path, tiny_llama)
    with pytest.raises(ValueError, match="larger validation_fraction"):
        asked(tmp_path, tiny_llama)


def test_prompts_of_another_tokenizer_are_refused(tmp_path: Path, tiny_llama: TargetConfig):
    """Their ids are other words here: the answers, and tau, would mean nothing."""
    save([prompt("a", tokens=[5, 6, 7, 8], mask=[0, 0, 1, 1])], tmp_path, tiny_llama)
    counts, special = torch.zeros(512, dtype=torch.int64), torch.tensor([0, 1, 2])
    Vocabulary(counts, special, tokenizer_hash="other", data_hash="d").save(tmp_path)
    with pytest.raises(ValueError, match="was tokenized for another target .tokenizer other.*run python data/main.py"):
        asked(tmp_path, tiny_llama)


def rows(path: Path, *values: dict) -> Path:
    file = path / "questions.jsonl"
    file.write_text("".join(json.dumps(value) + "\n" for value in values))
    return file


def test_token_ids_are_asked_as_they_are(tmp_path: Path, tiny_llama: TargetConfig):
    file = rows(tmp_path, {"id": "a", "source": "maths", "prompt_ids": [1, 2], "response_ids": [3]})
    assert asked(file, tiny_llama) == [Question("a", "maths", [1, 2], [3])]


@pytest.mark.parametrize(
    ("ids", "words"), [([1, 512], "vocabulary of 512"), ([-1], "vocabulary of 512"), ([], "its prompt has no token")]
)
def test_token_ids_that_would_end_the_server_are_refused_with_their_line(tmp_path: Path, tiny_llama: TargetConfig, ids, words):
    file = rows(tmp_path, {"id": "a", "prompt_ids": [1], "response_ids": [3]}, {"id": "b", "prompt_ids": ids, "response_ids": [3]})
    with pytest.raises(ValueError, match=f"line 2: .*{words}"):
        asked(file, tiny_llama)


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        (["user:Why?"], "<s>user\nWhy?</s>\n<s>assistant\n"),
        (["user:Why?", "assistant:So."], "<s>user\nWhy?</s>\n<s>assistant\n"),
        (
            ["user:Why?", "assistant:So.", "user:Who?"],
            "<s>user\nWhy?</s>\n<s>assistant\nSo.</s>\n<s>user\nWho?</s>\n<s>assistant\n",
        ),
        (
            ["user:Why?", "assistant:I look.", "tool:So."],
            "<s>user\nWhy?</s>\n<s>assistant\nI look.</s>\n<s>tool\nSo.</s>\n<s>assistant\n",
        ),
        (["user:Why?", "user:Who?"], "<s>user\nWhy?</s>\n<s>assistant\n"),
    ],
    ids=["question", "answered", "second question", "a tool's answer", "two questions: the first"],
)
def test_messages_are_asked_up_to_the_last_question(tmp_path: Path, tiny_llama: TargetConfig, messages, text: str):
    """The text is the tiny targets' chat template, written out by hand."""
    split = [message.split(":") for message in messages]
    messages = [{"role": role, "content": content} for role, content in split]
    file = rows(tmp_path, {"id": "a", "messages": messages, "prompt_ids": None, "response_ids": None})
    (question,) = asked(file, tiny_llama)
    tokenizer = load_tokenizer(tiny_llama.path, trust_remote_code=False)
    assert tokenizer.decode(question.prompt_ids) == text
    assert question.answer_ids is None


def test_a_row_without_a_question_is_refused_with_its_line(tmp_path: Path, tiny_llama: TargetConfig):
    file = rows(tmp_path, {"id": "a", "prompt": "Why?"}, {"id": "b", "messages": [{"role": "system", "content": "x"}]})
    with pytest.raises(ValueError, match="line 2: no question"):
        asked(file, tiny_llama)


def test_an_answer_is_as_long_as_the_one_on_record():
    recorded = Question("a", "facts", [1], [2, 3, 4])
    assert (recorded.num_tokens(None), recorded.num_tokens(2), recorded.num_tokens(9)) == (3, 2, 3)
    assert Question("a", "facts", [1], None).num_tokens(9) == 9


def test_without_a_record_the_length_must_be_said():
    with pytest.raises(ValueError, match="set max_new_tokens=128"):
        Question("a", "facts", [1], None).num_tokens(None)
