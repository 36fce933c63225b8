"""Quickstart: the whole way once, on this machine, each stage as the command that a user would type.

    python launch/quickstart.py [out=DIR] [conversations=FILE.jsonl]      # from the repository's folder

What an earlier run finished is reused: every stage finds its own summary and says so.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import json
import os
import re
import shlex
import time
from dataclasses import asdict

from omegaconf import OmegaConf

from data.boundaries import LAYER_IDS
from data.config import ROOT, TargetConfig, as_json, quoted, stage, write_atomically
from data.manifest import Manifest
from data.signals import told_to_end
from launch.config import QuickstartConfig
from launch.figure import draw, read_metrics
from launch.processes import Family

LARGEST_GAP = 0.02  # |live tau / offline tau - 1|
SMALLEST_TAU = 1.15  # on held-out prompts of EXAMPLES
EXAMPLES = Path("data/examples/conversations.jsonl")
STOP_SECONDS = 60.0  # for a stage to save what it has


@stage("quickstart")
@told_to_end("what is finished is kept, the same command goes on")
def main(config: QuickstartConfig) -> dict:
    commands, folders = plan(config)
    seconds = {}
    for position, (name, command) in enumerate(commands.items(), start=1):
        started = time.monotonic()
        run(name, command, position=position, of=len(commands))
        seconds[name] = round(time.monotonic() - started, 1)
        if name == "data":
            require_held_out(summary_of(folders["data"]))
    return report(config, folders, seconds)


def plan(config: QuickstartConfig) -> tuple[dict[str, list[str]], dict[str, Path]]:
    """Every stage's command, in their order, and the folder its summary.json goes to.

    Raises ValueError if there is no conf/target/NAME.yaml of the target's name.
    """
    out, target = Path(config.out), target_options(config.target)
    names = {"data": "prompts", "extract": "shards", "train": "run", "evaluate": "evaluation", "bench": "bench"}
    folders = {stage: out / name for stage, name in names.items()}
    prompts, shards = (_as_option(str(folders[name])) for name in ("data", "extract"))
    drafter = _as_option(str(folders["train"] / "export"))
    commands = {
        "data": ["python", "data/main.py", *target, f"conversations={_as_option(config.conversations)}",
                 f"validation_fraction={config.validation_fraction}"],
        "extract": ["python", "extract/main.py", *target, f"prompts={prompts}"],
        "train": [*accelerate(), "train/main.py", *target, f"shards={shards}", f"experiment={config.experiment}"],
        "evaluate": ["python", "train/evaluate.py", *target, f"drafter={drafter}", f"shards={shards}"],
        "bench": ["python", "launch/bench.py", *target, f"drafter={drafter}", f"prompts={prompts}"],
    }  # fmt: skip
    for name, command in commands.items():
        command += [f"out={_as_option(str(folders[name]))}", *getattr(config.options, name)]
    return commands, folders


def target_options(target: TargetConfig) -> list[str]:
    """target=NAME, and what the command line made different from its YAML."""
    file = ROOT / "conf" / "target" / f"{target.name}.yaml"
    if not file.is_file():
        raise ValueError(f"there is no {file}, and the stages choose a target by its file: give file and `name` one name")
    known = OmegaConf.to_container(OmegaConf.load(file), resolve=True)
    changed = {name: value for name, value in asdict(target).items() if value != known[name]}
    return [f"target={target.name}", *(f"target.{name}={_as_option(value)}" for name, value in changed.items())]


def _as_option(value: str | bool | list[int] | None) -> str:
    """The value as Hydra reads it, in quotes where it needs them."""
    text = "null" if value is None else str(value).replace(" ", "") if isinstance(value, list) else str(value)
    plain = not isinstance(value, str) or re.fullmatch(r"[\w./~-]+", text)
    return text if plain else quoted(text)


def accelerate() -> list[str]:
    """One process, with a file of launch/accelerate/: no saved Accelerate setting of the user's steps in."""
    import torch

    if torch.cuda.is_available():
        return ["accelerate", "launch", "--config_file", "launch/accelerate/gpu.yaml"]
    threads = ["--num_cpu_threads_per_process", str(len(os.sched_getaffinity(0)))]
    return ["accelerate", "launch", "--config_file", "launch/accelerate/cpu.yaml", *threads]


def run(name: str, command: list[str], *, position: int, of: int) -> None:
    """Run one stage in the terminal. Raises ValueError if it fails; what it said stands above."""
    print(f"\n== {position}/{of} {name}\n$ {shlex.join(command)}", flush=True)
    if command[:2] == ["accelerate", "launch"]:  # the same, without the imports of Accelerate's other commands
        started = ["-m", "accelerate.commands.launch", *command[2:]]
    else:
        started = command[1:]
    family = Family([sys.executable, *started])  # Ctrl-C comes to it from here
    try:
        status = family.wait()
    except BaseException:
        family.tell()  # extraction keeps its shards, training saves a checkpoint
        family.end(seconds=STOP_SECONDS)
        raise
    if status:
        raise ValueError(f"stage {name} ended with status {status}, see above; once that is mended, the same "
                         "command goes on from there")  # fmt: skip


