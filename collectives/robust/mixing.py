"""Mix whole vectors or choose among them, as matrices of coefficients: pre-aggregators and rules.

Every function takes the Gram matrix of n vectors (gram.py), float64[n, n], and returns
float64[k, n]: the rows of ``matrix @ vectors`` are what goes on. Vectors are in the order of peer
ids, and of equal candidates the first counts. Owners that choose on different processors may differ
in the last bit of a distance, and so between candidates that are all but equal.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from atoll.collectives.counter_rng import random_words
from atoll.collectives.robust.gram import Matrix, distances


def nearest_neighbour_mixing(gram: Matrix, f: int) -> Matrix:
    """Return the matrix by which each vector becomes the mean of the n - f nearest to it.

    It is itself among them. This is NNM (Allouah et al. 2023, algorithm 2).
    """
    count = len(gram)
    near = np.argsort(distances(gram), axis=1, kind="stable")[:, : count - f]
    matrix: Matrix = np.zeros((count, count))
    np.put_along_axis(matrix, near, 1.0 / (count - f), axis=1)
    return matrix


def bucketing(count: int, size: int, key: int) -> Matrix:
    """Return the matrix of means of groups of ``size`` (Karimireddy et al. 2022, algorithm 1).

    The groups are drawn by a key that all peers share; the last group may be smaller.
    """
    words = np.empty(count, np.uint32)
    random_words(key, 0, words)
    order = np.argsort(words, kind="stable")
    groups = [order[lo : lo + size] for lo in range(0, count, size)]
    matrix: Matrix = np.zeros((len(groups), count))
    for row, group in zip(matrix, groups, strict=True):
        row[group] = 1.0 / len(group)
    return matrix


def adaptive_clipping(gram: Matrix, f: int) -> Matrix:
    """Return the matrix by which the longest vectors are scaled down.

    The floor(2 f / n (n - f)) longest get the length of the next one. This is ARC (Allouah et al.
    2025, algorithm 2).
    """
    count = len(gram)
    norms = np.sqrt(np.maximum(gram.diagonal(), 0.0))
    clipped = 2 * f * (count - f) // count
    radius = np.sort(norms)[count - clipped - 1]
    scale = np.ones(count)
    np.divide(radius, norms, out=scale, where=norms > radius)
    return np.diag(scale)


def krum_scores(squared: Matrix, f: int) -> Matrix:
    """Return each vector's sum of squared distances to its n - f - 2 nearest others.

    See Blanchard et al. 2017, section 4; some libraries take one more.
    """
    others = np.sort(squared, axis=1)[:, 1:]
    neighbours = max(0, len(squared) - f - 2)
    scores: Matrix = others[:, :neighbours].sum(axis=1)
    return scores


def krum(gram: Matrix, f: int) -> Matrix:
    """Return the coefficients of the vector with the least score."""
    return multi_krum(gram, f, 1)


def multi_krum(gram: Matrix, f: int, kept: int) -> Matrix:
    """Return the coefficients of the mean of the ``kept`` vectors with the least scores."""
    best = np.argsort(krum_scores(distances(gram), f), kind="stable")[:kept]
    return _mean_of(best.tolist(), len(gram))


def bulyan_selection(gram: Matrix, f: int) -> Matrix:
    """Return the matrix that selects n - 2 f vectors by Krum, one after the other.

    Each time Krum chooses among those that are left (El Mhamdi et al. 2018, section 4); their
    coordinates are aggregated after that.
    """
    squared, left = distances(gram), list(range(len(gram)))
    chosen: list[int] = []
    while len(chosen) < len(gram) - 2 * f:
        scores = krum_scores(squared[np.ix_(left, left)], f)
        chosen.append(left.pop(int(np.argmin(scores))))
    matrix: Matrix = np.zeros((len(chosen), len(gram)))
    matrix[range(len(chosen)), sorted(chosen)] = 1.0
    return matrix


def minimum_diameter(gram: Matrix, f: int) -> Matrix:
    """Return the coefficients of the mean of the n - f vectors with the least diameter.

    Their two farthest are nearest to each other; of several such sets it is the first. This is MDA
    (El Mhamdi et al. 2020).

    All sets need not be tried. For a given diameter, f vectors have to cover all pairs that are
    farther apart, which is decided in 2**f steps; the least diameter is found by bisection.
    """
    squared, count = distances(gram), len(gram)
    limits = np.unique(squared)
    low, high = 0, len(limits) - 1
    while low < high:
        middle = (low + high) // 2
        if _coverable(_far(squared, limits[middle], range(count)), f):
            high = middle
        else:
            low = middle + 1
    chosen: list[int] = []
    left = list(range(count))
    for candidate in range(count):
        near = [x for x in left if x == candidate or squared[x, candidate] <= limits[low]]
        spare = len(near) - (count - f)
        if candidate in near and spare >= 0 and _coverable(_far(squared, limits[low], near), spare):
            chosen.append(candidate)
            left = near
        else:
            left = [x for x in left if x != candidate]
        if len(chosen) == count - f:
            break
    return _mean_of(chosen, count)


def _far(squared: Matrix, limit: float, among: Sequence[int]) -> list[tuple[int, int]]:
    return [(a, b) for a in among for b in among if a < b and squared[a, b] > limit]


def _coverable(pairs: list[tuple[int, int]], budget: int) -> bool:
    """Return whether so many vectors, taken away, leave none of these pairs."""
    if not pairs:
        return True
    if budget <= 0:
        return False
    return any(
        _coverable([pair for pair in pairs if end not in pair], budget - 1) for end in pairs[0]
    )


def _mean_of(chosen: Sequence[int], count: int) -> Matrix:
    matrix: Matrix = np.zeros((1, count))
    matrix[0, list(chosen)] = 1.0 / len(chosen)
    return matrix
