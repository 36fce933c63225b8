"""Stage 3: shards -> a trained drafter, exported for the server.

    accelerate launch train/main.py target=smollm2_135m shards=SHARDS out=RUN [experiment=NAME]
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dataclasses import asdict

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs

from data.config import finished, fingerprint, stage
from data.embedded import ensure_target
from data.shards import ShardReader
from data.vocab import Vocabulary, draft_vocabulary
from train.checkpoint import RunState
from train.config import TrainConfig
from train.export import export
from train.loop import Trainer
from train.model import Drafter, DrafterShape
from train.target import Target, check_shards
from train.tracking import Tracker


@stage("train")
def main(config: TrainConfig) -> dict:
    out, shards = Path(config.out), Path(config.shards)
    inputs = fingerprint(asdict(config), shards / "manifest.json")
    if done := finished(out, inputs):
        return {**done, "line": f"nothing to do, {out} is trained: {done['line']}"}

    accelerator = Accelerator(
        mixed_precision="no",  # the drafter casts its matrices itself, once a step
        log_with=None if config.tracker.name == "none" else config.tracker.name,
        project_dir=config.out,
        # the only buffers are the vocabulary map, which never changes
        kwargs_handlers=[DistributedDataParallelKwargs(broadcast_buffers=False, gradient_as_bucket_view=True)],
    )
    with accelerator.main_process_first():
        target_path = ensure_target(config.target)

    train_reader = ShardReader(shards, split="train")
    validation_reader = ShardReader(shards, split="validation")
    check_shards(train_reader, target_path, name=config.target.name, boundaries=config.target.boundaries)

    dtype = torch.bfloat16 if config.precision == "bf16" else torch.float32
    target = Target.load(target_path, device=accelerator.device, dtype=dtype)
    drafter = fresh_drafter(config, target, shards)
    state = RunState.fresh(
        shape=drafter.shape.as_dict(),
        boundaries=config.target.boundaries,
        depths=config.drafter.depths,
        target=config.target.name,
        fingerprint={
            **{name: asdict(getattr(config, name)) for name in ("drafter", "loss", "optim", "batch")},
            **{name: getattr(config, name) for name in ("seed", "epochs", "precision")},
            "shards": fingerprint(shards / "manifest.json"),
        },
    )
    tracker = Tracker(config, accelerator, provenance=asdict(train_reader.provenance))
    trainer = Trainer(
        config,
        accelerator,
        drafter=drafter,
        target=target,
        train_reader=train_reader,
        validation_reader=validation_reader,
        tracker=tracker,
        state=state,
    )
    accelerator.print(
        f"{len(train_reader)} conversations, {int(train_reader.lengths.sum())} tokens, boundaries "
        f"{config.target.boundaries}; {trainer.total_steps} steps on {accelerator.num_processes} "
        f"{accelerator.device.type} process(es); drafter of "
        f"{sum(p.numel() for p in drafter.parameters()) / 1e6:.1f} M parameters"
    )
    validation = trainer.run()
    if accelerator.is_main_process:
        export(
            trainer.served.state_dict(),
            shape=drafter.shape,
            boundaries=config.target.boundaries,
            depths=config.drafter.depths,
            target_name=config.target.name,
            target_path=target_path,
            out=out / "export",
            engine=config.export_engine,
            engine_version=config.export_engine_version,
        )
    summary = {
        "fingerprint": inputs,
        "steps": trainer.total_steps,
        "boundaries": config.target.boundaries,
        "supervised_tokens": trainer.state.supervised_tokens,
        "train_seconds": round(trainer.state.seconds, 1),
        "best_tau": trainer.state.best_tau,
        **validation,
    }
    tracker.finish(summary)
    line = f"validation tau({config.drafter.depths}) {validation['tau']:.3f} after {trainer.total_steps} steps"
    return {**summary, "line": f"{line}, {round(trainer.state.seconds)} s; drafter in {out / 'export'}"}


def fresh_drafter(config: TrainConfig, target: Target, shards: Path) -> Drafter:
    """A drafter with random weights (or the target's head) and the vocabulary map of these shards."""
    shape = DrafterShape.resolve(config.drafter, target.config, num_boundaries=len(config.target.boundaries))
    vocabulary = Vocabulary.load(shards)
    d2t, t2d = draft_vocabulary(vocabulary.counts, size=shape.draft_vocab_size, special_ids=vocabulary.special_ids)
    drafter = Drafter(shape, d2t=d2t, t2d=t2d)
    drafter.initialize(
        target, std=config.drafter.init_std, head_from_target=config.drafter.init_head_from_target, seed=config.seed
    )
    return drafter


if __name__ == "__main__":
    main()
