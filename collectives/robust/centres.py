"""Find a centre of whole vectors: geometric median, centered clipping, CAF, Flag.

Every centre is a combination of the vectors, so all iterations run on the Gram matrix (gram.py) of
n vectors, float64[n, n], and cost nothing beside the vectors themselves. The functions return the
coefficients, float64[1, n].
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from atoll.collectives.robust.gram import Matrix, distances, medoid, recentred

ITERATIONS_MAX: Final = 1_000  # each is some microseconds; most inputs need fewer than a hundred
STOP: Final = 1e-13  # a step that is smaller, beside the spread of the vectors, changes nothing
FLAG_ITERATIONS: Final = 200
FLAG_SMOOTHING: Final = 1e-7  # smooths the weights of vectors in the subspace: see `flag`


def geometric_median(gram: Matrix) -> Matrix:
    """Return the coefficients of the point with the least sum of distances.

    It is found by Weiszfeld's iteration from the mean, with distances smoothed (Pillutla et al.
    2022, algorithm 2).
    """
    spread, inner = _spread(gram)
    if spread == 0.0:
        return _only(len(gram), medoid(distances(gram)))
    weights: Matrix = np.full(len(gram), 1.0 / len(gram))
    for _ in range(ITERATIONS_MAX):
        inverse = 1.0 / np.maximum(_distances_to(inner, weights), STOP * spread)
        after = inverse / inverse.sum()
        if _length(inner, after - weights) <= STOP * spread:
            weights = after
            break
        weights = after
    return weights[None, :]


def centered_clipping(gram: Matrix, radius: float | None = None) -> Matrix:
    """Return the coefficients of the centre that centered clipping ends at.

    The centre is the fixed point of ``v += mean of (x - v) min(1, radius / |x - v|)`` (Karimireddy
    et al. 2021, run to convergence as in BTARD, Gorbunov et al. 2022), from the medoid.

    The default radius adapts to the vectors: the median of their distances from the medoid. A
    constant fits one scale of updates only: far larger it is the mean, far smaller it takes
    thousands of steps.
    """
    spread, inner = _spread(gram)
    start = medoid(distances(gram))
    radius = spread if radius is None else radius
    weights: Matrix = _only(len(gram), start)[0]
    if radius == 0.0:
        return weights[None, :]
    for _ in range(ITERATIONS_MAX):
        away = _distances_to(inner, weights)
        scale = np.ones(len(gram))
        np.divide(radius, away, out=scale, where=away > radius)
        after = weights * (1.0 - scale.mean()) + scale / len(gram)
        moved = _length(inner, after - weights)
        weights = after
        if moved <= STOP * radius:
            break
    return weights[None, :]


def covariance_filter(gram: Matrix, f: int) -> Matrix:
    """Return the coefficients of the mean by CAF, a covariance-bound-agnostic filter.

    Weights shrink along the direction of largest variance until n - 2 f of their sum are left; the
    mean at which that variance was least counts (Diakonikolas et al. 2020; Allouah et al. 2025).
    Each step ends the weight of one vector at least: scores are compared with the largest of the
    living. Eigenvectors are exact.
    """
    count = len(gram)
    inner = recentred(gram, medoid(distances(gram)))
    weights: Matrix = np.ones(count)
    best, least = weights / count, np.inf
    while weights.sum() > count - 2 * f:
        share = weights / weights.sum()
        centred = np.eye(count) - share[None, :]
        root = np.sqrt(share)
        kernel = root[:, None] * (centred @ inner @ centred.T) * root[None, :]
        values, vectors = np.linalg.eigh((kernel + kernel.T) / 2)
        if values[-1] < least:
            best, least = share, float(values[-1])
        if values[-1] <= 0.0:
            break
        # (x - mean) . v, where v is the unit vector of which the dual one is known.
        along = centred @ inner @ centred.T @ (root * vectors[:, -1])
        scores = along**2
        top = scores[weights > 0].max()
        if top <= 0.0:
            break
        weights = weights * np.clip(1.0 - scores / top, 0.0, None)
    return best[None, :]


def flag(gram: Matrix, dimensions: int, pairs: float = 0.0) -> Matrix:
    """Return the coefficients of the Flag aggregator (Almansoori et al. 2023).

    It is the mean of unit vectors, projected on the subspace that is nearest to all of them, and
    given the median length of the vectors.

    With raw vectors a projection does not bound what a long one adds, so unit vectors it is.
    ``pairs`` is the paper's lambda: how much differences of two vectors count.
    """
    count = len(gram)
    norms = np.sqrt(np.maximum(gram.diagonal(), 0.0))
    scale = np.zeros(count)
    np.divide(1.0, norms, out=scale, where=norms > 0)
    unit = scale[:, None] * gram * scale[None, :]
    columns = _flag_columns(count, pairs)  # each a combination of unit vectors
    share = np.full(columns.shape[1], 1.0)
    share[count:] = pairs / max(1, count * (count - 1))
    lengths = np.einsum("ic,ij,jc->c", columns, unit, columns)
    weights = np.ones(columns.shape[1])
    basis = np.zeros((count, 0))
    for _ in range(FLAG_ITERATIONS):
        mixed = columns * (share * weights)
        kernel = mixed.T @ unit @ mixed
        values, vectors = np.linalg.eigh((kernel + kernel.T) / 2)
        top = values[-dimensions:] > values[-1] * STOP
        basis = (mixed @ vectors[:, -dimensions:])[:, top] / np.sqrt(values[-dimensions:][top])
        inside = ((basis.T @ unit @ columns) ** 2).sum(axis=0)
        after = np.clip(lengths - inside, 0.0, None) + FLAG_SMOOTHING
        after = after**-0.25
        if np.abs(after - weights).max() <= STOP * after.max():
            break
        weights = after
    projected: Matrix = basis @ (basis.T @ unit @ np.full(count, 1.0 / count))
    projected *= scale * float(np.median(norms))
    return projected[None, :]


def _flag_columns(count: int, pairs: float) -> Matrix:
    if pairs == 0.0:
        return np.eye(count)
    each = np.eye(count)
    found = [each[i] - each[j] for i in range(count) for j in range(i)]
    return np.concatenate([each, np.array(found).reshape(-1, count).T], axis=1)


def _spread(gram: Matrix) -> tuple[float, Matrix]:
    """Return the median distance from the medoid, and the Gram matrix of differences from it."""
    squared = distances(gram)
    origin = medoid(squared)
    return float(np.median(np.sqrt(squared[origin]))), recentred(gram, origin)


def _distances_to(inner: Matrix, weights: Matrix) -> Matrix:
    """Return the distance of each vector from the combination with these weights.

    Their sum is one.
    """
    pulled = inner @ weights
    squared = inner.diagonal() - 2.0 * pulled + float(weights @ pulled)
    found: Matrix = np.sqrt(np.maximum(squared, 0.0))
    return found


def _length(inner: Matrix, weights: Matrix) -> float:
    return math.sqrt(max(0.0, float(weights @ inner @ weights)))


def _only(count: int, index: int) -> Matrix:
    alone: Matrix = np.zeros((1, count))
    alone[0, index] = 1.0
    return alone
