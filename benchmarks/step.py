"""The training step, Eyas beside SpecForge, in one run and on the same tensors.

    python benchmarks/step.py [--shapes 8b kimi] [--variants bf16 fp8 ...] [--json FILE] [--prompts DIR]

Whole steps: forward, backward, clip, AdamW on float32 masters. Random states, seven depths. With --prompts, what
data/main.py wrote, also a mix of real lengths. Without a GPU tiny shapes run in float32: their figures mean nothing.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import argparse
import json
import subprocess
import tempfile
from dataclasses import replace

import torch
from torch import Tensor

from benchmarks.cases import (
    CASES,
    CUDA,
    DEPTHS,
    DEVICE,
    LLAMA_8B,
    TINY,
    Case,
    micro_batch,
    optimizer_config,
    random_batch,
    random_module,
    random_target,
)
from benchmarks.timing import free, matmul_ceiling, measure
from data.batch import Batch
from data.packing import pack
from data.prompts import PromptSet
from train import optim
from train.plan import flops_per_step
from train.shape import DrafterShape
from train.target import Target

# name: (how its row is called, options of Eyas)
VARIANTS = {
    "bf16": ("", {}),
    "fp8": (", MLP in float8", {"float8": True}),
    "hits": (", hits of every step", {"measure_every": 1}),
    "every-row": (", every row asks", {"every_row": True}),
    "mlp-again": (", MLP again", {"checkpointing": "mlp"}),
    "layers-again": (", layers again", {"checkpointing": "layer"}),
}


class Eyas:
    """The product's own step, as train/loop.py takes it: TrainingTimeTest, clip, fused AdamW."""

    def __init__(
        self,
        case: Case,
        target: Target,
        *,
        depths: int = DEPTHS,
        float8: bool = False,
        checkpointing: str = "none",
        measure_every: int = 4,
        every_row: bool = False,
    ):
        self.depths, self.measure_every, self.every_row, self.steps = depths, measure_every, every_row, 0
        self.model = random_module(case.shape, target, depths=depths, float8=float8)
        self.drafter = self.model.drafter
        self.drafter.activation_checkpointing = checkpointing
        if CUDA:
            self.drafter.compile(matrices=float8)  # as train/loop.py does
        self.config = optimizer_config()
        self.optimizers = optim.build(self.drafter, self.config)

    def prepare(self, batch: Batch) -> tuple:
        """What the loader makes of a pack beforehand: the arguments of the module, on the device."""
        micro = micro_batch(batch, depths=self.depths, every_row=self.every_row)
        return micro.batch, micro.documents, micro.counted, micro.counted.sum(1)

    def __call__(self, prepared: tuple) -> None:
        self.steps += 1
        summand, _ = self.model(*prepared, self.steps % self.measure_every == 0)  # as measure_every_steps of conf/
        summand.backward()
        torch.nn.utils.clip_grad_norm_(self.drafter.parameters(), self.config.max_grad_norm, foreach=True)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)


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


def run_case(case: Case, *, variants: list[str] | None, ceiling: float) -> list[dict]:
    """All tokens supervised, documents of equal length: Eyas in each variant, then the peer at each of its batch sizes.

    variants  names in VARIANTS; None: the case's own
    """
    target, lines = random_target(case.shape), []
    masks = [torch.ones(n, dtype=torch.bool) for n in case.lengths]
    tokens = sum(case.lengths)
    flops = flops_per_step(case.shape, case.lengths, depths=DEPTHS)
    for label, options in (VARIANTS[name] for name in variants or case.variants):
        eyas = Eyas(case, target, **options)
        found = measure(eyas, [eyas.prepare(random_batch(case, masks))])
        lines.append(row(case, f"Eyas{label}", found, tokens=tokens, supervised=tokens, flops=flops, ceiling=ceiling))
        del eyas
        free()
    for backend, size in case.peers:
        length = case.lengths[0]
        pack_of_peer = random_batch(replace(case, tokens_per_pack=size * length), masks[:1] * size)
        flops = flops_per_step(case.shape, (length,) * size, depths=DEPTHS)
        for compact in (False, True):
            lines += run_peer(
                case, target, [pack_of_peer], size=size, backend=backend, compact=compact, supervised=size * length,
                tokens=size * length, flops=flops, ceiling=ceiling,
            )  # fmt: skip
    return lines


def run_peer(
    case: Case,
    target: Target,
    packs: list[Batch],
    *,
    size: int,
    backend: str = "flex_attention",
    compact: bool = False,
    **figures: float,
) -> list[dict]:
    """SpecForge's row, on packs of `size` documents of one length; none where it fails. figures: as `row` takes them."""
    who = f"SpecForge {backend.split('_')[0]}{' compact' if compact else ''}, batch {size}"
    try:
        found = measure_peer(case.shape, target, packs, size=size, backend=backend, compact=compact)
    except Exception as error:  # the peer's failure is a result, and must not hide the other rows
        print(f"{case.name:16} {who:34} failed: {type(error).__name__}: {str(error)[:200]}", flush=True)
        return []
    finally:
        free()
    return [row(case, who, found, **figures)]


