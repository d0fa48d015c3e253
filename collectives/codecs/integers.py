"""Encode in int8 and int4: symmetric integers times one float32 scale for each block.

``scale = absmax / M`` with M = 127 or 7, and ``y = x / scale``. Three ways to round::

    int8, int4               code = rint(y), ties to even            value = code * scale
    int8_sr, int4_sr         code = floor(y) + (u < y - floor(y))    value = code * scale
    int8_shift, int4_shift   code = rint(y - s)                      value = (code + s) * scale

u is a random number for each element, word ``element`` of the key's stream over 2**32 and cut to 24
bits, in [0, 1). s is one for each block, ``((word >> 16) + 0.5) / 65536 - 0.5`` of word ``block``,
in (-1/2, 1/2), which the decoder computes too: the key is in the header. Both are unbiased (to
2**-24 and 2**-17 of a step). The shift is the cheaper: no random number for each element, and about
the error of rounding to nearest, where stochastic rounding has at least twice that (QSDP, arXiv
2302.02390). y is clamped to [-M, M] before a random rounding and y - s before a shifted one, which
matters where absmax / scale comes out above M. Codes are two's complement, never -128 or -8.
"""

from __future__ import annotations

from typing import ClassVar, Final, Literal

import numpy as np

from atoll.collectives.codecs.base import (
    F32,
    TILE_ELEMENTS,
    U8,
    WORK_ELEMENTS,
    Contract,
    Errors,
    scratch,
)
from atoll.collectives.codecs.blocks import BlockCodec, absolute_block_error
from atoll.collectives.codecs.packing import byte_table, check_codes, expand, pack
from atoll.collectives.codecs.scales import FloatScales
from atoll.collectives.counter_rng import random_words, unit_floats
from atoll.collectives.errors import CodecError

# One scale per 256 elements costs 0.125 bit per element. Against one scale per tensor it gains two
# to three orders of magnitude in error on heavy tails.
BLOCK_ELEMENTS: Final = 256
# Steps of 4 bits are 18 times as wide, so that the smaller error is worth 0.5 bit per element.
INT4_BLOCK: Final = 64
KEY_BYTES: Final = 8

_NIBBLES: Final = byte_table([0, 1, 2, 3, 4, 5, 6, 7, np.nan, -7, -6, -5, -4, -3, -2, -1], 4)


