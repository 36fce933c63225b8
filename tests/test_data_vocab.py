"""The draft vocabulary: what is in it, and how d2t says so."""

from __future__ import annotations

import time

import pytest
import torch

from data.config import TargetConfig
from data.prompts import Prompt, PromptSet
from data.tokenizing import load_tokenizer
from data.vocab import Vocabulary, draft_vocabulary, special_ids


def test_the_most_frequent_and_the_special_tokens_are_in():
    """By hand: 2 is special and unseen; 5, 7 and 1 are the most frequent others."""
    counts = torch.tensor([0, 4, 0, 1, 0, 9, 2, 9])
    d2t, t2d = draft_vocabulary(counts, size=4, special_ids=[2])
    assert (torch.arange(4) + d2t).tolist() == [1, 2, 5, 7]
    assert d2t.tolist() == [1, 1, 3, 4] and d2t.dtype == torch.int64
    assert t2d.nonzero().flatten().tolist() == [1, 2, 5, 7] and t2d.dtype == torch.bool


def test_of_equally_frequent_tokens_the_lowest_ids_are_in():
    d2t, _ = draft_vocabulary(torch.tensor([3, 3, 3, 3]), size=2, special_ids=[])
    assert (torch.arange(2) + d2t).tolist() == [0, 1]


def test_fewer_distinct_tokens_than_asked_are_filled_up():
    d2t, t2d = draft_vocabulary(torch.tensor([0, 0, 0, 5, 0, 0]), size=4, special_ids=[5])
    assert (torch.arange(4) + d2t).tolist() == [0, 1, 3, 5] and t2d.sum() == 4


def test_the_whole_vocabulary_maps_to_itself():
    d2t, t2d = draft_vocabulary(torch.tensor([1, 0, 2]), size=3, special_ids=[0])
    assert d2t.tolist() == [0, 0, 0] and t2d.all()


def test_a_draft_vocabulary_larger_than_the_targets_is_refused():
    with pytest.raises(ValueError, match="draft_vocab_size=9 is larger than the target's vocabulary of 8"):
        draft_vocabulary(torch.zeros(8, dtype=torch.int64), size=9, special_ids=[])


def test_a_draft_vocabulary_of_special_tokens_only_is_refused():
    with pytest.raises(ValueError, match="no room beside 3 special tokens"):
        draft_vocabulary(torch.zeros(8, dtype=torch.int64), size=3, special_ids=[0, 1, 2])


def test_kimis_vocabulary_takes_no_time():
    """A peer's Python loop took minutes."""
    counts = torch.randint(0, 1000, (163_840,))
    started = time.monotonic()
    draft_vocabulary(counts, size=32_000, special_ids=list(range(163_584, 163_840)))
    assert time.monotonic() - started < 2


def prompts_of(*rows: tuple[str, list[int], list[int]]) -> PromptSet:
    return PromptSet.collect(
        Prompt(str(i), "s", split, torch.tensor(tokens, dtype=torch.int32).numpy(), torch.tensor(mask).byte().numpy())
        for i, (split, tokens, mask) in enumerate(rows)
    )


@pytest.fixture
def tokenizer(tiny_llama: TargetConfig):
    return load_tokenizer(tiny_llama.path, trust_remote_code=False)


def test_only_supervised_tokens_of_the_train_split_count(tokenizer, tmp_path):
    prompts = prompts_of(("train", [7, 8, 8], [0, 1, 1]), ("validation", [9, 9], [1, 1]), ("train", [8, 6], [1, 0]))
    vocabulary = Vocabulary.count(prompts, tokenizer, vocab_size=512, tokenizer_hash="t")
    assert vocabulary.counts.shape == (512,) and vocabulary.counts.nonzero().tolist() == [[8]]
    assert vocabulary.counts[8] == 3
    vocabulary.save(tmp_path)
    loaded = Vocabulary.load(tmp_path)
    assert torch.equal(loaded.counts, vocabulary.counts) and loaded.tokenizer_hash == "t"
    assert loaded.special_ids.tolist() == [0, 1, 2] and loaded.data_hash == vocabulary.data_hash


def test_the_hash_follows_the_data(tokenizer):
    a, b = (prompts_of(("train", [7, token], [0, 1])) for token in (8, 9))
    hashes = {Vocabulary.count(p, tokenizer, vocab_size=512, tokenizer_hash="t").data_hash for p in (a, b, a)}
    assert len(hashes) == 2


def test_a_train_split_without_supervision_is_an_error(tokenizer):
    with pytest.raises(ValueError, match="no supervised token in the train split"):
        Vocabulary.count(prompts_of(("validation", [1], [1])), tokenizer, vocab_size=512, tokenizer_hash="t")


def test_special_tokens_are_the_tokenizers(tokenizer):
    """<s>, </s> and <pad> of the tiny targets."""
    assert special_ids(tokenizer) == [0, 1, 2]


def test_a_missing_or_damaged_file_is_named(tmp_path):
    with pytest.raises(ValueError, match="vocabulary.safetensors is missing"):
        Vocabulary.load(tmp_path)
    (tmp_path / "vocabulary.safetensors").write_bytes(b"x")
    with pytest.raises(ValueError, match="vocabulary.safetensors is damaged"):
        Vocabulary.load(tmp_path)
