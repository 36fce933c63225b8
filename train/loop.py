"""The loop: steps over epochs, metrics, validation, checkpoints, and where a killed run goes on."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import Tensor

from data.shards import ShardReader
from data.stream import Step
from train import attention, checkpoint, engine, loss, optim
from train.checkpoint import RunState
from train.config import TrainConfig
from train.evaluate import score_reader, summarize
from train.feed import StepFeed
from train.follow import Planner
from train.interval import Interval
from train.model import Drafter
from train.progress import Meter, Progress, device_name, validated
from train.running import Agreement, Termination, Watch
from train.target import Target
from train.tracking import Tracker, costs
from train.unroll import TrainingTimeTest
from train.writer import CheckpointWriter


class Trainer:
    """One run. Every process makes one and calls `run`."""

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
    ):
        self.config, self.accelerator, self.target, self.tracker = config, accelerator, target, tracker
        self.train_reader, self.validation_reader = train_reader, validation_reader
        self.folder, self.depths = Path(config.out) / "checkpoints", config.drafter.depths
        self.attend = attention.choose(config.attention)
        self.agreement, self.termination = Agreement(accelerator.num_processes), Termination()
        # active rows in eighths of a pack: the shapes that a step can have are few, and repeat
        self.bucket = max(config.batch.tokens_per_pack // 8, 1) if config.batch.pad_packs else 1
        if accelerator.is_main_process:
            checkpoint.remove_partial(self.folder)

        self.state = RunState.fresh(config, drafter.shape, shards=train_reader.path)
        resumed = self._resumed()
        if accelerator.is_main_process:
            checkpoint.forget_taus(self.folder, beyond=self.state.step)
        if resumed is not None:
            checkpoint.load_weights(drafter, resumed["drafter"], where=self.folder)
        module = TrainingTimeTest(
            drafter.to(device=accelerator.device, dtype=torch.float64 if config.precision == "fp64" else None),
            target,
            depths=self.depths,
            gamma=config.loss.gamma,
            attention=self.attend,
            head=loss.choose(config.attention),
            dtype=target.head.dtype,
            float8=config.precision == "fp8",
        )
        drafter.activation_checkpointing = config.activation_checkpointing
        self.engine = engine.choose(config.engine, module, config.optim, accelerator)
        if resumed is not None and self.state.step > 0:  # before that there are no moments, and the average is no average
            self.engine.restore(resumed["average"], resumed["optimizer"])
        if config.compile:
            drafter.compile(matrices=config.precision == "fp8")
        self.planner = Planner(config, train_reader, arrived=self.state.arrived, agree=self._first_says)
        self.total_steps = self.planner.total_steps()
        self.writer = CheckpointWriter(self.folder, keep=config.keep_checkpoints, writes=accelerator.is_main_process)
        self.interval = Interval.restored(
            self.state.interval,
            self.depths,
            rank=accelerator.process_index,
            num_ranks=accelerator.num_processes,
            device=accelerator.device,
        )
        self.saved = time.monotonic()  # when the last checkpoint was made
        self.meter = Meter(
            drafter.shape,
            depths=self.depths,
            device_name=device_name(accelerator.device),
            devices=accelerator.num_processes,
            peak_tflops=config.tracker.peak_tflops,
        )

    def run(self) -> dict:
        """Train to the end and return the last validation's figures."""
        config, state, validation = self.config, self.state, None
        self.tracker.begin(state.step)
        self.started = time.monotonic() - state.seconds
        quiet = not self.accelerator.is_main_process
        with (
            self.termination,
            Watch(self.agreement, busy=lambda: self.writer.busy) as self.watch,
            self.writer,
            Progress(total=self.total_steps, initial=state.step, disable=quiet) as bar,
        ):
            for epoch in range(state.epoch, config.epochs):
                resumed_at = state.step_in_epoch
                self._train_epoch(epoch, bar)
                if state.step_in_epoch > resumed_at:
                    self._save()  # written while the validation runs
                last = epoch + 1 == config.epochs
                if last or (config.evaluate_every_epochs and (epoch + 1) % config.evaluate_every_epochs == 0):
                    validation = self._validate(bar)
                state.epoch, state.step_in_epoch = epoch + 1, 0
            self.writer.finish()
            self.watch.part()
        return validation

    def summary(self) -> dict:
        """What the whole run took, and the best it reached."""
        state = self.state
        return {
            "steps": state.step,
            "supervised_tokens": state.supervised_tokens,
            "train_seconds": round(state.seconds, 1),
            "best_tau": checkpoint.best(self.folder)[1],
            **costs(
                seconds=state.seconds,
                devices=self.accelerator.num_processes,
                tokens=self.config.epochs * int(self.train_reader.lengths.sum()),
                dollars_per_gpu_hour=self.config.tracker.dollars_per_gpu_hour,
            ),
        }

    def close(self) -> None:
        """Let the engine go before the process group does."""
        self.engine.close()

    def _train_epoch(self, epoch: int, bar: Progress) -> None:
        """The steps of an epoch that are left to do."""
        done_before, skip = 0, self.state.step_in_epoch
        for steps in self.planner.parts(epoch):
            self._count_steps(bar)
            left = steps[max(skip - done_before, 0) :]
            done_before += len(steps)
            if left:
                self._train(left, bar)
        self._count_steps(bar)

    def _count_steps(self, bar: Progress) -> None:
        """Anew with what has come; without follow nothing does, and packing every epoch to count them takes its time."""
        if self.config.follow:
            bar.total = self.total_steps = self.planner.total_steps()

    def _train(self, steps: list[Step], bar: Progress) -> None:
        config, state = self.config, self.state
        feed = StepFeed(
            self.train_reader,
            steps,
            config=config.batch,
            depths=self.depths,
            bucket=self.bucket,
            rank=self.accelerator.process_index,
            num_ranks=self.accelerator.num_processes,
            device=self.accelerator.device,
        )
        try:
            for i, (num_batches, counts) in enumerate(feed):
                stop, writing = self._step(feed, num_batches, counts)
                state.step, state.step_in_epoch = state.step + 1, state.step_in_epoch + 1
                state.seconds = time.monotonic() - self.started
                bar.update()
                if state.step % config.log_every_steps == 0 or state.step == self.total_steps:
                    self._log(bar)
                every = config.checkpoint_every_steps
                due = every and state.step % every == 0 and (config.follow or i + 1 < len(steps))
                if stop or (due and not writing):  # one that is not on the disk yet must not hold up the training
                    self._save()
                if stop:
                    self._leave(bar)
        finally:
            feed.close()

    def _step(self, feed: StepFeed, num_batches: int, counts: Tensor) -> tuple[bool, bool]:
        """One optimizer step over this process's micro-batches. The loss is divided once, over all of them.

        Returns whether any process was told to end, and whether a checkpoint is still being written.
        """
        flags = torch.tensor([self.termination.asked, self.writer.busy])
        agreed = self.agreement.sum(torch.cat([counts, flags]))
        counts = agreed[: self.depths].to(self.accelerator.device, torch.float32, non_blocking=True)  # [K]
        interval, every = self.interval, self.config.measure_every_steps
        measure = self.state.step % every == every - 1 or self.state.step == self.total_steps - 1
        for left in reversed(range(num_batches)):
            micro = feed.next_batch()
            sums = self.engine.accumulate(micro.batch, micro.documents, micro.counted, counts, measure, last=left == 0)
            interval.add(sums, micro)
        lr = optim.learning_rate(self.state.step, total_steps=self.total_steps, config=self.config.optim)
        interval.grad_norm = self.engine.step(lr)
        interval.data_wait, feed.waited = interval.data_wait + feed.waited, 0.0
        stop, writing = agreed[self.depths :].bool().tolist()
        return stop, writing

    def _log(self, bar: Progress) -> None:
        """Write what the interval saw, over all processes, and begin the next one."""
        config, state = self.config, self.state
        seen = self.interval.over_all(self.agreement)
        state.supervised_tokens += seen.num_counted
        figures = {
            "epoch": state.epoch + state.step_in_epoch / max(self.total_steps // config.epochs, 1),
            **seen.figures(gamma=config.loss.gamma, meter=self.meter),
            "lr": optim.learning_rate(state.step - 1, total_steps=self.total_steps, config=config.optim),
            "supervised_tokens": state.supervised_tokens,
            "seconds": state.seconds,
        }
        self.tracker.log(state.step, figures)
        bar.figures(figures)
        self._check_weights()
        self.interval = Interval.begin(self.depths, device=self.accelerator.device)

    def _validate(self, bar: Progress) -> dict:
        """Score the validation shards with the weights that would be served; every process returns the same figures."""
        if self.config.follow:
            self.validation_reader.refresh()
        served = self.engine.served()
        mine = score_reader(
            served,
            self.target,
            self.validation_reader,
            depths=self.depths,
            attend=self.attend,
            tokens_per_pack=self.config.batch.tokens_per_pack,
            rank=self.accelerator.process_index,
            num_ranks=self.accelerator.num_processes,
        )
        figures = summarize([one for scores in self.agreement.gather(mine) for one in scores], depths=self.depths)
        new = self.state.step not in checkpoint.taus(self.folder)
        self.agreement.wait()  # all have looked before one writes
        if self.accelerator.is_main_process and new:
            self.tracker.log(
                self.state.step, {"tau": figures["tau"], "validation": figures, "seconds": self.state.seconds}
            )
            checkpoint.record_tau(self.folder, self.state.step, figures["tau"])  # last: what it has is not logged again
        bar.figures({"tau": figures["tau"]})
        self.accelerator.print(f"\nepoch {self.state.epoch + 1}: {validated(figures, depths=self.depths)}")
        return figures

    def _save(self) -> None:
        """Hand a checkpoint to the writer; what the step waited for it is logged."""
        self._check_weights()
        stall = self.writer.finish()  # before the others are met: under ZeRO their GPUs would wait for this disk
        state = replace(self.state, interval=self.agreement.gather(self.interval.stored()))
        stall += self.writer.save(self.engine.stored(), state)
        now = time.monotonic()
        share, self.saved = stall / (now - self.saved), now
        self.tracker.log(
            self.state.step,
            {
                "checkpoint_stall_seconds": stall,
                "checkpoint_stall_share": share,  # of the time since the last one
                "checkpoint_write_seconds": self.writer.write_seconds,  # of the last one, beside the training
            },
        )

    def _check_weights(self) -> None:
        """Raises ValueError where they are lost, on every process: one gradient that is not finite makes all others so."""
        if not math.isfinite(self.interval.grad_norm):
            raise ValueError(
                f"the gradients of step {self.state.step} or of one shortly before are not finite, and no checkpoint has "
                f"been made since: look for such numbers with launch/verify.py shards={self.config.shards}, or try a "
                "smaller optim.lr in another out="
            )

    def _leave(self, bar: Progress) -> None:
        self.writer.finish()
        self.watch.part()
        bar.write(f"told to end: step {self.state.step} is saved, the same command goes on from there")
        self.close()
        self.accelerator.state.destroy_process_group()
        raise SystemExit(self.termination.status)

    def _resumed(self) -> dict[str, dict[str, Tensor]] | None:
        """Take the state of the newest complete checkpoint of this very run, and return its tensors; None without one."""
        newest = checkpoint.latest(self.folder)
        seen = self.agreement.gather(newest and newest.name)
        if len(set(seen)) > 1:
            raise ValueError(
                f"the processes see different checkpoints in {self.folder} as the newest one ({seen}): copy the first "
                "one's folder to every machine, or, where they share it, start again: its file system takes a moment"
            )
        if newest is None:
            return None
        found = checkpoint.read_state(newest)
        self.state.check_continues(newest, found)
        needed = {"drafter": True, "average": self.config.optim.ema is not None, "optimizer": found.step > 0}
        tensors = checkpoint.read_tensors(newest, needed=[name for name, is_needed in needed.items() if is_needed])
        self.state = found
        self.accelerator.print(f"resuming from {newest}")
        return tensors

    def _first_says(self, number: int) -> int:
        """The first process's number, on every process; a run that was told to end ends here too."""
        first = self.accelerator.is_main_process
        said, stop = self.agreement.sum(torch.tensor([number if first else 0, int(self.termination.asked)])).tolist()
        if stop:
            self._save()
            self._leave(Progress(total=0, initial=0, disable=not first))
        return said
