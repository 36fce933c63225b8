"""Families x batch shapes, with real servers: however a prompt is prefilled, its record is the same, and Hugging Face's.

Each server below covers one family and several shapes; together they cover every family and every shape. The whole
product of both is run by `python -m pytest tests/test_extract_matrix.py -m matrix` (half an hour on two cores).
"""

from __future__ import annotations

import asyncio
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from data.hugging_face import transformers
from data.prompts import Prompt
from data.schema import Provenance, Record
from data.shards import ShardReader
from extract.capture import Reference
from extract.client import Client
from extract.sink import extract
from tests.families import FAMILIES, VOCAB, Family, family
from tests.targets import SGLANG_VERSION, serve

CHUNK = 32  # tokens of a prefill: longer prompts come in pieces, and pieces of several requests share a batch
LENGTHS = (1, 7, 33, 100, 64, 2, 31, 65)
PREFIX = 40  # tokens that half of the prompts, and other clients' requests, begin with
STATES = 1e-5  # largest relative difference of a record's states between two shapes, and to Hugging Face


@dataclass(frozen=True)
class Shape:
    """How a server is started, beside its family; what the tests do with it is the same for all."""

    name: str
    engine: dict[str, Any] = field(default_factory=dict)
    num_ranks: int = 1


PLAIN = Shape("plain")
CHUNKED = Shape("chunked", {"extra_args": ["--chunked-prefill-size", str(CHUNK)]})
MIXED = Shape("chunked, decodes in the same batch", {"extra_args": ["--chunked-prefill-size", str(CHUNK), "--enable-mixed-chunk"]})
RADIX = Shape("radix cache", {"radix_cache": True})
OVERLAP = Shape("overlap schedule, chunked", {"overlap_schedule": True, **CHUNKED.engine})
TP2 = Shape("tp 2, chunked", {"tensor_parallel": 2, **CHUNKED.engine}, num_ranks=2)
DP2 = Shape("dp 2, radix cache", {"data_parallel": 2, "radix_cache": True})
DP_ATTENTION = Shape("dp attention", {"tensor_parallel": 2, "data_parallel": 2, "dp_attention": True})
SHAPES = (PLAIN, CHUNKED, MIXED, RADIX, OVERLAP, TP2, DP2, DP_ATTENTION)
MOE_WITH_MLA = ("deepseek_v2", "deepseek_v3", "kimi_k2", "kimi_k25")  # dp attention is for these

COVERING = [
    ("llama", MIXED),
    ("qwen2", DP2),
    ("qwen3", RADIX),
    ("qwen3_moe", TP2),
    ("deepseek_v2", OVERLAP),
    ("deepseek_v3", DP_ATTENTION),
    ("kimi_k25", CHUNKED),
    ("gpt_oss", CHUNKED),
    ("glm4_moe", RADIX),
]


def prompts() -> list[Prompt]:
    """Half of those that are long enough begin alike; every third token is the assistant's."""
    generator = np.random.default_rng(1)
    shared = generator.integers(3, VOCAB, PREFIX)
    rows = []
    for i, length in enumerate(LENGTHS):
        tokens = generator.integers(3, VOCAB, length)
        if i % 2 == 0 and length > PREFIX:
            tokens[:PREFIX] = shared
        rows.append(
            Prompt(
                id=f"prompt-{i}", source="toy", split="train", tokens=tokens.astype(np.int32),
                loss_mask=(np.arange(length) % 3 == 0).astype(np.uint8),
            )
        )  # fmt: skip
    return rows


@contextmanager
def other_clients(url: str):
    """Inside, requests that are not ours come one after the other: our prompts' beginnings, with answers."""
    over, errors = threading.Event(), []

    async def ask():
        async with Client(url, timeout_seconds=60) as client:
            number = 0
            while not over.is_set() or number < 3:
                asked = [prompt.tokens[: PREFIX + 3].tolist() for prompt in prompts()]
                await asyncio.gather(
                    *(
                        client.generate(tokens, rid=f"other-{number}-{i}", max_new_tokens=4, ignore_eos=True)
                        for i, tokens in enumerate(asked)
                    )
                )
                number += 1

    def run():
        try:
            asyncio.run(ask())
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
    assert errors == [], "ordinary traffic is served as ever"


def records(
    server, made: Family, out: Path, *, in_flight_bytes: int, retries: int = 0, sent: list[Prompt] | None = None
) -> dict[str, Record]:
    provenance = Provenance.of_target(
        made.folder, name=made.name, boundaries=list(made.boundaries), codec="fp32", engine="sglang",
        engine_version=SGLANG_VERSION,
    )  # fmt: skip
    extract(
        sent or prompts(), server=server, out=out, provenance=provenance, shard_bytes=1 << 30,
        in_flight_bytes=in_flight_bytes,
        retries=retries,
    )  # fmt: skip
    return {record.id: record for record in ShardReader(out, split="train")}


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def check(name: str, shape: Shape, models: Path, out: Path) -> None:
    if name == "deepseek_v2" and transformers.__version__ == "5.12.1":
        pytest.skip("the DeepSeek-V2 of transformers 5.12.1 does not run, so there is nothing to compare with")
    made = family(name, models)
    reference = Reference(made.reference)
    ways = {}
    engine = {**shape.engine, "extra_args": [*shape.engine.get("extra_args", []), *made.options]}
    with serve(made.folder, out, boundaries=list(made.boundaries), **engine) as server:
        assert server.num_ranks == shape.num_ranks
        with other_clients(server.url):  # first, so that a cache is filled with what our prompts begin with
            pass
        ways["one by one"] = records(server, made, out / "one", in_flight_bytes=1)
        ways["all at once"] = records(server, made, out / "all", in_flight_bytes=1 << 30)
        with other_clients(server.url):
            ways["beside other traffic"] = records(server, made, out / "beside", in_flight_bytes=1 << 30)
        assert not [path for path in server.capturing.spool.iterdir() if path.is_dir()], "nothing is left in the spool"
    for way, found in ways.items():
        assert list(found) == [prompt.id for prompt in prompts()], way
        for prompt in prompts():
            record, expected = found[prompt.id], reference.states(torch.from_numpy(prompt.tokens))
            where = f"{name}, {shape.name}, {way}, {len(prompt.tokens)} tokens"
            assert record.tokens.tolist() == prompt.tokens.tolist(), where
            assert record.loss_mask.tolist() == prompt.loss_mask.tolist(), where
            assert record.aux.shape == (len(prompt.tokens), len(made.boundaries), 128), where
            assert record.last.shape == (len(prompt.tokens), 128), where
            for column, boundary in enumerate(made.boundaries):
                error = relative(record.aux[:, column], expected.residual[boundary])
                assert error <= STATES, f"boundary {boundary}: {error:.1e} in {where}"
            assert relative(record.last, expected.last) <= STATES, where


@pytest.mark.parametrize(("name", "shape"), COVERING, ids=lambda value: getattr(value, "name", value))
def test_a_prompts_record_is_hugging_faces_however_it_was_prefilled(name, shape, models, tmp_path):
    check(name, shape, models, tmp_path)


@pytest.mark.matrix
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)
@pytest.mark.parametrize("name", FAMILIES)
def test_the_whole_product(name, shape, models, tmp_path):
    if shape is DP_ATTENTION and name not in MOE_WITH_MLA:
        pytest.skip("dp attention is for DeepSeek and Kimi")
    if (name, shape) not in COVERING:
        check(name, shape, models, tmp_path)
