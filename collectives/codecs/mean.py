"""Keep as a result the mean of parts, in more bits than the parts had.

What a coarse codec leaves out of a part is kept by who sent it, and goes with its next one (error
feedback). Of an encoded mean nobody would keep what is left out: so that travels in a finer codec.
Of n peers in a butterfly each sends (n - 1) / n of a vector in either: with parts of two bits and
a mean of four three quarters of what int4 takes for both.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from atoll.collectives.codecs.base import F32, U8, Codec


class MeanCodec(Codec):
    """Encode a result as ``whole`` does, where its parts are encoded as ``parts`` says."""

    def __init__(self, parts: Codec, whole: Codec) -> None:
        self._parts, self._whole = parts, whole
        self.name = f"{whole.name} of {parts.name}"
        self.contract = whole.contract

    @property
    def part_codec(self) -> Codec:
        return self._parts

    def encoded_bytes(self, count: int) -> int:
        return self._whole.encoded_bytes(count)

    def encode(self, values: F32, out: U8, key: int = 0) -> None:
        self._whole.encode(values, out, key)

    def check(self, data: U8, count: int) -> None:
        self._whole.check(data, count)

    def decode(self, data: U8, out: F32) -> None:
        self._whole.decode(data, out)

    def decode_add(self, data: U8, factor: float, into: F32) -> None:
        self._whole.decode_add(data, factor, into)

    def decode_columns(self, parts: Sequence[U8], count: int, lo: int, out: F32) -> bool:
        return self._whole.decode_columns(parts, count, lo, out)


@lru_cache
def mean_codec(parts: Codec, whole: Codec) -> MeanCodec:
    """Return the same codec object for the same two."""
    return MeanCodec(parts, whole)
