"""Memory for captured rows that is used again: a fresh page costs more than the copy into it."""

from __future__ import annotations

import threading
import weakref
from collections import deque

import numpy as np
import torch
from torch import Tensor

KEEP_BYTES = 1 << 30  # that nobody uses, at most
_ROUND = 1 << 16


class Memory:
    """Blocks of host memory. One that nothing refers to any more is given out again, from any thread."""

    def __init__(self, *, keep_bytes: int = KEEP_BYTES) -> None:
        self._keep_bytes, self._lock = keep_bytes, threading.Lock()
        self._free: list[np.ndarray] = []
        self._returned: deque[np.ndarray] = deque()  # by whoever dropped the last reference, who may hold the lock

    def take(self, size: int) -> Tensor:
        """[size] uint8, of any content; what was made of it (slices, views, arrays) keeps it."""
        block = self._fitting(size)
        if block is None:
            block = np.empty(size + -size % _ROUND, dtype=np.uint8)
        given = block[:size]
        weakref.finalize(given, self._returned.append, block).atexit = False
        return torch.from_numpy(given)

    def _fitting(self, size: int) -> np.ndarray | None:
        """The smallest free block of `size` to twice as many bytes; what is too much to keep is dropped."""
        with self._lock:
            while self._returned:
                self._free.append(self._returned.popleft())
            fitting = [i for i, block in enumerate(self._free) if size <= len(block) <= max(2 * size, _ROUND)]
            found = self._free.pop(min(fitting, key=lambda i: len(self._free[i]))) if fitting else None
            left = sum(map(len, self._free))
            while left > self._keep_bytes:
                left -= len(self._free.pop(0))  # returned first
        return found
