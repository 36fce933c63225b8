"""Training-time-test attention at the last of seven depths: Eyas beside flex_attention, SDPA and the bare FlashAttention.

    python benchmarks/attention.py [--shapes 8b kimi kimi-32k] [--json FILE]

Forward and backward of one depth: every row sees its document up to itself, and six keys of its own. The ceiling is
plain causal FlashAttention over the same rows, without those six. Each other way gets what it needs made beforehand
(block masks, masks, keys side by side). Without a GPU a tiny shape runs in float32: its figures mean nothing.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.cases import CUDA, DEVICE, DTYPE
from benchmarks.timing import free, measure
from train import attention
from train.attention import Documents

OWN_KEYS = 6
LARGEST_MASK = 1 << 31  # scores: SDPA with a mask beyond this does not fit


@dataclass(frozen=True)
class Case:
    name: str
    lengths: tuple[int, ...]
    heads: int
    kv_heads: int
    head_dim: int


CASES = {
    "8b": Case("8B, 4 x 2048", (2048,) * 4, 32, 8, 128),
    "kimi": Case("Kimi, 2 x 4096", (4096,) * 2, 56, 8, 128),
    "short": Case("8B, 32 x 256", (256,) * 32, 32, 8, 128),
    "kimi-32k": Case("Kimi, 1 x 32768", (32768,), 56, 8, 128),
    "tiny": Case("tiny, 2 x 64", (64,) * 2, 4, 2, 16),
}


@dataclass
class Inputs:
    """query, grad [T, heads, D]; keys, values: one [T, kv_heads, D] for depth 0 and for each own key."""

    query: Tensor
    keys: list[Tensor]
    values: list[Tensor]
    grad: Tensor
    documents: Documents
    document: Tensor  # [T]

    @classmethod
    def random(cls, case: Case) -> Inputs:
        rows = sum(case.lengths)
        generator = torch.Generator(DEVICE).manual_seed(0)

        def draw(heads: int) -> Tensor:
            return torch.randn(rows, heads, case.head_dim, generator=generator, device=DEVICE, dtype=DTYPE)

        edges = torch.tensor([0, *torch.tensor(case.lengths).cumsum(0).tolist()], dtype=torch.int32, device=DEVICE)
        longest = max(case.lengths)
        documents = Documents(torch.arange(rows, device=DEVICE), edges, edges, longest, longest)
        document = torch.repeat_interleave(torch.arange(len(case.lengths)), torch.tensor(case.lengths)).to(DEVICE)
        keys, values = ([draw(case.kv_heads) for _ in range(1 + OWN_KEYS)] for _ in range(2))
        return cls(draw(case.heads), keys, values, draw(case.heads), documents, document)

    def trained(self) -> list[Tensor]:
        return [self.query, *self.keys, *self.values]


def both_ways(function: Callable[..., Tensor], tensors: list[Tensor], grad: Tensor) -> Callable[[None], None]:
    """A call that goes forward and back: `function` of `tensors`, whose gradients are all asked for."""
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]

    def run(_: None) -> None:
        out = function(*leaves)
        torch.autograd.grad(out, leaves, grad.view(out.shape))

    return run


def side_by_side(tensors: list[Tensor]) -> Tensor:
    """[T, heads, D] of every depth -> [1, heads, depths * T, D]."""
    return torch.cat(tensors).transpose(0, 1)[None].contiguous()


def sees(document: Tensor) -> Callable[..., Tensor]:
    """Whether row q sees key kv, of all depths' keys one after the other."""
    rows = document.shape[0]

    def mask(batch, head, q, kv):
        row = kv % rows
        return torch.where(kv < rows, (row <= q) & (document[row] == document[q]), row == q)

    return mask


def ways(case: Case, inputs: Inputs) -> dict[str, Callable[[None], None]]:
    """Every way of computing the same, and the ceiling, which computes less."""
    depths, documents = 1 + OWN_KEYS, inputs.documents
    ours = attention.choose("fused" if CUDA else "dense")
    found = {
        "Eyas": both_ways(
            lambda query, *kv: ours(query, list(kv[:depths]), list(kv[depths:]), documents),
            inputs.trained(),
            inputs.grad,
        ),
    }
    grad = inputs.grad.transpose(0, 1)[None]
    joined = [side_by_side([inputs.query]), side_by_side(inputs.keys), side_by_side(inputs.values)]
    rows = inputs.query.shape[0]
    if CUDA:
        mask = torch.compile(create_block_mask)(sees(inputs.document), None, None, rows, depths * rows, device=DEVICE)
        flex = torch.compile(flex_attention)
        found["flex_attention"] = both_ways(
            lambda q, k, v: flex(q, k, v, block_mask=mask, enable_gqa=True), joined, grad
        )
        from train.kernels.attention import flash_attention_4

        found["causal FlashAttention, PyTorch's"] = bare(inputs, None)
        if flash := flash_attention_4():
            found["causal FlashAttention-4"] = bare(inputs, flash)
    if rows * rows * depths * case.heads <= LARGEST_MASK * 8:
        every = torch.arange(depths * rows, device=DEVICE)
        dense_mask = sees(inputs.document)(None, None, torch.arange(rows, device=DEVICE)[:, None], every[None])
        found["SDPA with a mask"] = both_ways(
            lambda q, k, v: scaled_dot_product_attention(q, k, v, attn_mask=dense_mask, enable_gqa=True), joined, grad
        )
    return found


def bare(inputs: Inputs, flash) -> Callable[[None], None]:
    """Causal FlashAttention over depth 0 alone, called as the fused attention calls it."""
    from train.kernels import attention as kernels

    query, key, value = inputs.query, inputs.keys[0], inputs.values[0]

    def run(_: None) -> None:
        out, lse = kernels.causal_forward(query, key, value, inputs.documents, flash=flash)
        kernels.causal_backward(inputs.grad, query, key, value, out, lse, inputs.documents, flash=flash)

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ["8b", "kimi", "short", "kimi-32k"] if CUDA else ["tiny"]
    parser.add_argument("--shapes", nargs="*", default=names, choices=sorted(CASES))
    parser.add_argument("--json", help="file for every figure")
    arguments = parser.parse_args()
    if not CUDA:
        print("no GPU here: a tiny shape runs in float32, its figures mean nothing")
    device = torch.cuda.get_device_name() if CUDA else "cpu"
    print(f"{device}, torch {torch.__version__}, {OWN_KEYS} own keys a row, forward and backward")
    lines = []
    for case in (CASES[name] for name in arguments.shapes):
        inputs = Inputs.random(case)
        found = {}
        for name, run in ways(case, inputs).items():
            try:
                found[name] = measure(run, [None])
            except torch.OutOfMemoryError:
                print(f"{case.name:16} {name:34} does not fit")
            free()
        ceiling = min((f["seconds"] for name, f in found.items() if name.startswith("causal")), default=None)
        for name, figures in found.items():
            ratio = figures["seconds"] / ceiling if ceiling else float("nan")
            ms, gib = 1e3 * figures["seconds"], figures["gib"]
            lines.append({"case": case.name, "who": name, "ms": ms, "of_ceiling": ratio, "gib": gib})
            print(f"{case.name:16} {name:34} {ms:9.3f} ms {ratio:6.2f} x the ceiling {gib:6.2f} GiB", flush=True)
        del inputs
        free()
    if arguments.json:
        content = {"device": device, "torch": torch.__version__, "rows": lines}
        Path(arguments.json).write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
