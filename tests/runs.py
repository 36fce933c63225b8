"""Many small training runs, one after the other in one group of processes: one start for all of them.

    accelerate launch ... tests/runs.py '[["out=A", "engine=zero2", ...], ...]'

Each is what train/main.py does up to its export: the composed config, a Trainer, and `run`.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from hydra import compose, initialize_config_dir

from data.config import typed
from data.embedded import ensure_target
from data.shards import ShardReader
from train.config import TrainConfig
from train.engine import accelerator_of
from train.loop import Trainer
from train.main import DTYPES
from train.start import first_drafter
from train.target import Target
from train.tracking import Tracker

CONF = Path(__file__).resolve().parent.parent / "conf"


def run(overrides: list[str]) -> None:
    with initialize_config_dir(str(CONF), version_base=None):
        config = typed(TrainConfig, compose("train", overrides=overrides))
    accelerator = accelerator_of(config.engine)
    target = Target.load(ensure_target(config.target), device=accelerator.device, dtype=DTYPES[config.precision])
    reader, validation = (ShardReader(config.shards, split=split) for split in ("train", "validation"))
    trainer = Trainer(
        config,
        accelerator,
        drafter=first_drafter(config, target),
        target=target,
        train_reader=reader,
        validation_reader=validation,
        tracker=Tracker(config, accelerator, provenance=asdict(reader.provenance)),
    )
    figures = trainer.run()
    if accelerator.is_main_process:
        (Path(config.out) / "validation.json").write_text(json.dumps(figures))
        print(f"done: {config.out}", flush=True)
    trainer.close()
    if trainer.lock is not None:
        trainer.lock.close()


if __name__ == "__main__":
    for overrides in json.loads(sys.argv[1]):
        run(overrides)
