"""Small datasets for tests: records with random states, and the provenance that fits them."""

from __future__ import annotations

import errno
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from data.lanes import OpenShard, Planned
from data.schema import Provenance, Record
from data.shards import ShardWriter

PROVENANCE = Provenance(
    target="toy", config_hash="c", weights_fingerprint="w", tokenizer_hash="t", chat_template_hash="j",
    boundaries=(2, 3, 5), num_layers=6, hidden_size=8, vocab_size=512, codec="bf16", engine="sglang",
    engine_version="0.5.23",
)  # fmt: skip


def record_of(id: str, *, num_tokens: int = 5, split: str = "train", provenance: Provenance = PROVENANCE) -> Record:
    """Random but the same for the same id; every second token is the assistant's."""
    generator = torch.Generator().manual_seed(sum(id.encode()))
    shape = (num_tokens, len(provenance.boundaries), provenance.hidden_size)
    return Record(
        id=id,
        tokens=torch.randint(0, provenance.vocab_size, (num_tokens,), generator=generator),
        loss_mask=torch.arange(num_tokens) % 2,
        aux=torch.randn(shape, generator=generator),
        last=torch.randn(num_tokens, provenance.hidden_size, generator=generator),
        source="test",
        split=split,
    )


def no_room_for(id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the record `id` on the disk is full."""
    add = OpenShard.add

    def full(self: OpenShard, planned: Planned) -> None:
        if planned.record.id == id:
            raise OSError(errno.ENOSPC, "No space left on device")
        add(self, planned)

    monkeypatch.setattr(OpenShard, "add", full)


def dataset_of(folder: Path, records: list[Record], *, shard_bytes: int = 1 << 20, codec: str = "bf16") -> Path:
    """The records as shards of the train split."""
    provenance = replace(PROVENANCE, codec=codec)
    with ShardWriter(folder, provenance=provenance, split="train", shard_bytes=shard_bytes) as writer:
        for record in records:
            writer.write(record)
    return folder
