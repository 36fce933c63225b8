"""Packing: documents of any length -> packs of at most `budget` tokens. Pure functions."""

from __future__ import annotations

from typing import NamedTuple, Sequence

import numpy as np
import torch
from torch import Tensor

from data.batch import Batch
from data.schema import Record


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

    records  one for each piece, in the same order. The padding has loss_mask False and zeros elsewhere.
    Raises ValueError if there is nothing to collate, or `pad_to` is too short.
    """
    if not pieces or len(records) != len(pieces):
        raise ValueError(f"{len(pieces)} pieces need as many records, at least one; found {len(records)}")
    aux = [record.aux[piece.start : piece.stop].flatten(1) for record, piece in zip(records, pieces)]  # [t, A*H]
    last = [record.last[piece.start : piece.stop] for record, piece in zip(records, pieces)]
    tokens = [record.tokens[piece.start : piece.stop] for record, piece in zip(records, pieces)]
    loss_mask = [record.loss_mask[piece.start : piece.stop] for record, piece in zip(records, pieces)]
    lengths = [len(document) for document in tokens]
    padding = 0 if pad_to is None else pad_to - sum(lengths)
    if padding < 0:
        raise ValueError(f"pad_to={pad_to} is too short for a pack of {sum(lengths)} tokens")
    if padding:
        for columns in (aux, last, tokens, loss_mask):
            columns.append(columns[0].new_zeros((padding, *columns[0].shape[1:])))
        lengths.append(padding)
    return _batch(aux, last, tokens, loss_mask, lengths, records)


def padding_batch(num_tokens: int, *, num_boundaries: int, hidden_size: int, dtype: torch.dtype) -> Batch:
    """A Batch of padding only, for a rank that has no pack left in a step. dtype: of aux and last."""
    aux = torch.zeros(num_tokens, num_boundaries * hidden_size, dtype=dtype)
    last = torch.zeros(num_tokens, hidden_size, dtype=dtype)
    zeros = torch.zeros(num_tokens, dtype=torch.int32)
    return _batch([aux], [last], [zeros], [zeros], [num_tokens], [])


def _batch(
    aux: list[Tensor], last: list[Tensor], tokens: list[Tensor], loss_mask: list[Tensor], lengths: list[int],
    records: Sequence[Record],
) -> Batch:  # fmt: skip
    sizes = torch.tensor(lengths)  # [N]
    cu_seqlens = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])  # [N+1]
    document = torch.repeat_interleave(torch.arange(len(lengths)), sizes)  # [T]
    return Batch(
        tokens=torch.cat(tokens).long(),
        loss_mask=torch.cat(loss_mask).bool(),
        aux=torch.cat(aux),
        last=torch.cat(last),
        positions=torch.arange(int(cu_seqlens[-1])) - cu_seqlens[document],
        document=document,
        cu_seqlens=cu_seqlens.int(),
        max_seqlen=max(lengths),
        ids=tuple(record.id for record in records),
        sources=tuple(record.source for record in records),
    )
