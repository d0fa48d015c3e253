"""Decode the values of encoded parts, some columns of all of them at a time.

A chunk of sixteen parts takes 10 MiB as float32, and fresh memory costs more than the arithmetic on
it. So where there are kernels no more is decoded than stays in the cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from atoll.collectives.codecs import F32, U8, Codec
from atoll.collectives.robust.coordinate import COLUMNS, blocks_of


class Columns:
    """Decode columns of parts in one codec. For one thread at a time."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self._room: F32 = np.empty(0, np.float32)

    @property
    def allocated_bytes(self) -> int:
        return self._room.nbytes

    def of(self, parts: Sequence[U8], count: int) -> Iterator[F32]:
        """Yield the values of n parts, float32[n, c], one piece after the other.

        A piece lies in memory that is used again for the next. The parts have ``count`` elements
        each and have passed ``check``.
        """
        for lo in range(0, count, COLUMNS):
            block = self._rows(len(parts), min(COLUMNS, count - lo))
            if not self._codec.decode_columns(parts, count, lo, block):
                break
            yield block
        else:
            return
        rows = self._rows(len(parts), count)
        for part, row in zip(parts, rows, strict=True):
            self._codec.decode(part, row)
        yield from blocks_of(rows)

    def _rows(self, count: int, columns: int) -> F32:
        if self._room.size < count * columns:
            self._room = np.empty(count * columns, np.float32)
        return self._room[: count * columns].reshape(count, columns)
