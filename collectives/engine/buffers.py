"""Use buffers of one size again: fresh pages cost more than the arithmetic on them."""

from __future__ import annotations

from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

Item = TypeVar("Item", np.uint8, np.float32)


class BufferPool(Generic[Item]):
    """Lend one-dimensional arrays of ``elements``, with whatever an earlier user left in them.

    Safe to share between threads without a lock, because ``list.pop`` and ``list.append`` are
    atomic. The pool sets no limit: who takes from it names the rule that bounds it.
    """

    def __init__(self, elements: int, dtype: type[Item]) -> None:
        self._elements = elements
        self._dtype: type[Item] = dtype
        self._free: list[NDArray[Item]] = []
        self._all: list[NDArray[Item]] = []

    def take(self) -> NDArray[Item]:
        try:
            return self._free.pop()
        except IndexError:
            buffer: NDArray[Item] = np.empty(self._elements, self._dtype)
            self._all.append(buffer)
            return buffer

    def give(self, buffer: NDArray[Item]) -> None:
        self._free.append(buffer)

    @property
    def allocated_bytes(self) -> int:
        """Return the bytes that the pool has taken so far, whether in use or free."""
        return sum(buffer.nbytes for buffer in list(self._all))
