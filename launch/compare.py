"""Runs side by side: a table of what differs and what came of it, and a picture of tau over tokens and over time.

    python launch/compare.py RUN [RUN ...] [--png FILE] [--json FILE]

RUN: a folder of train/main.py, the folder of a sweep (all runs in it), or an offline run of W&B (wandb/offline-run-*).
Needs no network.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import argparse
import json
from dataclasses import dataclass

import matplotlib

matplotlib.use("Agg")

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke

from launch import offline_runs
from launch.figure import DEPTHS, GRID, STYLE, read_metrics

IGNORED = ("out", "tracker", "git", "provenance", "export_engine", "export_engine_version", "plan")  # not what a run is
OFTEN_OF_NO_INTEREST = ("log_every_steps", "keep_checkpoints", "checkpoint_every_steps", "batch.num_workers")


@dataclass
class Run:
    """A run of train/main.py.

    name     as its tracker calls it, else its folder
    config   flat, names dotted
    rows     of metrics.jsonl, ascending
    summary  of its end; {} while it runs
    """

    name: str
    config: dict
    rows: list[dict]
    summary: dict

    @property
    def taus(self) -> list[dict]:
        """The rows of its validations; nan (nothing was generated) is none."""
        return [row for row in self.rows if isinstance(tau := row.get("tau"), (int, float)) and tau == tau]

    @property
    def best(self) -> dict | None:
        """Of `taus` the row with the largest; None before the first validation."""
        return max(self.taus, key=lambda row: row["tau"], default=None)

    @property
    def tau(self) -> float | None:
        """The largest exact greedy tau on the validation shards; None before the first validation."""
        best = self.best
        return best["tau"] if best else self.summary.get("best_tau", self.summary.get("tau"))

    @property
    def accuracy(self) -> list[float | None]:
        """By depth, 0 .. 1, given the earlier drafts right; on the validation shards, where tau was best. None: not seen."""
        best = self.best or {}
        return (best.get("validation") or {}).get("acc") or self.summary.get("acc") or []

    @property
    def tokens_per_second(self) -> float | None:
        """Median over the log's lines, of all processes together."""
        found = [row["tokens_per_second"] for row in self.rows if "tokens_per_second" in row]
        middle = sorted(found[1:] or found)  # the first has compilation in it
        return middle[len(middle) // 2] if middle else None

    @property
    def seconds(self) -> float | None:
        """Of training, evaluation and checkpoints in it."""
        return self.summary.get("train_seconds") or next(
            (row["seconds"] for row in reversed(self.rows) if "seconds" in row), None
        )


def find(folder: Path) -> list[Run]:
    """The runs in `folder`. Raises ValueError if there are none."""
    if (folder / "metrics.jsonl").exists():
        return [of_folder(folder)]
    if list(folder.glob("run-*.wandb")):
        return [of_wandb(folder)]
    inside = sorted(file.parent for file in folder.glob("*/metrics.jsonl"))
    if not inside:  # W&B's latest-run is a link to one of them
        inside = sorted({file.parent.resolve() for file in folder.glob("*/run-*.wandb")})
    if not inside:
        raise ValueError(
            f"{folder} is no run: expected metrics.jsonl (of train/main.py), run-*.wandb (an offline run of W&B), or "
            "folders with them"
        )
    return [run for one in inside for run in find(one)]


def of_folder(folder: Path) -> Run:
    """A run folder of train/main.py, finished or not."""
    config = _json(folder / "run.json")
    given = (config.get("tracker") or {}).get("run_name")
    return Run(given or folder.name, _flat(config), read_metrics(folder / "metrics.jsonl"), _json(folder / "summary.json"))


def of_wandb(folder: Path) -> Run:
    """An offline run of W&B; its history has one number a key, which become one list a name again."""
    found = offline_runs.read(folder)
    rows = [_nested(row) for row in found.history]
    return Run(found.name or folder.name, _flat(found.config), rows, _nested(found.summary))


def differing(runs: list[Run]) -> list[str]:
    """The options in which the runs differ, dotted; those that change nothing of the result only if nothing else does."""
    keys = dict.fromkeys(key for run in runs for key in run.config)
    differ = [
        key for key in keys
        if key.split(".")[0] not in IGNORED and len({json.dumps(run.config.get(key)) for run in runs}) > 1
    ]  # fmt: skip
    return [key for key in differ if key not in OFTEN_OF_NO_INTEREST] or differ


def label(run: Run, keys: list[str]) -> str:
    """ "lr=0.0001, depths=4"; the run's name where nothing differs."""
    return ", ".join(f"{_end(key, keys)}={_short(run.config.get(key))}" for key in keys) or run.name


def table(runs: list[Run]) -> tuple[list[str], list[list[str]]]:
    """Header and rows, best tau first."""
    keys = differing(runs)
    depths = max((len(run.accuracy) for run in runs), default=0)
    prices = any("dollars" in run.summary for run in runs)
    header = ["run", *(_end(key, keys) for key in keys), "tau", *(f"acc {k + 1}" for k in range(depths)), "tokens/s", "hours"]
    header += ["dollars"] if prices else []
    rows = []
    for run in sorted(runs, key=lambda run: -(run.tau or 0)):
        accuracy = [f"{100 * acc:.1f}" if acc is not None else "-" for acc in run.accuracy]
        accuracy += [""] * (depths - len(accuracy))
        speed, seconds = run.tokens_per_second, run.seconds
        row = [run.name, *(_short(run.config.get(key)) for key in keys), f"{run.tau:.3f}" if run.tau else "-", *accuracy]
        row += [f"{speed:,.0f}" if speed else "-", f"{seconds / 3600:.2f}" if seconds else "-"]
        rows.append(row + ([str(run.summary.get("dollars", "-"))] if prices else []))
    return header, rows


def show(header: list[str], rows: list[list[str]]) -> str:
    """The table for a terminal: the first column to the left, the others to the right."""
    widths = [max(len(line[i]) for line in [header, *rows]) for i in range(len(header))]
    lines = [
        "  ".join(cell.ljust(width) if i == 0 else cell.rjust(width) for i, (cell, width) in enumerate(zip(line, widths)))
        for line in [header, *rows]
    ]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def draw(runs: list[Run], png: Path) -> Path:
    """tau over supervised tokens, and over time: one line a run, the best at the top of the legend."""
    keys = differing(runs)
    runs = sorted(runs, key=lambda run: -(run.tau or 0))
    timed = any("seconds" in row for run in runs for row in run.taus)
    with matplotlib.rc_context({**STYLE, "font.size": 11.5, "axes.titlesize": 13}):
        figure = Figure(figsize=(11, 4.6), layout="constrained", facecolor="white")
        panels = figure.subplots(1, 2 if timed else 1, sharey=True, squeeze=False)[0]
        largest = max((row.get("supervised_tokens", 0) for run in runs for row in run.taus), default=1)
        unit, name = (1e6, "million ") if largest >= 2e6 else (1e3, "thousand ") if largest >= 2e3 else (1, "")
        _lines(panels[0], runs, keys, key="supervised_tokens", unit=unit)
        panels[0].set(title="Acceptance length, held-out conversations", xlabel=f"supervised tokens seen ({name.strip()})" if name
                      else "supervised tokens seen", ylabel="tokens per verification step (tau)")  # fmt: skip
        if timed:
            longest = max(row["seconds"] for run in runs for row in run.taus if "seconds" in row)
            unit, name = (3600, "hours") if longest > 7200 else (60, "minutes") if longest > 120 else (1, "seconds")
            _lines(panels[1], runs, keys, key="seconds", unit=unit)
            panels[1].set(title="The same over time", xlabel=f"{name} of training")
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=min(len(runs), 4), fontsize=11)
        png.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(png, dpi=150)
    return png


