"""Share the chunks of a butterfly out: each participant owns as many as its links carry in time.

Theory
======

``n`` participants, B encoded bytes in all, of which i owns the share ``x[i]``. It sends its parts
of what others own, and the results of what it owns to all others; it receives everyone's parts of
its own, and the results of what others own. Both ways that makes::

    (1 - x) B + (n - 1) x B  =  (1 + (n - 2) x) B        bytes on its uplink and on its downlink

So its time is ``t(x) = (1 + (n - 2) x) B / r`` with ``r`` the slower of its two links, and what is
wanted is ``minimise max t[i](x[i])`` over ``x >= 0, sum x = 1``. Such a linear programme is solved
by filling water: at the level T, i can own ``x[i](T) = max(0, (T r[i] / B - 1) / (n - 2))``, and
the level is the T at which these add up to 1. With the peers sorted by rate, the k fastest have a
share, and ``T = (n - 2 + k) B / (sum of their rates)`` for the k at which the next one would get
nothing. A peer with ``r < B / T`` owns nothing. It takes ``B / r`` all the same, for its own parts
and for the results, which no split of the work spares it; the others are still balanced among
themselves, so that their lines are free early.

**One of four at 20 Mbit/s, the others at 100.** The three fast ones: ``T = (4 - 2 + 3) B / 300 =
B / 60``. There the slow one would get ``20 / 60 - 1 < 0``: nothing. So the shares are 1/3, 1/3,
1/3 and 0. The slow peer has ``B / 20`` to send and to receive, which is also the least that any
collective can make it carry: its vector has to leave it, and the result to reach it. So ``B / 20``
is the optimum over all splits (64 MiB: 26.8 s, 28.0 s with headers). Equal shards take ``1.5 B /
20``, 50 % more: the slow peer would hand out a quarter of the results to three others.

Whole chunks: t rises with the number of chunks, so giving each chunk to whom it costs least, one
after the other, is optimal, also for the second slowest and so on. All that fits under the water
is given at once.

A slow path between i and j carries ``(x[i] + x[j]) B`` each way, so its ends should own little:
nothing crosses it if they own nothing. Half of it is counted for each end, ``2 x B / (rate of its
slowest path)``, which is safe, and exact where both ends own the same. Without limits of pairs all
of the above is exact. With two participants both always carry B, so they share equally. Lines of
sites are left out here; the cost model has them.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from atoll.collectives.errors import ConfigError
from atoll.collectives.planning.network_model import Network

BISECTIONS: Final = 60  # as many as a float64 has bits; the last chunks are given one by one


def butterfly_shards(
    network: Network, chunks: int, owners: Collection[int] | None = None
) -> tuple[int, ...]:
    """Return how many of the chunks each participant owns, so that the slowest ends soonest.

    ``owners``: who may own any, in ascending order; None: all. ConfigError for a negative number of
    chunks.
    """
    n = network.count
    able = range(n) if owners is None else owners
    if n <= 2 or chunks <= 0 or len(able) == 1:
        return shared_equally(n, chunks, able)
    rates = np.minimum(network.up, network.down)
    off = np.where(np.eye(n, dtype=np.bool_), np.inf, network.pair)
    paths = np.minimum(off, off.T).min(axis=1)  # the slowest of each one's paths

    def below(level: float) -> NDArray[np.int64]:
        """Return the whole chunks that each can own in this time.

        It is a hair less, for what rounding may add.
        """
        own = np.minimum((level * rates - chunks) / (n - 2), level * paths / 2)
        whole: NDArray[np.int64] = np.maximum(own * (1 - 1e-12), 0).astype(np.int64)
        return np.where(may_own, whole, 0)

    may_own = np.isin(np.arange(n), list(able))
    low = high = water_level(rates[may_own].tolist(), n) * chunks
    while below(high).sum() < chunks:
        high *= 2
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if below(middle).sum() <= chunks else (low, middle)
    shards = below(low).tolist()

    def entry(peer: int) -> tuple[float, int, int]:
        owned = shards[peer] + 1
        time = max((chunks + (n - 2) * owned) / rates[peer], 2 * owned / paths[peer])
        return float(time), owned, peer

    queue = [entry(peer) for peer in able]
    heapq.heapify(queue)
    for _ in range(chunks - sum(shards)):
        _, owned, peer = queue[0]
        shards[peer] = owned
        heapq.heapreplace(queue, entry(peer))
    return tuple(shards)


def water_level(rates: Sequence[float], n: int) -> float:
    """Return T / B: seconds per encoded byte at which the shares that fit add up to one.

    ``rates``: of those of the ``n`` participants, 3 at least, who may own anything.
    """
    fastest = sorted(rates, reverse=True)
    total, level = 0.0, 0.0
    for count, rate in enumerate(fastest, 1):
        if count > 1 and level * rate <= 1:
            break  # nothing for this one, nor for any that is slower
        total += rate
        level = (n - 2 + count) / total
    return level


def shared_equally(count: int, chunks: int, owners: Collection[int]) -> tuple[int, ...]:
    """Return the shards of so many participants, of whom only ``owners`` own any: equal ones."""
    shards = dict(zip(owners, equal_shards(len(owners), chunks), strict=True))
    return tuple(shards.get(peer, 0) for peer in range(count))


def equal_shards(count: int, chunks: int) -> tuple[int, ...]:
    """Return the sizes of shards that differ by one chunk at most.

    Raises ConfigError for a negative number of chunks.
    """
    if count < 1 or chunks < 0:
        raise ConfigError(f"{chunks} chunks cannot be shared out among {count} peers")
    return tuple(chunks * (i + 1) // count - chunks * i // count for i in range(count))