class IntegerCodec(BlockCodec):
    """Encode in codes from ``-code_max`` to ``code_max``."""

    code_max: ClassVar[int]
    rounding: ClassVar[Literal["nearest", "stochastic", "shift"]] = "nearest"

    def _encode_rows(self, rows: F32, scales: U8, codes: U8, lo: int, key: int) -> None:
        divisors = self.scales.fit(rows, scales)
        tile: F32 = scratch("tile", np.float32, rows.size).reshape(rows.shape)
        np.divide(rows, divisors[:, None], out=tile)
        if self.bits == 8:
            self._round(tile, codes, lo, key)
            return
        whole: U8 = scratch("codes", np.uint8, rows.size)
        self._round(tile, whole, lo, key)
        np.bitwise_and(whole, 15, out=whole)
        pack(whole, 4, codes)

    def _round(self, rows: F32, codes: U8, lo: int, key: int) -> None:
        """Round (blocks, width), which may be written over, to uint8[blocks * width]."""
        flat, signed = rows.reshape(-1), codes.view(np.int8)
        if self.rounding == "stochastic":
            # absmax / scale may come out one step above code_max.
            np.clip(flat, -self.code_max, self.code_max, out=flat)
            floor: F32 = scratch("floor", np.float32, flat.size)
            np.floor(flat, out=floor)
            np.subtract(flat, floor, out=flat)
            np.copyto(signed, floor, casting="unsafe")
            words = scratch("words", np.uint32, flat.size)
            random_words(key, lo, words)
            up = scratch("up", np.bool_, flat.size)
            np.less(unit_floats(words), flat, out=up)
            np.add(signed, up.view(np.int8), out=signed)
            return
        if self.rounding == "shift":
            np.subtract(rows, self._shifts(lo, len(rows), key)[:, None], out=rows)
            np.clip(rows, -self.code_max, self.code_max, out=rows)
        np.rint(flat, out=flat)
        np.copyto(signed, flat, casting="unsafe")

    def _shifts(self, lo: int, blocks: int, key: int) -> F32:
        """Return a shift for each block from the one that begins with element ``lo``."""
        words = scratch("shifts", np.uint32, blocks)
        random_words(key, lo // self.contract.block, words)
        np.right_shift(words, 16, out=words)
        shifts: F32 = words.astype(np.float32)
        np.add(shifts, np.float32(0.5), out=shifts)
        np.multiply(shifts, np.float32(2**-16), out=shifts)
        return np.subtract(shifts, np.float32(0.5), out=shifts)

    def _check_codes(self, codes: U8) -> None:
        if self.bits == 4:
            check_codes(codes, _NIBBLES, self.name)
        elif codes.size and codes.view(np.int8).min() < -self.code_max:
            at = int(codes.view(np.int8).argmin())
            raise CodecError(f"the {self.name} code -128 at element {at} is not allowed")

    def _decode_codes(self, codes: U8, lo: int, key: int, out: F32) -> None:
        if self.bits == 4:
            expand(codes, _NIBBLES, out)
        else:
            # Convert, then multiply: one call with mixed types goes through numpy's small buffers.
            np.copyto(out, codes.view(np.int8))
        if self.rounding == "shift":
            rows = out.reshape(-1, min(self.contract.block, out.size))
            np.add(rows, self._shifts(lo, len(rows), key)[:, None], out=rows)


def _contract(
    kind: Literal["unbiased", "contractive"],
    bits: int,
    block: int,
    error_max: float,
    errors: Errors,
    header_bytes: int = 0,
) -> Contract:
    keyed = kind == "unbiased"
    per_element = bits + 32 / block
    return Contract(kind, per_element, block, error_max, errors, header_bytes, keyed, not keyed)


class Int8Codec(IntegerCodec):
    """Encode in symmetric absmax int8 with one float32 scale per 256 elements."""

    name = "int8"
    bits, code_max = 8, 127
    scales = FloatScales(127, 1, 127)
    tile_elements = TILE_ELEMENTS
    contract = _contract(
        "contractive",
        8,
        BLOCK_ELEMENTS,
        absolute_block_error(BLOCK_ELEMENTS, 0.5 / 127),
        Errors(4.9e-5, 1.0e-4, 3.3e-4),
    )


class Int8StochasticCodec(Int8Codec):
    """Encode in int8, rounded up or down at random. Its key must differ for each vector."""

    name = "int8_sr"
    rounding = "stochastic"
    tile_elements = WORK_ELEMENTS
    # The variance of an element is a quarter of a squared step at most.
    contract = _contract(
        "unbiased", 8, BLOCK_ELEMENTS, 255 / 4 / 127**2, Errors(9.8e-5, 2.0e-4, 6.6e-4)
    )


class Int8ShiftCodec(Int8Codec):
    """Encode in int8 on a grid that is shifted at random for each block."""

    name = "int8_shift"
    rounding = "shift"
    scales = FloatScales(127, 2**-17, 127.5)
    # The error is evenly distributed over one step, whatever the value.
    contract = _contract(
        "unbiased",
        8,
        BLOCK_ELEMENTS,
        256 / 12 / 127**2,
        Errors(4.9e-5, 1.0e-4, 3.05e-4),
        KEY_BYTES,
    )


class Int4Codec(IntegerCodec):
    """Encode in symmetric absmax int4 with one float32 scale per 64 elements."""

    name = "int4"
    bits, code_max = 4, 7
    scales = FloatScales(7, 1, 7)
    tile_elements = TILE_ELEMENTS
    contract = _contract(
        "contractive",
        4,
        INT4_BLOCK,
        absolute_block_error(INT4_BLOCK, 0.5 / 7),
        Errors(1.2e-2, 2.0e-2, 3.1e-2),
    )


class Int4StochasticCodec(Int4Codec):
    """Encode in int4, rounded up or down at random. Its key must differ for each vector."""

    name = "int4_sr"
    rounding = "stochastic"
    tile_elements = WORK_ELEMENTS
    contract = _contract("unbiased", 4, INT4_BLOCK, 63 / 4 / 49, Errors(2.3e-2, 4.0e-2, 7.0e-2))


class Int4ShiftCodec(Int4Codec):
    """Encode in int4 on a grid that is shifted at random for each block."""

    name = "int4_shift"
    rounding = "shift"
    scales = FloatScales(7, 2**-17, 7.5)
    contract = _contract(
        "unbiased", 4, INT4_BLOCK, 64 / 12 / 49, Errors(1.17e-2, 2.05e-2, 3.96e-2), KEY_BYTES
    )
