"""Extraction beside the server's own rate: from a real SGLang server to finished shards, in one run.

    python benchmarks/extract.py [--sizes 1b 8b] [--out DIR] [--json FILE] [--engine-args="--attention-backend triton"]
                                 [--repeats 3] [--checked 4]

Llama-shaped targets with random bf16 weights, made on the fly. A server without the plugin says what it prefills by
itself; a server with it what ordinary requests cost then, and what arrives in shards; some records are compared with
Hugging Face on the same GPU. DIR on tmpfs (/dev/shm) measures the way and not the disk. Without a GPU a tiny shape
runs, to show that it works: its figures mean nothing.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import argparse
import asyncio
import gc
import json
import shutil
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import aiohttp
import numpy as np
import torch
from omegaconf import OmegaConf
from safetensors.torch import save_file

from data.boundaries import engine_layer_ids
from data.config import typed
from data.embedded import _tiny_tokenizer
from data.manifest import Manifest, remove_shards
from data.prompts import Prompt
from data.schema import Provenance, Record
from data.shards import ShardReader
from extract.capture import Reference, head_weight
from extract.command import Capturing, installation
from extract.config import EngineConfig, ServerConfig
from extract.server import Server
from extract.sink import extract

ROOT = Path(__file__).resolve().parent.parent
CUDA = torch.cuda.is_available()
DTYPE = torch.bfloat16 if CUDA else torch.float32
LONGER = 4 if CUDA else 1  # times the requests go into shards: the way's end takes a second, which hours do not show
KEPT = 8  # finished shards; those before are removed
SHARD_BYTES = 250_000_000  # several are written at a time, of what is in flight
LIMIT = 1.5  # times the relative error that Hugging Face's own states have in the same dtype ...
FLOOR = 1e-4  # ... or this


@dataclass(frozen=True)
class Size:
    """A Llama: layers of hidden size H, heads of 64 or 128; requests x length tokens are prefilled each time."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    vocab: int
    requests: int
    length: int = 512

    @property
    def boundaries(self) -> list[int]:
        return [2, self.layers // 2, self.layers - 3]


SIZES = {
    "1b": Size(16, 2048, 8192, 32, 8, 49152, requests=3072),
    "8b": Size(32, 4096, 14336, 32, 8, 49152, requests=768),
    "tiny": Size(8, 64, 128, 4, 2, 512, requests=32, length=64),
}


def make_target(size: Size, folder: Path) -> None:
    """Random weights whose blocks write little enough to the residual stream that bfloat16 can be compared."""
    generator = torch.Generator(device="cuda" if CUDA else "cpu").manual_seed(0)

    def random(*shape: int, scale: float = 0.02) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator, device=generator.device) * scale).to(DTYPE).cpu()

    head_dim, ones = size.hidden // size.heads, torch.ones(size.hidden, dtype=DTYPE)
    weights = {
        "model.embed_tokens.weight": random(size.vocab, size.hidden), "model.norm.weight": ones.clone(),
        "lm_head.weight": random(size.vocab, size.hidden),
    }  # fmt: skip
    for i in range(size.layers):
        shapes = {
            "self_attn.q_proj": (size.heads * head_dim, size.hidden),
            "self_attn.k_proj": (size.kv_heads * head_dim, size.hidden),
            "self_attn.v_proj": (size.kv_heads * head_dim, size.hidden),
            "self_attn.o_proj": (size.hidden, size.heads * head_dim),
            "mlp.gate_proj": (size.intermediate, size.hidden),
            "mlp.up_proj": (size.intermediate, size.hidden),
            "mlp.down_proj": (size.hidden, size.intermediate),
        }
        for name, shape in shapes.items():
            weights[f"model.layers.{i}.{name}.weight"] = random(*shape, scale=0.005 if name.endswith(("o_proj", "down_proj")) else 0.02)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"model.layers.{i}.{name}.weight"] = ones.clone()
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    _tiny_tokenizer().save_pretrained(folder)
    config = dict(
        architectures=["LlamaForCausalLM"], model_type="llama", hidden_size=size.hidden, vocab_size=size.vocab,
        intermediate_size=size.intermediate, num_hidden_layers=size.layers, num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads, head_dim=head_dim, max_position_embeddings=8192, rms_norm_eps=1e-5,
        rope_theta=10000.0, hidden_act="silu", tie_word_embeddings=False, bos_token_id=0, eos_token_id=1,
        torch_dtype=str(DTYPE).removeprefix("torch."),
    )  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config, indent=1))


