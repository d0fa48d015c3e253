"""The arithmetic of one reduction: own contributions are encoded, parts of all are added up.

It decides nothing: the engine says whose part is added when, one thread at a time for each chunk.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

import numpy as np

from atoll.collectives.buffers import BufferPool
from atoll.collectives.codecs import F32, U8, Codec, get_codec
from atoll.collectives.native import KERNELS
from atoll.collectives.result import RoundResult

__all__ = ["ENCODERS_MAX", "Sums"]

# Chunks that are filled and encoded at the same time. Each takes a float32 chunk, and this many
# cores encode more than 100 Gbit/s of float32, so more would take memory and bring nothing.
ENCODERS_MAX: Final = 4
EXACT: Final = get_codec("float32")


class Sums:
    """``factors`` weight the participants' parts; ``is_root(chunk)``: whether its sum here is the
    whole; ``source`` and ``own`` give the own part, as the engine says. Buffers that ``encoded``
    lends are given back to it, but where bytes could not be decoded: then the reduction fails
    anyway."""

    def __init__(
        self,
        result: RoundResult,
        factors: tuple[float, ...],
        is_root: Callable[[int], bool],
        source: Callable[[int, F32], None],
        own: Callable[[int], F32] | None = None,
    ) -> None:
        self.encoded = BufferPool(result.layout.chunk_bytes, np.uint8)
        self._floats = BufferPool(result.grid.size(0), np.float32)
        self._result, self._is_root = result, is_root
        self._codec, self._grid, self._layout = result.codec, result.grid, result.layout
        self._is_exact = result.codec.contract.kind == "exact"
        self._factors = factors
        self._source, self._own = source, own
        self._encoders = threading.BoundedSemaphore(ENCODERS_MAX)
        self._sums: dict[int, F32] = {}
        self._doubtful: set[int] = set()  # in place, and not known to be finite

    @property
    def allocated_bytes(self) -> int:
        return self.encoded.allocated_bytes + self._floats.allocated_bytes

    def in_place(self, chunk: int) -> bool:
        """Whether the sum grows where the result lies: then each addition writes there."""
        return self._is_exact and self._is_root(chunk)

    def part(self, chunk: int, buffer: U8) -> U8:
        """What to send of a chunk: the sum, if there is one here, else the own part; in ``buffer``
        or where it lies. CodecError, or what ``source`` raises."""
        payload = buffer[: self._layout.size(chunk)]
        if chunk in self._sums:
            self.encode(chunk, payload)
        elif self._own is not None and self._is_exact:
            payload = self._own(chunk).view(np.uint8)
            self._codec.check(payload, self._grid.size(chunk))
        else:
            self._encode_own(chunk, payload)
        return payload

    def _encode_own(self, chunk: int, out: U8) -> None:
        with self._encoders:
            buffer = self._floats.take()
            try:
                values = buffer[: self._grid.size(chunk)]
                self._source(chunk, values)
                self._codec.encode(values, out)
            finally:
                self._floats.give(buffer)

    def add(self, chunk: int, participant: int | None, buffer: U8) -> None:
        """Add the part of a participant, or a sum of several, which has its weights already (None);
        and give the buffer back. CodecError."""
        factor = 1.0 if participant is None else self._factors[participant]
        self._weigh(self._codec, chunk, factor, buffer[: self._layout.size(chunk)])
        self.encoded.give(buffer)

    def add_own(self, chunk: int, me: int, *, as_others: bool) -> None:
        """Add the own part: ``as_others`` through the codec, else as it is. CodecError, or what
        ``source`` raises."""
        if as_others and not self._is_exact:
            encoded = self.encoded.take()
            self._encode_own(chunk, encoded[: self._layout.size(chunk)])
            self.add(chunk, me, encoded)
            return
        if self._own is not None:
            self._weigh(EXACT, chunk, self._factors[me], self._own(chunk).view(np.uint8))
            return
        with self._encoders:
            buffer = self._floats.take()
            try:
                values = buffer[: self._grid.size(chunk)]
                self._source(chunk, values)
                self._weigh(EXACT, chunk, self._factors[me], values.view(np.uint8))
            finally:
                self._floats.give(buffer)

    def _weigh(self, codec: Codec, chunk: int, factor: float, data: U8) -> None:
        is_first = chunk not in self._sums
        if is_first:
            place = self._result.view(chunk).view(np.float32) if self.in_place(chunk) else None
            self._sums[chunk] = self._floats.take() if place is None else place
        total = self._sums[chunk][: self._grid.size(chunk)]
        if codec.contract.kind == "exact" and KERNELS is not None:
            if not KERNELS.weigh(data, factor, total, is_first):
                codec.check(data, total.size)  # else the sum is too large: see `encode`
                self._doubtful.add(chunk)
            return
        if is_first:
            total.fill(0)
        codec.decode_add(data, factor, total)
        self._doubtful.add(chunk)

    def encode(self, chunk: int, out: U8) -> None:
        """Encode the sum into ``out`` and forget it. CodecError for values next to the largest
        float32: the parts have been checked."""
        total = self._sums.pop(chunk)
        if self.in_place(chunk):
            if chunk in self._doubtful:
                self._codec.check(out, self._grid.size(chunk))
            return
        try:
            self._codec.encode(total[: self._grid.size(chunk)], out)
        finally:
            self._floats.give(total)
