"""Find, store, check and read the scales of blocks.

A float32 scale is 0 or lies between ``low`` and ``high``. ``low`` is so large that every value that
is decoded is 0 or a normal number, so that a processor which flushes subnormal numbers to zero
decodes like every other. ``high`` is so small that none is infinite. Blocks whose scale would lie
below ``low`` are flushed: their scale is 0 and they decode to zeros.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from atoll.collectives.codecs.base import F32, U8, scratch
from atoll.collectives.errors import CodecError

_MAGNITUDE_BITS: Final = np.int32(0x7FFF_FFFF)
_FLOAT_MAX: Final = np.finfo(np.float32).max
# Below the smallest normal number absmax / 127 loses so many bits that a code could pass 127.
SCALE_MIN: Final = np.finfo(np.float32).tiny
# One step under float32's maximum / 127, so that 127 * scale cannot round up to infinity.
SCALE_MAX: Final = np.nextafter(_FLOAT_MAX / np.float32(127), np.float32(0))


def magnitudes_of(rows: F32) -> NDArray[np.int32]:
    """Return the magnitudes of (blocks, width) as int32, in the scratch of "tile".

    They order like their bits read as integers, and NaN and infinity come last.
    """
    magnitudes = scratch("tile", np.float32, rows.size).view(np.int32).reshape(rows.shape)
    return np.bitwise_and(rows.view(np.int32), _MAGNITUDE_BITS, out=magnitudes)


def absmax_of(rows: F32) -> F32:
    """Return the largest magnitude of each row of (blocks, width), in scratch.

    What it works on is ``magnitudes_of(rows)``, which it leaves as they are. Raises CodecError on
    NaN or infinity.
    """
    magnitudes = magnitudes_of(rows)
    absmax: F32 = scratch("absmax", np.float32, len(rows))
    # An integer maximum is twice as fast as one of floats, and finds NaN and infinity too.
    np.maximum.reduce(magnitudes, axis=1, out=absmax.view(np.int32))
    if not np.isfinite(absmax).all():
        raise CodecError("NaN or infinity cannot be encoded")
    return absmax


def fold(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the sum of each row, made in place and in the same order on every processor.

    The upper half is added to the lower half until one number is left. A row shorter than a power
    of two is as if zeros followed.
    """
    width = rows.shape[1]
    while width > 1:
        half = 1 << (width - 1).bit_length() - 1
        low, high = rows[:, : width - half], rows[:, half:width]
        np.add(low, high, out=low)
        width = half
    return rows[:, 0]


class Scales(ABC):
    """Find the scales of blocks, write them and read them.

    ``fit`` finds scales and writes them; ``size`` is the bytes of one.
    """

    size: int

    @abstractmethod
    def fit(self, rows: F32, out: U8) -> F32:
        """Write the scale of each row, and return what to divide the row by.

        That is its scale, or 1 where that is 0. Raises CodecError on NaN or infinity.
        """

    @abstractmethod
    def check(self, data: U8, name: str) -> None:
        """Raise CodecError unless every scale is one that ``fit`` may write."""

    @abstractmethod
    def load(self, data: U8) -> F32:
        """Return the scales as float32, perhaps in scratch."""


class FloatScales(Scales):
    """Keep scales as float32: the largest magnitude divided by ``divisor``.

    ``level_min`` and ``level_max`` are the smallest and largest magnitude, but 0, that a scale is
    multiplied with in decoding.
    """

    size = 4

    def __init__(self, divisor: float, level_min: float, level_max: float) -> None:
        self.divisor = np.float32(divisor)
        self.low = np.float32(SCALE_MIN * 2.0 ** math.ceil(-math.log2(level_min)))
        self.high = _FLOAT_MAX
        if level_max > 1:
            self.high = np.nextafter(_FLOAT_MAX / np.float32(level_max), np.float32(0))

    def fit(self, rows: F32, out: U8) -> F32:
        raw = absmax_of(rows)
        np.divide(raw, self.divisor, out=raw)
        return self.settle(raw, out)

    def settle(self, raw: F32, out: U8) -> F32:
        """Bring scales that are not negative into the range, and write them.

        Return what to divide by: the scales, or 1 where they are 0.
        """
        np.minimum(raw, self.high, out=raw)
        flushed = raw < self.low
        raw[flushed] = 0
        np.copyto(out.view("<f4"), raw)
        raw[flushed] = 1  # such values are below 1e-30, so their codes round to 0
        return raw

    def check(self, data: U8, name: str) -> None:
        scales = data.view("<f4")
        # NaN fails every comparison, and -0.0 carries a sign that encode never writes.
        valid = self._in_range(scales) | (scales.view("<u4") == 0)
        if not valid.all():
            block = int(np.argmin(valid))
            raise CodecError(f"the {name} scale of block {block} is not allowed: {scales[block]!r}")

    def _in_range(self, scales: F32) -> NDArray[Any]:
        return (scales >= self.low) & (scales <= self.high)

    def load(self, data: U8) -> F32:
        return data.view("<f4")


class SignedScales(FloatScales):
    """Keep scales as float32: the value of largest magnitude with its sign.

    Of two equal ones it is the positive.
    """

    def fit(self, rows: F32, out: U8) -> F32:
        absmax = absmax_of(rows)
        negative = np.maximum.reduce(rows, axis=1) < absmax
        divisors = self.settle(absmax, out)
        negative &= out.view("<u4") != 0
        np.negative(divisors, out=divisors, where=negative)
        np.copyto(out.view("<f4"), divisors, where=negative)
        return divisors

    def _in_range(self, scales: F32) -> NDArray[Any]:
        return super()._in_range(np.abs(scales))


class PowerScales(Scales):
    """Keep scales as E8M0, one byte: 2 ** (byte - 127), and 0 for byte 0.

    scale = 2 ** (floor(log2(absmax)) - exponent_max), ``exponent_max`` being that of the largest
    level (OCP Microscaling 1.0). There byte 0 is 2 ** -127, which is no normal number.
    """

    size = 1

    def __init__(self, exponent_max: int, exponent_min: int) -> None:
        """Take the exponents of the largest level, and of the smallest but 0."""
        self.exponent_max = exponent_max
        self.low, self.high = 1 - exponent_min, 254 - exponent_max

    def fit(self, rows: F32, out: U8) -> F32:
        bits = absmax_of(rows).view(np.int32)
        np.right_shift(bits, 23, out=bits)
        np.subtract(bits, self.exponent_max, out=bits)
        bits[bits < self.low] = 0
        np.copyto(out, bits, casting="unsafe")
        bits[bits == 0] = 127
        np.left_shift(bits, 23, out=bits)
        return bits.view(np.float32)

    def check(self, data: U8, name: str) -> None:
        # Byte 0 wraps around to 255 when 1 is taken away, so one maximum is not enough.
        valid = (data >= self.low) & (data <= self.high) | (data == 0)
        if not valid.all():
            block = int(np.argmin(valid))
            raise CodecError(f"the {name} scale of block {block} is not allowed: {data[block]}")

    def load(self, data: U8) -> F32:
        bits = scratch("powers", np.int32, data.size)
        np.copyto(bits, data)
        np.left_shift(bits, 23, out=bits)
        return bits.view(np.float32)
