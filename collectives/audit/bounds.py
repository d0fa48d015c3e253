"""Bound how far an honest owner's encoded result lies from the exact aggregate, by its bytes alone.

Bounds are float64[SKETCH_WIDTH] of one chunk: for each bucket of a sketch (sketch.py) the sum of
the squares of the largest error that each element may have::

    float32                          0
    bfloat16, float16                half the distance to the next number
    int8, int4, nearest or shifted   half a step of the block's scale
    int8_sr, int4_sr                 a whole step
    fp4_e3m0                         half the gap to the next level

Nothing is added for the scale: the value that it was rounded from is in no decoded number. Blocks
whose scale is 0 were flushed (codecs/scales.py). An honest scale is the largest value's, so some
value comes near the largest code; one that is larger than its values show is not believed, or a
large scale over zeros would excuse any error. What is beyond the largest number of a format is
clamped without a bound; it counts as if it had not been, so that nobody makes a check worthless
with a single number. Then an honest owner may fail a check, and recomputing its result shows so.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np

from atoll.collectives.audit.sketch import F64, SKETCH_WIDTH, bucket_sums
from atoll.collectives.codecs import F32, U8, BlockCodec, Codec
from atoll.collectives.errors import ConfigError
from atoll.collectives.native import KERNELS

# Peers in one round. Each says six things to each, and checks what everybody has said: with 64
# these are 25,000 messages and 24,000 signatures, some seconds of one core in all.
AUDITED_PEERS_MAX: Final = 64

# Steps, of codecs whose error does not depend on the code.
_STEPS: Final[Mapping[str, float]] = {
    "int8": 0.5,
    "int8_sr": 1.0,
    "int8_shift": 0.5,
    "int4": 0.5,
    "int4_sr": 1.0,
    "int4_shift": 0.5,
}
# The largest value of a block decodes to so many scales at least: a random rounding may take a
# step from it, a shift half a one.
_REACHED: Final[Mapping[str, float]] = {"int8": 126.0, "int4": 6.0, "fp4_": 15.0}
# The smallest normal number and half the relative distance of two numbers.
_HALVES: Final[Mapping[str, tuple[float, float]]] = {
    "bfloat16": (2.0**-126, 2.0**-8),
    "float16": (2.0**-14, 2.0**-11),
}
# Division, shift and multiplication round to float32, at most four times in all and at 127.5 steps
# at most: 2^-15 steps. That is a small part of half a step, and of the smallest gap of fp4_e3m0.
_ROUNDED: Final = 1 + 2.0**-12
_FLUSHED: Final = 1e-30  # the values of blocks without a scale are smaller
_UNIT: Final = 2.0**-24  # half the relative distance of two float32
_TILE_ELEMENTS: Final = 16_384  # whole blocks of any codec; small memory comes without page faults
_SMALLEST: Final = 2.0**-149  # the smallest float32: what a product that underflows may lose


def check_codec(codec: Codec) -> None:
    """Raise ConfigError unless there are bounds for a codec.

    With others owners cannot be checked.
    """
    if codec.name not in ("float32", "fp4_e3m0", *_STEPS, *_HALVES):
        known = ", ".join(["float32", *_HALVES, *_STEPS, "fp4_e3m0"])
        raise ConfigError(
            f"audited rounds cannot have results in {codec.name}: nothing bounds their error",
            fix=f"use one of {known}",
        )


def error_bounds(codec: Codec, data: U8, count: int, values: F32 | None = None) -> F64:
    """Return the bounds of encoding, of a chunk of ``count`` elements, float64[SKETCH_WIDTH].

    ``values``: as they are decoded, if they are at hand. Raises CodecError for malformed bytes, and
    ConfigError for a codec without bounds.
    """
    check_codec(codec)
    if values is None:
        values = np.empty(count, np.float32)
        codec.decode(data, values)  # which checks them
    if isinstance(codec, BlockCodec):
        block = codec.contract.block
        shown = _largest(values, block) / np.float64(_REACHED[codec.name[:4]])
        scales = np.minimum(codec.block_scales(data, count), shown)
        if codec.name in _STEPS:
            return _of_steps(scales * _STEPS[codec.name], block, count)
        return bucket_sums(_of_levels(values, scales, block))
    if codec.name in _HALVES:
        smallest, half = _HALVES[codec.name]
        exponents = values.view(np.uint32) & np.uint32(0x7F80_0000)
        errors = np.maximum(exponents.view(np.float32), np.float32(smallest)).astype(np.float64)
        np.multiply(errors, half, out=errors)
        return bucket_sums(np.multiply(errors, errors, out=errors))
    return np.zeros(SKETCH_WIDTH)


def widened(bounds: F64, coefficients: F64, norms: F32, result_norm: float, count: int) -> F64:
    """Return the bounds of a result whose sum was itself computed in float32.

    The sum is ``sum of coefficients[i] g_i``. ``norms[i]`` is |g_i - R| over the chunk of ``count``
    elements and ``result_norm`` is |R|. With n parts each element is rounded n + 1 times at most,
    so its error is no more than ``(n + 1) 2^-24 sum of |c_i g_i|``, and in no bucket the length of
    all these errors is more than ``(n + 1) 2^-24 sum of |c_i| (|g_i - R| + |R|)``. Lengths of
    errors add up, not their squares.
    """
    longest = float((np.abs(coefficients) * (norms.astype(np.float64) + result_norm)).sum())
    rounding = (len(norms) + 2) * (_UNIT * longest + _SMALLEST * np.sqrt(count))
    return np.asarray((np.sqrt(bounds) + rounding) ** 2)


def _largest(values: F32, block: int) -> F32:
    """Return the largest magnitude of each block."""
    found: F32 = np.empty(-(-values.size // block), np.float32)
    if KERNELS is not None:
        KERNELS.peaks(values, block, found)
        return found
    for lo in range(0, values.size, _TILE_ELEMENTS):
        magnitudes = np.abs(values[lo : lo + _TILE_ELEMENTS])
        starts = np.arange(0, magnitudes.size, block)
        np.maximum.reduceat(magnitudes, starts, out=found[lo // block :][: starts.size])
    return found


def _of_steps(errors: F64, block: int, count: int) -> F64:
    """Return the bounds that follow from the errors of the elements of each block.

    ``errors`` are these; a block has as many elements of each bucket.
    """
    squares = np.where(errors > 0, errors * _ROUNDED, _FLUSHED) ** 2
    whole = count // block
    sums: F64 = np.full(SKETCH_WIDTH, squares[:whole].sum() * (block // SKETCH_WIDTH))
    sums += bucket_sums(np.repeat(squares[whole:], count - whole * block))
    return sums


def _of_levels(values: F32, scales: F64, block: int) -> F64:
    whole = values.size - values.size % block
    divisors = np.where(scales > 0, scales, 1.0).astype(np.float32)
    factors = np.where(scales > 0, divisors.astype(np.float64) * _ROUNDED, _FLUSHED) ** 2
    by_block = _half_gaps(values[:whole].reshape(-1, block), divisors)
    by_bucket = by_block.reshape(-1, block // SKETCH_WIDTH, SKETCH_WIDTH).sum(axis=1)
    sums: F64 = (by_bucket * factors[: len(by_bucket), None]).sum(axis=0)
    if whole < values.size:
        rest = _half_gaps(values[None, whole:], divisors[-1:])[0]
        sums += bucket_sums(rest.astype(np.float64)) * factors[-1]
    return sums


def _half_gaps(rows: F32, scales: F32) -> F32:
    """Return the squares of half the gaps to the next levels, in units of each row's scale.

    A level is 0 or a power of two, and the gap to the next is as large as it is itself; 16 is the
    last and has 8 below.
    """
    halves: F32 = np.abs(rows)
    np.divide(halves, 2 * scales[: len(rows), None], out=halves)
    np.clip(halves, 1 / 8, 4, out=halves)
    return np.multiply(halves, halves, out=halves)
