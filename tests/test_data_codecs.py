"""Codecs: what they keep of the states, in how many bytes, and how plain safetensors sees it."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch
import torch
import webdataset
from torch.utils.data import DataLoader

from data.codecs import Codec, TeacherHead, decode_fp8, encode_fp8, is_finite
from data.packing import Piece, padding_batch
from data.schema import stored
from data.shards import ShardReader, ShardWriter
from data.stream import PackDataset
from tests.records import PROVENANCE, record_of

CODECS = ["bf16", "fp32", "fp8", "fp8+bf16", "bf16+fp8", "fp8+topk5", "bf16+topk5"]
HEAD = TeacherHead(torch.randn(PROVENANCE.vocab_size, 8, generator=torch.Generator().manual_seed(3)), device="cpu")


def captured(id: str, *, num_tokens: int = 5):
    """With last and the top k, so that any codec finds what it stores."""
    record = record_of(id, num_tokens=num_tokens)
    return replace(record, **HEAD.top_k(record.last, 5))


def dataset(folder: Path, codec: str, records) -> ShardReader:
    with ShardWriter(folder, provenance=replace(PROVENANCE, codec=codec), split="train", shard_bytes=4000) as writer:
        for record in records:
            writer.write(record)
    return ShardReader(folder, split="train")


@pytest.mark.parametrize(
    ("name", "canonical"),
    [("bf16", "bf16"), ("bf16+bf16", "bf16"), ("fp8", "fp8"), ("fp8+topk", "fp8+topk64"), ("fp8+topk8", "fp8+topk8")],
)
def test_a_codec_has_one_name(name: str, canonical: str):
    assert Codec.parse(name).name == canonical
    assert replace(PROVENANCE, codec=name).codec == canonical


@pytest.mark.parametrize(
    "name", ["int3", "topk64", "topk64+bf16", "fp8+", "fp8+topk0", "fp8+topk8+bf16", "", "fp8+int3"]
)
def test_an_unknown_codec_is_refused_with_those_there_are(name: str):
    with pytest.raises(ValueError, match=r"codec=.*: expected one of bf16, fp32, fp8, or AUX\+LAST"):
        Codec.parse(name)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("bf16", 57_344),  # 4 x 7168 x 2
        ("fp8+bf16", 3 * 7168 + 3 * 4 + 7168 * 2),
        ("fp8", 4 * 7168 + 4 * 4),
        ("fp8+topk64", 3 * 7168 + 3 * 4 + 64 * (4 + 4) + 4),
    ],
)
def test_bytes_of_a_kimi_token_by_hand(name: str, expected: int):
    size = Codec.parse(name).bytes_per_token(num_boundaries=3, hidden_size=7168)
    assert size == expected
    if name == "fp8+topk64":
        assert size / 57_344 <= 0.40


@pytest.mark.parametrize("codec", CODECS)
def test_a_shard_is_as_large_as_its_codec_says(tmp_path: Path, codec: str):
    """Beside states, tokens and masks there are only headers: less than 3 KB a record."""
    reader = dataset(tmp_path, codec, [captured("a", num_tokens=1000)])
    states = 1000 * (Codec.parse(codec).bytes_per_token(num_boundaries=3, hidden_size=8) + 5)
    assert states < reader.entries[0].size < states + 1000
    assert states < reader.shards[0].info.bytes < states + 4500


def test_e4m3_by_hand():
    """Largest 400: scale 1. e4m3 has steps of 2 from 16 on (17 ties to even 16), of 32 from 256 on, of 2^-9 at 0."""
    values, scales = encode_fp8(torch.tensor([[400.0, 17.0, 19.0, -1.0, 0.0, 2**-9, 2**-10, 1.0625]]))
    assert scales.tolist() == [1.0]
    assert decode_fp8(values, scales)[0].tolist() == [384.0, 16.0, 20.0, -1.0, 0.0, 2**-9, 0.0, 1.0]


def test_relative_error_of_fp8_is_that_of_four_significant_bits():
    """At most 2^-4 of any value down to 2^-14 of its row's largest, and 2.3 % in the mean of a uniform mantissa."""
    states = (
        torch.randn(400, 3, 64, generator=torch.Generator().manual_seed(0))
        * torch.logspace(-30, 30, 400)[:, None, None]
    )
    values, scales = encode_fp8(states)
    assert values.shape == states.shape and scales.shape == (400, 3) and values.dtype == torch.float8_e4m3fn
    decoded = decode_fp8(values, scales, dtype=torch.float64)
    large = states.abs() > states.abs().amax(-1, keepdim=True) * 2**-14
    error = ((decoded - states) / states).abs()[large]
    assert error.max() <= 2**-4 and 0.02 < error.mean() < 0.026
    whole = (decoded - states).flatten(1).norm(dim=1) / states.flatten(1).double().norm(dim=1)
    assert whole.max() < 0.04


