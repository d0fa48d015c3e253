"""Compute robust means of each coordinate by itself: median, trimmed mean, mean around the median.

Rows are vectors of peers, float[n, c]; every function returns float[c] of the same dtype. With a
matrix, float64[k, n], the k rows of ``mixed_rows`` take their place. Rows are sorted, column by
column, by a network of minima and maxima, so that the result has the same bits whatever the order
of the rows is. Values are finite: the caller has refused all others.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from atoll.collectives.native import KERNELS, PIECE, ROWS_MAX

Rows: TypeAlias = NDArray[np.floating[Any]]
Coefficients: TypeAlias = NDArray[np.float64] | None

# Columns that are worked on at a time: sixteen rows of float32 and as many of scratch fit into the
# second-level cache of any processor that trains.
COLUMNS: Final = PIECE


def blocks_of(rows: Rows) -> Iterator[Rows]:
    """Yield all rows in pieces of COLUMNS columns, one after the other, that stay in the cache."""
    for lo in range(0, rows.shape[1], COLUMNS):
        yield np.ascontiguousarray(rows[:, lo : lo + COLUMNS])


def sorted_rows(rows: Rows) -> Rows:
    """Return a copy with each column in ascending order."""
    out = rows.copy()
    spare = np.empty_like(out[0])
    for low, high in _network(len(out)):
        np.minimum(out[low], out[high], out=spare)
        np.maximum(out[low], out[high], out=out[high])
        out[low] = spare
    return out


@lru_cache(64)
def _network(count: int) -> tuple[tuple[int, int], ...]:
    """Return the pairs that Batcher's odd-even merge sort compares, for any count.

    See Knuth, volume 3, 5.2.2, algorithm M.
    """
    return tuple(_comparators(count))


def _comparators(count: int) -> Iterator[tuple[int, int]]:
    top = 1 << max(0, (count - 1).bit_length() - 1)
    p = top
    while p > 0:
        q, r, d = top, 0, p
        while True:
            yield from ((i, i + d) for i in range(count - d) if i & p == r)
            if q == p:
                break
            d, q, r = q - p, q >> 1, p
        p >>= 1


def mean(rows: Rows) -> Rows:
    """Return the mean of the rows: their sum, in their order, divided by their number."""
    total: Rows = rows[0].copy()
    for row in rows[1:]:
        total += row
    total /= len(rows)
    return total


def median(rows: Rows, matrix: Coefficients = None) -> Rows:
    """Return the coordinate-wise median (CWMed).

    Of an even number of rows it is the mean of the middle two.
    """
    count = _count(rows, matrix)
    return _ordered_mean(rows, matrix, (count - 1) // 2, 2 - count % 2)


def _middle(ordered: Rows) -> Rows:
    half = len(ordered) // 2
    if len(ordered) % 2:
        odd: Rows = ordered[half]
        return odd
    return mean(ordered[half - 1 : half + 1])


def trimmed_mean(rows: Rows, f: int, matrix: Coefficients = None) -> Rows:
    """Return the mean without the f smallest and the f largest values (CWTM).

    See Yin et al. 2018, definition 2.
    """
    return _ordered_mean(rows, matrix, f, _count(rows, matrix) - 2 * f)


def _count(rows: Rows, matrix: Coefficients) -> int:
    return len(rows if matrix is None else matrix)


def _ordered_mean(rows: Rows, matrix: Coefficients, first: int, keep: int) -> Rows:
    if KERNELS is not None and fits_kernels(rows, matrix):
        return _by_kernel(rows, matrix, first, keep, around=False)
    return mean(sorted_rows(mixed_rows(rows, matrix))[first : first + keep])


def fits_kernels(rows: Rows, matrix: Coefficients = None) -> bool:
    count = max(len(rows), _count(rows, matrix))
    return rows.dtype == np.float32 and rows.flags.c_contiguous and count <= ROWS_MAX


def _by_kernel(rows: Rows, matrix: Coefficients, first: int, keep: int, *, around: bool) -> Rows:
    assert KERNELS is not None
    count, coefficients = _count(rows, matrix), None
    if matrix is not None:
        coefficients = matrix.astype(np.float32).reshape(-1)
    out: NDArray[np.float32] = np.empty(rows.shape[1], np.float32)
    flat = rows.reshape(-1).view(np.float32)
    network = _flat_network(count)
    KERNELS.order(flat, len(rows), coefficients, network, first, keep, around, out)
    return out


@lru_cache(64)
def _flat_network(count: int) -> NDArray[np.uint8]:
    return np.array(_network(count), np.uint8).reshape(-1)


def around_median(rows: Rows, count: int, matrix: Coefficients = None) -> Rows:
    """Return the mean of the ``count`` values that are closest to the median.

    That is Meamed (Xie et al. 2018), and also the last step of Bulyan. Of two that are as far away
    the smaller one counts.
    """
    if KERNELS is not None and fits_kernels(rows, matrix):
        return _by_kernel(rows, matrix, 0, count, around=True)
    ordered = sorted_rows(mixed_rows(rows, matrix))
    middle = _middle(ordered)
    start: NDArray[np.intp] = np.zeros(rows.shape[1], np.intp)
    for _ in range(len(ordered) - count):  # they are neighbours in the order: move the window up
        low = np.take_along_axis(ordered, start[None], 0)[0]
        above = np.minimum(start + count, len(ordered) - 1)
        high = np.take_along_axis(ordered, above[None], 0)[0]
        moves = (start + count < len(ordered)) & (middle - low > high - middle)
        start += moves
    picked = start[None] + np.arange(count)[:, None]
    return mean(np.take_along_axis(ordered, picked, 0))


def mixed_rows(rows: Rows, matrix: Coefficients) -> Rows:
    """Return ``matrix @ rows``, or the rows themselves without a matrix.

    Every sum is in the order of the rows; what counts nothing is not touched.
    """
    if matrix is None:
        return rows
    coefficients = matrix.astype(rows.dtype)
    out: Rows = np.zeros((len(matrix), rows.shape[1]), rows.dtype)
    if KERNELS is not None and fits_kernels(rows):
        narrow = [a.reshape(-1).view(np.float32) for a in (rows, coefficients, out)]
        KERNELS.mix(narrow[0], len(rows), narrow[1], narrow[2])
        return out
    spare = np.empty_like(rows[0])
    for target, row_coefficients in zip(out, coefficients, strict=True):
        for row, coefficient in zip(rows, row_coefficients, strict=True):
            if coefficient:
                np.multiply(row, coefficient, out=spare)
                target += spare
    return out
