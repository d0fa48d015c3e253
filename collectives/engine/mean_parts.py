"""Add up the parts of a chunk, and encode the sum once more: this makes most results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np

from atoll.collectives.codecs import F32, U8, Codec, get_codec
from atoll.collectives.engine.parts import Parts
from atoll.collectives.engine.result import RoundResult
from atoll.collectives.native import KERNELS

EXACT: Final = get_codec("float32")


class Sums(Parts):
    """Add up the parts of each chunk of a reduction.

    ``codec`` is that of parts and partial sums; ``factors`` are the weights of the participants'
    parts; ``is_root(chunk)`` says whether the sum of a chunk here is the whole; ``fold`` is one of
    plan.FOLDS: what is called a sum may be the largest or smallest of each element.
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
        super().__init__(result, codec, source, own)
        assert isinstance(result.codec, Codec)
        self._whole, self._is_root = result.codec, is_root
        self._pick = {"max": np.maximum, "min": np.minimum}.get(fold)  # instead of adding
        self._is_exact = self._whole.contract.kind == "exact"
        self._factors = factors
        self._sums: dict[int, F32] = {}
        self._doubtful: set[int] = set()  # in place, and not known to be finite

    def in_place(self, chunk: int) -> bool:
        return self._is_exact and self._is_root(chunk)

    def part(self, chunk: int, buffer: U8, *, own: bool) -> U8:
        if own or chunk not in self._sums:
            return self._encode_own(chunk, buffer)
        payload = buffer[: self._layout.size(chunk)]
        self.encode(chunk, payload)
        return payload

    def add(self, chunk: int, participant: int | None, buffer: U8) -> None:
        factor = 1.0 if participant is None else self._factors[participant]
        self._weigh(self._codec, chunk, factor, buffer[: self._layout.size(chunk)])
        self.encoded.give(buffer)

    def add_own(self, chunk: int, me: int, *, coded: bool) -> None:
        if coded and self._codec.contract.kind != "exact":
            encoded = self.encoded.take()
            part = self._encode_own(chunk, encoded)
            if not np.may_share_memory(part, encoded):
                np.copyto(encoded[: part.size], part)
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
        """Encode the sum of a chunk into ``out``, and forget it.

        Raises CodecError for values next to the largest float32 only: the parts have been checked.
        """
        total = self._sums.pop(chunk)
        codec = self._whole if self._is_root(chunk) else self._codec
        if self.in_place(chunk):
            if chunk in self._doubtful:
                codec.check(out, self._grid.size(chunk))
            return
        try:
            codec.encode(total[: self._grid.size(chunk)], out)
        finally:
            self._floats.give(total)
