"""Encode one number for each element, without scales: float32 as it is, and its two 16-bit halves.

    float32    n * float32
    bfloat16   n * the upper 16 bits of float32, nearest, ties to even
    float16    n * IEEE binary16, nearest, ties to even

Values beyond the largest finite number of the format are clamped to it.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from atoll.collectives.codecs.base import (
    F32,
    TILE_ELEMENTS,
    U8,
    Contract,
    Errors,
    TiledCodec,
    check_finite,
    scratch,
)
from atoll.collectives.errors import CodecError

BFLOAT16_MAX: Final = 2.0**128 - 2.0**120
FLOAT16_MAX: Final = 65504.0


class Float32Codec(TiledCodec):
    """Keep the values as they are; the reference that other codecs are compared with."""

    name = "float32"
    contract = Contract("exact", 32.0, 1)
    tile_elements = TILE_ELEMENTS

    def encoded_bytes(self, count: int) -> int:
        return 4 * count

    def encode(self, values: F32, out: U8, key: int = 0) -> None:
        self._check_length(out, values.size)
        check_finite(values)
        np.copyto(out.view("<f4"), values)

    def check(self, data: U8, count: int) -> None:
        self._check_length(data, count)
        check_finite(data.view("<f4"))

    def decode(self, data: U8, out: F32) -> None:
        self.check(data, out.size)
        np.copyto(out, data.view("<f4"))

    def decode_add(self, data: U8, factor: float, into: F32) -> None:
        self.check(data, into.size)
        values = data.view("<f4")
        for lo, hi, _ in self._tiles(into.size):
            scaled = scratch("decoded", np.float32, hi - lo)
            np.multiply(values[lo:hi], np.float32(factor), out=scaled)
            np.add(into[lo:hi], scaled, out=into[lo:hi])

    def _decode_tile(self, data: U8, count: int, lo: int, out: F32) -> None:
        np.copyto(out, data[4 * lo : 4 * (lo + out.size)].view("<f4"))


class _HalfCodec(TiledCodec):
    """Encode each element in two bytes. ``exponent`` are the bits that NaN and infinity set."""

    exponent: int
    value_max: float

    def encoded_bytes(self, count: int) -> int:
        return 2 * count

    def encode(self, values: F32, out: U8, key: int = 0) -> None:
        self._check_length(out, values.size)
        for lo, hi, _ in self._tiles(values.size):
            check_finite(values[lo:hi])
            clamped = scratch("tile", np.float32, hi - lo)
            np.clip(values[lo:hi], -self.value_max, self.value_max, out=clamped)
            self._encode_tile(clamped, out[2 * lo : 2 * hi])

    def check(self, data: U8, count: int) -> None:
        self._check_length(data, count)
        words = data.view("<u2")
        for lo, hi, _ in self._tiles(count):
            magnitudes = scratch("halves", np.uint16, hi - lo)
            np.bitwise_and(words[lo:hi], 0x7FFF, out=magnitudes)
            if magnitudes.max() >= self.exponent:
                at = lo + int(magnitudes.argmax())
                raise CodecError(f"NaN or infinity in {self.name} at element {at}")

    def _encode_tile(self, values: F32, out: U8) -> None:
        """Encode clamped values, which may be written over."""
        np.copyto(out.view("<f2"), values, casting="unsafe")

    def _decode_tile(self, data: U8, count: int, lo: int, out: F32) -> None:
        np.copyto(out, data[2 * lo : 2 * (lo + out.size)].view("<f2"))


class Float16Codec(_HalfCodec):
    """Encode in IEEE half precision. Below 6.1e-5 it loses precision, and below 3e-8 everything."""

    name = "float16"
    # For magnitudes from 6.1e-5 to 65,504.
    contract = Contract("contractive", 16.0, 1, 2.0**-22, Errors(4.3e-8, 4.3e-8, 4.3e-8))
    exponent = 0x7C00
    value_max = FLOAT16_MAX


class Bfloat16Codec(_HalfCodec):
    """Encode in bfloat16: the range of float32 with 8 bits of precision."""

    name = "bfloat16"
    contract = Contract("contractive", 16.0, 1, 2.0**-16, Errors(2.8e-6, 2.8e-6, 2.8e-6))
    exponent = 0x7F80
    value_max = BFLOAT16_MAX

    def _encode_tile(self, values: F32, out: U8) -> None:
        bits = values.view(np.uint32)
        odd = scratch("rounding", np.uint32, bits.size)
        np.right_shift(bits, 16, out=odd)
        np.bitwise_and(odd, 1, out=odd)
        np.add(odd, 0x7FFF, out=odd)
        np.add(bits, odd, out=bits)
        np.right_shift(bits, 16, out=bits)
        np.copyto(out.view("<u2"), bits, casting="unsafe")

    def _decode_tile(self, data: U8, count: int, lo: int, out: F32) -> None:
        bits = out.view(np.uint32)
        np.copyto(bits, data[2 * lo : 2 * (lo + out.size)].view("<u2"))
        np.left_shift(bits, 16, out=bits)
