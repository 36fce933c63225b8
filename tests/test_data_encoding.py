"""The record's bytes: plain safetensors files, whose layout is known before the record is there."""

from __future__ import annotations

from dataclasses import replace

import pytest
import safetensors.torch
import torch

from data.encoding import Layout, decode, encode
from tests.records import PROVENANCE, record_of

LAYOUT = Layout(PROVENANCE)


def bytes_of(record, codec: str = "bf16") -> bytes:
    header, tensors = encode(record, Layout(replace(PROVENANCE, codec=codec)))
    return header + b"".join(t.reshape(-1).view(torch.uint8).numpy().tobytes() for t in tensors)


def with_top_k(record, k: int):
    T = record.num_tokens
    ids = torch.arange(T * k, dtype=torch.int32).view(T, k)
    return replace(record, top_ids=ids, top_log_probs=-ids.float(), log_normalizer=torch.ones(T))


@pytest.mark.parametrize(("codec", "dtype"), [("bf16", torch.bfloat16), ("fp32", torch.float32)])
@pytest.mark.parametrize("num_tokens", [1, 3, 8])
def test_plain_safetensors_reads_a_record(codec: str, dtype: torch.dtype, num_tokens: int):
    record = record_of("a", num_tokens=num_tokens)
    columns = safetensors.torch.load(bytes_of(record, codec))
    assert set(columns) == {"tokens", "loss_mask", "aux", "last"}
    assert columns["tokens"].dtype == torch.int32 and columns["tokens"].tolist() == record.tokens.tolist()
    assert columns["loss_mask"].dtype == torch.uint8 and columns["loss_mask"].tolist() == record.loss_mask.tolist()
    for name in ("aux", "last"):
        assert columns[name].dtype == dtype and torch.equal(columns[name], getattr(record, name).to(dtype))


def test_bf16_rounds_to_nearest_even():
    """By hand: bf16 keeps 8 bits of 1.x. 1 + 3/256 lies between 1 + 2/256 and 1 + 4/256: a tie, to even."""
    record = record_of("a", num_tokens=1)
    values = torch.tensor([1 + 1 / 256, 1 + 3 / 256, 1 + 1.01 / 256, -(1 + 3 / 256), 0.0, 1.0, 2.0, 3.0])
    record = replace(record, last=values[None])
    last = safetensors.torch.load(bytes_of(record))["last"][0].float().tolist()
    assert last == [1.0, 1 + 4 / 256, 1 + 2 / 256, -(1 + 4 / 256), 0.0, 1.0, 2.0, 3.0]


@pytest.mark.parametrize("codec", ["bf16", "fp32", "fp8", "fp8+bf16", "fp8+topk4"])
@pytest.mark.parametrize("num_tokens", [1, 9, 10, 1000])
def test_the_layout_is_what_safetensors_finds(codec: str, num_tokens: int):
    """Size, columns, dtypes and shapes, for headers of several lengths; every column at a multiple of its element."""
    layout = Layout(replace(PROVENANCE, codec=codec))
    content = bytes_of(with_top_k(record_of("a", num_tokens=num_tokens), 4), codec)
    assert layout.num_bytes(num_tokens) == len(content) and len(layout.header(num_tokens)) % 64 == 0
    columns = safetensors.torch.load(content)
    found = {name: (column.dtype, tuple(column.shape[1:])) for name, column in columns.items()}
    assert found == layout.columns and {len(column) for column in columns.values()} == {num_tokens}
    for begin, name in zip(layout.begins, layout.order):
        assert begin * num_tokens % layout.columns[name][0].itemsize == 0


def test_decoding_shares_memory_with_the_buffer():
    content = bytearray(b"x" * 512 + bytes_of(record_of("a")))
    columns = decode(content, offset=512, size=len(content) - 512, num_tokens=5, layout=LAYOUT)
    content[-1] ^= 1  # loss_mask is the last column
    assert columns["loss_mask"][-1] == record_of("a").loss_mask[-1].item() ^ 1


def test_a_file_that_safetensors_laid_out_is_decoded():
    """In another order, with another header: what the header says counts."""
    expected = {name: column for name, column in safetensors.torch.load(bytes_of(record_of("a"))).items()}
    content = bytearray(safetensors.torch.save(expected, metadata=None))
    assert content != bytes_of(record_of("a")), "else this tests nothing"
    columns = decode(content, offset=0, size=len(content), num_tokens=5, layout=LAYOUT)
    assert columns.keys() == expected.keys()
    assert all(torch.equal(columns[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    ("size", "num_tokens", "codec", "message"),
    [
        (-1, 5, "bf16", "ends after the record"),
        (0, 4, "bf16", "5 tokens, the index says 4"),
        (0, 5, "fp32", "aux is BF16"),
        (0, 5, "fp8", "columns tokens, aux, last, loss_mask; expected"),
    ],
)
def test_a_record_that_is_not_what_the_dataset_says_does_not_decode(size, num_tokens, codec, message):
    content = bytes_of(record_of("a"))
    layout = Layout(replace(PROVENANCE, codec=codec))
    with pytest.raises(ValueError, match=message):
        decode(bytearray(content), offset=0, size=len(content) + size, num_tokens=num_tokens, layout=layout)


def test_a_record_without_what_the_codec_stores_is_refused():
    layout = Layout(replace(PROVENANCE, codec="fp8+topk4"))
    with pytest.raises(ValueError, match="record a has no top-k tokens, codec fp8.topk4 stores them"):
        encode(record_of("a"), layout)
    with pytest.raises(ValueError, match="record a has no last, codec bf16 stores it"):
        encode(replace(record_of("a"), last=None), LAYOUT)
    with pytest.raises(ValueError, match="record a has no top-k tokens"):
        encode(replace(with_top_k(record_of("a"), 4), log_normalizer=None), layout)