def require_held_out(data: dict) -> None:
    """Raises ValueError if tau could not be measured on anything: before hours of extraction and training."""
    if data["validation"] == 0:
        raise ValueError(
            f"none of the {data['kept']} conversations is held out, and tau is measured on those: set a larger "
            f"validation_fraction=, or give more conversations"
        )


def summary_of(folder: Path) -> dict:
    """What a stage wrote to its `out`."""
    return json.loads((folder / "summary.json").read_text())


def report(config: QuickstartConfig, folders: dict[str, Path], seconds: dict[str, float]) -> dict:
    """The table, the picture and the summary. Raises ValueError, the summary written, if a promise is broken."""
    data, extract, evaluate, bench = (summary_of(folders[name]) for name in ("data", "extract", "evaluate", "bench"))
    exported = json.loads((folders["train"] / "export" / "config.json").read_text())
    summary = {
        "stage": "quickstart",
        "conversations_kept": data["kept"],
        "records": sum(shard.samples for shard in Manifest.load(folders["extract"]).shards),
        "probe_passed": extract["probe_passed"],
        "offline_tau": evaluate["tau"],
        "live_tau": bench["tau"],
        "tau_ratio": bench["tau"] / evaluate["tau"],
        "outputs_identical": bench["outputs_identical"],
        "drafts_per_step": bench["num_drafts"],
        "tokens_per_second_with_drafts": bench["tokens_per_second"],
        "tokens_per_second_without": bench["tokens_per_second_without"],
        "boundaries": exported["eyas"]["boundaries"],
        "engine_ids": exported["eagle_config"][LAYER_IDS],
        "seconds_by_stage": seconds,
        "seconds": round(sum(seconds.values()), 1),
    }
    smallest = SMALLEST_TAU if Path(config.conversations) == EXAMPLES else 1.0  # of others nobody knows how much
    promises = {
        "records = conversations kept": summary["records"] == summary["conversations_kept"],
        "wiring probe passed": summary["probe_passed"] is True,
        f"offline tau > {smallest}": summary["offline_tau"] > smallest,
        f"live tau within {100 * LARGEST_GAP:.0f} % of offline": abs(summary["tau_ratio"] - 1) <= LARGEST_GAP,
        "outputs identical with and without drafts": summary["outputs_identical"] is True,
    }
    summary["promises"] = promises
    picture = draw(
        Path(config.out) / "quickstart.png",
        metrics=read_metrics(folders["train"] / "metrics.jsonl"),
        offline=evaluate,
        live=bench,
        title=f"{config.target.name}, {summary['records']} conversations, {summary['drafts_per_step']} drafts a step",
    )
    print_table(summary, picture)
    if not all(promises.values()):
        write_atomically(Path(config.out) / "summary.json", as_json(summary))
        broken = "; ".join(name for name, kept in promises.items() if not kept)
        raise ValueError(f"the run went through, but not as promised: {broken} (all figures: {config.out}/summary.json)")
    print_next(config, folders)
    tau = f"tau {summary['offline_tau']:.3f} offline, {summary['live_tau']:.3f} live"
    return {**summary, "line": f"{tau}, outputs identical, {summary['seconds']:.0f} s"}


def print_table(summary: dict, picture: Path) -> None:
    without = summary["tokens_per_second_without"]
    rows = {
        "conversations": f"{summary['conversations_kept']} kept, {summary['records']} records captured",
        "boundaries": f"{summary['boundaries']}, served as layer ids {summary['engine_ids']}",
        "tau, offline": f"{summary['offline_tau']:.3f} tokens a step, computed from the held-out shards",
        "tau, live": f"{summary['live_tau']:.3f} tokens a step, counted by the server ({summary['tau_ratio']:.4f} of it)",
        "speed": f"{summary['tokens_per_second_with_drafts']:.1f} tokens/s with drafts, "
        + ("not measured without" if without is None else f"{without:.1f} without"),
        "seconds": ", ".join(f"{name} {value:.0f}" for name, value in summary["seconds_by_stage"].items()),
        "picture": str(picture),
    }
    print()
    for name, value in rows.items():
        print(f"  {name:<14} {value}")
    for name, kept in summary["promises"].items():
        print(f"  {'ok' if kept else 'BROKEN':<14} {name}")


def print_next(config: QuickstartConfig, folders: dict[str, Path]) -> None:
    target = shlex.join(target_options(config.target))
    drafter = shlex.quote(f"drafter={_as_option(str(folders['train'] / 'export'))}")
    print(f"""
What to do next
  serve it       python launch/serve.py {target} {drafter}
  your own data  python launch/quickstart.py {target} conversations=FILE.jsonl out=outputs/own
  your own model a YAML like conf/target/{config.target.name}.yaml, then target=NAME: README, "The stages by hand"
""")


if __name__ == "__main__":
    main()
