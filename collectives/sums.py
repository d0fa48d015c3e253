"""The arithmetic of one reduction: own contributions are encoded, parts of all are added up.

It decides nothing: the engine says whose part is added when, one thread at a time for each chunk.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

import numpy as np

from atoll.collectives.buffers import BufferPool
from atoll.collectives.codecs import F32, U8
from atoll.collectives.result import RoundResult

__all__ = ["ENCODERS_MAX", "Sums"]

# Chunks that are filled and encoded at the same time. Each takes a float32 chunk, and this many
# cores encode more than 100 Gbit/s of float32, so more would take memory and bring nothing.
ENCODERS_MAX: Final = 4


class Sums:
    """``factors`` weight the participants' parts. Buffers that ``encoded`` lends are given back to
    it, but where bytes could not be decoded: then the reduction fails anyway."""

    def __init__(self, result: RoundResult, factors: tuple[float, ...]) -> None:
        self.encoded = BufferPool(result.layout.chunk_bytes, np.uint8)
        self._floats = BufferPool(result.grid.size(0), np.float32)
        self._codec, self._grid, self._layout = result.codec, result.grid, result.layout
        self._factors = factors
        self._encoders = threading.BoundedSemaphore(ENCODERS_MAX)
        self._sums: dict[int, F32] = {}

    @property
    def allocated_bytes(self) -> int:
        return self.encoded.allocated_bytes + self._floats.allocated_bytes

    def contribution(self, chunk: int, source: Callable[[int, F32], None], out: U8) -> None:
        """Encode the own part of a chunk. CodecError, or what ``source`` raises."""
        with self._encoders:
            buffer = self._floats.take()
            try:
                values = buffer[: self._grid.size(chunk)]
                source(chunk, values)
                self._codec.encode(values, out)
            finally:
                self._floats.give(buffer)

    def add(self, chunk: int, participant: int, buffer: U8) -> None:
        """Add a part, and give its buffer back. CodecError."""
        total = self._sums.get(chunk)
        if total is None:
            total = self._sums[chunk] = self._floats.take()
            total.fill(0)
        data = buffer[: self._layout.size(chunk)]
        self._codec.decode_add(data, self._factors[participant], total[: self._grid.size(chunk)])
        self.encoded.give(buffer)

    def finish(self, chunk: int) -> U8:
        """The encoded sum, in a buffer to be given back. CodecError only for values next to the
        largest float32, since each part was finite."""
        total = self._sums.pop(chunk)
        buffer = self.encoded.take()
        data = buffer[: self._layout.size(chunk)]
        self._codec.encode(total[: self._grid.size(chunk)], data)
        self._floats.give(total)
        return buffer
