"""Stage 3: shards -> a trained drafter, exported for the server.

    accelerate launch train/main.py target=smollm2_135m shards=SHARDS out=RUN [experiment=NAME]
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dataclasses import asdict

import torch
from accelerate import Accelerator

from data.boundaries import text_config
from data.config import finished, fingerprint, stage
from data.embedded import ensure_target
from data.shards import ShardReader
from data.signals import told_to_end
from data.storage import local_folder
from train.briefing import briefing
from train.config import TrainConfig
from train.engine import accelerator_of
from train.export import check_replaceable, export, layer_ids
from train.follow import wait_for_shards
from train.loop import Trainer
from train.progress import device_name, validated
from train.running import memory_or_what_to_do, only_run
from train.shape import DrafterShape
from train.start import first_drafter
from train.target import Target, check_shards
from train.tracking import Tracker

DTYPES = {"bf16": torch.bfloat16, "fp8": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}


@stage("train")
@told_to_end("checkpoints that it saved are kept, the same command continues")
def main(config: TrainConfig) -> dict:
    out, shards = Path(config.out), (wait_for_shards if config.follow else local_folder)(config.shards)
    inputs = fingerprint(asdict(config), "growing" if config.follow else shards / "manifest.json")
    if done := finished(out, inputs):
        return {**done, "line": f"nothing to do, {out} is trained: {done['line']}"}

    tracking = None if config.tracker.name == "none" else config.tracker.name
    accelerator = accelerator_of(config.engine, log_with=tracking, project_dir=config.out)
    with accelerator.main_process_first():
        target_path = ensure_target(config.target)

    train_reader, validation_reader = (ShardReader(shards, split=split) for split in ("train", "validation"))
    if not len(train_reader):
        raise ValueError(f"{shards} has no records of the train split: extract more, or choose other shards=")
    check_shards(train_reader, target_path, name=config.target.name, boundaries=config.target.boundaries)
    shape = DrafterShape.resolve(config.drafter, text_config(target_path), num_boundaries=len(config.target.boundaries))
    layer_ids(
        config.target.boundaries, target_path, engine=config.export_engine, engine_version=config.export_engine_version
    )  # the export comes last: what it cannot be told is said now, and where it cannot be
    check_replaceable(out / "export", engine=config.export_engine)
    accelerator.print(
        briefing(
            config,
            shape,
            train_reader,
            held_out=len(validation_reader),
            device=accelerator.device,
            num_processes=accelerator.num_processes,
        )
    )
    if config.plan:
        accelerator.end_training()
        sys.exit()  # and no summary: nothing was done

    if config.attention == "fused" and accelerator.device.type != "cuda":
        raise ValueError(f"attention=fused runs on CUDA, this is {device_name(accelerator.device)}: set attention=dense")
    with only_run(out, accelerator), memory_or_what_to_do(config, accelerator.device):
        summary = _trained(
            config,
            accelerator,
            shape=shape,
            target_path=target_path,
            train_reader=train_reader,
            validation_reader=validation_reader,
        )
    line = f"{validated(summary, depths=config.drafter.depths)} after {summary['steps']} steps"
    line += f", {round(summary['train_seconds'])} s; drafter in {out / 'export'}"
    return {"fingerprint": inputs, **summary, "line": line}


def _trained(
    config: TrainConfig,
    accelerator: Accelerator,
    *,
    shape: DrafterShape,
    target_path: Path,
    train_reader: ShardReader,
    validation_reader: ShardReader,
) -> dict:
    """The whole run, or what is left of it: its figures, and the drafter in <out>/export."""
    target = Target.load(target_path, device=accelerator.device, dtype=DTYPES[config.precision])
    drafter = first_drafter(config, shape, target=target, target_path=target_path)
    tracker = Tracker(config, accelerator, provenance=asdict(train_reader.provenance))
    trainer = Trainer(
        config,
        accelerator,
        drafter=drafter,
        target=target,
        train_reader=train_reader,
        validation_reader=validation_reader,
        tracker=tracker,
    )
    validation = trainer.run()

    exported = Path(config.out) / "export"
    weights = trainer.engine.served().state_dict()  # by every process: zero3 puts them together
    if accelerator.is_main_process:
        export(
            weights,
            shape=shape,
            boundaries=config.target.boundaries,
            depths=config.drafter.depths,
            target_name=config.target.name,
            target_path=target_path,
            out=exported,
            engine=config.export_engine,
            engine_version=config.export_engine_version,
        )
    summary = {"boundaries": config.target.boundaries, **trainer.summary(), **validation}
    trainer.close()
    tracker.finish(summary, drafter=exported)
    return summary


if __name__ == "__main__":
    main()
