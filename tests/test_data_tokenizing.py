"""Token ids and masks, on a real tokenizer; where every row went."""

from __future__ import annotations

import numpy as np
import pytest

from data.config import TargetConfig
from data.prompts import PromptSet, split_of
from data.tokenizing import Tokenizing, load_tokenizer, tokenize_spans

HELLO = [{"role": "user", "content": "What does the hawk see?"}, {"role": "assistant", "content": "It sees the hare."}]


@pytest.fixture
def tokenizer(tiny_llama: TargetConfig):
    return load_tokenizer(tiny_llama.path, trust_remote_code=False)


def tokenizing_of(tokenizer, **changes) -> Tokenizing:
    defaults = dict(
        vocab_size=512, max_tokens=100, cut_long=False, min_supervised=1, validation_fraction=0.0,
        rewritten_history="refuse", template_options={},
    )  # fmt: skip
    return Tokenizing(tokenizer, **{**defaults, **changes})


def run(tokenizing: Tokenizing, *rows: dict) -> PromptSet:
    return PromptSet.collect(tokenizing.run(enumerate(rows, start=1), file_name="file"))


def test_the_mask_is_the_answer_and_its_end_of_turn(tokenizer):
    (prompt,) = run(tokenizing_of(tokenizer), {"id": "a", "messages": HELLO})
    assert tokenizer.decode(prompt.tokens.tolist()) == (
        "<s>user\nWhat does the hawk see?</s>\n<s>assistant\nIt sees the hare.</s>\n"
    )
    assert tokenizer.decode(prompt.tokens[prompt.loss_mask == 1].tolist()) == "It sees the hare.</s>"
    assert prompt.tokens.dtype == np.int32 and prompt.loss_mask.dtype == np.uint8


@pytest.mark.parametrize("answer", ["naïve 🦅 鷹", "\n\n  x \n", "a</s>b", "", "é", "🦅🦅"])
def test_the_mask_survives_any_text(tokenizer, answer: str):
    """Characters of several tokens, white space at the edges, special tokens inside."""
    messages = [HELLO[0], {"role": "assistant", "content": answer}]
    (prompt,) = run(tokenizing_of(tokenizer), {"messages": messages})
    assert tokenizer.decode(prompt.tokens[prompt.loss_mask == 1].tolist()) == f"{answer}</s>"


def test_one_tokenization_of_the_whole_text(tokenizer):
    """` hawk` is one token; a span that begins inside it, at `awk`, counts it and does not cut it."""
    ((ids, mask),) = tokenize_spans(tokenizer, ["the hawk"], [[(5, 8)]])
    assert ids.tolist() == tokenizer("the hawk", add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids[mask == 1].tolist()) == " hawk"


class _WithoutOffsets:
    """A tokenizer like Kimi's: Python code, no offsets."""

    is_fast = False

    def __init__(self, tokenizer) -> None:
        self._tokenizer = tokenizer

    def __call__(self, text: str, **options):
        assert "return_offsets_mapping" not in options
        return self._tokenizer(text, **options)


def test_a_tokenizer_without_offsets_gives_the_same_mask(tokenizer):
    text = "<s>user\nhi</s>\n<s>assistant\nIt sees 🦅.</s>\n<s>user\nbye</s>\n"
    start = text.index("It")
    spans = [[(start, text.index("</s>", start) + 4)]]
    ((ids, mask),) = tokenize_spans(tokenizer, [text], spans)
    ((other_ids, other_mask),) = tokenize_spans(_WithoutOffsets(tokenizer), [text], spans)
    assert ids.tolist() == other_ids.tolist() and mask.tolist() == other_mask.tolist() and mask.any()


def test_without_offsets_a_token_across_the_edge_leaves_the_mask_empty(tokenizer):
    ((_, mask),) = tokenize_spans(_WithoutOffsets(tokenizer), ["the hawk"], [[(5, 8)]])
    assert not mask.any()


def test_plain_text_supervises_every_token_after_the_first(tokenizer):
    (prompt,) = run(tokenizing_of(tokenizer), {"text": "the hawk flies"})
    assert prompt.loss_mask.tolist() == [0] + [1] * (len(prompt.tokens) - 1)


def test_token_ids_are_taken_as_they_are(tokenizer):
    (prompt,) = run(tokenizing_of(tokenizer), {"prompt_ids": [5, 6], "response_ids": [7], "messages": HELLO})
    assert prompt.tokens.tolist() == [5, 6, 7] and prompt.loss_mask.tolist() == [0, 0, 1]


def test_rows_of_tokens_and_text_need_no_chat_template(tokenizer):
    tokenizer.chat_template = None
    assert len(run(tokenizing_of(tokenizer), {"text": "a b"}, {"tokens": [1, 2], "loss_mask": [0, 1]})) == 2
    with pytest.raises(ValueError, match="no chat template"):
        run(tokenizing_of(tokenizer), {"messages": HELLO})


