"""A plan for machines that are not at hand: disk, memory, communication and hours, before anything is downloaded.

    python launch/plan.py                                     # the reference user: docs/kimi-k25.md
    python launch/plan.py target=smollm2_135m drafter=eagle31 --conversations 11071 --tokens 290 --gpus 1 --gib 141

Words with = are options of train/main.py. On the machine itself, with the shards there, plan=true says it exactly.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import argparse
from dataclasses import dataclass

from hydra import compose, initialize_config_dir
from hydra.errors import HydraException

from data.boundaries import text_config
from data.config import require, typed
from launch.disk import bytes_per_token
from train import plan
from train.config import TrainConfig
from train.plan import GIB, Engine
from train.shape import DrafterShape

REFERENCE = ["target=kimi_k25", "drafter=kimi"]
# Kimi-K2.5's text config.json, as published: enough to plan with before 600 GB are downloaded
KIMI_K25 = {
    "hidden_size": 7168, "vocab_size": 163840, "num_hidden_layers": 61, "num_attention_heads": 64,
    "num_key_value_heads": 64, "intermediate_size": 18432, "rms_norm_eps": 1e-5, "rope_theta": 50000.0,
    "max_position_embeddings": 262144,
}  # fmt: skip
CODECS = ("bf16", "fp8", "fp8+topk64")
PACKS = (8192, 16384, 32768)
# What is worked out with: measured on an H200 (docs/LOG.md), and two thirds of it
SHARES = (plan.MEASURED_MFU, 2 / 3 * plan.MEASURED_MFU)


@dataclass(frozen=True)
class Machine:
    """What the training runs on.

    gpus         how many            gpu    their name
    gib          memory of each      peak_tflops  dense bf16 of each
    link         GB/s that each sends while it receives as much; link_name: what that is
    """

    gpus: int
    gpu: str
    gib: float
    peak_tflops: float
    link: float
    link_name: str


@dataclass(frozen=True)
class Work:
    """So many conversations of `tokens` tokens each."""

    conversations: int
    tokens: int

    @property
    def total(self) -> int:
        return self.conversations * self.tokens


def render(config: TrainConfig, shape: DrafterShape, machine: Machine, work: Work) -> str:
    """The whole plan, in Markdown."""
    sections = [disk(shape, config, machine, work), memory(shape, config, machine), exchange(shape, config, machine, work),
                hours(shape, config, machine, work), extraction(shape, work)]  # fmt: skip
    return "\n\n".join(sections) + "\n"


def disk(shape: DrafterShape, config: TrainConfig, machine: Machine, work: Work) -> str:
    """Of the shards, by codec, with what training reads a second; and of the checkpoints."""
    rate = tokens_per_second(shape, config, machine, work, share=SHARES[0])
    lines = [
        f"**Disk.** {work.conversations:,} conversations of {work.tokens:,} tokens are {work.total / 1e6:.0f} M tokens; "
        f"{shape.num_boundaries} boundaries and the last state, {shape.hidden_size} wide.",
        "",
        f"| codec | bytes a token | shards, TB | read by training at {rate:,.0f} tokens/s, GB/s |",
        "|---|---|---|---|",
    ]
    for name in CODECS:
        size = bytes_per_token(name, shape.hidden_size, num_boundaries=shape.num_boundaries)
        lines.append(f"| {name} | {size:,} | {size * work.total / 1e12:.2f} | {size * rate / 1e9:.2f} |")
    ema = config.optim.ema is not None
    saved = plan.checkpoint_bytes(shape, optimizer=config.optim.name, ema=ema)
    kept = config.keep_checkpoints + 1
    lines += ["", f"A checkpoint ({config.optim.name}{', with the average of the weights' if ema else ''}) is {saved / 1e9:.1f} GB; "
              f"{kept} are kept, the best with them: {kept * saved / 1e9:.0f} GB."]  # fmt: skip
    return "\n".join(lines)


def memory(shape: DrafterShape, config: TrainConfig, machine: Machine) -> str:
    """Of a GPU, by engine and pack. ZeRO knows AdamW only."""
    ema = config.optim.ema is not None
    count = sum(plan.num_parameters(shape).values())
    lines = [
        f"**Memory of a GPU, GiB** (of {machine.gib:.0f}; {count / 1e6:.0f} M parameters, {config.drafter.depths} depths, every row asks, "
        f"{plan.BESIDE / GIB:.0f} GiB beside the tensors counted in).",
        "",
        "| tokens in a pack | " + " | ".join(name for name, _, _ in _engines(config, machine.gpus)) + " |",
        "|---" * (1 + len(_engines(config, machine.gpus))) + "|",
    ]
    for pack in PACKS:
        cells = []
        for _, optimizer, engine in _engines(config, machine.gpus):
            parts = plan.memory(shape, tokens=pack, depths=config.drafter.depths, optimizer=optimizer, ema=ema, engine=engine)
            needed = (sum(parts.values()) + plan.BESIDE) / GIB
            cells.append(f"{needed:.1f}" if needed <= machine.gib else f"({needed:.1f})")
        lines.append(f"| {pack:,} | " + " | ".join(cells) + " |")
    parts = plan.memory(
        shape, tokens=PACKS[0], depths=config.drafter.depths, optimizer=config.optim.name, ema=ema, engine=Engine(machine.gpus)
    )
    lines += ["", f"What does not fit stands in brackets. The parts, {Engine(machine.gpus).name} with {config.optim.name}, "
              f"{PACKS[0]:,} tokens: " + ", ".join(f"{name} {size / GIB:.1f}" for name, size in parts.items()) + "."]  # fmt: skip
    return "\n".join(lines)


def exchange(shape: DrafterShape, config: TrainConfig, machine: Machine, work: Work) -> str:
    """Of a step: bytes, the link's time for them, and the step's own time."""
    seconds = step_seconds(shape, config, machine, work, share=SHARES[0])
    lines = [
        f"**Communication of a step** of {config.batch.conversations_per_step} conversations, by each GPU, against {machine.link_name} "
        f"({machine.link:.0f} GB/s each way) and a step of {seconds:.1f} s.",
        "",
        "| engine | gradients as | GB | seconds at the link's rate | of the step | at a quarter of the rate |",
        "|---|---|---|---|---|---|",
    ]
    for zero, size, name in ((0, 4, "fp32"), (0, 2, "bf16"), (1, 4, "fp32"), (2, 4, "fp32"), (3, 4, "fp32")):
        engine = Engine(machine.gpus, zero)
        sent = plan.communication_bytes(shape, engine, gradient_bytes=size) / 1e9
        time = sent / machine.link
        lines.append(f"| {engine.name} | {name} | {sent:.2f} | {time:.2f} | {100 * time / seconds:.1f} % | {400 * time / seconds:.1f} % |")
    return "\n".join(lines)


def hours(shape: DrafterShape, config: TrainConfig, machine: Machine, work: Work) -> str:
    """Of training, at what was measured on another chip and at two thirds of it."""
    steps = config.epochs * -(-work.conversations // config.batch.conversations_per_step)
    lines = [
        f"**Hours of training**: {config.epochs} epochs are {steps:,} steps on {machine.gpus} x {machine.gpu} "
        f"({machine.peak_tflops:.0f} TFLOP/s dense bf16 each), if every row asks.",
        "",
        "| share of the peak | tokens/s a GPU | tokens/s | hours |",
        "|---|---|---|---|",
    ]
    for share, why in zip(SHARES, ("as on an H200", "two thirds of that")):
        rate = tokens_per_second(shape, config, machine, work, share=share)
        spent = config.epochs * work.total / rate / 3600
        lines.append(f"| {100 * share:.0f} %, {why} | {rate / machine.gpus:,.0f} | {rate:,.0f} | {spent:.1f} |")
    return "\n".join(lines)


def extraction(shape: DrafterShape, work: Work) -> str:
    """By the rate of the server's prefill, which only the machine itself can tell."""
    lines = [
        "**Hours of extraction**, by the prefill rate of the server (its own machine decides: time the first hundred).",
        "",
        "| tokens/s | hours | bf16, GB/s to disk | fp8+topk64, GB/s to disk |",
        "|---|---|---|---|",
    ]
    for rate in (1000, 2500, 5000, 10000):
        each = [bytes_per_token(codec, shape.hidden_size, num_boundaries=shape.num_boundaries) for codec in ("bf16", "fp8+topk64")]
        written = [size * rate / 1e9 for size in each]
        lines.append(f"| {rate:,} | {work.total / rate / 3600:.1f} | {written[0]:.2f} | {written[1]:.2f} |")
    return "\n".join(lines)


