"""Judge whether inner products that an owner has told can be those of the parts that it was sent.

Rules that compare whole vectors (robust/gram.py) need the inner products of all parts, and only the
owner of a shard has these. It signs them, chunk by chunk; everybody compares them with the sketches
that all tell of their own parts (sketch.py). What fails proves nothing by itself: it says which
chunks are to be opened, and then the inner products are computed again (``gram_holds``).
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from atoll.collectives.audit.checks import SKETCH_ROUNDING
from atoll.collectives.audit.sketch import F64
from atoll.collectives.codecs import F32
from atoll.collectives.robust.gram import Matrix

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
