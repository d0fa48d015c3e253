"""Keep as a result the mean of parts, in more bits than the parts had.

What a coarse codec leaves out of a part is kept by who sent it, and goes with its next one (error
feedback). Of an encoded mean nobody would keep what is left out: so that travels in a finer codec.
Of n peers in a butterfly each sends (n - 1) / n of a vector in either: with parts of two bits and
a mean of four three quarters of what int4 takes for both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from atoll.collectives.codecs.base import F32, U8, Codec, Contract


@dataclass(frozen=True)
class MeanCodec(Codec):
    """Encode a result as ``whole`` does, where its parts are encoded as ``parts`` says."""

    parts: Codec
    whole: Codec

    @cached_property
    def name(self) -> str:  # type: ignore[override]  # of a codec it is a constant
        return f"{self.whole.name} of {self.parts.name}"

    @property
    def contract(self) -> Contract:  # type: ignore[override]
        return self.whole.contract

    @property
    def part_codec(self) -> Codec:
        return self.parts

    def encoded_bytes(self, count: int) -> int:
        return self.whole.encoded_bytes(count)

    def encode(self, values: F32, out: U8, key: int = 0) -> None:
        self.whole.encode(values, out, key)

    def check(self, data: U8, count: int) -> None:
        self.whole.check(data, count)

    def decode(self, data: U8, out: F32) -> None:
        self.whole.decode(data, out)

    def decode_add(self, data: U8, factor: float, into: F32) -> None:
        self.whole.decode_add(data, factor, into)

    def decode_columns(self, parts: Sequence[U8], count: int, lo: int, out: F32) -> bool:
        return self.whole.decode_columns(parts, count, lo, out)
