"""The training step, Eyas beside SpecForge, in one run and on the same tensors.

    python benchmarks/step.py [--shapes 8b kimi] [--json FILE] [--prompts DIR]     # DIR: what data/main.py wrote

Whole steps: forward, backward, clip, AdamW on float32 masters. Random states, seven depths. Without a GPU
tiny shapes run, to show that it works: their figures mean nothing.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import argparse
import gc
import json
import subprocess
import tempfile
import time
from dataclasses import dataclass, replace
from typing import Callable

import torch
from torch import Tensor

from data.batch import Batch
from data.packing import pack
from data.prompts import PromptSet
from train import attention, loss, optim
from train.attention import Documents
from train.config import OptimConfig
from train.model import Drafter, DrafterShape
from train.plan import flops_per_step
from train.target import Target
from train.unroll import TrainingTimeTest, counted_rows

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
DTYPE = torch.bfloat16 if CUDA else torch.float32
DEPTHS = 7
WARMUP, REPEATS = (4, 8) if CUDA else (1, 1)


@dataclass(frozen=True)
class Case:
    """One row of the table: a drafter's shape, and the lengths of the documents of one step."""

    name: str
    shape: DrafterShape
    lengths: tuple[int, ...]
    peers: tuple[tuple[str, int], ...]  # SpecForge's (attention, batch) to run beside it
    tokens_per_pack: int
    variants: tuple[tuple[str, dict], ...] = (("", {}), (", MLP in float8", {"float8": True}))


def shape_of(**sizes: int) -> DrafterShape:
    return DrafterShape(
        num_boundaries=3, rms_norm_eps=1e-5, rope_theta=5e5, rope_scaling={}, max_position_embeddings=65536,
        fc_norm=False, norm_before_fc=False, norm_output=False, **sizes,
    )  # fmt: skip


LLAMA_8B = shape_of(
    hidden_size=4096, intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8, head_dim=128,
    vocab_size=128256, draft_vocab_size=32000,
)  # fmt: skip
KIMI = shape_of(
    hidden_size=7168, intermediate_size=18432, num_attention_heads=56, num_key_value_heads=8, head_dim=128,
    vocab_size=163840, draft_vocab_size=32000,
)  # fmt: skip
TINY = shape_of(
    hidden_size=64, intermediate_size=128, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    vocab_size=512, draft_vocab_size=128,
)  # fmt: skip
CASES = {
    "8b": Case(
        "8B, 4 x 2048", LLAMA_8B, (2048,) * 4, (("flex_attention", 4), ("flex_attention", 1)), 8192,
        (*Case.variants, (", hits of every step", {"measure_every": 1})),
    ),
    "8b-half": Case("8B, 2 x 2048", LLAMA_8B, (2048,) * 2, (), 4096),
    "kimi": Case("Kimi, 2 x 4096", KIMI, (4096,) * 2, (("flex_attention", 1),), 8192),
    "kimi-32k": Case(
        "Kimi, 1 x 32768", KIMI, (32768,), (), 32768,
        ((", layers again", {"checkpointing": "layer"}), (", MLP again", {"checkpointing": "mlp"}), ("", {})),
    ),
    "tiny": Case("tiny, 2 x 64", TINY, (64,) * 2, (), 128),
}


def random_batch(case: Case, masks: list[Tensor], *, seed: int = 0) -> Batch:
    """A pack with random states, padded to the budget; masks: one bool [length] for each document."""
    lengths = [len(mask) for mask in masks]
    if padding := case.tokens_per_pack - sum(lengths):
        lengths, masks = [*lengths, padding], [*masks, torch.zeros(padding, dtype=torch.bool)]
    generator = torch.Generator(DEVICE).manual_seed(seed)
    sizes = torch.tensor(lengths)
    tokens, hidden = int(sizes.sum()), case.shape.hidden_size
    edges = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
    document = torch.repeat_interleave(torch.arange(len(lengths)), sizes)
    return Batch(
        tokens=torch.randint(0, case.shape.vocab_size, (tokens,)),
        loss_mask=torch.cat(masks),
        aux=torch.randn(tokens, 3 * hidden, generator=generator, device=DEVICE, dtype=DTYPE),
        last=torch.randn(tokens, hidden, generator=generator, device=DEVICE, dtype=DTYPE),
        positions=torch.arange(tokens) - edges[document],
        document=document,
        cu_seqlens=edges.int(),
        max_seqlen=max(lengths),
    )


