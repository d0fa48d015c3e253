"""Sketch long vectors, and bound how far an honest encoding moves what is sketched.

A sketch is a few numbers that a vector is recognized by, drawn after it is fixed. A shared random
seed gives each element a sign, and bucket b of a sketch is the sum of the signed elements at k = b
mod 8. Sketches are linear, so those of a sum are the sum of those of its parts; and of any vector
that was fixed before the seed the square of each bucket has the sum of squares of its elements as
its expectation (Alon, Matias, Szegedy 1996, section 2.2).

Both functions add up in float64, bucket by bucket in ascending order of the elements, and round to
float32 once, in numpy as in the kernels: the same bits on every machine, so that an owner can ask
for equality. What is beyond float32's largest number is clamped to it. Values are finite.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from atoll.collectives.codecs import F32, U8, BlockCodec, Codec
from atoll.collectives.errors import ConfigError, LocalProtocolError
from atoll.collectives.native import KERNELS

F64: TypeAlias = NDArray[np.float64]

SKETCH_WIDTH: Final = 8  # as many float64 as a vector register holds; see checks.py what they show
SEED_BYTES: Final = 32
_TAG: Final = b"atoll-sketch"
_FLOAT_MAX: Final = float(np.finfo(np.float32).max)
_TILE_ELEMENTS: Final = 32_768  # that numpy works on at a time: as float64 they stay in the cache


def sign_bits(seed: bytes, chunk: int, count: int) -> U8:
    """Return the signs of the elements of a chunk, uint8[ceil(count / 8)].

    There is one bit for each element, 1 for minus, the lowest bit of a byte first; SHAKE-256 of a
    tag, the seed and the chunk, so nobody knows any before the seed. Raises LocalProtocolError for
    a seed that has not SEED_BYTES bytes.
    """
    if len(seed) != SEED_BYTES:
        raise LocalProtocolError(f"a seed of signs has {SEED_BYTES} bytes, not {len(seed)}")
    stream = hashlib.shake_256(_TAG + seed + chunk.to_bytes(8, "little"))
    return np.frombuffer(stream.digest(-(-count // 8)), np.uint8)


def sketch(values: F32, bits: U8) -> F32:
    """Return the sketch of a vector, float32[SKETCH_WIDTH].

    ``values`` are float32[n], ``bits`` the ``sign_bits`` for n elements.
    """
    sums: F64 = np.zeros(SKETCH_WIDTH)
    if KERNELS is not None:
        KERNELS.sketch(values, bits, sums)
    else:
        _sketch(values, bits, sums)
    return np.clip(sums, -_FLOAT_MAX, _FLOAT_MAX).astype(np.float32)


def distance(values: F32, other: F32) -> np.float32:
    """Return the Euclidean distance of two float32[n]."""
    sums: F64 = np.zeros(SKETCH_WIDTH)
    if KERNELS is not None:
        KERNELS.squares(values, other, sums)
    else:
        _squares(values, other, sums)
    total = 0.0
    for part in sums.tolist():
        total += part
    return np.float32(min(math.sqrt(total), _FLOAT_MAX))


def bucket_sums(values: F64) -> F64:
    """Return for each bucket b the sum of what stands at k = b mod 8, float64[SKETCH_WIDTH].

    It is added up in ascending order too.
    """
    whole = values.size - values.size % SKETCH_WIDTH
    sums: F64 = values[:whole].reshape(-1, SKETCH_WIDTH).sum(axis=0)
    sums[: values.size - whole] += values[whole:]
    return sums


def _sketch(values: F32, bits: U8, sums: F64) -> None:
    for lo, hi in _tiles(values.size):
        signs = np.unpackbits(bits[lo // 8 : -(-hi // 8)], bitorder="little")[: hi - lo]
        turned = signs.astype(np.uint64) << np.uint64(63)
        rows, flat = _rows(hi - lo)
        np.copyto(flat, values[lo:hi])
        np.bitwise_xor(flat.view(np.uint64), turned, out=flat.view(np.uint64))
        _add(rows, sums)


def _squares(values: F32, other: F32, sums: F64) -> None:
    for lo, hi in _tiles(values.size):
        rows, flat = _rows(hi - lo)
        np.subtract(values[lo:hi], other[lo:hi], out=flat, dtype=np.float64)
        np.multiply(flat, flat, out=flat)
        _add(rows, sums)


def _tiles(count: int) -> Iterator[tuple[int, int]]:
    for lo in range(0, count, _TILE_ELEMENTS):
        yield lo, min(lo + _TILE_ELEMENTS, count)


def _rows(count: int) -> tuple[F64, F64]:
    """Return rows of buckets to add up, and a flat view of the elements in them.

    The first row is for the sums so far, then come ``count`` elements, then zeros.
    """
    whole = -(-count // SKETCH_WIDTH) + 1
    flat: F64 = np.empty(whole * SKETCH_WIDTH)
    flat[SKETCH_WIDTH + count :] = 0.0
    return flat.reshape(whole, SKETCH_WIDTH), flat[SKETCH_WIDTH : SKETCH_WIDTH + count]


def _add(rows: F64, sums: F64) -> None:
    """Add up rows of buckets, of which the first is ``sums``, into ``sums``.

    numpy reduces the first axis of a matrix row after row: in ascending order, as it must be.
    """
    rows[0] = sums
    np.add.reduce(rows, axis=0, out=sums)


# ---------------------------------------------------------------- bounds
#
# Bound how far an honest owner's encoded result lies from the exact aggregate, by its bytes alone.
#
# Bounds are float64[SKETCH_WIDTH] of one chunk: for each bucket of a sketch the sum of
# the squares of the largest error that each element may have::
#
#     float32                          0
#     bfloat16, float16                half the distance to the next number
#     int8, int4, nearest or shifted   half a step of the block's scale
#     int8_sr, int4_sr                 a whole step
#     fp4_e3m0                         half the gap to the next level
#
# Nothing is added for the scale: the value that it was rounded from is in no decoded number.
# Blocks whose scale is 0 were flushed (codecs/scales.py). An honest scale is the largest value's,
# so some value comes near the largest code; one that is larger than its values show is not
# believed, or a large scale over zeros would excuse any error. What is beyond the largest number
# of a format is clamped without a bound; it counts as if it had not been, so that nobody makes a
# check worthless with a single number. Then an honest owner may fail a check, and recomputing its
# result shows so.


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
_PEAK_TILE_ELEMENTS: Final = (
    16_384  # whole blocks of any codec; small memory comes without page faults
)
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
    for lo in range(0, values.size, _PEAK_TILE_ELEMENTS):
        magnitudes = np.abs(values[lo : lo + _PEAK_TILE_ELEMENTS])
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
