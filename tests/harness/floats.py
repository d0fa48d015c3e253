"""Vectors on which two forms of a codec may differ: limits, ties, unaligned memory, any bits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from atoll.collectives.codecs import F32, NUMPY_CODECS
from atoll.collectives.codecs.blocks import BlockCodec
from atoll.collectives.codecs.levels import LevelCodec
from atoll.collectives.codecs.scales import FloatScales, PowerScales

__all__ = [
    "MAX",
    "any_values",
    "around_limits",
    "finite",
    "halfway",
    "near_ties",
    "normal",
    "shifted",
    "special_values",
]

MAX, TINY = np.finfo(np.float32).max, np.finfo(np.float32).tiny

# float32's limits, int8's and int4's codes, steps of bfloat16 and float16, levels of fp4_e3m0.
SPECIAL = [0.0, -0.0, 1.0, -1.0, 127.0, 16.0, 7.0, 1e-45, -1e-45, 1.1754942e-38, float(TINY)]
SPECIAL += [float(TINY) * 127, 0.5, 1.5, -2.5, 3.0, 6.0, 12.0, 0.125, 0.75, float(MAX), -float(MAX)]
SPECIAL += [65504.0, 65519.996, 65520.0, -1e5, 2.0**-14, 2.0**-24, 2.0**-25, 2047.5 * 2.0**-25]
SPECIAL += [1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-11, 1 - 2.0**-24, 2.0**128 - 2.0**119]
SPECIAL += [
    float(codec.scales.high)
    for codec in NUMPY_CODECS.values()
    if isinstance(codec, BlockCodec) and isinstance(codec.scales, FloatScales)
]
SPECIAL_VALUES = np.array(SPECIAL, np.float32)


def finite(data: bytes) -> F32:
    """Any bits, but of infinities and NaN one bit is cleared."""
    bits = np.frombuffer(data[: len(data) // 4 * 4], np.uint32)
    return np.where(bits >> 23 & 255 == 255, bits & 0xBFFF_FFFF, bits).view(np.float32)


any_values = st.binary(max_size=2800).map(finite)
special_values = st.binary(max_size=300).map(
    lambda data: SPECIAL_VALUES[np.frombuffer(data, np.uint8) % SPECIAL_VALUES.size]
)


def normal(count: int, seed: int) -> F32:
    """Values over many binades, so that blocks differ."""
    random = np.random.default_rng(seed)
    spread = np.exp2(random.integers(-30, 30, count // 50 + 1).repeat(50)[:count])
    return (random.standard_normal(count) * spread).astype(np.float32)


def shifted(values: NDArray[Any], by: int) -> NDArray[Any]:
    """The same values, ``by`` elements into a buffer: vectors there are not aligned."""
    buffer = np.empty(values.size + by, values.dtype)
    buffer[by:] = values
    return buffer[by:]


def near_ties(codec: BlockCodec) -> Iterator[F32]:
    """Blocks of values between two codes, and of their neighbours. With powers of two as scales
    every quotient is exact; with others it is rounded."""
    block = codec.contract.block
    if isinstance(codec, LevelCodec):
        levels = codec.levels.values[: codec.levels.count]
        top, ties = levels[-1], (levels[1:] + levels[:-1]) / 2
    else:
        assert isinstance(codec.scales, FloatScales)
        top = codec.scales.divisor
        ties = np.arange(top, dtype=np.float32) + np.float32(0.5)
    near = np.concatenate([np.nextafter(ties, np.float32(side)) for side in (0, 99)] + [ties])
    for factor in (1.0, 2.0**-100, 2.0**90, 3.3, 1e-30):
        scale = np.float32(factor)
        for sign in (1, -1):
            row: F32 = np.full(block, top * scale)
            for lo in range(0, near.size, block - 1):
                part = near[lo : lo + block - 1] * scale * np.float32(sign)
                row[: part.size] = part
                yield row


def around_limits(codec: BlockCodec, steps: int = 130) -> Iterator[F32]:
    """Short blocks whose largest magnitude lies up to so many floats from where a scale becomes 0
    or reaches its maximum."""
    scales = codec.scales
    if isinstance(scales, PowerScales):
        ends = (scales.low + scales.exponent_max, scales.high + scales.exponent_max)
        low, high = np.array([end << 23 for end in ends], np.int32).view(np.float32)
    else:
        assert isinstance(scales, FloatScales)
        low, high = scales.low * scales.divisor, scales.high * scales.divisor
    for limit in (0, low, high, MAX):
        for step in range(-steps, steps + 1):
            top = np.float32(limit).view(np.int32) + np.int32(step)
            value = np.clip(top, 0, MAX.view(np.int32)).astype(np.int32).view(np.float32)
            for row in (value, -value):
                yield np.array([row, row / 2, -row / 3], np.float32)


def halfway(codec: str) -> Iterator[F32]:
    """Around every middle of two neighbours of bfloat16 or float16, of both signs."""
    bits = {"bfloat16": 16, "float16": 19}[codec]  # of float32's, that are kept
    upper = np.arange(0, 1 << bits, dtype=np.uint32) << np.uint32(32 - bits)
    middle = upper | np.uint32(1 << 31 - bits)
    values = np.concatenate([middle - 1, middle, middle + 1, upper]).view(np.float32)
    yield values[np.isfinite(values)]
    steps = np.arange(4100, dtype=np.float32) * np.float32(2**-26)  # float16's subnormal numbers
    yield from (steps, np.nextafter(steps, np.float32(1)), -steps)
