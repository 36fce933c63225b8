"""The loop: steps over epochs, metrics, validation, checkpoints, and where a killed run goes on."""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor
from torch.utils.data import DataLoader
from tqdm import tqdm

from data.batch import Batch
from data.shards import ShardReader
from data.stream import PackDataset, plan_epoch, rank_packs
from train import attention, checkpoint, loss, optim
from train.checkpoint import RunState
from train.config import TrainConfig
from train.evaluate import score_reader, summarize
from train.metrics import DepthSums
from train.model import Drafter
from train.target import Target
from train.tracking import Tracker
from train.unroll import TrainingTimeTest, counted_rows


@dataclass
class Interval:
    """What happened since the last line of the log; device sums stay on the device until it is written."""

    sums: DepthSums
    grad_norm: Tensor
    started: float
    tokens: int = 0
    data_wait: float = 0.0  # seconds
    steps: int = 0


class Trainer:
    """One run. Every rank makes one and calls `run`."""

    def __init__(
        self,
        config: TrainConfig,
        accelerator: Accelerator,
        *,
        drafter: Drafter,
        target: Target,
        train_reader: ShardReader,
        validation_reader: ShardReader,
        tracker: Tracker,
        state: RunState,
    ):
        self.config, self.accelerator, self.target, self.tracker = config, accelerator, target, tracker
        self.train_reader, self.validation_reader = train_reader, validation_reader
        self.folder = Path(config.out) / "checkpoints"
        self.depths = config.drafter.depths
        self.attend = attention.choose(config.attention)
        # active rows in eighths of a pack: the shapes that a step can have are few, and repeat
        self.bucket = max(config.batch.tokens_per_pack // 8, 1) if config.batch.pad_packs else 1
        self.drafter = drafter.to(accelerator.device)
        self.average = optim.averaged(self.drafter, config.optim)
        self.optimizers = optim.build(self.drafter, config.optim)
        self.state = self._resume(state)
        if config.compile:
            self.drafter.compile()
        step_module = TrainingTimeTest(
            self.drafter,
            target,
            depths=self.depths,
            gamma=config.loss.gamma,
            attention=self.attend,
            head=loss.choose(config.attention),
            dtype=target.head.dtype,
        )
        self.model = accelerator.prepare(step_module)
        self.total_steps = config.epochs * len(self._plan(0))

    @property
    def served(self) -> torch.nn.Module:
        return optim.served(self.drafter, self.average)

    def run(self) -> dict:
        """Train to the end and return the last validation's figures."""
        config, state = self.config, self.state
        started = time.monotonic() - state.seconds
        validation = None
        with tqdm(
            total=self.total_steps,
            initial=state.step,
            desc="train",
            unit="step",
            disable=not self.accelerator.is_main_process,
        ) as bar:
            for epoch in range(state.epoch, config.epochs):
                steps = self._plan(epoch)
                interval = self._interval()
                for batches, waited in self._batches(steps, skip=state.step_in_epoch):
                    self._step(batches, interval, waited)
                    state.step, state.step_in_epoch = state.step + 1, state.step_in_epoch + 1
                    state.seconds = time.monotonic() - started
                    bar.update()
                    if state.step % config.log_every_steps == 0 or state.step == self.total_steps:
                        interval = self._log(interval, bar)
                    every = config.checkpoint_every_steps
                    if every and state.step % every == 0 and state.step_in_epoch < len(steps):
                        self._save()
                state.epoch, state.step_in_epoch = epoch + 1, 0
                last = state.epoch == config.epochs
                if last or (config.evaluate_every_epochs and state.epoch % config.evaluate_every_epochs == 0):
                    validation = self._validate(bar)
                self._save()
        return validation if validation is not None else self._validate(None)

    def _plan(self, epoch: int) -> list:
        batch = self.config.batch
        return plan_epoch(
            self.train_reader.lengths,
            seed=self.config.seed,
            epoch=epoch,
            tokens_per_pack=batch.tokens_per_pack,
            conversations_per_step=batch.conversations_per_step,
            packs_per_step=batch.packs_per_step,
        )

    def _batches(self, steps: list, *, skip: int):
        """Yield this rank's micro-batches of every step after the first `skip`, and the seconds waited for them."""
        rank, ranks = self.accelerator.process_index, self.accelerator.num_processes
        mine = [rank_packs(step, rank=rank, world_size=ranks) for step in steps[skip:]]
        pad_to = self.config.batch.tokens_per_pack if self.config.batch.pad_packs else None
        dataset = PackDataset(self.train_reader, [pack for step in mine for pack in step], pad_to=pad_to)
        workers = self.config.batch.num_workers
        loader = iter(
            DataLoader(
                dataset,
                batch_size=None,
                num_workers=workers,
                prefetch_factor=4 if workers else None,
                pin_memory=self.accelerator.device.type == "cuda",
            )
        )
        for step in mine:
            asked = time.monotonic()
            batches = list(islice(loader, len(step)))
            yield batches, time.monotonic() - asked

    def _step(self, batches: list[Batch], interval: Interval, waited: float) -> None:
        """One optimizer step over this rank's micro-batches. The loss is divided once, over all ranks."""
        device, ranks = self.accelerator.device, self.accelerator.num_processes
        counted = [counted_rows(batch, depths=self.depths) for batch in batches]  # on the CPU, [K, T] each
        counts = torch.stack([rows.sum(1) for rows in counted]).sum(0)
        counts = self.accelerator.reduce(counts.to(device, torch.float32), "sum")  # [K]
        lr = optim.learning_rate(self.state.step, total_steps=self.total_steps, config=self.config.optim)
        optim.set_learning_rate(self.optimizers, lr)
        for i, (batch, rows) in enumerate(zip(batches, counted, strict=True)):
            documents = attention.Documents.of(batch, counted=rows[0], bucket=self.bucket)
            quiet = i + 1 < len(batches) and ranks > 1
            with self.accelerator.no_sync(self.model) if quiet else nullcontext():
                summand, sums = self.model(batch.to(device), documents.to(device), rows.to(device), counts)
                self.accelerator.backward(summand * ranks)  # DDP averages over ranks: the sum is what is wanted
            interval.sums += sums
            interval.tokens += int(batch.cu_seqlens[len(batch.ids)])
        interval.grad_norm = self.accelerator.clip_grad_norm_(
            self.drafter.parameters(), self.config.optim.max_grad_norm
        )
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if self.average is not None:
            self.average.update_parameters(self.drafter)
        interval.data_wait += waited
        interval.steps += 1

    def _interval(self) -> Interval:
        device = self.accelerator.device
        return Interval(DepthSums.zeros(self.depths, device=device), torch.zeros((), device=device), time.monotonic())

    def _log(self, interval: Interval, bar: tqdm) -> Interval:
        """Write what the interval saw, over all ranks, and begin the next one."""
        device = self.accelerator.device
        sums = DepthSums(self.accelerator.reduce(interval.sums.values, "sum"))
        tokens = self.accelerator.reduce(torch.tensor(float(interval.tokens), device=device), "sum")
        means = sums.means()
        supervised = int(sums.values[0, 0])
        self.state.supervised_tokens += supervised
        seconds = time.monotonic() - interval.started
        total = sum(self.config.loss.gamma**k * x for k, x in enumerate(means["loss"]) if x == x)
        figures = {
            "epoch": self.state.epoch + self.state.step_in_epoch / max(self.total_steps // self.config.epochs, 1),
            "loss": total,
            "loss_by_depth": means["loss"],
            "acc": means["acc"],
            "alpha": means["alpha"],
            "lr": self.optimizers[0].param_groups[0]["lr"],
            "grad_norm": float(interval.grad_norm),
            "tokens_per_second": float(tokens) / seconds,
            "supervised_tokens": self.state.supervised_tokens,
            "data_wait_share": interval.data_wait / seconds,
        }
        self.tracker.log(self.state.step, figures)
        bar.set_postfix(loss=f"{total:.3f}", acc=f"{means['acc'][0]:.3f}", tok_s=f"{figures['tokens_per_second']:.0f}")
        return self._interval()

    def _validate(self, bar: tqdm | None) -> dict:
        """Score the validation shards with the weights that would be served; every rank returns the same figures."""
        mine = score_reader(
            self.served,
            self.target,
            self.validation_reader,
            depths=self.depths,
            attend=self.attend,
            tokens_per_pack=self.config.batch.tokens_per_pack,
            rank=self.accelerator.process_index,
            num_ranks=self.accelerator.num_processes,
        )
        figures = summarize(gather_object(mine), depths=self.depths)
        if figures["tau"] > self.state.best_tau:
            self.state.best_tau, self.state.best_step = figures["tau"], self.state.step
        self.tracker.log(self.state.step, {"tau": figures["tau"], "validation": figures})
        if bar is not None:
            bar.write(f"epoch {self.state.epoch}: validation tau({self.depths}) {figures['tau']:.3f}")
        return figures

    def _save(self) -> None:
        if self.accelerator.is_main_process:
            checkpoint.save(
                self.folder,
                drafter=self.drafter,
                average=self.average,
                optimizers=self.optimizers,
                state=self.state,
            )
            checkpoint.prune(self.folder, keep=self.config.keep_checkpoints, best_step=self.state.best_step)
        self.accelerator.wait_for_everyone()

    def _resume(self, fresh: RunState) -> RunState:
        """The state to go on from: of the newest complete checkpoint of this very run, or `fresh`."""
        newest = checkpoint.latest(self.folder)
        if newest is None:
            return fresh
        found = checkpoint.read_state(newest)
        changed = [
            f"{key}={found.fingerprint.get(key)} there, {value} here"
            for key, value in fresh.fingerprint.items()
            if found.fingerprint.get(key) != value
        ]
        if changed:
            raise ValueError(
                f"{newest} belongs to a run with other settings ({'; '.join(changed[:3])}): choose another out=, "
                "or remove the folder"
            )
        state = checkpoint.load(newest, drafter=self.drafter, average=self.average, optimizers=self.optimizers)
        self.tracker.resume(state.step)
        self.accelerator.print(f"resuming from {newest}")
        return state
