"""Memory for captured rows that is used again: a fresh page costs more than the copy into it."""

from __future__ import annotations

import weakref
from collections import defaultdict, deque

import numpy as np

KEEP_BYTES = 1 << 30  # that nobody uses, at most
_SMALLEST = 1 << 16


class Memory:
    """Blocks of host memory. One that nothing refers to any more is given out again, from any thread."""

    def __init__(self, *, keep_bytes: int = KEEP_BYTES) -> None:
        self._keep_bytes = keep_bytes
        self._free: dict[int, deque[np.ndarray]] = defaultdict(deque)  # by size; its methods are atomic

    def take(self, size: int) -> np.ndarray:
        """[size] uint8, of any content; what was made of it (slices, views, tensors) keeps it."""
        size_class = _class_of(size)
        try:
            block = self._free[size_class].pop()
        except IndexError:
            block = np.empty(size_class, dtype=np.uint8)
        given = block[:size]
        weakref.finalize(given, self._return, block).atexit = False
        return given

    def _return(self, block: np.ndarray) -> None:
        """Called wherever the last reference is dropped, so it cannot wait for a lock."""
        free = sum(size * len(blocks) for size, blocks in list(self._free.items()))
        if free + len(block) <= self._keep_bytes:
            self._free[len(block)].append(block)


def _class_of(size: int) -> int:
    """A multiple of a quarter of its power of two: at most a quarter, or 64 KiB, is too much."""
    step = max(1 << max((size - 1).bit_length() - 3, 0), _SMALLEST)
    return -(-size // step) * step