def test_bf16_keeps_eight_bits():
    record = captured("a", num_tokens=200)
    states = stored(record, Codec.parse("bf16"))
    assert ((states.aux.double() - record.aux) / record.aux).abs().max() <= 2**-8


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_decoding_fp8_is_exact_and_encoding_it_again_changes_nothing(dtype: torch.dtype):
    values, scales = encode_fp8(torch.randn(50, 64, generator=torch.Generator().manual_seed(0)) * 3)
    decoded = decode_fp8(values, scales, dtype=dtype)
    assert torch.equal(decoded.double(), values.double() * scales.double()[:, None])
    assert torch.equal(decode_fp8(*encode_fp8(decoded), dtype=dtype), decoded)


def test_rows_of_zeros_and_the_largest_and_smallest_numbers_survive_fp8():
    rows = torch.tensor([[0.0, 0.0], [3.0e38, 1.0e38], [448.0, 1.0], [2.0**-126, 0.0], [1e-44, 0.0]])
    decoded = decode_fp8(*encode_fp8(rows), dtype=torch.float64)
    assert decoded.isfinite().all() and decoded[0].tolist() == [0, 0] and decoded[2].tolist() == [448, 1]
    assert decoded[1] == pytest.approx(rows[1].double(), rel=2**-4) and decoded[3].tolist() == [2.0**-126, 0]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_fp8_refuses_what_is_not_finite(value: float):
    with pytest.raises(ValueError, match="not finite"):
        encode_fp8(torch.tensor([[1.0, value]]))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float16, torch.bfloat16])
def test_every_number_there_is_is_finite_or_not_as_torch_says(dtype: torch.dtype):
    size = 2 ** (8 * dtype.itemsize)
    patterns = torch.arange(size, dtype=torch.int32).to(torch.uint8 if size == 256 else torch.uint16).view(dtype)
    finite = patterns.float().isfinite()
    assert is_finite(patterns[finite]) and 0 < finite.sum() < size
    assert not any(is_finite(torch.stack([patterns[0], one])) for one in patterns[~finite])


@pytest.mark.parametrize("value", [math.nan, -math.nan, math.inf, -math.inf])
def test_one_value_among_many_that_is_not_finite_is_found(value: float):
    column = torch.randn(64, 3, 100, generator=torch.Generator().manual_seed(0))
    assert is_finite(column) and is_finite(column.double()) and is_finite(column.int())
    assert is_finite(torch.full((3,), torch.finfo(torch.float32).max)) and is_finite(-column.abs())
    column[40, 1, 7] = value
    assert not is_finite(column) and not is_finite(column[:, 1]) and not is_finite(column.double())


def test_the_top_k_are_those_of_the_softmax():
    last = torch.randn(40, 8, generator=torch.Generator().manual_seed(5)).bfloat16()
    top = HEAD.top_k(last, 5)
    logits = last.double() @ HEAD.head.double().T
    for row, ids, log_probs in zip(logits, top["top_ids"], top["top_log_probs"]):
        expected = row.sort(descending=True)
        assert ids.tolist() == expected.indices[:5].tolist()
        torch.testing.assert_close(log_probs.double(), row.log_softmax(-1)[ids.long()], rtol=0, atol=1e-5)
    torch.testing.assert_close(top["log_normalizer"].double(), logits.logsumexp(-1), rtol=1e-6, atol=0)
    assert {name: column.dtype for name, column in top.items()} == {
        "top_ids": torch.int32, "top_log_probs": torch.float32, "log_normalizer": torch.float32
    }  # fmt: skip


def test_of_equally_likely_tokens_the_lowest_id_comes_first():
    """Eyas' argmax takes the lowest id; 300 equal logits, of which only 3 are kept."""
    ids = TeacherHead(torch.ones(300, 8), device="cpu").top_k(torch.ones(2, 8), 3)["top_ids"]
    assert ids[:, 0].tolist() == [0, 0] and all(len(set(row)) == 3 for row in ids.tolist())