def prompts_of(size: Size, *, seed: int, count: int | None = None) -> list[Prompt]:
    generator = np.random.default_rng(seed)
    mask = np.ones(size.length, dtype=np.uint8)
    return [
        Prompt(f"{seed}-{i}", "random", "train", generator.integers(3, size.vocab, size.length, dtype=np.int32), mask)
        for i in range(count or size.requests)
    ]


async def prefill(url: str, prompts: list[Prompt]) -> float:
    """Seconds for all of them in one request to the server: what it prefills by itself."""
    content = {
        "input_ids": [prompt.tokens.tolist() for prompt in prompts],
        "rid": [f"own-{prompt.id}-{time.monotonic_ns()}" for prompt in prompts],
        "sampling_params": {"max_new_tokens": 1, "temperature": 0},
    }
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600)) as session:
        began = time.perf_counter()
        async with session.post(f"{url}/generate", json=content) as answer:
            assert answer.status == 200 and len(await answer.json()) == len(prompts), answer.status
        return time.perf_counter() - began


def own_rate(server: Server, size: Size, *, repeats: int, name: str) -> float:
    """Tokens/s of ordinary requests, the median."""
    asyncio.run(prefill(server.url, prompts_of(size, seed=99, count=max(8, size.requests // 8))))  # warm
    tokens = size.requests * size.length
    seconds = [asyncio.run(prefill(server.url, prompts_of(size, seed=100 + i))) for i in range(repeats)]
    print(f"   {name}: " + ", ".join(f"{tokens / s:,.0f}" for s in seconds) + " tokens/s", flush=True)
    return tokens / statistics.median(seconds)


class Recycled:
    """In the place of an upload: takes finished shards away, but for the last ones."""

    def __init__(self, out: Path) -> None:
        self._out, self._thread, self._gone = out, ThreadPoolExecutor(1), set[str]()

    def send(self) -> None:
        self._thread.submit(self._remove)

    def _remove(self) -> None:
        finished = [shard.name for shard in Manifest.load(self._out).shards]
        for name in set(finished[:-KEPT]) - self._gone:
            (self._out / name).unlink()
            self._gone.add(name)

    def end(self) -> None:
        self._thread.shutdown()
        remove_shards(self._out, self._gone)  # from the manifest; that waits for nobody now


def shards_rate(
    server: Server, size: Size, out: Path, provenance: Provenance, *, repeats: int, in_flight_bytes: int
) -> float:
    """Tokens/s from the first request to the last finished shard, the median. Leaves the last shards."""
    rates = []
    for i in range(repeats + 1):
        shutil.rmtree(out, ignore_errors=True)
        count = size.requests * (LONGER if i else 1)  # the first one warms up
        prompts, recycled = prompts_of(size, seed=200 + i, count=count), Recycled(out)
        began = time.perf_counter()
        extract(
            prompts, server=server, out=out, provenance=provenance, shard_bytes=SHARD_BYTES,
            in_flight_bytes=in_flight_bytes, retries=0, uploader=recycled,
        )  # fmt: skip
        rates.append(count * size.length / (time.perf_counter() - began))
        recycled.end()
    print(f"   to finished shards: {rates[0]:,.0f} (cold), " + ", ".join(f"{rate:,.0f}" for rate in rates[1:]) + " tokens/s", flush=True)
    return statistics.median(rates[1:])


def check(target: Path, out: Path, boundaries: list[int], *, count: int) -> dict[str, Any]:
    """Some records against Hugging Face in float32: how far they are from it, and how far its own DTYPE is.

    Raises AssertionError if the server's are farther by more than LIMIT, or as near to another boundary.
    """
    reader = ShardReader(out, split="train")
    records = [reader.read(int(index)) for index in np.linspace(0, len(reader) - 1, count)]
    exact, rounded = (states_of(records, target, boundaries, dtype=dtype) for dtype in (torch.float32, DTYPE))
    head = head_weight(target).float()
    errors, own, neighbours, same = [], [], [], []
    for record, expected, theirs in zip(records, exact, rounded):
        for i, boundary in enumerate(boundaries):
            errors.append(relative(record.aux[:, i], expected[boundary]))
            own.append(relative(theirs[boundary], expected[boundary]))
            neighbours.append(relative(record.aux[:, i], expected[boundary + 1]))
        errors.append(relative(record.last, expected["last"]))
        own.append(relative(theirs["last"], expected["last"]))
        same.append(float(((record.last.float() @ head.T).argmax(-1) == (expected["last"] @ head.T).argmax(-1)).float().mean()))
    result = {
        "records_checked": len(records), "worst_relative_error": max(errors), "worst_of_hugging_face": max(own),
        "nearest_other_boundary": min(neighbours), "same_next_token": sum(same) / len(same),
    }  # fmt: skip
    assert all(error <= max(LIMIT * floor, FLOOR) for error, floor in zip(errors, own)), (errors, own)
    assert 2 * max(errors) < min(neighbours), (errors, neighbours)
    return result


@torch.no_grad()
def states_of(
    records: list[Record], target: Path, boundaries: list[int], *, dtype: torch.dtype
) -> list[dict[int | str, torch.Tensor]]:
    """What Hugging Face computes in `dtype`, of each record: the boundaries, those after them, and last, in float32."""
    reference = Reference(target, device="cuda" if CUDA else "cpu", dtype=dtype)
    found = []
    for record in records:
        states = reference.states(record.tokens)
        wanted = {b: states.residual[b] for boundary in boundaries for b in (boundary, boundary + 1)}
        found.append({name: rows.float().cpu() for name, rows in {**wanted, "last": states.last}.items()})
    return found


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    found, wanted = found.float().cpu(), wanted.float().cpu()
    return float((found - wanted).norm() / wanted.norm())


def measure(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    size, folder = SIZES[name], arguments.out / name
    target = folder / "target"
    engine = typed(EngineConfig, OmegaConf.merge(OmegaConf.load(ROOT / "conf/engine/sglang.yaml"), {
        "python": arguments.python, "extra_args": arguments.engine_args.split(), "dtype": "auto",
    }))  # fmt: skip
    config = typed(ServerConfig, OmegaConf.load(ROOT / "conf/server/local.yaml"))
    found = installation(engine)
    layer_ids = engine_layer_ids(
        size.boundaries, architecture="LlamaForCausalLM", engine="sglang", engine_version=found.version
    )
    print(f"{name}: {size.requests} x {size.length} tokens, SGLang {found.version} on {found.device}", flush=True)
    try:
        make_target(size, target)
        provenance = Provenance.of_target(
            target, name=name, boundaries=size.boundaries, codec="bf16" if CUDA else "fp32", engine="sglang",
            engine_version=found.version,
        )  # fmt: skip
        with Server(target, engine=engine, config=config, out=folder / "without") as server:
            own = own_rate(server, size, repeats=arguments.repeats, name="the server by itself")
        capturing = Capturing(folder / "spool", layer_ids)
        with Server(target, engine=engine, config=config, out=folder / "with", capturing=capturing) as server:
            name = "ordinary requests, plugin loaded and capture asked for"
            beside = own_rate(server, size, repeats=arguments.repeats, name=name)
            shards = shards_rate(
                server, size, folder / "shards", provenance, repeats=arguments.repeats,
                in_flight_bytes=arguments.in_flight_bytes,
            )  # fmt: skip
        gc.collect()
        row_bytes = 4 * size.hidden * DTYPE.itemsize
        result = {
            "own_tokens_per_second": own, "ordinary_tokens_per_second": beside, "shards_tokens_per_second": shards,
            "ratio": shards / own, "gigabytes_per_second": shards * row_bytes / 1e9, "bytes_per_token": row_bytes,
        }  # fmt: skip
        print(f"   {result['ratio']:.1%} of the server's own rate, {result['gigabytes_per_second']:.2f} GB/s", flush=True)
        if arguments.checked:
            result |= check(target, folder / "shards", size.boundaries, count=arguments.checked)
    finally:
        for path in (target, folder / "shards", folder / "spool"):
            shutil.rmtree(path, ignore_errors=True)
    if arguments.checked:
        print(
            f"   {result['records_checked']} records within {result['worst_relative_error']:.1e} of Hugging Face in float32 "
            f"(its own {str(DTYPE).removeprefix('torch.')} is {result['worst_of_hugging_face']:.1e} away, the next boundary "
            f"{result['nearest_other_boundary']:.1e}), same next token in {result['same_next_token']:.1%}",
            flush=True,
        )
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", default=["1b", "8b"] if CUDA else ["tiny"], choices=SIZES)
    parser.add_argument("--out", type=Path, default=Path("/dev/shm/eyas-benchmark"))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--python", default=None, help="the Python that has SGLang; this one if left out")
    parser.add_argument("--engine-args", default="", help="further options of sglang.launch_server")
    parser.add_argument("--repeats", type=int, default=3 if CUDA else 1, help="of each measurement; the median counts")
    parser.add_argument("--checked", type=int, default=4, help="records compared with Hugging Face; 0: none")
    parser.add_argument("--in-flight-bytes", type=int, default=4_000_000_000)
    arguments = parser.parse_args()
    results = {name: measure(name, arguments) for name in arguments.sizes}
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
