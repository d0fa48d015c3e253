"""Encode each value as the nearest of a few uneven levels, times the block's scale.

    fp8_e4m3    sign, 4 bits of exponent, 3 of mantissa; up to 448      E8M0 scale of 32 elements
    fp8_e5m2    sign, 5 bits of exponent, 2 of mantissa; up to 57344    E8M0 scale of 32
    fp4_e2m1    0 .5 1 1.5 2 3 4 6, and negative                        E8M0 scale of 32
    fp4_e3m0    0 .25 .5 1 2 4 8 16, and negative                       absmax / 16 of 64
    dynamic8    256 levels, denser towards 0 (Dettmers, 1511.04561)     signed extreme of 256
    int2        .4528 and 1.5104, and negative (Lloyd-Max for Gauss)    least squares of 256

dynamic8's levels contain 1 but not -1. So its scale is the value of largest magnitude, with its
sign: that value is then kept as it is, and blocks that were decoded encode to the same bytes.

Not for sums that are encoded again on every hop of a ring (dynamic8 is): where the inputs are alike
these codecs err in the same direction each time, measured up to four times as much for 16 peers.

Codes are sign and magnitude, the sign being that of the value even where it becomes 0; those of
dynamic8 count its levels from the lowest. Values beyond the largest level take that. Of two equally
near levels the one with the even code is taken. fp8's codes for NaN and infinity are refused.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from atoll.collectives.codecs.base import F32, U8, Contract, Errors, scratch
from atoll.collectives.codecs.blocks import BlockCodec, absolute_block_error
from atoll.collectives.codecs.packing import byte_table, check_codes, expand, pack
from atoll.collectives.codecs.scales import FloatScales, PowerScales, Scales, SignedScales, fold


class Levels:
    """Hold the values of all codes, float32, and search them for the nearest.

    ``signed``: codes are sign and magnitude and ``values`` those of the positive half, ascending;
    else ``values`` are all levels, ascending. A code may follow whose value is NaN: it is refused.
    """

    def __init__(self, values: Sequence[float], bits: int, signed: bool = True) -> None:
        half = np.full(1 << bits - signed, np.nan, np.float32)
        half[: len(values)] = values
        self.count, self.bits, self.signed = len(values), bits, signed
        self.values: F32 = np.concatenate([half, -half]) if signed else half

    @functools.cached_property
    def table(self) -> F32:
        return byte_table(self.values.tolist(), self.bits)

    @functools.cached_property
    def thresholds(self) -> F32:
        """Return what a value must exceed to leave a code upwards, float32[codes].

        With signed codes the magnitude must.
        """
        levels = self.values[: self.count].astype(np.float64)
        middles = (levels[:-1] + levels[1:]) / 2  # exact: float32 has 29 bits fewer
        below = middles.astype(np.float32)
        low = np.float32(-np.inf)
        below = np.where(below > middles, np.nextafter(below, low), below)
        # A tie goes up where the upper code is even: then the threshold is one step lower.
        up = (below == middles) & (np.arange(1, self.count) % 2 == 0)
        below = np.where(up, np.nextafter(below, low), below)
        thresholds = np.full(self.values.size >> self.signed, np.inf, np.float32)
        thresholds[: below.size] = below
        return np.tile(thresholds, 1 + self.signed)

    @functools.cached_property
    def lowest(self) -> U8:
        """Return for all upper 16 bits the code of the lowest value, or magnitude, with them.

        That is uint8[65536].
        """
        upper = np.arange(0x8000, dtype=np.uint32) << 16
        steps = self.thresholds[: self.count - 1]
        positive = np.searchsorted(steps, upper.view(np.float32), "left")
        if self.signed:
            negative = positive | 1 << self.bits - 1
        else:
            negative = np.searchsorted(steps, -(upper | 0xFFFF).view(np.float32), "left")
        return np.concatenate([positive, negative]).astype(np.uint8)

    def nearest(self, values: F32, codes: U8) -> None:
        """Find the codes of float32[n], which is used up; at most a tile.

        At most one threshold lies among the floats that share their upper 16 bits, so the code is
        the lowest of these or the next.
        """
        cells = scratch("cells", np.uint32, values.size)
        np.right_shift(values.view(np.uint32), 16, out=cells)
        index = scratch("index", np.intp, values.size)
        np.copyto(index, cells)
        np.take(self.lowest, index, 0, codes, "clip")
        np.copyto(index, codes)
        thresholds = cells.view(np.float32)
        np.take(self.thresholds, index, 0, thresholds, "clip")
        if self.signed:
            np.absolute(values, out=values)
        above = scratch("above", np.bool_, values.size)
        np.greater(values, thresholds, out=above)
        np.add(codes, above.view(np.uint8), out=codes)


class LevelCodec(BlockCodec):
    """Encode each value as the nearest of ``levels``, times the scale."""

    def __init__(self, name: str, levels: Levels, scales: Scales, contract: Contract) -> None:
        self.name, self.levels, self.scales, self.contract = name, levels, scales, contract
        self.bits = levels.bits

    def _encode_rows(self, rows: F32, scales: U8, codes: U8, lo: int, key: int) -> None:
        pack(self._nearest(rows, self.scales.fit(rows, scales)), self.bits, codes)

    def _nearest(self, rows: F32, divisors: F32) -> U8:
        tile: F32 = scratch("tile", np.float32, rows.size)
        np.divide(rows, divisors[:, None], out=tile.reshape(rows.shape))
        codes: U8 = scratch("codes", np.uint8, rows.size)
        self.levels.nearest(tile, codes)
        return codes

    def _check_codes(self, codes: U8) -> None:
        check_codes(codes, self.levels.table, self.name)

    def _decode_codes(self, codes: U8, lo: int, key: int, out: F32) -> None:
        expand(codes, self.levels.table, out)


class Int2Codec(LevelCodec):
    """Choose the levels by the root mean square, then the scale that is best for them.

    With the root mean square itself as scale, a block with one large value would be made worse than
    if nothing was sent. This is never worse, and contractive: with the levels q of a block,
    ``scale = <x, q> / <q, q>``, sums in float64 in the order of ``scales.fold``.
    """

    def _encode_rows(self, rows: F32, scales: U8, codes: U8, lo: int, key: int) -> None:
        values = scratch("doubles", np.float64, rows.size).reshape(rows.shape)
        products = scratch("products", np.float64, rows.size).reshape(rows.shape)
        self.scales.fit(rows, scales)  # refuses what is not finite
        np.copyto(values, rows)
        np.multiply(values, values, out=products)
        rms: F32 = np.sqrt(fold(products) / rows.shape[1]).astype(np.float32)
        rms[rms < INT2_SCALES.low] = 1
        chosen = self._nearest(rows, rms)
        levels = scratch("levels", np.float32, rows.size)
        np.take(self.levels.values, chosen, 0, levels, "clip")
        np.copyto(products, levels.reshape(rows.shape))
        np.multiply(values, products, out=values)
        np.multiply(products, products, out=products)
        best = np.minimum(fold(values) / fold(products), INT2_SCALES.high)
        INT2_SCALES.settle(best.astype(np.float32), scales)
        pack(chosen, 2, codes)


def _float_levels(exponent_bits: int, mantissa_bits: int, top: float) -> list[float]:
    """Return the values of a small IEEE-like format from 0 to ``top``."""
    bias = (1 << exponent_bits - 1) - 1
    steps = 1 << mantissa_bits
    levels = [step / steps * 2.0 ** (1 - bias) for step in range(steps)]
    for exponent in range(1 - bias, (1 << exponent_bits) - bias):
        levels += [(1 + step / steps) * 2.0**exponent for step in range(steps)]
    return [level for level in levels if level <= top]


def _dynamic_levels() -> NDArray[np.float32]:
    """Return the 256 levels of dynamic8, ascending.

    They are for i = 0 ... 6 the 2**i midpoints of equal parts of [0.1, 1], times 10**(i - 6), with
    both signs; and 0 and 1.
    """
    levels = [0.0, 1.0]
    for i in range(7):
        bounds = np.linspace(0.1, 1, 2**i + 1)
        middles = (bounds[:-1] + bounds[1:]) / 2 * 10.0 ** (i - 6)
        levels += [*middles, *-middles]
    return np.sort(np.array(levels, np.float32))


DYNAMIC_LEVELS: Final = _dynamic_levels()
INT2_SCALES: Final = FloatScales(1, 0.4528, 1.5104)

# Above, a value may be clamped by 1/8 (fp8) or 1/4 of itself, which is more than rounding does to
# it. Below the smallest normal level it is off by half a step at most, a small part of the absmax.
LEVEL_CODECS: Final = (
    LevelCodec(
        "fp8_e4m3",
        Levels(_float_levels(4, 3, 448), 8),
        PowerScales(8, -9),
        Contract("contractive", 8.25, 32, 1 / 64 + 1e-4, Errors(8.6e-4, 1.0e-3, 1.1e-3)),
    ),
    LevelCodec(
        "fp8_e5m2",
        Levels(_float_levels(5, 2, 57344), 8),
        PowerScales(15, -16),
        Contract("contractive", 8.25, 32, 1 / 64 + 1e-4, Errors(2.9e-3, 3.0e-3, 3.1e-3)),
    ),
    LevelCodec(
        "fp4_e2m1",
        Levels(_float_levels(2, 1, 6), 4),
        PowerScales(2, -1),
        Contract("contractive", 4.25, 32, 1 / 16 + 31 / 16**2, Errors(1.3e-2, 1.6e-2, 2.0e-2)),
    ),
    LevelCodec(
        "fp4_e3m0",
        Levels([0, 0.25, 0.5, 1, 2, 4, 8, 16], 4),
        FloatScales(16, 0.25, 16),
        Contract("contractive", 4.5, 64, 1 / 9 + 63 / 128**2, Errors(3.5e-2, 3.2e-2, 2.4e-2)),
    ),
    LevelCodec(
        "dynamic8",
        Levels(DYNAMIC_LEVELS.tolist(), 8, signed=False),
        SignedScales(1, float(DYNAMIC_LEVELS[128]), 1),
        Contract(
            "contractive",
            8.125,
            256,
            absolute_block_error(256, 0.9 / 128),
            Errors(1.2e-4, 1.7e-4, 2.1e-4),
        ),
    ),
    Int2Codec(
        "int2",
        Levels([0.4528, 1.5104], 2),
        INT2_SCALES,
        Contract("contractive", 2.125, 256, 0.96, Errors(0.117, 0.186, 0.320), idempotent=False),
    ),
)