def _lines(axes: Axes, runs: list[Run], keys: list[str], *, key: str, unit: float) -> None:
    """The last tau of each run stands at the right edge in its colour, moved apart where two would meet."""
    ends = []
    for i, run in enumerate(runs):
        points = [(row[key] / unit, row["tau"]) for row in run.taus if key in row]
        if not points:
            continue
        color = DEPTHS[i % len(DEPTHS)]
        style = {"color": color, "linewidth": 2.2, "marker": "o", "markersize": 4.5, "markeredgecolor": "white"}
        axes.plot(*zip(*points), **style, linestyle="-" if i < len(DEPTHS) else "--", label=label(run, keys))
        ends.append((points[-1][1], color))
    axes.grid(axis="y", color=GRID)
    axes.margins(x=0.03)
    right = axes.get_xlim()[1]
    axes.set_xlim(0, 1.09 * right)
    bottom, top = axes.get_ylim()
    least, last = 0.045 * (top - bottom), None
    for y, color in sorted(ends, key=lambda end: end[0]):
        height = y if last is None else max(y, last + least)
        axes.annotate(f"{y:.2f}", (right, height), xytext=(4, 0), textcoords="offset points", va="center", color=color,
                      fontsize=10, fontweight="bold", path_effects=[withStroke(linewidth=3, foreground="white")])  # fmt: skip
        last = height


def _flat(config: dict, prefix: str = "") -> dict:
    flat = {}
    for name, value in config.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return flat


def _nested(row: dict) -> dict:
    """{"acc/0": 1, "acc/1": 2, "validation/acc/0": 3} -> {"acc": [1, 2], "validation": {"acc": [3]}}."""
    tree: dict = {}
    for name, value in row.items():
        place = tree
        *path, last = name.split("/")
        for part in path:
            place = place.setdefault(part, {}) if isinstance(place, dict) else {}
        if isinstance(place, dict):
            place[last] = value
    return _lists(tree)


def _lists(tree):
    if not isinstance(tree, dict):
        return tree
    if tree and all(name.isdigit() for name in tree):
        return [tree.get(str(depth), float("nan")) for depth in range(max(map(int, tree)) + 1)]
    return {name: _lists(value) for name, value in tree.items()}


def _end(key: str, keys: list[str]) -> str:
    """The last part of an option's name, or all of it where two end alike."""
    end = key.rsplit(".", 1)[-1]
    return end if sum(other.rsplit(".", 1)[-1] == end for other in keys) == 1 else key


def _short(value) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _json(file: Path) -> dict:
    try:
        return json.loads(file.read_text())
    except (FileNotFoundError, ValueError):
        return {}


def compare(runs: list[Run], *, png: Path, data: Path | None) -> None:
    """Prints the table and draws the picture; data: file for the table, too. Raises ValueError or OSError."""
    header, rows = table(runs)
    print(show(header, rows))
    if data:
        data.parent.mkdir(parents=True, exist_ok=True)
        data.write_text(json.dumps([dict(zip(header, row)) for row in rows], indent=1) + "\n")
    if any(run.taus for run in runs):
        print(f"picture: {draw(runs, png)}")
    else:
        print("no picture: no run has been validated yet")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN")
    parser.add_argument("--png", type=Path, default=Path("outputs/compare.png"), help="picture to write (%(default)s)")
    parser.add_argument("--json", type=Path, help="file for the table as data")
    arguments = parser.parse_args()
    try:
        compare([run for folder in arguments.runs for run in find(folder)], png=arguments.png, data=arguments.json)
    except (ValueError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