class Eyas:
    """The product's own step, as train/loop.py takes it: TrainingTimeTest, clip, fused AdamW."""

    def __init__(
        self,
        case: Case,
        target: Target,
        *,
        fused: bool,
        bucket: int = 1024,
        float8: bool = False,
        checkpointing: str = "none",
        measure_every: int = 4,
        every_row: bool = False,
    ):
        self.bucket, self.measure_every, self.steps, self.every_row = bucket, measure_every, 0, every_row
        shape = case.shape
        t2d = torch.zeros(shape.vocab_size, dtype=torch.bool)
        t2d[: shape.draft_vocab_size] = True
        with torch.device(DEVICE):
            self.drafter = Drafter(shape, d2t=torch.zeros(shape.draft_vocab_size, dtype=torch.int64), t2d=t2d)
        name = "fused" if fused else "dense"
        self.model = TrainingTimeTest(
            self.drafter, target, depths=DEPTHS, gamma=0.8, attention=attention.choose(name), head=loss.choose(name),
            dtype=DTYPE, float8=float8,
        )  # fmt: skip
        self.drafter.activation_checkpointing = checkpointing
        if fused:
            self.drafter.compile()
        config = OptimConfig("adamw", 1e-4, [0.9, 0.95], 0.0, 0.0, 0.0, 0.5, None)
        self.optimizers = optim.build(self.drafter, config)

    def prepare(self, batch: Batch) -> tuple:
        """What the loader's thread does on the CPU, and the copies to the device."""
        cpu = replace(batch, aux=batch.aux[:0], last=batch.last[:0])
        counted = counted_rows(cpu, depths=DEPTHS)
        asking = torch.ones_like(counted[0]) if self.every_row else counted[0]
        documents = Documents.of(cpu, counted=asking, bucket=self.bucket)
        return batch.to(DEVICE), documents.to(DEVICE), counted.to(DEVICE), counted.sum(1).to(DEVICE)

    def __call__(self, prepared: tuple) -> None:
        self.steps += 1
        summand, _ = self.model(*prepared, self.steps % self.measure_every == 0)  # as measure_every_steps of conf/
        summand.backward()
        torch.nn.utils.clip_grad_norm_(self.drafter.parameters(), 0.5, foreach=True)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)


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


def random_target(shape: DrafterShape) -> Target:
    embedding, head = (
        torch.randn(shape.vocab_size, shape.hidden_size, device=DEVICE, dtype=DTYPE) * 0.02 for _ in range(2)
    )
    return Target(embedding=embedding, final_norm=torch.ones(shape.hidden_size, device=DEVICE), head=head, config={})


def row(case: Case, who: str, found: dict, *, tokens: int, supervised: int, flops: float, ceiling: float) -> dict:
    rate = flops / found["seconds"] / 1e12
    line = {
        "case": case.name, "who": who, "ms": 1e3 * found["seconds"], "tokens_per_second": tokens / found["seconds"],
        "supervised_per_second": supervised / found["seconds"], "tflops": rate, "share_of_matmul": rate / ceiling,
        "gib": found["gib"],
    }  # fmt: skip
    print(
        f"{case.name:16} {who:34} {line['ms']:9.1f} ms {line['tokens_per_second']:9.0f} tok/s "
        f"{line['supervised_per_second']:9.0f} supervised/s {rate:6.1f} TFLOP/s {100 * rate / ceiling:5.1f} % "
        f"{found['gib']:6.1f} GiB",
        flush=True,
    )
    return line


def run_case(case: Case, *, ceiling: float) -> list[dict]:
    """All tokens supervised, documents of equal length: Eyas, then the peer at each of its batch sizes."""
    target, lines = random_target(case.shape), []
    masks = [torch.ones(n, dtype=torch.bool) for n in case.lengths]
    tokens = sum(case.lengths)
    for variant, options in case.variants:
        eyas = Eyas(case, target, fused=CUDA, **options)
        found = measure(eyas, [eyas.prepare(random_batch(case, masks))])
        flops = flops_per_step(case.shape, case.lengths, depths=DEPTHS)
        lines.append(row(case, f"Eyas{variant}", found, tokens=tokens, supervised=tokens, flops=flops, ceiling=ceiling))
        del eyas
        free()
    for backend, size in case.peers:
        for compact in (False, True):
            length = case.lengths[0]
            part = random_batch(replace(case, tokens_per_pack=size * length), masks[:1] * size)
            name = f"SpecForge {backend.split('_')[0]}{' compact' if compact else ''}, batch {size}"
            try:
                found = run_peer(case, target, [part], size=size, backend=backend, compact=compact)
            except Exception as error:  # the peer's failure is a result, and must not hide the other rows
                print(f"{case.name:16} {name:34} failed: {type(error).__name__}: {str(error)[:200]}", flush=True)
                free()
                continue
            peer_flops = flops_per_step(case.shape, (length,) * size, depths=DEPTHS)
            n = size * length
            lines.append(row(case, name, found, tokens=n, supervised=n, flops=peer_flops, ceiling=ceiling))
            free()
    return lines


