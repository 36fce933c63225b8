"""Which rank reads what: the plan of an epoch is a pure function, so a position is (epoch, step)."""

from __future__ import annotations

from typing import Sequence

import numpy as np
from torch.utils.data import Dataset

from data.batch import Batch
from data.packing import Pack, Piece, collate, pack, padding_batch
from data.shards import ShardReader

Step = list[Pack]


def plan_epoch(
    lengths: Sequence[int] | np.ndarray,
    *,
    seed: int,
    epoch: int,
    tokens_per_pack: int,
    conversations_per_step: int | None,
    packs_per_step: int | None,
) -> list[Step]:
    """The steps of an epoch, each a list of packs, every record exactly once.

    lengths                 [n], tokens per record
    tokens_per_pack         most tokens of a pack; longer records are cut
    conversations_per_step  the shuffled order is cut into steps, then each is packed: the same
                            conversations a step whatever the hardware
    packs_per_step          the epoch is packed as a whole (fuller packs), then the packs are shuffled

    Exactly one of the last two is given. Depends on nothing else: not on the number of ranks, so any
    number can resume. The last step may be smaller; nothing is dropped.
    Raises ValueError if both or neither are given, or one is below 1.
    """
    per_step = packs_per_step if conversations_per_step is None else conversations_per_step
    if (conversations_per_step is None) == (packs_per_step is None) or per_step < 1:
        raise ValueError(
            f"batch.conversations_per_step={conversations_per_step} and batch.packs_per_step={packs_per_step}: give "
            f"exactly one of them, at least 1"
        )
    lengths = np.asarray(lengths, dtype=np.int64)
    generator = np.random.default_rng([seed, epoch])
    order = generator.permutation(len(lengths))  # [n]
    if conversations_per_step is not None:
        chunks = [order[i : i + per_step] for i in range(0, len(order), per_step)]
        return [_pack_records(lengths, chunk, budget=tokens_per_pack) for chunk in chunks]
    packs = _pack_records(lengths, order, budget=tokens_per_pack)
    packs = [packs[i] for i in generator.permutation(len(packs))]
    return [packs[i : i + per_step] for i in range(0, len(packs), per_step)]


def rank_packs(step: Step, *, rank: int, world_size: int) -> list[Pack]:
    """The packs of one rank; as many for every rank, an empty pack ([]) where there are too few."""
    rounds = -(-len(step) // world_size)
    packs = step[rank::world_size]
    return packs + [[] for _ in range(rounds - len(packs))]


class PackDataset(Dataset):
    """Packs as Batches, for torch's DataLoader(batch_size=None).

    pad_to  tokens of every batch; None: as many as the pack has. An empty pack becomes padding only.
    """

    def __init__(self, reader: ShardReader, packs: list[Pack], *, pad_to: int | None) -> None:
        self.reader, self.packs, self.pad_to = reader, packs, pad_to

    def __len__(self) -> int:
        return len(self.packs)

    def __getitem__(self, i: int) -> Batch:
        pieces = self.packs[i]
        if pieces:
            return collate([self.reader.read(piece.index) for piece in pieces], pieces, pad_to=self.pad_to)
        return padding_batch(self.pad_to or 1, self.reader.provenance)


def _pack_records(lengths: np.ndarray, records: np.ndarray, *, budget: int) -> list[Pack]:
    packs = pack(lengths[records], budget=budget)
    return [[Piece(int(records[piece.index]), piece.start, piece.stop) for piece in pieces] for pieces in packs]
