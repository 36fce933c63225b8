"""Where figures go: metrics.jsonl in the run's folder always, W&B or TensorBoard through Accelerate."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path

from accelerate import Accelerator

from train.config import TrainConfig

SECRET = ("key", "token", "secret", "password")  # parts of names that never leave the machine


class Tracker:
    """Used by every rank; only the main process writes."""

    def __init__(self, config: TrainConfig, accelerator: Accelerator, *, provenance: dict):
        self.accelerator, self.name = accelerator, config.tracker.name
        self.file = Path(config.out) / "metrics.jsonl"
        if self.name == "none" or not accelerator.is_main_process:
            return
        options = {}
        if self.name == "wandb":
            os.environ.setdefault("WANDB_SILENT", "true")
            options["wandb"] = {
                "name": config.tracker.run_name or Path(config.out).name,
                "group": config.tracker.group,
                "mode": wandb_mode(config.tracker.mode),
                "dir": config.out,
            }
        described = without_secrets({**asdict(config), "provenance": provenance})
        accelerator.init_trackers(config.tracker.project, config=_flat(described), init_kwargs=options)

    def resume(self, step: int) -> None:
        """Forget the lines beyond `step`: a resumed run writes them again."""
        if self.accelerator.is_main_process and self.file.exists():
            lines = [line for line in self.file.read_text().splitlines() if json.loads(line)["step"] <= step]
            self.file.write_text("".join(line + "\n" for line in lines))

    def log(self, step: int, figures: dict) -> None:
        """figures: numbers, or lists of one number per depth (acc -> acc/0, acc/1, ... in the tracker)."""
        if not self.accelerator.is_main_process:
            return
        with self.file.open("a") as file:
            file.write(json.dumps({"step": step, **figures}) + "\n")
        if self.name != "none":
            self.accelerator.log(_flat(figures), step=step)

    def finish(self, summary: dict) -> None:
        if self.name == "wandb" and self.accelerator.is_main_process:
            self.accelerator.get_tracker("wandb").tracker.summary.update(_flat(summary))
        self.accelerator.end_training()


def wandb_mode(asked: str) -> str:
    """online only for a user who is logged in; WANDB_MODE, where it is set, has the last word."""
    if os.environ.get("WANDB_MODE"):
        return os.environ["WANDB_MODE"]
    if asked != "auto":
        return asked
    import wandb

    return "online" if wandb.api.api_key else "offline"


def without_secrets(config: dict) -> dict:
    """The config with every value dropped whose name speaks of a secret."""
    return {
        name: without_secrets(value) if isinstance(value, dict) else value
        for name, value in config.items()
        if name.startswith("tokens_") or not any(word in name.lower().split("_") for word in SECRET)
    }


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