def run_peer(case: Case, target: Target, packs: list[Batch], *, size: int, backend: str, compact: bool) -> dict:
    from benchmarks.peer import step_function

    step, alive = step_function(
        case.shape, depths=DEPTHS, head=target.head, embedding=target.embedding, attention=backend, compact=compact
    )
    inputs = [
        {
            "input_ids": b.tokens.view(size, -1).to(DEVICE),
            "loss_mask": b.loss_mask.view(size, -1).to(DEVICE).long(),
            "attention_mask": torch.ones(size, b.num_tokens // size, dtype=torch.long, device=DEVICE),
            "target": b.last.view(size, b.num_tokens // size, -1),
            "hidden_states": b.aux.view(size, b.num_tokens // size, -1),
        }
        for b in packs
    ]
    found = measure(step, inputs)
    del step, alive, inputs
    return found


def run_mix(prompts: PromptSet, *, shape: DrafterShape, ceiling: float, budget: int, packs: int, peer_steps: int) -> list[dict]:
    """Real lengths and loss masks: Eyas packs them, the peer takes one a step, or as many as fit, padded."""
    case = Case(f"mix, {budget}", shape, (budget,), (), budget)
    masks = [torch.from_numpy(prompts[i].loss_mask.copy()).bool() for i in range(len(prompts))]
    masks = [mask[: min(budget, 2048)] for mask in masks]
    target = random_target(shape)
    planned = pack([len(mask) for mask in masks], budget=budget)
    order = torch.randperm(len(planned), generator=torch.Generator().manual_seed(0)).tolist()[:packs]
    chosen = [[masks[piece.index] for piece in planned[i]] for i in order]
    fill = sum(len(mask) for documents in chosen for mask in documents) / (budget * len(chosen))
    supervised = sum(int(mask.sum()) for documents in chosen for mask in documents) / len(chosen)
    flops = sum(flops_per_step(shape, tuple(len(m) for m in documents), depths=DEPTHS) for documents in chosen) / len(chosen)
    tokens, lines = int(fill * budget), []
    for variant, options in (*case.variants, (", every row asks", {"every_row": True})):
        eyas = Eyas(case, target, fused=CUDA, **options)
        inputs = [eyas.prepare(random_batch(case, documents, seed=i)) for i, documents in enumerate(chosen)]
        who = f"Eyas, {100 * fill:.1f} % full{variant}"
        found = measure(eyas, inputs)
        lines.append(row(case, who, found, tokens=tokens, supervised=supervised, flops=flops, ceiling=ceiling))
        del eyas, inputs
        free()
    if not CUDA:
        return lines
    generator = torch.Generator().manual_seed(1)
    for size in (1, 16, 32):
        drawn = torch.randperm(len(masks), generator=generator).tolist()
        groups = [[masks[i] for i in drawn[s * size : (s + 1) * size]] for s in range(peer_steps if size == 1 else 4)]
        batches, real = [], 0
        for documents in groups:
            longest = -(-max(len(mask) for mask in documents) // 128) * 128  # flex attention's block
            padded = [torch.nn.functional.pad(mask, (0, longest - len(mask))) for mask in documents]
            batches.append(random_batch(replace(case, tokens_per_pack=longest * size), padded))
            real += sum(int(mask.sum()) for mask in documents)
        name = f"SpecForge flex, batch {size}"
        try:
            found = run_peer(case, target, batches, size=size, backend="flex_attention", compact=False)
        except Exception as error:  # as above
            print(f"{case.name:16} {name:34} failed: {type(error).__name__}: {str(error)[:200]}", flush=True)
            free()
            continue
        tokens = sum(sum(len(mask) for mask in documents) for documents in groups) / len(groups)
        lines.append(row(case, name, found, tokens=int(tokens), supervised=real / len(groups), flops=0.0, ceiling=ceiling))
        free()
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="*", default=["8b", "kimi"] if CUDA else ["tiny"], choices=sorted(CASES))
    parser.add_argument("--prompts", help="folder of data/main.py: its lengths and masks are the realistic mix")
    parser.add_argument("--budget", type=int, default=8192)
    parser.add_argument("--json", help="file for every figure")
    arguments = parser.parse_args()
    parts = [["--shapes", name] for name in arguments.shapes]
    if arguments.prompts:
        parts.append(["--shapes", "--prompts", arguments.prompts, "--budget", str(arguments.budget)])
    found = [measured(part) for part in parts] if len(parts) > 1 else [measure_here(arguments)]
    if arguments.json:
        everything = {**found[0], "rows": [row for part in found for row in part["rows"]]}
        Path(arguments.json).write_text(json.dumps(everything, indent=1) + "\n")


def measured(part: list[str]) -> dict:
    """One case in a process of its own: what a compiler's cache keeps alive is not the next one's memory."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        subprocess.run([sys.executable, __file__, *part, "--json", file.name], check=True)
        return json.load(file)


def measure_here(arguments: argparse.Namespace) -> dict:
    if not CUDA:
        print("no GPU here: a tiny shape runs in float32, its figures mean nothing")
    ceiling = matmul_ceiling()
    device = torch.cuda.get_device_name() if CUDA else "cpu"
    print(f"{device}, torch {torch.__version__}, {ceiling:.0f} TFLOP/s in a matrix product of 8192", flush=True)
    lines = [line for name in arguments.shapes for line in run_case(CASES[name], ceiling=ceiling)]
    if arguments.prompts:
        prompts = PromptSet.load(Path(arguments.prompts))
        shape = LLAMA_8B if CUDA else TINY
        lines += run_mix(
            prompts, shape=shape, ceiling=ceiling, budget=arguments.budget, packs=8 if CUDA else 2, peer_steps=16
        )
    return {"device": device, "torch": torch.__version__, "matmul_tflops": ceiling, "rows": lines}


if __name__ == "__main__":
    main()
