"""How the benchmarks of training take time and memory: whole rounds, medians, and a large product as the ceiling."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

import torch

from benchmarks.cases import CUDA, DEVICE, DTYPE

WARMUP, REPEATS = (4, 8) if CUDA else (1, 1)


def measure(step: Callable, inputs: list) -> dict:
    """Seconds a step over `inputs` in turn (median of whole rounds), and peak memory in GiB."""
    for i in range(WARMUP * max(1, len(inputs) // 4)):
        step(inputs[i % len(inputs)])
    if CUDA:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    rounds = []
    for _ in range(max(REPEATS // len(inputs), 2)):
        started = time.perf_counter()
        for one in inputs:
            step(one)
        if CUDA:
            torch.cuda.synchronize()
        rounds.append((time.perf_counter() - started) / len(inputs))
    seconds = sorted(rounds)[len(rounds) // 2]
    return {"seconds": seconds, "gib": torch.cuda.max_memory_allocated() / 2**30 if CUDA else 0.0}


def matmul_ceiling() -> float:
    """TFLOP/s of a large bf16 matrix product on random data, on this device in this run."""
    size = 8192 if CUDA else 512
    a, b = (torch.randn(size, size, device=DEVICE, dtype=DTYPE) for _ in range(2))
    seconds = measure(lambda _: [a @ b for _ in range(10)], [None])["seconds"] / 10
    return 2 * size**3 / seconds / 1e12


def free() -> None:
    torch._dynamo.reset()  # compiled code holds on to what it was made for
    gc.collect()
    if CUDA:
        torch.cuda.empty_cache()
