"""The arithmetic of one reduction: own contributions are encoded, parts of all are added up.

It decides nothing: the engine says whose part is added when, one thread at a time for each chunk.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

import numpy as np

from atoll.collectives.buffers import BufferPool
from atoll.collectives.codecs import F32, U8, get_codec
from atoll.collectives.result import RoundResult

__all__ = ["ENCODERS_MAX", "Sums"]

# Chunks that are filled and encoded at the same time. Each takes a float32 chunk, and this many
# cores encode more than 100 Gbit/s of float32, so more would take memory and bring nothing.
ENCODERS_MAX: Final = 4
EXACT: Final = get_codec("float32")


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

    def add(self, chunk: int, participant: int | None, buffer: U8) -> None:
        """Add the part of a participant, or a sum of several, which has its weights already (None);
        and give the buffer back. CodecError."""
        total = self._open(chunk)
        data = buffer[: self._layout.size(chunk)]
        factor = 1.0 if participant is None else self._factors[participant]
        self._codec.decode_add(data, factor, total[: self._grid.size(chunk)])
        self.encoded.give(buffer)

    def add_own(
        self,
        chunk: int,
        me: int,
        source: Callable[[int, F32], None],
        own: Callable[[int], F32] | None,
    ) -> None:
        """Add the own part as it is, without encoding it. What ``source`` raises."""
        total = self._open(chunk)
        if own is not None:
            values = own(chunk)
            EXACT.decode_add(values.view(np.uint8), self._factors[me], total[: values.size])
            return
        with self._encoders:
            buffer = self._floats.take()
            try:
                values = buffer[: self._grid.size(chunk)]
                source(chunk, values)
                np.multiply(values, np.float32(self._factors[me]), out=values)
                np.add(total[: values.size], values, out=total[: values.size])
            finally:
                self._floats.give(buffer)

    def _open(self, chunk: int) -> F32:
        total = self._sums.get(chunk)
        if total is None:
            total = self._sums[chunk] = self._floats.take()
            total.fill(0)
        return total

    def has(self, chunk: int) -> bool:
        """Whether there is a sum of this chunk here."""
        return chunk in self._sums

    def encode(self, chunk: int, out: U8) -> None:
        """Encode the sum into ``out`` and forget it. CodecError only for values next to the largest
        float32, or where the own part was not finite: other parts have been checked."""
        total = self._sums.pop(chunk)
        try:
            self._codec.encode(total[: self._grid.size(chunk)], out)
        finally:
            self._floats.give(total)
