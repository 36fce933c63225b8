"""A conversation with the target, turn by turn, with a stand-in for its server: ids are the server's own."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from data.conversations import Refused, conversation_of
from data.prompts import NOT_SERVED
from data.rendering import Renderer
from data.tokenizing import load_tokenizer
from extract.client import Answer, RequestFailed
from extract.config import SamplingConfig
from extract.converse import Converser, message_of, seed_of

SAMPLING = SamplingConfig(temperature=0.7, top_p=0.9, max_new_tokens=30, seed=5, max_requests=4)
EOS = 1


class Client:
    """Answers with the ids it is told, one list after the other; remembers what it was asked."""

    def __init__(self, *answers, fails: int = 0):
        self.answers, self.fails, self.asked = list(answers), fails, []

    async def generate(self, input_ids, **options):
        self.asked.append((list(input_ids), options))
        if self.fails:
            self.fails -= 1
            raise RequestFailed("once")
        ids = self.answers.pop(0)
        return Answer(ids, {"finish_reason": {"type": "stop" if ids[-1] == EOS else "length"}})


@pytest.fixture(scope="module")
def tokenizer(tiny_llama):
    return load_tokenizer(Path(tiny_llama.path), trust_remote_code=False)


def converse(tokenizer, row, client, *, context=400, retries=1):
    renderer = Renderer(tokenizer, options={}, rewritten_history="last_turn")
    converser = Converser(renderer, SAMPLING, context=context, retries=retries)
    return asyncio.run(converser.converse(conversation_of(1, row), client))


def test_a_later_turn_goes_on_from_the_servers_ids_though_they_are_not_how_the_text_tokenizes(tokenizer):
    """The first answer spells a word letter by letter, as no tokenizer would."""
    spelt = [tokenizer.convert_tokens_to_ids(letter) for letter in "hawk"]
    assert tokenizer("hawk", add_special_tokens=False)["input_ids"] != spelt
    client = Client([*spelt, EOS], [40, 41, EOS])
    row = converse(tokenizer, {"id": "a", "turns": ["Who?", "And then?"]}, client)
    (first, _), (second, _) = client.asked
    assert second[: len(first) + 5] == first + spelt + [EOS]
    assert row["prompt_ids"] == second and row["response_ids"] == [40, 41, EOS] and row["finished"]
    assert row["earlier_answers"] == [(len(first), len(first) + 5)]
    assert [message["content"] for message in row["messages"][:3]] == ["Who?", "hawk", "And then?"]
    supervised = conversation_of(1, {"id": "a", **row, "earlier_answers": [list(span) for span in row["earlier_answers"]]})
    assert [t for t, m in zip(supervised.tokens, supervised.loss_mask) if m] == [*spelt, EOS, 40, 41, EOS]


def test_an_answer_that_was_cut_off_is_closed_by_the_template(tokenizer):
    client = Client([40, 41], [42, EOS])
    row = converse(tokenizer, {"id": "a", "turns": ["Who?", "And then?"]}, client)
    (first, _), (second, _) = client.asked
    assert second[: len(first) + 2] == [*first, 40, 41] and second[len(first) + 2] == EOS
    assert row["earlier_answers"] == [(len(first), len(first) + 2)]


def test_where_the_template_rewrites_an_answer_the_prompt_is_rendered_anew_and_only_the_last_one_counts(tokenizer):
    """The tiny template shows thinking; one that drops it, as Qwen3's does, changes what stands before."""
    template = tokenizer.chat_template
    tokenizer.chat_template = template.replace("<think>{{ m['reasoning_content'] }}</think>", "")
    try:
        thought = tokenizer("<think>hm</think>yes", add_special_tokens=False)["input_ids"]
        client = Client([*thought, EOS], [42, EOS])
        row = converse(tokenizer, {"id": "a", "turns": ["Who?", "And then?"]}, client)
    finally:
        tokenizer.chat_template = template
    assert row["earlier_answers"] == []
    assert "hm" not in tokenizer.decode(row["prompt_ids"]) and "yes" in tokenizer.decode(row["prompt_ids"])
    assert row["messages"][1] == {"role": "assistant", "content": "yes", "reasoning_content": "hm"}


def test_what_was_thought_stands_by_itself():
    def said(prompt, text):
        message = message_of(prompt, text, marked=f"{text}</s>")
        return message.get("reasoning_content"), message["content"]

    assert said("...<assistant>", "plain") == (None, "plain")
    assert said("...<assistant>", "<think>\nwhy\n</think>\n\nso") == ("why", "so")
    assert said("...<think>\n", "why\n</think>\n\nso") == ("why", "so")
    assert said("...<think>\n", "cut off while thinking") == ("cut off while thinking", "")


def test_what_was_thought_in_a_channel_stands_by_itself():
    """As GPT-OSS answers; without its special tokens that reads "analysisWhy?assistantfinalSo."."""

    def said(marked):
        message = message_of("<|start|>assistant", re.sub(r"<\|\w+\|>", "", marked), marked=marked)
        return message.get("reasoning_content"), message["content"]

    thought, start = "<|channel|>analysis<|message|>Why?\nSo 1 < 2.", "<|end|><|start|>assistant"
    assert said(f"{thought}{start}<|channel|>final<|message|>So.<|return|>") == ("Why?\nSo 1 < 2.", "So.")
    assert said("<|channel|>final<|message|>So.<|return|>") == (None, "So.")
    assert said(f"{thought}{start}<|channel|>final<|message|>cut o") == ("Why?\nSo 1 < 2.", "cut o")
    assert said(thought) == ("Why?\nSo 1 < 2.", "")
    call = "<|channel|>commentary to=functions.look <|constrain|>json<|message|>{}<|call|>"
    assert said(f"{thought}{start}{call}") == ("Why?\nSo 1 < 2.", "")


def test_every_answer_has_a_seed_of_its_own_which_is_the_same_in_every_run(tokenizer):
    client = Client([40, EOS], [40, EOS])
    converse(tokenizer, {"id": "a", "turns": ["Who?", "And then?"]}, client)
    seeds = [options["seed"] for _, options in client.asked]
    assert seeds == [seed_of(5, "a", 1), seed_of(5, "a", 3)] and len({*seeds, seed_of(5, "b", 1), seed_of(6, "a", 1)}) == 4
    assert all(0 <= seed < 2**31 for seed in seeds) and seed_of(None, "a", 1) is None
    assert {(o["temperature"], o["top_p"], o["max_new_tokens"]) for _, o in client.asked} == {(0.7, 0.9, 30)}


def test_a_request_that_fails_is_asked_again_and_one_without_room_is_refused(tokenizer):
    row = {"id": "a", "turns": ["Who?"]}
    assert converse(tokenizer, row, Client([40, EOS], fails=1))["response_ids"] == [40, EOS]
    with pytest.raises(RequestFailed):
        converse(tokenizer, row, Client([40, EOS], fails=2))
    with pytest.raises(Refused, match="leave no room in a context of 8"):
        converse(tokenizer, row, Client([40, EOS]), context=8)
    length = len(converse(tokenizer, row, Client([40, EOS]))["prompt_ids"])
    converse(tokenizer, row, full := Client([40, 41]), context=length + NOT_SERVED + 2)
    assert full.asked[0][1]["max_new_tokens"] == 2, "with its answer, it can be captured"
