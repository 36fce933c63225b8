"""What a person sees while a run trains: one bar, with everything that says whether it goes well.

    train   37% |███████▍            | 192/519  02:10 < 03:41, epoch 1.11 | loss 3.214 | tau 2.31 | 43.5k tok/s | ...
"""

from __future__ import annotations

import sys

import torch
from tqdm import tqdm

from train import plan
from train.shape import DrafterShape


def device_name(device: torch.device) -> str:
    """As train/plan.py knows it."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"


class Meter:
    """MFU: the operations that the model needs, over those that all devices could have done meanwhile.

    peak_tflops  dense bf16 of one device; None: looked up by `device_name`, and where that is unknown there is no MFU
    """

    def __init__(self, shape: DrafterShape, *, depths: int, device_name: str, devices: int, peak_tflops: float | None):
        self.shape, self.depths, self.devices = shape, depths, devices
        self.peak = peak_tflops if peak_tflops is not None else plan.peak_tflops(device_name)

    def mfu(self, *, tokens: float, rows: float, pairs: float, seconds: float) -> float | None:
        """0 .. 1. tokens, rows, pairs: as train.plan.flops takes them, summed over all processes in `seconds`."""
        if self.peak is None or not seconds:
            return None
        done = plan.flops(self.shape, tokens=tokens, rows=rows, pairs=pairs, depths=self.depths)
        return done / seconds / (self.peak * 1e12 * self.devices)


class Progress(tqdm):
    """The bar of a run. `figures` takes a line of the log as it is, and shows what it knows of it."""

    def __init__(self, *, total: int, initial: int, disable: bool):
        self.known: dict[str, float] = {}
        bar = "{desc}  {percentage:3.0f}% |{bar:20}| {n_fmt}/{total_fmt}  {elapsed} < {remaining}{postfix}"
        # a terminal is drawn on twice a second, a file is written to twice a minute
        every = 0.5 if sys.stderr.isatty() else 30.0
        super().__init__(
            total=total, initial=initial, disable=disable, desc="train", unit="step", bar_format=bar, mininterval=every,
            dynamic_ncols=True, smoothing=0.1,
        )  # fmt: skip

    def write(self, text: str) -> None:
        """A line above the bar, from the process that has one."""
        if not self.disable:
            tqdm.write(text, file=sys.stderr)

    def figures(self, found: dict) -> None:
        self.known |= {name: value for name, value in found.items() if isinstance(value, (int, float))}
        self.set_postfix_str(described(self.known), refresh=False)


def validated(figures: dict, *, depths: int) -> str:
    """ "validation tau(7) 2.671", of what train/evaluate.py measured."""
    if not figures["documents"]:
        return f"no validation records, no tau({depths})"
    return f"validation tau({depths}) {figures['tau']:.3f}"


def described(figures: dict[str, float]) -> str:
    """ "epoch 1.11 | loss 3.214 | ...", of those figures that are there."""
    speed = figures.get("tokens_per_second")
    fast = speed is not None and speed >= 10_000
    words = [
        ("epoch {:.2f}", figures.get("epoch")),
        ("loss {:.3f}", figures.get("loss")),
        ("tau {:.2f}", figures.get("tau")),
        ("{:.1f}k tok/s", speed / 1000) if fast else ("{:.0f} tok/s", speed),
        ("MFU {:.0f} %", 100 * figures["mfu"] if "mfu" in figures else None),
        ("data wait {:.1f} %", 100 * figures["data_wait_share"] if "data_wait_share" in figures else None),
    ]
    return " | ".join(text.format(value) for text, value in words if value is not None)