def test_long_records_go_through_the_head_in_parts(monkeypatch):
    last = torch.randn(10, 8, generator=torch.Generator().manual_seed(5))
    whole = HEAD.top_k(last, 5)
    monkeypatch.setattr("data.codecs._LOGITS", 3 * PROVENANCE.vocab_size)
    parts = HEAD.top_k(last, 5)
    assert torch.equal(whole["top_ids"], parts["top_ids"])
    torch.testing.assert_close(whole["top_log_probs"], parts["top_log_probs"])


@pytest.mark.parametrize("codec", CODECS)
def test_plain_webdataset_and_safetensors_read_every_codec(tmp_path: Path, codec: str):
    record = captured("a")
    dataset(tmp_path, codec, [record])
    (sample,) = webdataset.WebDataset([str(tmp_path / "train-000000.tar")], shardshuffle=False)
    columns = safetensors.torch.load(sample["safetensors"])
    expected = stored(record, Codec.parse(codec)).states()
    assert columns.keys() == {"tokens", "loss_mask", *expected}
    for name, column in expected.items():
        assert columns[name].dtype == column.dtype and columns[name].float().equal(column.float())


@pytest.mark.parametrize("codec", CODECS)
def test_a_record_comes_back_as_it_was_stored(tmp_path: Path, codec: str):
    records = [captured(f"id-{i}", num_tokens=1 + i) for i in range(6)]
    for record, read in zip(records, dataset(tmp_path, codec, records), strict=True):
        expected = stored(record, Codec.parse(codec))
        assert read.states().keys() == expected.states().keys()
        assert all(read.states()[name].float().equal(column.float()) for name, column in expected.states().items())
        decoded = read.decoded()
        assert (
            decoded.aux_scale is None
            and decoded.last_scale is None
            and decoded.aux.dtype in (torch.bfloat16, torch.float32)
        )
        torch.testing.assert_close(decoded.aux.float(), record.aux, rtol=2**-4, atol=2**-9)
        assert (decoded.last is None) == ("topk" in codec)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_of_every_codec_are_decoded_where_they_are_used(tmp_path: Path, codec: str, num_workers: int):
    records = [captured(f"id-{i}", num_tokens=4 + i) for i in range(3)]
    reader = dataset(tmp_path, codec, records)
    packs = [[(0, 0, 4), (2, 1, 5)], []]
    pieces = [[Piece(*piece) for piece in pack] for pack in packs]
    batches = list(DataLoader(PackDataset(reader, pieces, pad_to=10), batch_size=None, num_workers=num_workers))
    batch, padding = (batch.to("cpu") for batch in batches)
    first, third = reader.read(0).decoded(), reader.read(2).decoded()
    assert batch.aux.shape == padding.aux.shape == (10, 24) and batch.aux.dtype == padding.aux.dtype == first.aux.dtype
    assert torch.equal(batch.aux[:4], first.aux.flatten(1)) and torch.equal(batch.aux[4:8], third.aux[1:5].flatten(1))
    assert not batch.aux[8:].any() and not padding.aux.any()
    if "topk" in codec:
        assert batch.last is None and torch.equal(batch.top_ids[4:8], third.top_ids[1:5])
        assert padding.top_ids.shape == (10, 5) and padding.top_log_probs.isfinite().all()
    else:
        assert torch.equal(batch.last[4:8], third.last[1:5]) and batch.top_ids is None


def test_what_a_codec_stores_must_be_there(tmp_path: Path):
    with pytest.raises(ValueError, match="record a has no top-k tokens, codec fp8.topk5 stores them"):
        dataset(tmp_path / "a", "fp8+topk5", [record_of("a")])
    with pytest.raises(ValueError, match="record a has no last, codec fp8.bf16 stores it"):
        dataset(tmp_path / "b", "fp8+bf16", [replace(captured("a"), last=None)])
    with pytest.raises(ValueError, match=r"top_ids has shape \[5, 5\], expected \[5, 6\]"):
        dataset(tmp_path / "c", "fp8+topk6", [captured("a")])


def test_a_shard_of_another_codec_than_the_manifest_says_is_named(tmp_path: Path):
    dataset(tmp_path, "fp8", [captured("a")])
    manifest = tmp_path / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"codec": "fp8"', '"codec": "bf16"'))
    with pytest.raises(ValueError, match="train-000000.tar is corrupt at record a.*columns tokens.*expected"):
        ShardReader(tmp_path, split="train").read(0)


def test_a_padding_batch_has_the_columns_of_its_dataset():
    batch = padding_batch(3, replace(PROVENANCE, codec="fp8+topk4"))
    assert batch.aux_scale.shape == (3, 3) and batch.top_log_probs.shape == (3, 4) and batch.last is None
