"""Order a ring: find a travelling salesman's tour on costs that differ by direction.

In a ring everyone sends the same bytes to the next one, so the slowest edge sets the pace: a tour
is better if its worst edge is cheaper, and among those with equal worst edges if the sum is less.
``cost[i, j]`` is what the edge from i to j takes, in any unit.

Up to EXACT_PEERS_MAX peers the best tour is found by dynamic programming over subsets (Held and
Karp 1962, n^2 2^n steps) in two passes: the least worst edge first, then the least sum over edges
that are no worse. One pass over pairs (worst, sum) would be wrong: a part of a tour with a worse
edge but a smaller sum may be the better one, if a worse edge follows anyway.

Above, tours begin at several peers and go to the nearest one left; then two moves improve them as
long as they can: a stretch of up to OR_MAX peers is put elsewhere (Or 1976), a stretch of any
length is turned round (2-opt, with the costs of the other direction). Both are tried everywhere.
Then the worst edge is forbidden and the tour is repaired, as long as that can be done, and all is
tried again from the starts without the worst edge of the best tour. All of it is deterministic.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from atoll.collectives.errors import ConfigError
from atoll.collectives.planning.network_model import F64

I64 = NDArray[np.int64]

EXACT_PEERS_MAX: Final = 10  # 2^9 subsets of the others: milliseconds; each more doubles it
OR_MAX: Final = 3  # longer stretches gain little, and each length costs a look at all places
SMALL_PEERS_MAX: Final = 24  # up to here all lengths and starts are tried: that takes 0.1 s
STARTS_PEERS: Final = 288  # above, starts times peers: what keeps 96 peers under a second
MOVES_MAX: Final = 2000  # in one improvement; a tour of 96 takes about 60
FORBID_MAX: Final = 40  # worst edges of one tour that are forbidden, one after the other
AGAIN_MAX: Final = 4  # times that all starts are tried again without the best tour's worst edge


def best_tour(cost: F64) -> tuple[int, ...]:
    """Return the tour to use, beginning at participant 0.

    ``cost``: float64[n, n], finite, not negative; ConfigError for anything else. The diagonal means
    nothing.
    """
    return exact_tour(cost) if len(cost) <= EXACT_PEERS_MAX else found_tour(cost)


def tour_cost(cost: F64, tour: tuple[int, ...]) -> tuple[float, float]:
    """Return (worst edge, sum of edges): a tour is judged by these, in this order."""
    if len(tour) < 2:
        return 0.0, 0.0
    edges = [float(cost[peer, after]) for peer, after in zip(tour, _shifted(tour), strict=True)]
    return max(edges), math.fsum(edges)


def _shifted(tour: tuple[int, ...]) -> tuple[int, ...]:
    return (*tour[1:], tour[0])


def _checked(cost: F64) -> F64:
    n = len(cost)
    if cost.shape != (n, n) or n < 1:
        raise ConfigError(f"the costs of a tour are not a square: {cost.shape}")
    cost = cost.copy()
    np.fill_diagonal(cost, 0)
    if not (np.isfinite(cost).all() and (cost >= 0).all()):
        raise ConfigError("a cost of a tour is negative or not finite")
    return cost


# ---------------------------------------------------------------- exact


def exact_tour(cost: F64) -> tuple[int, ...]:
    """Return the best tour.

    Raises ConfigError above EXACT_PEERS_MAX peers, and as ``best_tour``.
    """
    cost = _checked(cost)
    n = len(cost)
    if n > EXACT_PEERS_MAX:
        raise ConfigError(f"{n} peers are too many for an exact tour, at most {EXACT_PEERS_MAX}")
    if n <= 2:
        return tuple(range(n))
    worst, _ = _held_karp(cost, worst=True)
    allowed = np.where(cost <= worst, cost, math.inf)
    return _held_karp(allowed, worst=False)[1]


def _held_karp(cost: F64, *, worst: bool) -> tuple[float, tuple[int, ...]]:
    """Return the least worst edge, or the least sum, and a tour that has it.

    ``best[subset, last]``: of all ways from participant 0 through the subset of the others to
    ``last``. Subsets in ascending order: all smaller ones of a subset come before it.
    """
    join = np.maximum if worst else np.add
    others = len(cost) - 1
    between, full = cost[1:, 1:], 2**others - 1
    best = np.full((full + 1, others), math.inf)
    before = np.zeros((full + 1, others), dtype=np.int64)
    places = np.arange(others)
    for place in places:
        best[1 << place, place] = cost[0, place + 1]
    for subset in range(1, full + 1):
        outside = places[(subset >> places) & 1 == 0]
        # [last, next]: the way through the subset to last, and on to next
        ways = join(best[subset][:, None], between[:, outside])
        last = ways.argmin(axis=0)
        targets = subset | (1 << outside)
        best[targets, outside] = ways[last, np.arange(len(outside))]
        before[targets, outside] = last
    ends = join(best[full], cost[1:, 0])
    last_place = int(ends.argmin())
    tour, subset = [last_place + 1], full
    while subset != 1 << last_place:
        previous = int(before[subset, last_place])
        subset ^= 1 << last_place
        last_place = previous
        tour.append(last_place + 1)
    return float(ends.min()), (0, *reversed(tour))


# ---------------------------------------------------------------- found


def found_tour(cost: F64) -> tuple[int, ...]:
    """Return a good tour, for any number of peers. Raises ConfigError as ``best_tour``."""
    cost = _checked(cost)
    n = len(cost)
    if n <= 3:
        return best_tour(cost)
    count = n if n <= SMALL_PEERS_MAX else max(2, STARTS_PEERS // n)
    starts = [i * n // count for i in range(count)]
    best = _best_from(cost, cost, starts)
    for _ in range(AGAIN_MAX):
        found = _best_from(cost, _dear(cost, tour_cost(cost, best)[0]), starts)
        if tour_cost(cost, found) >= tour_cost(cost, best):
            break
        best = found
    return best


def _best_from(cost: F64, seen: F64, starts: Sequence[int]) -> tuple[int, ...]:
    """Return the best of the tours from these starts, which are found on the costs ``seen``."""
    tours = [_without_worst(cost, _improved(seen, _nearest(seen, start))) for start in starts]
    return min(map(_as_tuple, tours), key=lambda tour: tour_cost(cost, tour))


def _dear(cost: F64, worst: float) -> F64:
    """Return costs by which an edge of ``worst`` or above is dearer than any sum of the others."""
    return np.where(cost >= worst, cost + len(cost) * worst + 1, cost)


def _as_tuple(tour: I64) -> tuple[int, ...]:
    first = int(np.flatnonzero(tour == 0)[0])
    return tuple(int(peer) for peer in np.roll(tour, -first))


def _nearest(cost: F64, start: int) -> I64:
    free = np.ones(len(cost), dtype=np.bool_)
    tour = [start]
    for _ in range(len(cost) - 1):
        free[tour[-1]] = False
        tour.append(int(np.where(free, cost[tour[-1]], math.inf).argmin()))
    return np.array(tour, dtype=np.int64)


def _without_worst(cost: F64, tour: I64) -> I64:
    """Forbid the worst edges, and repair the tour, until it cannot be repaired."""
    for _ in range(FORBID_MAX):
        worst, _ = tour_cost(cost, tuple(tour))
        repaired = _improved(_dear(cost, worst), tour)
        if tour_cost(cost, tuple(repaired))[0] >= worst:
            return _improved(_dear(cost, math.nextafter(worst, math.inf)), tour)
        tour = repaired
    return tour


def _improved(cost: F64, tour: I64) -> I64:
    """Improve a tour: take the best move, as long as one lessens the sum."""
    enough = 1e-12 * float(cost.max())
    longest = len(tour) - 2 if len(tour) <= SMALL_PEERS_MAX else OR_MAX
    for _ in range(MOVES_MAX):
        along = cost[np.ix_(tour, tour)]
        gain, moved = _best_reversal(along)
        for length in range(1, longest + 1):
            other_gain, other = _best_shift(along, length)
            if other_gain > gain:
                gain, moved = other_gain, other
        if gain <= enough:
            return tour
        tour = tour[moved]
    return tour


def _best_shift(along: F64, length: int) -> tuple[float, I64]:
    """Find the best way to put ``length`` peers elsewhere in a tour.

    Return by how much the sum falls, and the places in their new order: those from place i on stand
    between places j and j + 1. ``along``: costs by place.
    """
    n = len(along)
    places = np.arange(n)
    last = (places + length - 1) % n
    before, after = (places - 1) % n, (places + length) % n
    edge = along[places, (places + 1) % n]
    saved = edge[before] + edge[last] - along[before, after]
    # [i, j]: what the two new edges cost more than the one that they take the place of
    added = along.T + along[last][:, (places + 1) % n] - edge[None, :]
    gains = saved[:, None] - added
    distance = (places[None, :] - places[:, None]) % n
    gains[(distance < length) | (distance == n - 1)] = -math.inf  # inside, or where it is
    i, j = divmod(int(gains.argmax()), n)
    rest = (i + length + np.arange(n - length)) % n
    cut = int(np.flatnonzero(rest == j)[0]) + 1
    stretch = (i + np.arange(length)) % n
    return float(gains[i, j]), np.concatenate([rest[:cut], stretch, rest[cut:]])


def _best_reversal(along: F64) -> tuple[float, I64]:
    """Find the best stretch of a tour to turn round, from place i to place j, i < j.

    Return by how much the sum falls, and the places in their new order. ``along``: costs by place.
    """
    n = len(along)
    places = np.arange(n)
    after = (places + 1) % n
    forward = np.concatenate([[0.0], np.cumsum(along[places, after])])
    backward = np.concatenate([[0.0], np.cumsum(along[after, places])])
    before = (places - 1) % n
    edge = along[places, after]
    old = edge[before][:, None] + edge[None, :] + forward[None, :n] - forward[:n, None]
    new = along[before] + along[:, after] + backward[None, :n] - backward[:n, None]
    gains = old - new
    gains[places[:, None] >= places[None, :]] = -math.inf
    gains[0, n - 1] = -math.inf  # all of it: the same as all but one, which the sums above allow
    i, j = divmod(int(gains.argmax()), n)
    moved = places.copy()
    moved[i : j + 1] = moved[i : j + 1][::-1]
    return float(gains[i, j]), moved
