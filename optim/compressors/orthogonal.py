"""Make orthonormal columns and low-rank products with the same bits on every processor.

A library's QR and matrix products add in an order of their own, which differs from processor to
processor. Here all sums are in float64 and in the order of ``scales.fold``, and products are made
element by element.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from atoll.collectives.codecs import F32
from atoll.collectives.codecs.scales import fold
from atoll.collectives.counter_rng import derive_key, random_words, unit_floats

SWEEPS = 2  # one loses orthogonality where columns are nearly parallel; "twice is enough" (Kahan)
NORM_MIN = 1e-30  # the least norm of a column that has a direction; float32 ends at 1e-45


def random_matrix(rows: int, columns: int, *parts: bytes | int) -> F32:
    """Return (rows, columns) of numbers in [-1/2, 1/2), a function of ``parts``."""
    words = np.empty(rows * columns, np.uint32)
    random_words(derive_key(*parts), 0, words)
    numbers = unit_floats(words)
    return np.subtract(numbers, np.float32(0.5), out=numbers).reshape(rows, columns)


def orthonormal(matrix: F32) -> F32:
    """Return an orthonormal basis for the columns of (rows, columns), by Gram-Schmidt.

    A column without a direction of its own, as those of a gradient of zeros, is replaced by a
    random one: it would stay zero for ever. There are at most as many columns as rows.
    """
    columns: NDArray[np.float64] = matrix.T.astype(np.float64)
    for number, column in enumerate(columns):
        tries = 0
        while not _make_unit(column, columns[:number]):
            tries += 1
            fresh = random_matrix(column.size, 1, b"atoll orthonormal", number, tries)
            column[:] = fresh[:, 0]
    return np.ascontiguousarray(columns.T.astype(np.float32))


def product(left: F32, right: F32) -> F32:
    """Return (m, n) from (m, rank) and (n, rank): ``left @ right.T``."""
    found: F32 = np.multiply.outer(left[:, 0], right[:, 0])
    for k in range(1, left.shape[1]):
        np.add(found, np.multiply.outer(left[:, k], right[:, k]), out=found)
    return found


def _make_unit(column: NDArray[np.float64], others: NDArray[np.float64]) -> bool:
    """Make a column orthogonal to the ``others`` and of length 1, in place.

    Return false if nothing is left of it.
    """
    for _ in range(SWEEPS):
        norm = np.sqrt(_dot(column, column))
        if norm < NORM_MIN:
            return False
        np.divide(column, norm, out=column)
        for other in others:
            column -= _dot(other, column) * other
    norm = np.sqrt(_dot(column, column))
    if norm < 0.1:  # it had length 1 but for rounding, and only rounding was left of it
        return False
    np.divide(column, norm, out=column)
    return True


def _dot(a: NDArray[np.float64], b: NDArray[np.float64]) -> np.float64:
    found: np.float64 = fold((a * b)[None, :])[0]
    return found
