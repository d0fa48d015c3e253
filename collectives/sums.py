"""The arithmetic of one reduction: own contributions are encoded, parts of all are added up.

It decides nothing: the engine says whose part is added when, one thread at a time for each chunk.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

import numpy as np

from atoll.collectives.buffers import BufferPool
from atoll.collectives.chunks import encoded_layout
from atoll.collectives.codecs import F32, U8, Codec, get_codec
from atoll.collectives.native import KERNELS
from atoll.collectives.result import RoundResult

__all__ = ["ENCODERS_MAX", "Sums"]

# Chunks that are filled and encoded at the same time. Each takes a float32 chunk, and this many
# cores encode more than 100 Gbit/s of float32, so more would take memory and bring nothing.
ENCODERS_MAX: Final = 4
EXACT: Final = get_codec("float32")


class Sums:
    """``codec`` is that of parts and partial sums; ``factors`` weight the participants' parts;
    ``is_root(chunk)``: whether its sum here is the whole; ``fold``: what is called a sum may be the
    largest or smallest of each element (plan.FOLDS). Buffers that ``encoded`` lends are given back
    to it, but where bytes could not be decoded: then the reduction fails anyway.

    ``source(chunk, out)`` fills in the own part; ``own(chunk)``, if given, shows where it lies.
    What they raise goes on to the caller.
    """

    def __init__(
        self,
        result: RoundResult,
        codec: Codec,
        factors: tuple[float, ...],
        is_root: Callable[[int], bool],
        source: Callable[[int, F32], None],
        own: Callable[[int], F32] | None = None,
        fold: str = "mean",
    ) -> None:
        self._result, self._is_root = result, is_root
        self._pick = {"max": np.maximum, "min": np.minimum}.get(fold)  # instead of adding
        self._codec, self._grid = codec, result.grid
        self._layout = encoded_layout(result.grid, codec)
        self.encoded = BufferPool(self._layout.chunk_bytes, np.uint8)
        self._floats = BufferPool(result.grid.size(0), np.float32)
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

    def part(self, chunk: int, buffer: U8, *, own: bool) -> U8:
        """What to send of a chunk: the sum, if there is one here, else, or if it must be ``own``,
        the own part; in ``buffer`` or where it lies. CodecError."""
        if own or chunk not in self._sums:
            return self._encode_own(chunk, buffer)
        payload = buffer[: self._layout.size(chunk)]
        self.encode(chunk, payload)
        return payload

    def _encode_own(self, chunk: int, buffer: U8) -> U8:
        if self._own is not None and self._codec.contract.kind == "exact":
            where = self._own(chunk).view(np.uint8)
            self._codec.check(where, self._grid.size(chunk))
            return where
        out = buffer[: self._layout.size(chunk)]
        if self._own is not None:
            self._codec.encode(self._own(chunk), out)
            return out
        with self._encoders:
            floats = self._floats.take()
            try:
                values = floats[: self._grid.size(chunk)]
                self._source(chunk, values)
                self._codec.encode(values, out)
            finally:
                self._floats.give(floats)
        return out

    def copied(self, payload: U8, buffer: U8) -> U8 | None:
        """A copy, for ``add``, of the own part that lies in ``buffer``. None if ``payload`` shows
        where the part lies: from there ``add_own`` adds it."""
        if not np.may_share_memory(payload, buffer):
            return None
        copy = self.encoded.take()
        copy[: payload.size] = payload
        return copy

    def add(self, chunk: int, participant: int | None, buffer: U8) -> None:
        """Add the part of a participant, or a sum of several, which has its weights already (None);
        and give the buffer back. CodecError."""
        factor = 1.0 if participant is None else self._factors[participant]
        self._weigh(self._codec, chunk, factor, buffer[: self._layout.size(chunk)])
        self.encoded.give(buffer)

    def add_own(self, chunk: int, me: int, *, coded: bool) -> None:
        """Add the own part as it is, or ``coded``: as others decode it. CodecError."""
        if coded and self._codec.contract.kind != "exact":
            encoded = self.encoded.take()
            self._encode_own(chunk, encoded)
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
        if self._pick is not None:
            self._pick_from(codec, data, total, is_first)
            return
        if codec.contract.kind == "exact" and KERNELS is not None:
            if not KERNELS.weigh(data, factor, total, is_first):
                codec.check(data, total.size)  # else the sum is too large: see `encode`
                self._doubtful.add(chunk)
            return
        if is_first:
            total.fill(0)
        codec.decode_add(data, factor, total)
        self._doubtful.add(chunk)

    def _pick_from(self, codec: Codec, data: U8, total: F32, is_first: bool) -> None:
        if is_first:
            codec.decode(data, total)
            return
        assert self._pick is not None
        buffer = self._floats.take()
        try:
            values = buffer[: total.size]
            codec.decode(data, values)
            self._pick(total, values, out=total)
        finally:
            self._floats.give(buffer)

    def encode(self, chunk: int, out: U8) -> None:
        """Encode the sum into ``out`` and forget it. CodecError for values next to the largest
        float32: the parts have been checked."""
        total = self._sums.pop(chunk)
        codec = self._result.codec if self._is_root(chunk) else self._codec
        if self.in_place(chunk):
            if chunk in self._doubtful:
                codec.check(out, self._grid.size(chunk))
            return
        try:
            codec.encode(total[: self._grid.size(chunk)], out)
        finally:
            self._floats.give(total)
