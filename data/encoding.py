"""A record as a safetensors file, and back. All but a few numbers in its header follow from the dataset alone."""

from __future__ import annotations

import json
import math
import struct
from typing import Any

import torch
from torch import Tensor

from data.codecs import STATE_COLUMNS, Codec
from data.schema import Provenance, Record, state_columns, stored_columns

_SAFETENSORS_NAMES = {
    torch.int32: "I32", torch.uint8: "U8", torch.bfloat16: "BF16", torch.float32: "F32", torch.float8_e4m3fn: "F8_E4M3",
}  # fmt: skip
_COLUMN_ORDER = ("tokens", *STATE_COLUMNS, "loss_mask")
_ALIGNMENT = 64  # bytes, of the tensors within a file


class Layout:
    """How the safetensors files of a dataset are laid out: its columns back to back after a header.

    columns      name -> dtype, and shape for one token: data/schema.py, `stored_columns`
    order        of the columns in a file; every tensor starts at a multiple of its element's size
    begins       [columns + 1]  bytes before each column, for one token; the last is all of them
    """

    def __init__(self, provenance: Provenance) -> None:
        self.codec = Codec.parse(provenance.codec)
        self.columns = stored_columns(provenance)
        self.order = sorted((name for name in _COLUMN_ORDER if name in self.columns), key=self._order)
        self.begins, said = [0], []
        for name in self.order:
            dtype, shape = self.columns[name]
            self.begins.append(self.begins[-1] + dtype.itemsize * math.prod(shape))
            each = "".join(f",{size}" for size in shape)
            said.append(f'"{name}":{{"dtype":"{_SAFETENSORS_NAMES[dtype]}","shape":[%d{each}],"data_offsets":[%d,%d]}}')
        self._text = "{" + ",".join(said) + "}"
        self._numbers = [n for begin, end in zip(self.begins, self.begins[1:]) for n in (1, begin, end)]

    def _order(self, name: str) -> int:
        return -self.columns[name][0].itemsize

    def header(self, num_tokens: int) -> bytes:
        """What a file of so many tokens begins with."""
        text = (self._text % tuple([num_tokens * number for number in self._numbers])).encode()
        text += b" " * (-(len(text) + 8) % _ALIGNMENT)
        return struct.pack("<Q", len(text)) + text

    def num_bytes(self, num_tokens: int) -> int:
        """Of the whole file."""
        return len(self.header(num_tokens)) + num_tokens * self.begins[-1]


def encode(record: Record, layout: Layout) -> tuple[bytes, list[Tensor]]:
    """The record as a safetensors file: its header, and the tensors that follow it back to back.

    Their memory is written as it is. Raises ValueError if the codec cannot store the record.
    """
    columns = {
        "tokens": record.tokens.to(torch.int32),
        "loss_mask": record.loss_mask.to(torch.uint8),
        **state_columns(record, layout.codec),
    }
    return layout.header(record.num_tokens), [columns[name].detach().cpu().contiguous() for name in layout.order]


def decode(buffer: Any, *, offset: int, size: int, num_tokens: int, layout: Layout) -> dict[str, Tensor | None]:
    """The safetensors file at buffer[offset : offset + size] as columns that share the buffer's memory.

    `last` is None where it is none of them. Raises ValueError, KeyError, TypeError or struct.error if the file is
    damaged, holds other columns, or not `num_tokens` tokens: the caller knows its name.
    """
    header = layout.header(num_tokens)
    start = offset + len(header)
    if buffer[offset:start] == header and size == len(header) + num_tokens * layout.begins[-1]:  # as `encode` made it
        begins = {name: num_tokens * begin for name, begin in zip(layout.order, layout.begins)}
    else:
        begins, start = _parse(buffer, offset=offset, size=size, num_tokens=num_tokens, layout=layout)
    found: dict[str, Tensor | None] = {"last": None}
    for name, (dtype, shape) in layout.columns.items():
        count = num_tokens * math.prod(shape)
        column = torch.frombuffer(buffer, dtype=dtype, count=count, offset=start + begins[name])
        found[name] = column.view(num_tokens, *shape) if shape else column
    return found


def _parse(buffer: Any, *, offset: int, size: int, num_tokens: int, layout: Layout) -> tuple[dict[str, int], int]:
    """Where each column begins after the header, by what the header says, and where the header ends in the buffer."""
    (length,) = struct.unpack_from("<Q", buffer, offset)
    if length + 8 > size:
        raise ValueError(f"header of {length} bytes in a record of {size}")
    header = json.loads(bytes(buffer[offset + 8 : offset + 8 + length]))
    if header.keys() != layout.columns.keys():
        raise ValueError(f"columns {', '.join(header)}; expected {', '.join(layout.columns)}")
    start, begins = offset + 8 + length, {}
    if (found := header["tokens"]["shape"][0]) != num_tokens:
        raise ValueError(f"{found} tokens, the index says {num_tokens}")
    for name, (dtype, shape) in layout.columns.items():
        column, expected = header[name], [num_tokens, *shape]
        if (column["dtype"], column["shape"]) != (_SAFETENSORS_NAMES[dtype], expected):
            raise ValueError(f"{name} is {column['dtype']} {column['shape']}, expected {dtype} {expected}")
        begins[name], end = column["data_offsets"]
        count = math.prod(expected)
        if not 0 <= begins[name] < end <= offset + size - start or begins[name] + count * dtype.itemsize != end:
            raise ValueError(f"{name} ends after the record")
    return begins, start
