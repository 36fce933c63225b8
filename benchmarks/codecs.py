"""What a codec costs a drafter: the same dataset in each, the same seed and steps, tau beside bf16's.

    python benchmarks/codecs.py --shards BF16 --evaluation BF16 --out DIR [--codecs fp8+bf16 fp8+topk64] [--seeds 0 1 2]
        [--at-once 3] [--json FILE] [--options experiment=smollm2_11k optim.ema=0.99 ...]

BF16: datasets in bf16 or fp32, to train on and to evaluate on (its validation split; a dataset of train records only
is evaluated with --split train). Per codec: bytes per token, relative error of the states, total variation of the
teacher, and per seed the exact greedy tau of the drafter on --evaluation, which stays as it is. The same command
continues: what is trained or evaluated is not done again. --options are train/main.py's.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import argparse
import json
import statistics
import subprocess
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

import torch

from data.codecs import Codec, TeacherHead, capped
from data.manifest import Manifest
from data.schema import Record, stored
from data.shards import ShardReader
from extract.capture import teacher_head
from launch.recode import recode, with_top_k
from train.loss import Teacher

ROOT = Path(__file__).resolve().parent.parent
CUDA = torch.cuda.is_available()
SAMPLE = 20  # records that errors are measured on


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2_135m", help="of conf/target/")
    parser.add_argument("--target-path", type=Path, default=ROOT / "outputs/models/smollm2_135m")
    parser.add_argument("--shards", type=Path, required=True)
    parser.add_argument("--evaluation", type=Path, required=True)
    parser.add_argument("--split", default="validation", help="of --evaluation")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--codecs", nargs="*", default=["fp8+bf16", "fp8", "fp8+topk64"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--at-once", type=int, default=1, help="trainings at a time, on one GPU")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--options", nargs="*", default=[], help="of train/main.py")
    options = parser.parse_args()

    head = teacher_head(options.target_path, device="auto")
    before = Manifest.load(options.shards).provenance
    folders, result = {before.codec: options.shards}, {}
    for name in options.codecs:
        codec = Codec.parse(name)
        folders[codec.name] = options.out / codec.name
        recode(options.shards, folders[codec.name], codec=codec, head=head, shard_bytes=1_000_000_000)
    for name, folder in folders.items():
        result[name] = sizes(Codec.parse(name), Manifest.load(folder)) | errors(options.shards, Codec.parse(name), head)
        print(
            f"{name:>12}  " + "  ".join(f"{figure} {value:.4g}" for figure, value in result[name].items()), flush=True
        )

    runs = [(seed, name) for seed in options.seeds for name in folders]
    with ThreadPoolExecutor(options.at_once) as threads:
        taus = list(threads.map(lambda run: tau(folders[run[1]], run[1], run[0], options), runs))
    for name in folders:
        mine = {seed: found for (seed, codec), found in zip(runs, taus) if codec == name}
        result[name] |= {"tau": mine, "mean_tau": statistics.mean(mine.values())}
    for name in folders:
        result[name]["of_" + before.codec] = result[name]["mean_tau"] / result[before.codec]["mean_tau"]
        seeds = "  ".join(f"{seed}: {found:.4f}" for seed, found in result[name]["tau"].items())
        print(
            f"{name:>12}  tau {seeds}  mean {result[name]['mean_tau']:.4f}, {100 * result[name]['of_' + before.codec]:.2f} %"
        )
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


def sizes(codec: Codec, manifest: Manifest) -> dict[str, float]:
    """Bytes of a token on disk in this dataset, all in all; of its states alone, and of Kimi-K2.5's."""
    shape = dict(num_boundaries=len(manifest.provenance.boundaries), hidden_size=manifest.provenance.hidden_size)
    tokens = sum(shard.tokens for shard in manifest.shards)
    return {
        "bytes_per_token": sum(shard.bytes for shard in manifest.shards) / tokens,
        "state_bytes": codec.bytes_per_token(**shape),
        "kimi_state_bytes": codec.bytes_per_token(num_boundaries=3, hidden_size=7168),
    }


def errors(source: Path, codec: Codec, head: TeacherHead) -> dict[str, float]:
    """Norm of the error over norm of the row, and total variation of the teacher over the vocabulary; means of rows."""
    found: dict[str, list[torch.Tensor]] = {"aux_error": [], "last_error": [], "teacher_variation": []}
    everything = torch.arange(head.head.shape[0])
    for record in islice(ShardReader(source, split="train"), SAMPLE):
        kept = stored(with_top_k(record, codec, head), codec).decoded()
        found["aux_error"].append(relative(kept.aux, record.aux).flatten())
        if kept.last is not None:
            found["last_error"].append(relative(kept.last, record.last))
        found["teacher_variation"].append(
            0.5 * (teacher(kept, head, everything) - teacher(record, head, everything)).abs().sum(-1)
        )
    return {name: float(torch.cat(values).mean()) for name, values in found.items() if values}


def relative(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    expected = expected.double()
    return (found.double() - expected).norm(dim=-1) / expected.norm(dim=-1)


def teacher(record: Record, head: TeacherHead, everything: torch.Tensor) -> torch.Tensor:
    """[T, vocab] probabilities that a drafter would learn from."""
    if record.last is not None:
        return capped(record.last.float() @ head.head.cpu().float().T, head.cap).softmax(-1)
    made = Teacher.from_top_k(
        record.top_ids, record.top_log_probs, target_ids=everything, vocab_size=len(everything), dtype=torch.float32
    )
    return made.logits.softmax(-1)


def tau(shards: Path, codec: str, seed: int, options: argparse.Namespace) -> float:
    """Of a drafter trained on `shards` with this seed, on the evaluation set."""
    run = options.out / f"{codec}-seed{seed}"
    file = ROOT / f"launch/accelerate/{'gpu' if CUDA else 'cpu'}.yaml"
    accelerate = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(file)]
    start(
        [*accelerate, "train/main.py", f"target={options.target}", f"shards={shards}", f"out={run}", f"seed={seed}",
         "tracker=none", *options.options], run,
    )  # fmt: skip
    evaluation = options.out / f"{codec}-seed{seed}-evaluation"
    start(
        [sys.executable, "train/evaluate.py", f"target={options.target}", f"drafter={run / 'export'}",
         f"shards={options.evaluation}", f"split={options.split}", f"out={evaluation}"], evaluation,
    )  # fmt: skip
    return json.loads((evaluation / "summary.json").read_text())["tau"]


def start(command: list[str], out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    with (out / "output.log").open("a") as log:
        done = subprocess.run(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
    if done.returncode:
        raise SystemExit(
            f"{' '.join(command)} failed, see {out / 'output.log'}:\n{(out / 'output.log').read_text()[-2000:]}"
        )


if __name__ == "__main__":
    main()
