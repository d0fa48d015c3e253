"""Check an owner's result from sketches and norms that all participants tell, as everybody does.

Signs of sketches are drawn when parts and results are fixed, and owners confirm what participants
tell of the parts that they hold. A check that fails proves nothing by itself: it says whose result
has to be recomputed (recompute.py), and that costs bytes, not a ban.

*The identity.* Of a linear rule the result is R = sum of c_i g_i + e, with the errors e of encoding
and rounding, and the same holds for sketches. So the gap between ``sum of c_i sketch(g_i)`` and
``sketch(R)`` is sum of s_k e_k in each bucket, with fair signs s_k that are independent of e. Its
variance is v = sum of e_k^2, and an honest owner's is at most what ``error_bounds`` says.

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

import math
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from atoll.collectives.audit.sketch import F64
from atoll.collectives.codecs import F32
from atoll.collectives.robust.gram import Matrix

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


# ---------------------------------------------------------------- inner products
#
# Judge whether inner products that an owner has told can be those of the parts that it was sent.
#
# Rules that compare whole vectors (robust/gram.py) need the inner products of all parts, and only
# the owner of a shard has these. It signs them, chunk by chunk; everybody compares them with the
# sketches that all tell of their own parts (sketch.py). What fails proves nothing by itself: it
# says which chunks are to be opened, and then the inner products are computed again
# (``gram_holds``).


FALSE_ALARM: Final = 1e-5  # probability, for all distances of a shard together
OPENED_OF_SUM: Final = 4  # chunks
HONEST_PAIRS: Final = 0.75  # fewer have a liar in them, where most are honest
# Error of an inner product, beside the lengths of both vectors. A matrix product adds up in an
# order that depends on the processor: in float64 the sum of m products is off by m 2^-53 of these
# at most, and a chunk has no more than 2^18 elements: 3e-11.
GRAM_ROUNDING: Final = 1e-9


def implausible_grams(grams: Matrix, sketches: F32) -> list[int]:
    """Return the chunks whose told inner products can hardly be those of the vectors.

    The owner of a shard has told ``grams``, float64[c, n, n] of its chunks; ``sketches`` of the
    vectors, float32[c, n, 8], all have seen. The chunks are those to be opened, none if all is
    well. All of them if a sketch is not finite.

    Distances are what rules go by, so these are judged, between all vectors and from zero, as
    squares: in each chunk, and in the shard, whose sum the rule uses. Told ones should be sums of
    ``seen`` ones. Of vectors that fill their buckets evenly, seen / told has the distribution of
    chi^2(k) / k with the k = 8 c buckets as degrees of freedom, and exceeds r > 1, or falls below
    r < 1, with a probability of exp(-k (r - 1 - ln r) / 2) at most (Chernoff). Of others k is less.
    It is estimated: it is 3 (sum)^2 / (sum of squares) - 2, for the squares of k normal numbers;
    and no more than for most other pairs, as in the one that is told too large by chance these are
    what is left where the one large bucket has cancelled out.

    So what is told of eight dense vectors may be too small and too large by factors of 7 and 140 in
    one chunk, 2.4 and 3.6 in a shard of 8, 1.8 and 2.1 in one of 20, 1.3 and 1.4 in one of 100.

    Where only the sum is off, those chunks are to be opened that are most off: a few, as an honest
    one among them may happen to look worse.
    """
    chunks, count, width = sketches.shape
    if not np.isfinite(sketches).all():
        return list(range(chunks))
    told = _Distances.told(grams)
    seen, fourth = _Distances.seen(sketches)
    exponent = math.log(count * (count + 1) / 2 * (chunks + 1) / FALSE_ALARM)
    found = _improbable(told, seen, fourth, width, exponent).any(axis=(1, 2))
    chosen = dict.fromkeys(np.flatnonzero(found).tolist())
    off = _improbable(told.sum(), seen.sum(), fourth.sum(axis=0), width * chunks, exponent)
    if off.any():
        gaps = np.maximum(told.least - seen.most, seen.least - told.most)[:, off]
        worst = (gaps / np.maximum(gaps.max(axis=0), np.finfo(np.float64).tiny)).max(axis=1)
        chosen |= dict.fromkeys(np.argsort(-worst, kind="stable")[:OPENED_OF_SUM].tolist())
    return list(chosen)


def unlike_norms(grams: Matrix, weights: F64, norms: F32, errors: F64) -> list[int]:
    """Return the chunks whose inner products contradict the distances from the result.

    These all tell too: ``norms`` float32[c, n]. Of a linear rule, whose result is the sum of
    ``weights[i] g_i`` but for what encoding and rounding may move it by (its length, ``errors``
    float64[c]), the inner products give the same distances, exactly. So distances from what the
    rule has chosen are true ones; those between the vectors that it has left out are judged by
    ``implausible_grams`` alone.
    """
    inner = grams @ weights
    squares = np.diagonal(grams, axis1=1, axis2=2)
    found = np.maximum(squares - 2.0 * inner + (inner @ weights)[:, None], 0.0)
    lengths = np.sqrt(np.maximum(squares, 0.0))
    slack = GRAM_ROUNDING * (lengths + (lengths @ np.abs(weights))[:, None]) ** 2
    told = norms.astype(np.float64)
    room = errors[:, None] + SKETCH_ROUNDING * told
    near = told < np.sqrt(np.maximum(found - slack, 0.0)) - room
    far = told > np.sqrt(found + slack) + room
    return np.flatnonzero((near | far).any(axis=1)).tolist()


def gram_holds(told: Matrix, true: Matrix) -> bool:
    """Return whether told inner products float64[n, n] are the true ones, but for rounding."""
    lengths = np.sqrt(true.diagonal())
    slack = GRAM_ROUNDING * lengths[:, None] * lengths[None, :]
    return bool((np.abs(told - true) <= slack).all())


class _Distances(NamedTuple):
    """Hold squared distances, float64[c, n + 1, n + 1], the last of them from zero.

    ``found`` are these; ``least`` and ``most`` are, by rounding, the least and the most they can
    be.
    """

    found: F64
    least: F64
    most: F64

    @classmethod
    def told(cls, grams: Matrix) -> _Distances:
        inner = np.pad(grams, ((0, 0), (0, 1), (0, 1)))
        squares = np.diagonal(inner, axis1=1, axis2=2)
        ends = squares[:, :, None] + squares[:, None, :]
        found = np.maximum(ends - 2.0 * inner, 0.0)
        slack = GRAM_ROUNDING * np.abs(ends)
        return cls(found, np.maximum(found - slack, 0.0), found + slack)

    @classmethod
    def seen(cls, sketches: F32) -> tuple[_Distances, F64]:
        """Return the squared distances of sketches, and the sums of their fourth powers."""
        points = np.pad(sketches.astype(np.float64), ((0, 0), (0, 1), (0, 0)))
        squares = np.empty((len(points), points.shape[1], points.shape[1]))
        fourth = np.empty_like(squares)
        for row in range(points.shape[1]):
            gaps = (points - points[:, row : row + 1]) ** 2
            squares[:, row], fourth[:, row] = gaps.sum(axis=2), (gaps**2).sum(axis=2)
        lengths, apart = np.sqrt(squares[:, -1]), np.sqrt(squares)
        slack = SKETCH_ROUNDING * (lengths[:, :, None] + lengths[:, None, :])
        return cls(squares, np.maximum(apart - slack, 0.0) ** 2, (apart + slack) ** 2), fourth

    def sum(self) -> _Distances:
        return _Distances(*(each.sum(axis=0) for each in self))


def _improbable(
    told: _Distances, seen: _Distances, fourth: F64, buckets: int, exponent: float
) -> NDArray[np.bool_]:
    """Return for each distance whether it was told too small, or too large, for what is seen."""
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):  # 0 / 0 is told of nothing
        freedom = np.nan_to_num(3 * seen.found**2 / fourth - 2, nan=buckets).clip(1.0, buckets)
        pairs = freedom[..., *np.triu_indices(freedom.shape[-1], 1)]
        most = np.quantile(pairs, HONEST_PAIRS, axis=-1, method="lower")[..., None, None]
        limit = 2 * exponent / np.minimum(freedom, most)
        above, below = seen.least / told.most, seen.most / told.least
        small = (above > 1) & ~(above - 1 - np.log(above) <= limit)
        large = (below < 1) & ~(below - 1 - np.log(below) <= limit)
        found: NDArray[np.bool_] = small | large
    return found
