"""Evaluate: what a drafter will do when it serves, measured without a server.

    python train/evaluate.py target=smollm2_135m drafter=RUN/export shards=SHARDS

tau is exact for greedy answers of the target: an accepted draft equals the token that stands in the
record, so that walking the record is the same as decoding. `greedy_share` says how true that is of the
data: the share of supervised tokens that are the target's own most likely ones.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from data.config import stage
from data.batch import Batch
from data.embedded import ensure_target
from data.packing import pack
from data.shards import ShardReader
from data.storage import local_folder
from data.stream import PackDataset
from train import attention
from train.attention import Documents
from train.config import EvaluateConfig
from train.export import load_drafter
from train.loss import PLAIN
from train.metrics import FIELDS, DepthSums, Walk, per_row, walk
from train.model import Drafter
from train.target import Target, check_shards
from train.unroll import counted_rows, teacher_of, unroll

LENGTH_BUCKETS = (128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)


@dataclass(frozen=True)
class DocumentScore:
    """One document's share of every metric; scores of any selection add up.

    sums    [6, K] as in metrics.DepthSums
    walks   [K] its generations, served on paper with 1 .. K drafts a step
    greedy  supervised tokens that are the target's most likely ones, of `supervised` tokens
    """

    source: str
    length: int
    sums: Tensor
    walks: tuple[Walk, ...]
    greedy: int
    supervised: int


@torch.no_grad()
def score_batch(
    drafter: Drafter, target: Target, batch: Batch, *, depths: int, attend: attention.TTTAttention
) -> list[DocumentScore]:
    """Scores of the documents of a batch on the CPU, in its order; the padding, which has no id, gives none."""
    device = target.head.device
    counted = counted_rows(batch, depths=depths)
    documents = Documents.of(batch, counted=counted[0])
    batch, counted, documents = batch.to(device), counted.to(device), documents.to(device)
    active, ids = documents.active, drafter.target_ids
    dtype = target.head.dtype
    normed = unroll(drafter, target, batch, documents, depths=depths, attention=attend, dtype=dtype)  # [K, R, H]
    teacher, seen = teacher_of(target, batch, documents, target_ids=ids, depths=depths, make=PLAIN.teacher)
    rows = counted[:, active].float()
    found = [PLAIN.loss(normed[k], drafter.lm_head.weight, teacher, seen[k], rows[k]) for k in range(depths)]
    entropy, top1, alpha = (torch.stack([getattr(f, n) for f in found]) for n in ("entropy", "top1", "alpha"))
    hits = ids[top1] == teacher.top1[seen]
    sums = torch.zeros(len(FIELDS), depths, batch.num_tokens, dtype=torch.float64, device=device)
    sums[..., active] = per_row(counted=rows.bool(), entropy=entropy, hits=hits, alpha=alpha)
    ahead = active + 2 + torch.arange(depths, device=device)[:, None]
    right = torch.zeros(depths, batch.num_tokens, dtype=torch.bool, device=device)
    right[:, active] = ids[top1] == batch.tokens[ahead % batch.num_tokens]
    greedy = torch.zeros_like(batch.loss_mask)
    greedy[(active + 1) % batch.num_tokens] = teacher.top1 == batch.tokens[(active + 1) % batch.num_tokens]
    sums, right, mask = sums.cpu(), right.T.cpu().numpy(), batch.loss_mask.cpu()
    greedy = greedy.cpu() & mask & (batch.positions > 0).cpu()
    edges = batch.cu_seqlens.tolist()
    return [
        DocumentScore(
            source=source,
            length=stop - start,
            sums=sums[..., start:stop].sum(-1),
            walks=tuple(walk(right[start:stop, :k], mask[start:stop].numpy()) for k in range(1, depths + 1)),
            greedy=int(greedy[start:stop].sum()),
            supervised=int(mask[start:stop].sum()),
        )
        for source, start, stop in zip(batch.sources, edges, edges[1:], strict=False)
    ]


def score_reader(
    drafter: Drafter,
    target: Target,
    reader: ShardReader,
    *,
    depths: int,
    attend: attention.TTTAttention,
    tokens_per_pack: int,
    rank: int = 0,
    num_ranks: int = 1,
    progress: Callable[[Iterable], Iterable] = iter,
) -> list[DocumentScore]:
    """Scores of this rank's share of `reader`: whole packs, no collective inside, so ranks need not be even."""
    packs = pack(reader.lengths, budget=tokens_per_pack)[rank::num_ranks]
    dataset = PackDataset(reader, packs, pad_to=None)
    was_training = drafter.training
    drafter.eval()
    scores = [
        score
        for i in progress(range(len(dataset)))
        for score in score_batch(drafter, target, dataset[i], depths=depths, attend=attend)
    ]
    drafter.train(was_training)
    return scores


