"""How states are stored: the codecs of `aux` and `last`, and the teacher's top k in place of `last`.

A dataset's codec is one word for both, or one for each:

    bf16 | fp32             as they are                               fp8           both as e4m3
    fp8+bf16                aux as e4m3, last as it is                fp8+topk64    aux as e4m3, no last: the 64 most
                                                                                    likely next tokens of the teacher

e4m3 has 4 significant bits (relative error at most 2^-4, 2.6 % on average). Its scales are powers of two, so that
decoding to bfloat16 is exact, and encoding what was decoded changes nothing.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp8": torch.float8_e4m3fn}
TOP_K = 64
STATE_COLUMNS = ("aux", "aux_scale", "last", "last_scale", "top_ids", "top_log_probs", "log_normalizer")

_FP8_MAX = torch.finfo(torch.float8_e4m3fn).max  # 448
# As signed integers, the bits of the least positive value that is no number; those above it are none either.
_NOT_A_NUMBER = {
    torch.float8_e4m3fn: (np.int8, 0x7F), torch.float16: (np.int16, 0x7C00), torch.bfloat16: (np.int16, 0x7F80),
    torch.float32: (np.int32, 0x7F800000),
}  # fmt: skip
_ELEMENTS = 1 << 20  # encoded at a time, so that intermediates stay in the processor's cache
_LOGITS = 1 << 26  # elements of the head's output at a time: 256 MiB


@dataclass(frozen=True)
class Codec:
    """What is stored of a token: aux bf16 | fp32 | fp8; last the same, or topk with `top_k` tokens."""

    aux: str
    last: str
    top_k: int = 0

    @classmethod
    @functools.cache
    def parse(cls, name: str) -> Codec:
        """Raises ValueError if there is no such codec."""
        aux, plus, last = name.partition("+")
        match = re.fullmatch(r"topk([1-9]\d*)?", last)
        if aux not in DTYPES or plus and last not in DTYPES and match is None:
            raise ValueError(
                f"codec={name}: expected one of bf16, fp32, fp8, or AUX+LAST, where LAST may also be topk{TOP_K}, "
                f"like fp8+bf16 or fp8+topk{TOP_K}"
            )
        if match:
            return cls(aux, "topk", int(match[1] or TOP_K))
        return cls(aux, last or aux)

    @property
    def name(self) -> str:
        last = f"topk{self.top_k}" if self.last == "topk" else self.last
        return self.aux if self.aux == last else f"{self.aux}+{last}"

    def columns(self, *, num_boundaries: int, hidden_size: int) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Stored columns of the states: their dtype, and their shape for one token."""
        columns = {"aux": (DTYPES[self.aux], (num_boundaries, hidden_size))}
        if self.aux == "fp8":
            columns["aux_scale"] = (torch.float32, (num_boundaries,))
        if self.last == "topk":
            columns["top_ids"] = (torch.int32, (self.top_k,))
            columns["top_log_probs"] = (torch.float32, (self.top_k,))
            columns["log_normalizer"] = (torch.float32, ())
        else:
            columns["last"] = (DTYPES[self.last], (hidden_size,))
            if self.last == "fp8":
                columns["last_scale"] = (torch.float32, ())
        return columns

    def bytes_per_token(self, *, num_boundaries: int, hidden_size: int) -> int:
        """Of the states; tokens and loss_mask take 5 more."""
        columns = self.columns(num_boundaries=num_boundaries, hidden_size=hidden_size).values()
        return sum(dtype.itemsize * torch.Size(shape).numel() for dtype, shape in columns)