def tokens_per_second(shape: DrafterShape, config: TrainConfig, machine: Machine, work: Work, *, share: float) -> float:
    """Of all GPUs at `share` of their peak."""
    each = plan.flops_per_step(shape, [work.tokens], depths=config.drafter.depths) / work.tokens
    return machine.gpus * machine.peak_tflops * 1e12 * share / each


def step_seconds(shape: DrafterShape, config: TrainConfig, machine: Machine, work: Work, *, share: float) -> float:
    """Of an optimizer step, at `share` of the peak."""
    tokens = config.batch.conversations_per_step * work.tokens
    return tokens / tokens_per_second(shape, config, machine, work, share=share)


def _engines(config: TrainConfig, gpus: int) -> list[tuple[str, str, Engine]]:
    """Column, optimizer, engine."""
    own = [(f"{Engine(gpus).name}, {config.optim.name}", config.optim.name, Engine(gpus))] if config.optim.name != "adamw" else []
    zeros = [(f"{Engine(gpus, zero).name}, adamw", "adamw", Engine(gpus, zero)) for zero in range(4 if gpus > 1 else 1)]
    return own + zeros


def target_config(config: TrainConfig) -> dict:
    """Raises ValueError for a target that is neither there nor known."""
    if Path(config.target.path).is_dir():
        return text_config(Path(config.target.path))
    if config.target.name == "kimi_k25":
        return KIMI_K25
    raise ValueError(f"there is no target at {config.target.path}: give target.path=DIR, a folder with its config.json")


