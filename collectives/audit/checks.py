"""Check an owner's result from sketches and norms that all participants tell, as everybody does.

Signs of sketches are drawn when parts and results are fixed, and owners confirm what participants
tell of the parts that they hold. A check that fails proves nothing by itself: it says whose result
has to be recomputed (recompute.py), and that costs bytes, not a ban.

*The identity.* Of a linear rule the result is R = sum of c_i g_i + e, with the errors e of encoding
and rounding, and the same holds for sketches. So the gap between ``sum of c_i sketch(g_i)`` and
``sketch(R)`` is sum of s_k e_k in each bucket, with fair signs s_k that are independent of e. Its
variance is v = sum of e_k^2, and an honest owner's is at most what bounds.py says.

* One bucket: |gap| > t sqrt(v) has a probability of 2 exp(-t^2 / 2) at most (Hoeffding 1963,
  theorem 2). With SPREADS = 8 that is 2 exp(-32) = 2.6e-14.
* All buckets of a shard: such sums are sub-Gaussian, E exp(x gap^2) <= 1 / sqrt(1 - 2 x v), as if
  they were normal with these variances, so the tail of a weighted chi-square holds for the sum of
  their squares (Laurent and Massart 2000, lemma 1): it exceeds ``sum v + 2 sqrt(x sum v^2) + 2 x
  max v`` with a probability of exp(-x) at most. With EXPONENT = 23 that is 1.1e-10.

To the variances comes the rounding of the sketches themselves, which is certain, and so no part of
them: each is off by 2^-24 of what it is. Bounds come from ``widened``: without it an honest result
in float32 has none, and parts that cancel out leave rounding errors of any size beside it.

What is found for sure: a dense shift in proportion to the bounds whose length is X times theirs
(the square root of their sum) is found with a probability above 0.999 from X = 15 for one chunk and
``identity_holds``, and for ``shard_identity_holds`` from 10 for one chunk, 2.5 for 8, 1.6 for 40.
Quantization itself has a length of 0.58 if it is evenly spread. The bounds are those of the result
that was sent: with 4 bits 15 times their length is more than the values themselves, and only whole
shards show much.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from atoll.collectives.audit.sketch import F64
from atoll.collectives.codecs import F32

SPREADS: Final = 8.0
EXPONENT: Final = 23.0
# Relative error of sketches, twice the unit of float32: their sums in float64 round as well.
SKETCH_ROUNDING: Final = 2.0**-23
# Honest results are 0.5 to 1 times as far from the vectors as these are from each other; estimates
# from one chunk make up to 3 of it. What lies 12 times as far as an honest result is always found.
FACTOR: Final = 4.0


def identity_holds(coefficients: F64, sketches: F32, result: F32, bounds: F64) -> bool:
    """Return whether the sketch of one chunk's result is that of the sum of its parts.

    ``coefficients`` are float64[n], ``sketches`` float32[n, 8] of the parts, ``result`` float32[8],
    ``bounds`` float64[8]. False for what is not finite.
    """
    gap, slack = _gap(coefficients, sketches, result)
    return bool((gap <= SPREADS * np.sqrt(bounds) + slack).all())


def shard_identity_holds(coefficients: F64, sketches: F32, results: F32, bounds: F64) -> bool:
    """Return whether the identity holds of all chunks of an owner at once.

    That shows smaller shifts. ``sketches`` are float32[c, n, 8] of the parts, ``results``
    float32[c, 8], ``bounds`` float64[c, 8].
    """
    gap, slack = _gap(coefficients, sketches, results)
    seen = (np.maximum(gap - slack, 0.0) ** 2).sum()
    spread = 2 * np.sqrt(EXPONENT * (bounds**2).sum())
    return bool(seen <= bounds.sum() + spread + 2 * EXPONENT * bounds.max(initial=0.0))


def _gap(coefficients: F64, sketches: F32, result: F32) -> tuple[F64, F64]:
    """Return what each bucket is off by, and how much of that the rounding of sketches may be."""
    with np.errstate(invalid="ignore", over="ignore"):  # then there is NaN, and no check holds
        parts = coefficients[:, None] * sketches
        gap = np.abs(parts.sum(axis=-2) - result)
        slack = SKETCH_ROUNDING * (np.abs(parts).sum(axis=-2) + np.abs(result))
        gap[~np.isfinite(slack)] = np.nan
    return gap, slack


def suspicious(norms: F32, sketches: F32, error: float) -> bool:
    """Return whether a result lies far from most vectors, whatever the rule.

    It does if the median of ``norms``, the distances |g_i - R|, is more than FACTOR times the
    distance of two vectors that are typical.

    Distances of vectors are estimated: ``sketches`` are float32[n, m], of one chunk (m = 8) or of
    several beside each other, to which then the norms belong too. Typical is the k-th nearest pair,
    where k is the number of pairs that a bare majority has: as long as a majority is honest, others
    can neither make it more than what honest vectors differ by, nor little by being alike.
    ``error`` is what encoding and rounding may move the result by: the square root of the sum of
    its ``widened`` bounds. True for what is not finite.

    Rules that are a centre of each coordinate are hardly ever suspicious when they are honest: of
    dense vectors never in thousands of draws with five participants and more, with three and m = 8
    in less than one of a hundred. Others may be, where one peer alone has trained a part of the
    model and the others' vectors are equal there; the linear ones have the identity instead.
    """
    if not (np.isfinite(norms).all() and np.isfinite(sketches).all()):
        return True
    squared = _squared_distances(sketches[None].astype(np.float64))
    pairs = np.sort(squared[np.triu_indices(len(squared), 1)])
    majority = len(norms) // 2 + 1
    apart = np.sqrt(pairs[majority * (majority - 1) // 2 - 1]) if pairs.size else 0.0
    return bool(np.median(norms.astype(np.float64)) > FACTOR * apart + error)


def _squared_distances(points: F64) -> F64:
    """Return the squared distances of n points, float64[n, n].

    The points are float64[c, n, m]: all m c coordinates count.
    """
    found: F64 = np.zeros((points.shape[1],) * 2)
    for row, point in zip(found, points.swapaxes(0, 1), strict=True):
        row[:] = ((points - point[:, None]) ** 2).sum(axis=(0, 2))
    return found
