"""The quickstart's picture: loss over steps, accuracy per depth, offline against live acceptance length."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib.axes import Axes
from matplotlib.figure import Figure

INK, MUTED, GRID = "#1b1f24", "#6a737d", "#e4e7eb"
OFFLINE, LIVE = "#9fb8d8", "#1f4e8c"
DEPTHS = ("#1f4e8c", "#c8642b", "#3c8d5a", "#8a4f9e", "#b59a1f", "#5f6b76", "#c23b5a")
STYLE = {
    "font.size": 10, "text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": MUTED, "axes.titlesize": 11,
    "axes.titleweight": "bold", "axes.titlelocation": "left", "axes.spines.top": False, "axes.spines.right": False,
    "axes.axisbelow": True, "xtick.color": MUTED, "ytick.color": MUTED, "legend.frameon": False,
}  # fmt: skip


def draw(out: Path, *, metrics: list[dict], offline: dict, live: dict, title: str) -> Path:
    """Write the PNG `out` and return its path.

    metrics  lines of RUN/metrics.jsonl: "step" with "loss" in nats and "acc" (one per depth, 0 .. 1), or with "tau"
             (validation)
    offline  summary of train/evaluate.py: "tau", "by_source" {name: {"tau"}}
    live     the same of launch/bench.py
    title    line above the three panels
    """
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(13.5, 4.6), layout="constrained", facecolor="white")
        loss, accuracy, tau = figure.subplots(1, 3, width_ratios=(1, 1, 1.15))
        logged = [row for row in metrics if "loss" in row]
        _loss(loss, logged)
        _accuracy(accuracy, logged)
        _tau(tau, offline, live)
        figure.suptitle(title, x=0.01, ha="left", fontsize=12, color=MUTED)
        out.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(out, dpi=150)
    return out


def read_metrics(path: Path) -> list[dict]:
    """The lines of a run's metrics.jsonl, without those that a death cut short, or that are just being written."""
    rows = []
    for line in path.read_text(errors="replace").splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            rows.append(json.loads(line))
    return rows


def _loss(axes: Axes, rows: list[dict]) -> None:
    steps = [row["step"] for row in rows]
    axes.plot(steps, [row["loss"] for row in rows], color=LIVE, linewidth=1.8, marker="o", markersize=2.5)
    axes.set(title="Training loss", xlabel="optimizer step", ylabel="cross-entropy, weighted over depths (nats)")
    axes.set_ylim(bottom=0)
    axes.grid(axis="y", color=GRID)


def _accuracy(axes: Axes, rows: list[dict]) -> None:
    """Conditional accuracy, one line a depth: few rows reach the deep ones, so each is a running mean."""
    steps = [row["step"] for row in rows]
    num_depths = len(rows[-1]["acc"]) if rows else 0
    top = 10.0
    for depth in range(num_depths):
        color = DEPTHS[depth % len(DEPTHS)]
        values = running_mean([100 * row["acc"][depth] for row in rows], width=max(1, len(rows) // 8))
        axes.plot(steps, values, color=color, linewidth=1.8, label=f"draft {depth + 1}")
        top = max([top, *(value for value in values if value == value)])
    axes.set(title="Training accuracy, by depth", xlabel="optimizer step",
             ylabel="drafts right, given the earlier ones (%)", ylim=(0, min(100, 1.25 * top)))  # fmt: skip
    axes.grid(axis="y", color=GRID)
    if num_depths:
        axes.legend(loc="upper left", ncols=3)


def running_mean(values: list[float], *, width: int) -> list[float]:
    """Mean of each value and the `width` - 1 before it; nan (nothing counted) is left out, and stays where all are."""
    means = []
    for end in range(1, len(values) + 1):
        seen = [value for value in values[max(0, end - width) : end] if value == value]
        means.append(sum(seen) / len(seen) if seen else float("nan"))
    return means


def _tau(axes: Axes, offline: dict, live: dict) -> None:
    """Bars from 1 (no drafting): all prompts at the top, then the sources that both sides have."""
    sources = [name for name in offline["by_source"] if name in live["by_source"]]
    rows = [("all", offline["tau"], live["tau"])]
    rows += [(name, offline["by_source"][name]["tau"], live["by_source"][name]["tau"]) for name in sources]
    thickness = 0.38
    for shift, color, label, values in (
        (-thickness / 2, OFFLINE, "offline, from the shards", [row[1] for row in rows]),
        (thickness / 2, LIVE, "live, on the server", [row[2] for row in rows]),
    ):
        places = [place + shift for place in range(len(rows))]
        bars = axes.barh(places, [value - 1 for value in values], thickness, left=1, color=color, label=label)
        axes.bar_label(bars, [f"{value:.3f}" for value in values], fontsize=7.5, padding=3, color=INK)
    longest = max(max(row[1:]) for row in rows)
    axes.set_yticks(range(len(rows)), [row[0] for row in rows])
    axes.get_yticklabels()[0].set(fontweight="bold", color=INK)
    axes.invert_yaxis()
    axes.set(title="Acceptance length, held-out prompts", xlabel="tokens per verification step (1 = no drafting)")
    axes.set_xlim(1, 1 + (longest - 1) * 1.15 + 0.02)
    axes.grid(axis="x", color=GRID)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=2, fontsize=9)
