"""Where figures go: metrics.jsonl and run.json in the run's folder always, W&B or TensorBoard through Accelerate.

The x axis of every curve is the number of supervised tokens seen, so that runs with different batches compare.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import uuid
from dataclasses import asdict
from pathlib import Path

from accelerate import Accelerator

from data.config import write_atomically
from train.config import TrainConfig

ROOT = Path(__file__).resolve().parent.parent
AXIS = "supervised_tokens"
BY_DEPTH = {
    "acc": "accuracy by depth, given the earlier drafts right",
    "alpha": "alpha by depth, sampling's acceptance",
}
POINTS = 300  # most points of one of those charts
SECRET = ("key", "token", "secret", "password")  # parts of names that never leave the machine


class Tracker:
    """Used by every rank; only the main process writes, and not before `begin`."""

    def __init__(self, config: TrainConfig, accelerator: Accelerator, *, provenance: dict):
        self.config, self.accelerator, self.provenance = config, accelerator, provenance
        self.name, self.out = config.tracker.name, Path(config.out)
        self.file = self.out / "metrics.jsonl"
        self.tokens = 0  # supervised ones, seen so far

    def begin(self, step: int) -> None:
        """Open the run, which goes on after `step`; what was logged beyond it is forgotten, and will be logged again."""
        config, accelerator = self.config, self.accelerator
        if not accelerator.is_main_process:
            return
        self._forget_beyond(step)
        described = {**without_secrets(asdict(config)), "provenance": self.provenance, "git": git_commit()}
        write_atomically(self.out / "run.json", json.dumps(described, indent=1, default=str) + "\n")
        if self.name == "none":
            return
        options = {"wandb": self._wandb_options(config)} if self.name == "wandb" else {}
        told = described if self.name == "wandb" else {k: _plain(v) for k, v in _flat(described).items()}
        accelerator.init_trackers(config.tracker.project, config=told, init_kwargs=options)
        if self.name == "wandb":
            run = accelerator.get_tracker("wandb").tracker
            run.define_metric(AXIS)
            run.define_metric("*", step_metric=AXIS)
            run.define_metric("tau", summary="max", step_metric=AXIS)
        else:
            writer = accelerator.get_tracker("tensorboard").writer
            charts = {title: ["Multiline", [f"{name}/.*"]] for name, title in BY_DEPTH.items()}
            writer.add_custom_scalars({"by depth": charts})

    def log(self, step: int, figures: dict) -> None:
        """figures: numbers, or lists of one number per depth (acc -> acc/0, acc/1, ... in the tracker)."""
        if not self.accelerator.is_main_process:
            return
        self.tokens = figures.get(AXIS, self.tokens)
        figures = {**figures, AXIS: self.tokens}
        with self.file.open("a") as file:
            file.write(json.dumps({"step": step, **figures}) + "\n")
        flat = {name: value for name, value in _flat(figures).items() if _is_number(value)}
        if self.name == "wandb":
            charts = self._charts() if "tau" in figures else {}
            self.accelerator.log({**flat, "step": step, **charts}, step=step)
        elif self.name == "tensorboard":
            self.accelerator.log(flat, step=self.tokens)

    def finish(self, summary: dict, *, drafter: Path | None = None) -> None:
        """Close the run with its summary fields, and a reference to the exported drafter: nothing is uploaded."""
        if self.accelerator.is_main_process and self.name != "none":
            told = {name: value for name, value in _flat(without_secrets(summary)).items() if _is_number(value)}
            if self.name == "wandb":
                run = self.accelerator.get_tracker("wandb").tracker
                run.summary.update(told)
                if drafter is not None:
                    run.log_artifact(_reference(drafter, run.id, summary))
            else:
                self.accelerator.log({f"summary/{name}": value for name, value in told.items()}, step=self.tokens)
        self.accelerator.end_training()

    def _forget_beyond(self, step: int) -> None:
        if self.file.exists():
            rows = [row for row in self._rows() if row["step"] <= step]
            write_atomically(self.file, "".join(json.dumps(row) + "\n" for row in rows))
            self.tokens = max((row.get(AXIS, 0) for row in rows), default=0)

    def _wandb_options(self, config: TrainConfig) -> dict:
        import wandb

        os.environ.setdefault("WANDB_SILENT", "true")
        # Of the machine W&B hears what this file tells it, and how busy its processor and GPUs are: its own description
        # would hold the command line, the user's name and paths.
        settings = wandb.Settings(
            console="off", disable_code=True, disable_git=True, x_disable_meta=True, x_disable_machine_info=True
        )
        return {
            "name": config.tracker.run_name or self.out.name,
            "group": config.tracker.group,
            "mode": wandb_mode(config.tracker.mode),
            "dir": config.out,
            "id": self._run_id(),
            "resume": "allow",
            "settings": settings,
        }

    def _run_id(self) -> str:
        """Made once a run folder: what continues after a death is the same run."""
        file = self.out / "wandb-id"
        if not file.exists():
            write_atomically(file, uuid.uuid4().hex[:12])
        return file.read_text().strip()

    def _rows(self) -> list[dict]:
        """The lines of metrics.jsonl; one that a death cut short is dropped."""
        rows = []
        for line in self.file.read_text().splitlines():
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError:
                continue
        return rows

    def _charts(self) -> dict:
        """One chart with a line per depth for the accuracy, one for alpha."""
        import wandb

        charts = {}
        for name, title in BY_DEPTH.items():
            rows = [row for row in self._rows() if isinstance(row.get(name), list)]
            rows = rows[:: max(len(rows) // POINTS, 1)]
            if rows:
                lines = [[None if y != y else y for y in line] for line in zip(*(row[name] for row in rows))]
                charts[f"by_depth/{name}"] = wandb.plot.line_series(
                    xs=[row[AXIS] for row in rows], ys=lines, keys=[f"draft {k + 1}" for k in range(len(lines))],
                    title=title, xname="supervised tokens",
                )  # fmt: skip
        return charts


def costs(*, seconds: float, devices: int, tokens: float, dollars_per_gpu_hour: float | None) -> dict:
    """Summary fields by which runs are compared: what they took.

    tokens  of conversations that were fed, supervised or not. dollars is there only where a price is given.
    """
    gpu_hours = seconds * devices / 3600
    found = {"tokens_per_second": round(tokens / seconds, 1) if seconds else None, "gpu_hours": round(gpu_hours, 4)}
    if dollars_per_gpu_hour is not None:
        found["dollars"] = round(gpu_hours * dollars_per_gpu_hour, 2)
    return found


def wandb_mode(asked: str) -> str:
    """online only for a user who is logged in; WANDB_MODE, where it is set, has the last word."""
    if os.environ.get("WANDB_MODE"):
        return os.environ["WANDB_MODE"]
    if asked != "auto":
        return asked
    import wandb

    try:
        return "online" if wandb.login(prompt=False) else "offline"
    except wandb.Error as error:
        print(f"W&B is not reached with the key that is here ({error}): kept offline, `wandb sync` sends it later", file=sys.stderr)
        return "offline"


def git_commit() -> dict:
    """Of this repository: commit, and whether tracked files differ from it; empty outside git."""

    def ask(*words: str) -> str:
        command = ["git", "-C", str(ROOT), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return {"commit": ask("rev-parse", "HEAD"), "dirty": bool(ask("status", "--porcelain", "--untracked-files=no"))}
    except (OSError, subprocess.CalledProcessError):
        return {}


def without_secrets(config: dict) -> dict:
    """The config without values whose name speaks of a secret, that the environment holds under such a name, or that
    stand in an address."""
    hidden = {value for name, value in os.environ.items() if _speaks_of_a_secret(name) and len(value) >= 6}
    return _cleaned(config, hidden)


def _cleaned(value, hidden: set[str]):
    if isinstance(value, dict):
        return {name: _cleaned(v, hidden) for name, v in value.items() if not _speaks_of_a_secret(name)}
    if isinstance(value, (list, tuple)):
        return [_cleaned(v, hidden) for v in value]
    if isinstance(value, str):
        for secret in hidden:
            value = value.replace(secret, "***")
        value = re.sub(r"(\w+://)[^/@\s]+@", r"\1***@", value)
        return re.sub(r"(\w+://[^\s?]+)\?\S+", r"\1?***", value)  # a signed address
    return value


def _speaks_of_a_secret(name: str) -> bool:
    words = str(name).lower().replace("key_value", "").split("_")  # num_key_value_heads is none
    return any(word in words for word in SECRET)


def _reference(drafter: Path, run_id: str, summary: dict):
    import wandb

    figures = {name: summary[name] for name in ("best_tau", "tau", "steps", "boundaries") if name in summary}
    metadata = {"folder": str(drafter.resolve()), **figures}
    artifact = wandb.Artifact(f"drafter-{run_id}", type="drafter", metadata=metadata)
    artifact.add_reference(drafter.resolve().as_uri(), checksum=False)
    return artifact


def _is_number(value) -> bool:
    return isinstance(value, (int, float)) and value == value


def _plain(value):
    return value if isinstance(value, (bool, int, float, str)) else str(value)


def _flat(figures: dict, prefix: str = "") -> dict:
    flat = {}
    for name, value in figures.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{name}/")
        elif isinstance(value, list) and value and all(isinstance(x, float) for x in value):
            flat |= {f"{prefix}{name}/{depth}": x for depth, x in enumerate(value)}
        else:
            flat[prefix + name] = value
    return flat