def measure_peer(
    shape: DrafterShape, target: Target, packs: list[Batch], *, size: int, backend: str, compact: bool
) -> dict:
    from benchmarks.peer import step_function

    step, alive = step_function(  # alive: what must not be collected meanwhile
        shape, depths=DEPTHS, head=target.head, embedding=target.embedding, attention=backend, compact=compact
    )
    return measure(step, [peer_input(pack, size) for pack in packs])


def peer_input(batch: Batch, size: int) -> dict[str, Tensor]:
    """A pack of `size` documents of one length, as SpecForge takes it."""
    return {
        "input_ids": batch.tokens.view(size, -1).to(DEVICE),
        "loss_mask": batch.loss_mask.view(size, -1).to(DEVICE).long(),
        "attention_mask": torch.ones(size, batch.num_tokens // size, dtype=torch.long, device=DEVICE),
        "target": batch.last.view(size, batch.num_tokens // size, -1),
        "hidden_states": batch.aux.view(size, batch.num_tokens // size, -1),
    }


def run_mix(prompts: PromptSet, *, shape: DrafterShape, budget: int, packs: int, ceiling: float) -> list[dict]:
    """Real lengths and loss masks, documents cut at 2048 tokens: Eyas packs them, the peer pads them."""
    case = Case(f"mix, {budget}", shape, (budget,), budget)
    masks = [torch.from_numpy(prompts[i].loss_mask.copy()).bool() for i in range(len(prompts))]
    masks = [mask[: min(budget, 2048)] for mask in masks]
    target = random_target(shape)
    planned = pack([len(mask) for mask in masks], budget=budget)
    order = torch.randperm(len(planned), generator=torch.Generator().manual_seed(0)).tolist()[:packs]
    chosen = [[masks[piece.index] for piece in planned[i]] for i in order]
    fill = sum(len(mask) for documents in chosen for mask in documents) / (budget * len(chosen))
    supervised = sum(int(mask.sum()) for documents in chosen for mask in documents) / len(chosen)
    flops = sum(flops_per_step(shape, [len(mask) for mask in documents], depths=DEPTHS) for documents in chosen)
    flops, tokens, lines = flops / len(chosen), int(fill * budget), []
    for label, options in (VARIANTS[name] for name in (*case.variants, "every-row")):
        eyas = Eyas(case, target, **options)
        inputs = [eyas.prepare(random_batch(case, documents, seed=i)) for i, documents in enumerate(chosen)]
        who = f"Eyas, {100 * fill:.1f} % full{label}"
        found = measure(eyas, inputs)
        lines.append(row(case, who, found, tokens=tokens, supervised=supervised, flops=flops, ceiling=ceiling))
        del eyas, inputs
        free()
    return lines + (peer_on_mix(case, target, masks, ceiling=ceiling) if CUDA else [])


def peer_on_mix(case: Case, target: Target, masks: list[Tensor], *, ceiling: float) -> list[dict]:
    """SpecForge on the same documents, drawn at random: one a step, 16, 32, padded to the longest of them."""
    lines, generator = [], torch.Generator().manual_seed(1)
    for size, steps in ((1, 16), (16, 4), (32, 4)):
        drawn = torch.randperm(len(masks), generator=generator).tolist()
        groups = [[masks[i] for i in drawn[s * size : (s + 1) * size]] for s in range(steps)]
        batches = []
        for documents in groups:
            longest = -(-max(len(mask) for mask in documents) // 128) * 128  # flex attention's block
            padded = [torch.nn.functional.pad(mask, (0, longest - len(mask))) for mask in documents]
            batches.append(random_batch(replace(case, tokens_per_pack=longest * size), padded))
        tokens = sum(len(mask) for documents in groups for mask in documents) / steps
        supervised = sum(int(mask.sum()) for documents in groups for mask in documents) / steps
        lines += run_peer(
            case, target, batches, size=size, tokens=int(tokens), supervised=supervised, flops=0.0, ceiling=ceiling
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="*", default=["8b", "kimi"] if CUDA else ["tiny"], choices=sorted(CASES))
    parser.add_argument("--variants", nargs="+", choices=sorted(VARIANTS), help="of Eyas; left out: each shape's own")
    parser.add_argument("--prompts", help="folder of data/main.py: its lengths and masks are the realistic mix")
    parser.add_argument("--budget", type=int, default=8192)
    parser.add_argument("--json", help="file for every figure")
    arguments = parser.parse_args()
    if not CUDA and set(arguments.shapes) - {"tiny"}:
        parser.error("there is no GPU here, and a CPU takes minutes for a step of these shapes: leave --shapes out for a tiny one")
    chosen = ["--variants", *arguments.variants] if arguments.variants else []
    parts = [["--shapes", name, *chosen] for name in arguments.shapes]
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
    print(f"{device}, torch {torch.__version__}, {ceiling:.0f} TFLOP/s in a large matrix product", flush=True)
    lines = []
    for name in arguments.shapes:
        lines += run_case(CASES[name], variants=arguments.variants, ceiling=ceiling)
    if arguments.prompts:
        prompts = PromptSet.load(Path(arguments.prompts))
        shape = LLAMA_8B if CUDA else TINY
        lines += run_mix(prompts, shape=shape, budget=arguments.budget, packs=8 if CUDA else 2, ceiling=ceiling)
    return {"device": device, "torch": torch.__version__, "matmul_tflops": ceiling, "rows": lines}


if __name__ == "__main__":
    main()