def summarize(scores: list[DocumentScore], *, depths: int) -> dict:
    """Of a selection: tau, tau with 1 .. K drafts, acc, alpha, loss, accept_histogram, greedy_share, documents,
    verification_steps."""
    sums = sum((DepthSums(score.sums) for score in scores), DepthSums.zeros(depths, device="cpu"))
    by_drafts = [sum((score.walks[k] for score in scores), Walk.empty(k + 1)) for k in range(depths)]
    walked = by_drafts[-1]
    supervised = sum(score.supervised for score in scores)
    return {
        "tau": walked.tau,
        "tau_by_drafts": [one.tau for one in by_drafts],
        **sums.means(),
        "accept_histogram": list(walked.histogram),
        "greedy_share": sum(score.greedy for score in scores) / supervised if supervised else float("nan"),
        "documents": len(scores),
        "verification_steps": walked.steps,
    }


def _bucket(length: int) -> str:
    index = int(np.searchsorted(LENGTH_BUCKETS, length))
    return f"<={LENGTH_BUCKETS[index]}" if index < len(LENGTH_BUCKETS) else f">{LENGTH_BUCKETS[-1]}"


def _grouped(scores: list[DocumentScore], key: Callable[[DocumentScore], str], *, depths: int) -> dict[str, dict]:
    groups: dict[str, list[DocumentScore]] = {}
    for score in scores:
        groups.setdefault(key(score), []).append(score)
    return {name: summarize(group, depths=depths) for name, group in sorted(groups.items())}


@stage("evaluate")
def main(config: EvaluateConfig) -> dict:
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("device=cuda: PyTorch finds no GPU here, set device=cpu")
    device = "cuda" if config.device == "auto" and torch.cuda.is_available() else config.device.replace("auto", "cpu")
    dtype = torch.bfloat16 if config.precision == "bf16" else torch.float32
    target_path = ensure_target(config.target)
    drafter, exported = load_drafter(Path(config.drafter))
    reader = ShardReader(local_folder(config.shards), split=config.split)
    if not len(reader):
        raise ValueError(f"{config.shards} has no records of split={config.split}: choose another one, or extract some")
    check_shards(reader, target_path, name=exported["eyas"]["target"], boundaries=exported["eyas"]["boundaries"])
    target = Target.load(target_path, device=device, dtype=dtype)
    depths = config.depths or exported["eyas"]["depths"]
    scores = score_reader(
        drafter.to(device=device, dtype=dtype),
        target,
        reader,
        depths=depths,
        attend=attention.choose("dense"),
        tokens_per_pack=config.tokens_per_pack,
        progress=lambda packs: tqdm(packs, desc="evaluate", unit="pack", delay=2),
    )
    overall = summarize(scores, depths=depths)
    by_source = _grouped(scores, lambda s: s.source, depths=depths)
    for name, group in by_source.items():
        print(f"  {name:>16}  tau {group['tau']:.3f}  acc {' '.join(f'{x:.3f}' for x in group['acc'])}")
    print(f"  {'by drafts a step':>16}  " + "  ".join(f"{k}: {tau:.3f}" for k, tau in enumerate(overall["tau_by_drafts"], 1)))
    return {
        **overall,
        "depths": depths,
        "by_source": by_source,
        "by_length": _grouped(scores, lambda s: _bucket(s.length), depths=depths),
        "line": f"tau({depths}) {overall['tau']:.3f} on {overall['documents']} documents, "
        f"{100 * overall['greedy_share']:.1f} % of their tokens are the target's own first choice",
    }


if __name__ == "__main__":
    main()