def test_in_is_kept_plus_refused_with_reasons_and_rows(tokenizer):
    tokenizing = tokenizing_of(tokenizer, max_tokens=60)
    prompts = run(
        tokenizing,
        {"id": "a", "messages": HELLO},
        {"id": "b", "messages": [{"role": "bot", "content": "x"}]},
        {"id": "c", "text": "word " * 100},
        {"id": "a", "text": "the same id"},
        {"id": "d", "tokens": [1, 2, 3], "loss_mask": [0, 0, 0]},
        {"id": "e", "tokens": [1, 512], "loss_mask": [0, 1]},
        {"id": "f", "messages": HELLO[:1]},
        {"id": "g", "text": "the hawk"},
    )
    assert [prompt.id for prompt in prompts] == ["a", "g"]
    account = tokenizing.account
    assert account.rows == 8 == account.kept + account.num_refused
    assert {reason: entry["first_rows"] for reason, entry in account.refused.items()} == {
        "unknown role 'bot'": [2],
        "longer than 60 tokens (cut_long=true would cut it)": [3],
        "duplicate id": [4],
        "empty loss mask": [5],
        "a token id outside the target's vocabulary of 512": [6],
        "no assistant turn": [7],
    }
    assert "refused 1: duplicate id (row 4)" in account.lines()


def test_a_reason_names_its_first_rows_only(tokenizer):
    tokenizing = tokenizing_of(tokenizer)
    run(tokenizing, *[{"text": ""}] * 1, *[{"id": str(i), "messages": []} for i in range(9)])
    assert "refused 9: no assistant turn (row 2, 3, 4, 5, 6, ...)" in tokenizing.account.lines()


def test_what_is_too_long_is_cut_only_if_asked(tokenizer):
    tokenizing = tokenizing_of(tokenizer, max_tokens=10, cut_long=True)
    (prompt,) = run(tokenizing, {"text": "word " * 100})
    assert len(prompt.tokens) == 10 and tokenizing.account.cut == 1


def test_what_is_cut_before_the_answer_is_refused(tokenizer):
    tokenizing = tokenizing_of(tokenizer, max_tokens=3, cut_long=True)
    assert len(run(tokenizing, {"messages": HELLO})) == 0
    assert list(tokenizing.account.refused) == ["empty loss mask"]


def test_too_few_supervised_tokens_are_refused(tokenizer):
    tokenizing = tokenizing_of(tokenizer, min_supervised=3)
    run(tokenizing, {"prompt_ids": [1], "response_ids": [2, 3]}, {"prompt_ids": [1], "response_ids": [2, 3, 4]})
    assert tokenizing.account.refused == {"fewer than 3 supervised tokens": {"count": 1, "first_rows": [1]}}


def test_the_order_of_rows_is_kept_across_batches(tokenizer, monkeypatch):
    monkeypatch.setattr("data.tokenizing._BATCH_ROWS", 2)
    rows = [{"id": str(i), "text": "a b"} if i % 2 else {"id": str(i), "messages": HELLO} for i in range(7)]
    assert run(tokenizing_of(tokenizer), *rows).ids == [str(i) for i in range(7)]


def test_the_split_depends_on_the_id_alone():
    ids = [f"row-{i}" for i in range(10_000)]
    validation = {id for id in ids if split_of(id, validation_fraction=0.1) == "validation"}
    assert 900 < len(validation) < 1100  # 1000 expected, three standard deviations are 90
    assert validation <= {id for id in ids if split_of(id, validation_fraction=0.2) == "validation"}
    assert not any(split_of(id, validation_fraction=0.0) == "validation" for id in ids)


def test_prompts_survive_the_disk(tokenizer, tmp_path):
    prompts = run(tokenizing_of(tokenizer), {"id": "a", "source": "s", "messages": HELLO}, {"id": "ü", "text": "a b"})
    prompts.save(tmp_path)
    loaded = PromptSet.load(tmp_path)
    assert len(loaded) == 2 and loaded.ids == ["a", "ü"] and loaded.sources == ["s", "file"]
    for a, b in zip(prompts, loaded, strict=True):
        assert a.tokens.tolist() == b.tokens.tolist() and a.loss_mask.tolist() == b.loss_mask.tolist()
    assert loaded.tokens.dtype == np.int32 and loaded.offsets.dtype == np.int64


def test_prompts_that_are_missing_or_damaged_are_named(tokenizer, tmp_path):
    with pytest.raises(ValueError, match="holds no prompts: make them with python data/main.py conversations=FILE out="):
        PromptSet.load(tmp_path)
    run(tokenizing_of(tokenizer), {"text": "a b"}).save(tmp_path)
    (tmp_path / "prompts.jsonl").write_text("")
    with pytest.raises(ValueError, match="are damaged"):
        PromptSet.load(tmp_path)
    (tmp_path / "prompts.safetensors").write_bytes(b"12345678")
    with pytest.raises(ValueError, match="are damaged"):
        PromptSet.load(tmp_path)


def test_a_tokenizer_that_cannot_be_loaded_is_named(tmp_path):
    with pytest.raises(ValueError, match=f"the tokenizer in {tmp_path} cannot be loaded"):
        load_tokenizer(tmp_path, trust_remote_code=False)