class TeacherHead:
    """The target's output head, where `last` is turned into the teacher's most likely next tokens.

    head    [vocab, H]  the target's, in any dtype
    device  a product of 2 * H * vocab operations a token: on a CPU that suits small targets only
    cap     of the target's logits, if it has one: data/boundaries.logits_cap

    Logits are float32 whatever the head's dtype: bfloat16 ones have ties among the most likely tokens.
    Raises ValueError if there is no such device.
    """

    def __init__(self, head: Tensor, *, device: torch.device | str, cap: float | None = None) -> None:
        self.device = torch.device(device)
        if self.device.type == "cuda" and not torch.cuda.is_available():
            raise ValueError("there is no GPU here to ask the target's head: leave its device at auto, or set cpu")
        self.head = head.to(self.device, head.dtype if self.device.type == "cuda" else torch.float32)
        self.cap = cap

    @torch.no_grad()
    def top_k(self, last: Tensor, k: int) -> dict[str, Tensor]:
        """last [T, H] after the final norm -> columns of the codec topk, on the CPU.

        top_ids         [T, k] int32    the k most likely tokens, the argmax first
        top_log_probs   [T, k] float32  their log-probabilities over the whole vocabulary
        log_normalizer  [T]    float32  log-sum-exp of the logits: logit = log-probability + log_normalizer
        """
        columns = []
        for rows in last.split(max(_LOGITS // self.head.shape[0], 1)):
            logits = self._logits(rows)  # [rows, vocab] float32
            log_normalizer = logits.logsumexp(-1)
            top = logits.topk(k, sorted=True)
            ids = _argmax_first(top.indices, logits.argmax(-1))
            columns.append((ids.int(), top.values - log_normalizer[:, None], log_normalizer))
        names = ("top_ids", "top_log_probs", "log_normalizer")
        return {name: torch.cat(parts).cpu() for name, parts in zip(names, zip(*columns))}

    def _logits(self, rows: Tensor) -> Tensor:
        rows = rows.to(self.device, self.head.dtype)
        if self.device.type == "cuda" and self.head.dtype != torch.float32:
            return capped(torch.mm(rows, self.head.T, out_dtype=torch.float32), self.cap)
        return capped(rows @ self.head.T, self.cap)


def capped(logits: Tensor, cap: float | None) -> Tensor:
    """What the target makes of its logits: data/boundaries.logits_cap."""
    return logits if cap is None else torch.tanh(logits / cap).mul_(cap)


def _argmax_first(ids: Tensor, argmax: Tensor) -> Tensor:
    """Of equally likely tokens topk may take any first; Eyas' argmax is the one with the lowest id."""
    found = (ids == argmax[:, None]).int().argmax(-1, keepdim=True)  # where it is; 0 if the tie reached beyond k
    ids = ids.scatter(1, found, ids[:, :1])
    return torch.cat([argmax[:, None], ids[:, 1:]], 1)


def is_finite(column: Tensor) -> bool:
    """Whether every number of a stored column is finite; as integers are.

    Told by the largest bits of either sign, on one core: four times the rate of a sum.
    """
    if column.dtype not in _NOT_A_NUMBER:
        return not column.is_floating_point() or bool(column.isfinite().all())
    signed, limit = _NOT_A_NUMBER[column.dtype]
    bits = column.reshape(-1).view(torch.uint8).numpy().view(signed)
    unsigned = bits.view(bits.dtype.str.replace("i", "u"))
    return bool(bits.max() < limit and unsigned.max() < np.iinfo(signed).max + 1 + limit)


def encode_fp8(states: Tensor) -> tuple[Tensor, Tensor]:
    """states [T, ..., H] -> e4m3 [T, ..., H], and float32 scales [T, ...]: state = e4m3 * scale.

    The scale is the least power of two by which the largest value of a row fits. Raises ValueError if a state is
    not finite.
    """
    values = torch.empty(states.shape, dtype=torch.float8_e4m3fn)
    scales = torch.empty(states.shape[:-1], dtype=torch.float32)
    rows = max(_ELEMENTS // max(states[:1].numel(), 1), 1)
    for part, value, scale in zip(states.split(rows), values.split(rows), scales.split(rows)):
        part = part.float()
        largest = part.abs().amax(-1)
        if not largest.isfinite().all():
            raise ValueError("states that are not finite cannot be stored as fp8")
        exponent = torch.frexp(largest / _FP8_MAX).exponent.clamp(min=-126)
        scale.copy_(_power_of_two(exponent))
        value.copy_(part * _power_of_two(-exponent)[..., None])
    return values, scales


def _power_of_two(exponent: Tensor) -> Tensor:
    """int32 in -126 .. 127 -> float32, exactly: its bits are the exponent's alone."""
    return ((exponent + 127) << 23).view(torch.float32)


def decode_fp8(values: Tensor, scales: Tensor, *, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """The inverse of `encode_fp8`, on any device; exact in bfloat16 and float32."""
    return values.to(dtype) * scales.to(dtype)[..., None]
