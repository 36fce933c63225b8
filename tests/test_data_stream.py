"""The plan of an epoch: every record once, whatever the number of ranks; batches from shards."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from data.shards import ShardReader
from data.stream import PackDataset, plan_epoch, rank_packs
from tests.records import dataset_of, record_of

LENGTHS = np.random.default_rng(0).integers(1, 90, 203)


def plan(*, seed: int = 0, epoch: int = 0, conversations: int | None = 20, packs: int | None = None):
    return plan_epoch(
        LENGTHS, seed=seed, epoch=epoch, tokens_per_pack=128, conversations_per_step=conversations, packs_per_step=packs
    )


def records_of(steps) -> Counter:
    return Counter(piece.index for step in steps for pack in step for piece in pack)


@pytest.mark.parametrize(("conversations", "packs"), [(20, None), (None, 3)])
def test_an_epoch_reads_every_record_once(conversations: int | None, packs: int | None):
    steps = plan(conversations=conversations, packs=packs)
    assert records_of(steps) == Counter(range(203))
    assert all(sum(p.stop - p.start for p in pack) <= 128 for step in steps for pack in step)


def test_a_step_is_so_many_conversations_and_the_last_one_the_rest():
    steps = plan(conversations=20)
    assert [sum(len(pack) for pack in step) for step in steps] == [20] * 10 + [3]


def test_a_step_is_so_many_packs_and_the_last_one_the_rest():
    steps = plan(conversations=None, packs=3)
    assert all(len(step) == 3 for step in steps[:-1]) and 1 <= len(steps[-1]) <= 3


def test_the_order_follows_seed_and_epoch_and_nothing_else():
    assert plan() == plan()
    assert plan() != plan(seed=1) and plan() != plan(epoch=1)


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_ranks_share_a_step_evenly(world_size: int):
    """The same packs whatever the number of ranks; ranks without one get an empty one, so none waits."""
    for step in plan():
        shares = [rank_packs(step, rank=rank, world_size=world_size) for rank in range(world_size)]
        assert len({len(share) for share in shares}) == 1
        packs = [pack for share in shares for pack in share if pack]
        assert sorted(packs) == sorted(step)


@pytest.mark.parametrize(("conversations", "packs"), [(None, None), (1, 1), (0, None), (None, 0)])
def test_exactly_one_size_of_a_step_is_given(conversations: int | None, packs: int | None):
    with pytest.raises(ValueError, match="exactly one of them"):
        plan(conversations=conversations, packs=packs)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_come_from_shards_in_the_order_of_the_plan(tmp_path, num_workers: int):
    records = [record_of(f"{i}", num_tokens=3 + i % 5) for i in range(12)]
    reader = ShardReader(dataset_of(tmp_path, records, shard_bytes=4000), split="train")
    (step,) = plan_epoch(
        reader.lengths, seed=0, epoch=0, tokens_per_pack=16, conversations_per_step=12, packs_per_step=None
    )
    dataset = PackDataset(reader, step, pad_to=16)
    batches = list(DataLoader(dataset, batch_size=None, num_workers=num_workers))
    assert len(batches) == len(step) and all(batch.num_tokens == 16 for batch in batches)
    assert sorted(id for batch in batches for id in batch.ids) == sorted(record.id for record in records)
    for batch, pieces in zip(batches, step):
        first = records[pieces[0].index]
        assert torch.equal(batch.tokens[: first.num_tokens], first.tokens)
        assert torch.equal(batch.aux[: first.num_tokens], first.aux.bfloat16().flatten(1))


@pytest.mark.parametrize("pad_to", [16, None])
def test_an_empty_pack_is_padding_of_the_same_shape(tmp_path, pad_to: int | None):
    reader = ShardReader(dataset_of(tmp_path, [record_of("a")]), split="train")
    batch = PackDataset(reader, [[]], pad_to=pad_to)[0]
    assert batch.num_tokens == (pad_to or 1) and not batch.loss_mask.any()
    assert batch.aux.shape[1:] == (24,) and batch.aux.dtype == torch.bfloat16


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("world_size", [1, 3])
def test_ranks_and_their_workers_together_read_every_token_of_an_epoch_once(
    tmp_path, world_size: int, num_workers: int
):
    """Records longer than a pack are in pieces; together they are the record, token for token."""
    records = [record_of(f"{i}", num_tokens=1 + 3 * i) for i in range(11)]
    reader = ShardReader(dataset_of(tmp_path, records, shard_bytes=4000), split="train")
    steps = plan_epoch(
        reader.lengths, seed=1, epoch=2, tokens_per_pack=16, conversations_per_step=4, packs_per_step=None
    )
    read: dict[str, list[list[int]]] = {record.id: [] for record in records}
    for rank in range(world_size):
        packs = [pack for step in steps for pack in rank_packs(step, rank=rank, world_size=world_size)]
        loader = DataLoader(PackDataset(reader, packs, pad_to=16), batch_size=None, num_workers=num_workers)
        for batch in loader:
            edges = batch.cu_seqlens.tolist()
            for id, start, stop in zip(batch.ids, edges, edges[1:]):
                read[id].append(batch.tokens[start:stop].tolist())
    for record in records:
        tokens = record.tokens.tolist()
        pieces = [tokens[start : start + 16] for start in range(0, len(tokens), 16)]
        assert sorted(read[record.id]) == sorted(pieces)


def test_records_are_the_same_in_any_order(tmp_path):
    records = [record_of(f"{i}", num_tokens=2 + i) for i in range(9)]
    reader = ShardReader(dataset_of(tmp_path, records, shard_bytes=2500), split="train")
    assert len(reader.shards) > 2
    for i in [*np.random.default_rng(0).permutation(9).tolist(), -1, -9]:
        assert torch.equal(reader.read(i).aux, records[i].aux.bfloat16()) and reader.read(i).id == records[i].id
    assert [record.id for record in reader] == [record.id for record in records]
    with pytest.raises(IndexError):
        reader.read(9)