def load(overrides: list[str]) -> tuple[TrainConfig, DrafterShape]:
    """conf/train.yaml for the reference user, with `overrides`. Raises ValueError, HydraException for a wrong one."""
    conf = Path(__file__).resolve().parent.parent / "conf"
    with initialize_config_dir(str(conf), version_base=None):
        config = typed(TrainConfig, compose("train", [*REFERENCE, "shards=none", "out=none", *overrides]))
    shape = DrafterShape.resolve(config.drafter, target_config(config), num_boundaries=len(config.target.boundaries))
    return config, shape


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("overrides", nargs="*", metavar="OPTION=VALUE", help="of train/main.py")
    options.add_argument("--conversations", type=int, default=10_000, help="how many (%(default)s)")
    options.add_argument("--tokens", type=int, default=8_000, help="of each conversation (%(default)s)")
    options.add_argument("--gpus", type=int, default=8, help="how many (%(default)s)")
    options.add_argument("--gpu", default="RTX PRO 6000", help="its name, for its peak (%(default)s)")
    options.add_argument("--gib", type=float, default=96, help="memory of each, GiB (%(default)s)")
    options.add_argument("--peak-tflops", type=float, help="dense bf16 of each, for a GPU that is not known")
    options.add_argument("--link", type=float, default=63, help="GB/s each way between GPUs (%(default)s: PCIe 5.0 x16)")
    options.add_argument("--link-name", default="PCIe 5.0 x16", help="what it is called in the text (%(default)s)")
    return options


def planned(arguments: argparse.Namespace) -> str:
    """What is printed. Raises ValueError for a number that is not above 0, and a GPU that is not known, without its peak."""
    for name in ("conversations", "tokens", "gpus", "gib", "link", "peak_tflops"):
        value = getattr(arguments, name)
        require(value is None or value > 0, f"--{name.replace('_', '-')}", value, "more than 0")
    config, shape = load(arguments.overrides)
    peak = arguments.peak_tflops or plan.peak_tflops(arguments.gpu)
    if peak is None:
        raise ValueError(f"--gpu {arguments.gpu!r} is not known: give --peak-tflops, known are {', '.join(plan.PEAK_TFLOPS)}")
    machine = Machine(arguments.gpus, arguments.gpu, arguments.gib, peak, arguments.link, arguments.link_name)
    return render(config, shape, machine, Work(arguments.conversations, arguments.tokens))


def main() -> None:
    try:
        print(planned(parser().parse_intermixed_args()), end="")
    except (ValueError, HydraException) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
