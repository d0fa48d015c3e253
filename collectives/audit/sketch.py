"""Sketch long vectors: a few numbers that one is recognized by, drawn after it is fixed.

A shared random seed gives each element a sign, and bucket b of a sketch is the sum of the signed
elements at k = b mod 8. Sketches are linear, so those of a sum are the sum of those of its parts;
and of any vector that was fixed before the seed the square of each bucket has the sum of squares of
its elements as its expectation (Alon, Matias, Szegedy 1996, section 2.2).

Both functions add up in float64, bucket by bucket in ascending order of the elements, and round to
float32 once, in numpy as in the kernels: the same bits on every machine, so that an owner can ask
for equality. What is beyond float32's largest number is clamped to it. Values are finite.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from atoll.collectives.codecs import F32, U8
from atoll.collectives.errors import LocalProtocolError
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
