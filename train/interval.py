"""What a run has seen since the last line of its log: summed on the device, kept in checkpoints, told as figures."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from train.feed import MicroBatch
from train.metrics import DepthSums
from train.progress import Meter
from train.running import Agreement


@dataclass
class Interval:
    """Of one process, or from `over_all` of all of them. Nothing here waits for the device before `figures`."""

    sums: DepthSums
    grad_norm: Tensor  # scalar, of the last step
    started: float  # time.monotonic()
    work: tuple[int, int, int] = (0, 0, 0)  # tokens, rows that asked, pairs: what train/plan.py counts operations by
    data_wait: float = 0.0  # seconds

    @classmethod
    def begin(cls, depths: int, *, device: torch.device) -> Interval:
        return cls(DepthSums.zeros(depths, device=device), torch.zeros((), device=device), time.monotonic())

    @classmethod
    def restored(cls, stored: list[dict], depths: int, *, rank: int, num_ranks: int, device: torch.device) -> Interval:
        """What this process had seen when a checkpoint was made; on another number of processes the first takes all.

        stored  from `stored`, one of each process that made the checkpoint
        """
        interval = cls.begin(depths, device=device)
        mine = stored[rank : rank + 1] if len(stored) == num_ranks else stored if rank == 0 else []
        for one in mine:
            interval.sums += DepthSums(torch.tensor(one["sums"], dtype=torch.float64, device=device))
            interval.add_work(*one["work"])
            interval.data_wait += one["data_wait"]
        interval.started -= max((one["seconds"] for one in stored), default=0.0)
        return interval

    def stored(self) -> dict:
        """As JSON takes it."""
        return {
            "sums": self.sums.values.tolist(),  # float64, to its last digit
            "work": self.work,
            "data_wait": self.data_wait,
            "seconds": time.monotonic() - self.started,
        }

    def add(self, sums: DepthSums, micro: MicroBatch) -> None:
        """One micro-batch more."""
        self.sums += sums
        self.add_work(micro.num_tokens, micro.rows, micro.pairs)

    def add_work(self, tokens: int, rows: int, pairs: int) -> None:
        self.work = tuple(map(sum, zip(self.work, (tokens, rows, pairs))))

    def over_all(self, agreement: Agreement) -> Interval:
        """With the sums and the work of all processes, each of which calls this; on the CPU."""
        sums = DepthSums(agreement.sum(self.sums.values.to("cpu", copy=True)))
        work = agreement.sum(torch.tensor(self.work, dtype=torch.float64))
        return replace(self, sums=sums, work=tuple(work.tolist()))

    @property
    def num_counted(self) -> int:
        """Supervised tokens: rows that the first depth counts."""
        return int(self.sums.values[0, 0])

    def figures(self, *, gamma: float, meter: Meter) -> dict:
        """For the log: loss of a step, its parts and acc and alpha by depth, grad_norm, speed, share of waiting, MFU."""
        seconds, means, counted = time.monotonic() - self.started, self.sums.means(), self.sums.values[0].tolist()
        tokens, rows, pairs = self.work
        mfu = meter.mfu(tokens=tokens, rows=rows, pairs=pairs, seconds=seconds)
        return {
            "loss": sum(gamma**k * x for k, (x, rows) in enumerate(zip(means["loss"], counted)) if rows),
            "loss_by_depth": means["loss"],
            "acc": means["acc"],
            "alpha": means["alpha"],
            "grad_norm": float(self.grad_norm),
            "tokens_per_second": tokens / seconds,
            "data_wait_share": self.data_wait / seconds,
            **({} if mfu is None else {"mfu": mfu}),
        }
