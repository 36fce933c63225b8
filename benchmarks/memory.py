"""What a step takes of a GPU's memory, beside train/plan.py's estimate: each case in a process of its own.

    python benchmarks/memory.py [--cases 8b kimi kimi-32k] [--depths 7] [--json FILE]        # needs a GPU

The step is the product's own (benchmarks/step.py): every row asks, AdamW, fused attention, torch.compile.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import argparse
import json
import subprocess

GIB = 2**30


def measure(name: str, depths: int) -> dict:
    """GiB that stand between steps, after the forward pass, and at the peak."""
    import torch

    from benchmarks.cases import CASES, random_batch, random_target
    from benchmarks.step import Eyas
    from benchmarks.timing import free

    case = CASES[name]
    masks = [torch.ones(n, dtype=torch.bool) for n in case.lengths]
    eyas = Eyas(case, random_target(case.shape), depths=depths)
    prepared = eyas.prepare(random_batch(case, masks))
    for _ in range(3):
        eyas(prepared)
    free()
    torch.cuda.synchronize()
    standing = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    eyas(prepared)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated()
    summand, _ = eyas.model(*prepared)
    forward = torch.cuda.memory_allocated()
    summand.backward()
    found = {"standing": standing, "forward": forward, "peak": peak}
    return {name: size / GIB for name, size in found.items()} | {"device": torch.cuda.get_device_name()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=["8b", "kimi", "kimi-32k"])
    parser.add_argument("--depths", nargs="+", type=int, default=[7])
    parser.add_argument("--json", type=Path, help="file for every figure")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)  # this process measures
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measure(arguments.cases[0], arguments.depths[0])))
        return
    from benchmarks.cases import CASES
    from benchmarks.timing import CUDA
    from train.plan import memory

    if not CUDA:
        parser.error("there is no GPU here, and its memory is what is measured")
    lines = []
    for name in arguments.cases:
        for depths in arguments.depths:
            command = [sys.executable, __file__, "--one", "--cases", name, "--depths", str(depths)]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                sys.exit(f"error: {name}, {depths} depths: {done.stderr.strip()[-2000:]}")
            found = json.loads(done.stdout.splitlines()[-1])
            case = CASES[name]
            estimate = sum(memory(case.shape, tokens=sum(case.lengths), depths=depths).values()) / GIB
            lines.append({"case": case.name, "depths": depths, **found, "estimate": estimate})
            print(
                f"{case.name:16} {depths} depths: standing {found['standing']:5.1f}, after the forward pass "
                f"{found['forward']:5.1f}, peak {found['peak']:5.1f} GiB; estimate {estimate:5.1f}, "
                f"{100 * (estimate / found['peak'] - 1):+.1f} %",
                flush=True,
            )
    if arguments.json:
        arguments.json.write_text(json.dumps(lines, indent=1) + "\n")


if __name__ == "__main__":
    main()
