"""Find distances between whole vectors that lie in pieces on several machines.

The *Gram matrix* of n vectors holds their inner products, float64[n, n]. Each owner of a part of
the coordinates computes it of that part, and the sum over the owners is that of the whole:
n (n + 1) / 2 numbers from each owner give everyone all distances and norms. Whoever knows it also
knows the Gram matrix of any linear combinations of the vectors, so a rule that selects, mixes or
scales whole vectors (mixing.py) is a function from the Gram matrix to its coefficients.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from atoll.collectives.native import KERNELS
from atoll.collectives.robust.coordinate import Rows, blocks_of, fits_kernels

Matrix: TypeAlias = NDArray[np.float64]

_LITTLE: Final = np.dtype("<f8")
# An inner product over 2^40 numbers next to the largest float32 is less, and no shard has as many:
# sums over owners stay finite.
PRODUCT_MAX: Final = 1e90
ROUNDING: Final = 1e-9  # relative, for sums of 2^40 products in float64, generously


class InnerProducts(NamedTuple):
    """Hold what an owner has needed for a rule; nothing where it needs none, or nothing is owned.

    ``told``: by owner, those over its shard, packed. ``chunks``: of each own chunk, packed and end
    to end, whose ``packed_sum`` was told. ``matrix``: float32, what the rule has made of all.
    """

    told: Mapping[int, bytes] = MappingProxyType({})
    chunks: bytes = b""
    matrix: bytes = b""


def add_gram(rows: Rows, total: Matrix) -> None:
    """Add the Gram matrix of float[n, c] to float64[n, n].

    It is in double precision from the products on: distances between vectors that are almost equal
    are small differences of these sums. In which order they are added up depends on the processor
    where there are no kernels.
    """
    for block in blocks_of(rows):
        if KERNELS is not None and fits_kernels(block) and total.flags.c_contiguous:
            KERNELS.gram(block.reshape(-1).view(np.float32), len(block), total.reshape(-1))
        else:
            wide: Matrix = block.astype(np.float64)
            total += wide @ wide.T


def packed_gram(gram: Matrix) -> bytes:
    """Return the upper triangle of a Gram matrix, row by row, as little-endian float64."""
    upper = gram[_places(len(gram))]
    return upper.astype(_LITTLE).tobytes()


@lru_cache(64)
def _places(count: int) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return the rows and columns of the upper triangle."""
    rows, columns = np.triu_indices(count)
    return rows, columns


def packed_sum(chunks: bytes, count: int) -> bytes:
    """Return the packed Gram matrix of a shard, from those of its chunks.

    Those are packed and end to end, and are added up in their order, so that all who have them have
    the same bits. Raises ValueError unless they are whole and finite.
    """
    rows = _upper(chunks, count)
    return sum(rows, np.zeros(rows.shape[1])).astype(_LITTLE).tobytes()


def grams_of_chunks(chunks: bytes, count: int) -> Matrix:
    """Return the packed Gram matrices of chunks as float64[chunks, n, n].

    Raises ValueError as ``packed_sum``.
    """
    rows = _upper(chunks, count)
    grams: Matrix = np.zeros((len(rows), count, count))
    places = _places(count)
    grams[:, *places] = rows
    grams[:, *places[::-1]] = rows
    return grams


def _upper(chunks: bytes, count: int) -> Matrix:
    rows = np.frombuffer(chunks, _LITTLE).astype(np.float64)
    if rows.size % (count * (count + 1) // 2):
        raise ValueError(f"{rows.size} inner products of {count} vectors")
    if not (np.abs(rows) <= PRODUCT_MAX).all():
        raise ValueError("inner products that no vectors have")
    return rows.reshape(-1, count * (count + 1) // 2)


def unpacked_gram(data: bytes | memoryview, count: int) -> Matrix:
    """Return the Gram matrix of ``count`` vectors that was packed, float64[n, n].

    Raises ValueError unless it can be one of vectors of float32: finite, not too large to be added
    up, and positive semidefinite but for rounding. Rules rely on that; whether it is the one of
    what was sent, only who has the vectors can tell.
    """
    upper = np.frombuffer(data, _LITTLE).astype(np.float64)
    if upper.size != count * (count + 1) // 2:
        raise ValueError(f"{upper.size} inner products of {count} vectors")
    gram: Matrix = np.zeros((count, count))
    gram[_places(count)] = upper
    gram += np.triu(gram, 1).T
    if not (np.abs(upper) <= PRODUCT_MAX).all() or not _is_positive(gram):
        raise ValueError("inner products that no vectors have")
    return gram


def _is_positive(gram: Matrix) -> bool:
    squares = gram.diagonal()
    if (squares < 0).any():
        return False
    lengths = np.sqrt(squares)  # with it, numbers of very different size are judged alike
    if (np.abs(gram) > (1 + ROUNDING) * np.outer(lengths, lengths)).any():  # Cauchy-Schwarz
        return False
    scale = np.zeros_like(lengths)
    np.divide(1.0, lengths, out=scale, where=lengths > 0)
    cosines = gram * scale[:, None] * scale[None, :]
    cosines[np.diag_indices(len(gram))] += ROUNDING * len(gram)
    try:
        np.linalg.cholesky(cosines)  # a third of the time that eigenvalues take
    except np.linalg.LinAlgError:
        return False
    return True


def combined(gram: Matrix, matrix: Matrix) -> Matrix:
    """Return the Gram matrix of ``matrix @ vectors``, symmetric to the last bit.

    Rules that choose compare a distance with the same one seen from the other end.
    """
    made: Matrix = matrix @ gram @ matrix.T
    return (made + made.T) / 2


def distances(gram: Matrix) -> Matrix:
    """Return squared distances, float64[n, n]; never negative, zero on the diagonal."""
    squares = gram.diagonal()
    found: Matrix = np.maximum(squares[:, None] + squares[None, :] - 2.0 * gram, 0.0)
    np.fill_diagonal(found, 0.0)
    return found


def medoid(squared: Matrix) -> int:
    """Return the index of the vector with the least sum of distances to all others.

    Of several it is the first.
    """
    return int(np.argmin(np.sqrt(squared).sum(axis=1)))


def recentred(gram: Matrix, origin: int) -> Matrix:
    """Return the Gram matrix of the differences from one of the vectors.

    Without a large common part, sums of its entries lose no digits.
    """
    row = gram[origin]
    moved: Matrix = gram - row[:, None] - row[None, :] + gram[origin, origin]
    return moved
