"""What the extractor can carry: rows from a stand-in for the server to finished shards, without a model or a GPU.

    python benchmarks/extractor.py [--hidden 2048] [--prompts 1536] [--length 512] [--processes 6] [--repeats 3]
                                   [--readers 4] [--lanes 8] [--out DIR] [--json FILE]

The stand-in answers /generate when its processes have written as many rows as the plugin would, as fast as they can. A real
server prefills at its own rate: what the extractor carries must be above it (benchmarks/extract.py measures both at once).
Changes of hands: how often a thread of the extractor had to wait, for the interpreter as a rule.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import argparse
import asyncio
import functools
import itertools
import json
import multiprocessing
import resource
import shutil
import statistics
import time
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing.connection import Connection
from types import SimpleNamespace

import torch
from aiohttp import web

from benchmarks.extract import Recycled, Size, prompts_of
from data.schema import Provenance
from extract import arrivals, sink, spool

TOGETHER = 8  # prompts of a piece
NUM_BOUNDARIES = 3


def write(folder: Path, prompts: list[tuple[str, list[int]]], number: int, hidden: int) -> None:
    """In a process of the stand-in: a piece, as the plugin writes it."""
    tokens = torch.tensor(list(itertools.chain.from_iterable(ids for _, ids in prompts)), dtype=torch.int32)
    aux, last = states(len(tokens), hidden)
    whose = [(rid, 0, len(ids)) for rid, ids in prompts]
    spool.write_piece(folder, whose, number=number, rank=0, tokens=tokens, aux=aux, last=last)


@functools.cache
def states(count: int, hidden: int) -> tuple[torch.Tensor, torch.Tensor]:
    """aux [count, NUM_BOUNDARIES, hidden] and last [count, hidden] in bfloat16, random."""
    return torch.randn(count, NUM_BOUNDARIES, hidden).bfloat16(), torch.randn(count, hidden).bfloat16()


def serve(folder: Path, hidden: int, processes: int, told: Connection) -> None:
    """The stand-in, in a process of its own: tells its address, and ends with its parent."""
    pool, numbers = ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")), itertools.count()

    async def generate(request: web.Request) -> web.Response:
        said, loop = await request.json(), asyncio.get_running_loop()
        prompts = list(zip(said["rid"], said["input_ids"]))
        pieces = [prompts[i : i + TOGETHER] for i in range(0, len(prompts), TOGETHER)]
        await asyncio.gather(*(loop.run_in_executor(pool, write, folder, piece, next(numbers), hidden) for piece in pieces))
        ended = {"output_ids": [], "meta_info": {"finish_reason": {"type": "length", "length": 0}}}
        return web.json_response([ended] * len(prompts))

    async def run() -> None:
        application = web.Application(client_max_size=1 << 30)
        application.router.add_post("/generate", generate)
        runner = web.AppRunner(application)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        told.send(f"http://127.0.0.1:{runner.addresses[0][1]}")
        await asyncio.to_thread(told.recv)

    asyncio.run(run())
    pool.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in dict(hidden=2048, prompts=1536, length=512, processes=6, repeats=3, readers=4, lanes=8).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--in-flight-bytes", type=int, default=2_000_000_000)
    parser.add_argument("--out", type=Path, default=Path("/dev/shm/eyas-extractor"))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    print(json.dumps(result := measure(arguments)))
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


def measure(arguments: argparse.Namespace) -> dict[str, float]:
    hidden, count = arguments.hidden, arguments.prompts
    arrivals._READERS, sink.LANES = ThreadPoolExecutor(arguments.readers), arguments.lanes
    size = Size(16, hidden, 4 * hidden, 8, 8, 49152, requests=count, length=arguments.length)
    provenance = Provenance(
        target="stand-in", config_hash="", weights_fingerprint="", tokenizer_hash="", chat_template_hash="",
        boundaries=(2, 8, 13), num_layers=16, hidden_size=hidden, vocab_size=size.vocab, codec="bf16", engine="sglang",
        engine_version="",
    )  # fmt: skip
    folder, gigabytes = arguments.out, count * arguments.length * (NUM_BOUNDARIES + 1) * hidden * 2 / 1e9
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "spool").mkdir(parents=True)
    context = multiprocessing.get_context("spawn")
    told, tells = context.Pipe()
    stand_in = context.Process(target=serve, args=(folder / "spool", hidden, arguments.processes, tells))
    try:
        stand_in.start()
        server = SimpleNamespace(
            url=told.recv(), config=SimpleNamespace(answer_timeout_seconds=600), state_bytes=2,
            capturing=SimpleNamespace(spool=folder / "spool"), failure=lambda what, cure: ValueError(f"{what}: {cure}"),
        )  # fmt: skip
        rates, cpu, waits = [], [], []
        for i in range(arguments.repeats + 1):  # the first one warms up
            shutil.rmtree(folder / "shards", ignore_errors=True)
            prompts, recycled = prompts_of(size, seed=i), Recycled(folder / "shards")
            before, began = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
            sink.extract(
                prompts, server=server, out=folder / "shards", provenance=provenance, shard_bytes=250_000_000,
                in_flight_bytes=arguments.in_flight_bytes, retries=0, uploader=recycled,
            )  # fmt: skip
            seconds, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF)
            recycled.end()
            rates.append(gigabytes / seconds)
            cpu.append((after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) / gigabytes)
            waits.append((after.ru_nvcsw - before.ru_nvcsw) / count)
        told.send("end")
        stand_in.join()
    finally:
        stand_in.terminate()
        shutil.rmtree(folder, ignore_errors=True)
    found = {"gigabytes_per_second": rates, "cpu_seconds_per_gigabyte": cpu, "changes_of_hands_per_prompt": waits}
    return {name: round(statistics.median(values[1:]), 3) for name, values in found.items()}


if __name__ == "__main__":
    main()
