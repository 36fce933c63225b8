"""Many small training runs on several numbers of processes, all forked from this one, which has imported everything once.

    python tests/runs.py '[[2, [["out=A", "engine=zero2", ...], ...]], ...]'     # [processes, runs one after the other]

Each run is what train/main.py does up to its export: the composed config, a Trainer, and `run`. In place of a group there
may be {"copy": [A, B, step]}: B begins as A was at its checkpoint of that step. The processes find one another as under
`accelerate launch`, by the environment.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import sys
import traceback
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # more processes than a machine may have GPUs, and forked

import deepspeed  # noqa: F401
from hydra import compose, initialize_config_dir

from data.config import typed
from data.embedded import ensure_target
from data.shards import ShardReader
from train.config import TrainConfig
from train.engine import accelerator_of
from train.loop import Trainer
from train.main import DTYPES
from train.model import Drafter
from train.shape import DrafterShape
from train.start import first_drafter
from train.target import Target
from train.tracking import Tracker

CONF = Path(__file__).resolve().parent.parent / "conf"
# With compile=true: everything but the C++, which takes a minute
compile_drafter = Drafter.compile
Drafter.compile = lambda drafter, **_: compile_drafter(drafter, backend="aot_eager", matrices=True)


def run(overrides: list[str]) -> None:
    with initialize_config_dir(str(CONF), version_base=None):
        config = typed(TrainConfig, compose("train", overrides=overrides))
    accelerator = accelerator_of(config.engine)
    path = ensure_target(config.target)
    target = Target.load(path, device=accelerator.device, dtype=DTYPES[config.precision])
    shape = DrafterShape.resolve(config.drafter, target.config, num_boundaries=len(config.target.boundaries))
    reader, validation = (ShardReader(config.shards, split=split) for split in ("train", "validation"))
    trainer = Trainer(
        config,
        accelerator,
        drafter=first_drafter(config, shape, target=target, target_path=path),
        target=target,
        train_reader=reader,
        validation_reader=validation,
        tracker=Tracker(config, accelerator, provenance=asdict(reader.provenance)),
    )
    figures = trainer.run()
    if accelerator.is_main_process:
        (Path(config.out) / "validation.json").write_text(json.dumps(figures))
    trainer.close()
    accelerator.wait_for_everyone()


def copy(source: Path, out: Path, step: int) -> None:
    """`out` begins as `source` was at its checkpoint of `step`."""
    name = f"step-{step:06d}"
    shutil.copytree(source / "checkpoints" / name, out / "checkpoints" / name)
    lines = (source / "metrics.jsonl").read_text().splitlines()
    kept = [line for line in lines if json.loads(line)["step"] <= step]
    (out / "metrics.jsonl").write_text("".join(line + "\n" for line in kept))


def process(rank: int, processes: int, port: int, cases: list) -> None:
    """One process of a group."""
    if processes > 1:
        os.environ |= {
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        }  # fmt: skip
    for case in cases:
        run(case)


def group(processes: int, cases: list) -> bool:
    """Forks a group and waits for it; whether all went well."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = []
    for rank in range(processes):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                process(rank, processes, port, cases)
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                os._exit(status)
        children.append(child)
    well = True
    while children:
        child, status = os.wait()
        children.remove(child)
        if status and well:
            well = False
            for other in children:
                os.kill(other, signal.SIGKILL)
    return well


if __name__ == "__main__":
    for entry in json.loads(sys.argv[1]):
        if isinstance(entry, dict):
            source, out, step = entry["copy"]
            copy(Path(source), Path(out), step)
        elif not group(*entry):
            sys.exit(1)
