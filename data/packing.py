"""Packing: documents of any length -> packs of at most `budget` tokens. Pure functions."""

from __future__ import annotations

from typing import NamedTuple, Sequence

import numpy as np
import torch
from torch import Tensor

from data.batch import Batch
from data.codecs import Codec
from data.schema import Provenance, Record


class Piece(NamedTuple):
    """Tokens [start, stop) of record `index`: all of it, unless it is longer than a pack."""

    index: int
    start: int
    stop: int


Pack = list[Piece]


def pack(lengths: Sequence[int] | np.ndarray, *, budget: int) -> list[Pack]:
    """Best-fit decreasing: each document goes where it leaves the least room.

    lengths  [n], tokens; budget: most tokens of a pack. A longer document is cut into pieces of
    `budget` and a rest. Every token is in exactly one piece; same input, same packs.
    Raises ValueError if budget or a length is below 1.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    if budget < 1 or (lengths < 1).any():
        raise ValueError(f"budget {budget} and every length must be at least 1 token")
    pieces = [
        Piece(index, start, min(start + budget, length))
        for index, length in enumerate(lengths.tolist())
        for start in range(0, length, budget)
    ]
    pieces.sort(key=lambda piece: piece.start - piece.stop)  # stable: equal ones stay in order
    packs: list[Pack] = []
    by_room: dict[int, list[int]] = {}  # room in tokens -> packs
    rooms = 0  # bit r is set iff by_room has r: the best fit is its lowest bit from a length on
    for piece in pieces:
        length = piece.stop - piece.start
        fitting = rooms >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            number = by_room[room].pop()
            packs[number].append(piece)
            if not by_room[room]:
                del by_room[room]
                rooms ^= 1 << room
        else:
            room, number = budget, len(packs)
            packs.append([piece])
        if room > length:
            by_room.setdefault(room - length, []).append(number)
            rooms |= 1 << (room - length)
    return packs


def collate(records: Sequence[Record], pieces: Pack, *, pad_to: int | None) -> Batch:
    """One pack as a Batch: the pieces back to back, then padding up to `pad_to` tokens as one more document.

    records  one for each piece, in the same order, with the same columns. The padding has loss_mask False and zeros
             elsewhere.
    Raises ValueError if there is nothing to collate, or `pad_to` is too short.
    """
    if not pieces or len(records) != len(pieces):
        raise ValueError(f"{len(pieces)} pieces need as many records, at least one; found {len(records)}")
    lengths = [piece.stop - piece.start for piece in pieces]
    padding = 0 if pad_to is None else pad_to - sum(lengths)
    if padding < 0:
        raise ValueError(f"pad_to={pad_to} is too short for a pack of {sum(lengths)} tokens")
    columns: dict[str, list[Tensor]] = {}
    for record, piece in zip(records, pieces):
        for name, column in (("tokens", record.tokens), ("loss_mask", record.loss_mask), *record.states().items()):
            columns.setdefault(name, []).append(column[piece.start : piece.stop])
    if padding:
        for parts in columns.values():
            parts.append(torch.zeros(padding, *parts[0].shape[1:], dtype=parts[0].dtype))
        lengths.append(padding)
    return _batch({name: _cat(parts) for name, parts in columns.items()}, lengths, records)


def padding_batch(num_tokens: int, provenance: Provenance) -> Batch:
    """A Batch of padding only, for a rank that has no pack left in a step, like those of a dataset."""
    columns = Codec.parse(provenance.codec).columns(
        num_boundaries=len(provenance.boundaries), hidden_size=provenance.hidden_size
    )
    zeros = {name: torch.zeros(num_tokens, *shape, dtype=dtype) for name, (dtype, shape) in columns.items()}
    nothing = torch.zeros(num_tokens, dtype=torch.int32)
    return _batch({"tokens": nothing, "loss_mask": nothing, **zeros}, [num_tokens], [])


def _batch(columns: dict[str, Tensor], lengths: list[int], records: Sequence[Record]) -> Batch:
    sizes = torch.tensor(lengths)  # [N]
    cu_seqlens = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])  # [N+1]
    document = torch.repeat_interleave(torch.arange(len(lengths)), sizes)  # [T]
    columns = {"last": None, **columns}
    return Batch(
        tokens=columns.pop("tokens").long(),
        loss_mask=columns.pop("loss_mask").bool(),
        aux=columns.pop("aux").flatten(1),
        positions=torch.arange(int(cu_seqlens[-1])) - cu_seqlens[document],
        document=document,
        cu_seqlens=cu_seqlens.int(),
        max_seqlen=max(lengths),
        ids=tuple(record.id for record in records),
        sources=tuple(record.source for record in records),
        **columns,
    )


def _cat(parts: list[Tensor]) -> Tensor:
    if parts[0].dtype == torch.float8_e4m3fn:  # bytes: torch cannot join them as numbers
        return torch.cat([part.view(torch.uint8) for part in parts]).view(torch.float8_e4m3fn)
    return torch.cat(parts)
