"""Describe the network between the participants of a collective: a value, without unknowns.

Rates are those of the links, in bytes per second, headers of the network included. Four kinds of
line limit a transfer from ``i`` to ``j``, and each is shared fairly by what crosses it:

    up[i]           everything that i sends
    down[j]         everything that j receives
    pair[i, j]      this pair alone: a long path, a limit of one connection
    lines of sites  everything that leaves, or enters, the site of i, or of j; only between sites

Measurements come from other peers and are never complete. ``measured`` fills the gaps: what is
missing or impossible counts as unknown, and the rest is brought within bounds, because one peer
with a broken clock must not keep the others from choosing a collective.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from atoll.collectives.errors import ConfigError

F64 = NDArray[np.float64]
Pairs = Mapping[tuple[int, int], float]  # (from, to) -> value

PEERS_MAX: Final = 1024  # as many as a view has members; a matrix takes 8 MiB
RATE_MIN_BYTES_PER_S: Final = 1e3  # slower than a modem: a measurement that went wrong
RATE_MAX_BYTES_PER_S: Final = 1e11  # 800 Gbit/s; memory is not faster
# 100 Mbit/s, if nobody has measured anything: only the ratios decide then.
RATE_DEFAULT_BYTES_PER_S: Final = 12.5e6
LATENCY_MAX_S: Final = 10.0  # where links give up
LATENCY_DEFAULT_S: Final = 0.025  # one way; a round trip of 50 ms is usual on one continent
LOSS_MAX: Final = 0.5  # share of packets; TCP stands still long before
SAME_SITE_LATENCY_S: Final = 0.0005  # one way: within a building, and not beyond a city


@dataclass(frozen=True, slots=True, eq=False)
class Network:
    """Hold the rates, latencies and losses between ``n`` participants at ``m`` sites.

    All arrays are float64 and cannot be written to.

    up, down: [n] bytes per second. pair: [n, n] bytes per second, infinite where nothing but up and
    down is known to limit; the diagonal means nothing. latency_s: [n, n] one way. loss: [n, n]
    fraction of packets. sites: the site of each participant, 0 to m - 1. site_up, site_down: [m]
    bytes per second, infinite if unknown. Raises ConfigError if a value is outside its bounds.
    """

    up: F64
    down: F64
    pair: F64
    latency_s: F64
    loss: F64
    sites: tuple[int, ...]
    site_up: F64
    site_down: F64

    def __post_init__(self) -> None:
        n, m = len(self.sites), len(set(self.sites))
        if not 1 <= n <= PEERS_MAX:
            raise ConfigError(f"a network has 1 to {PEERS_MAX} peers, not {n}")
        if set(self.sites) != set(range(m)):
            raise ConfigError(f"the sites of a network are not numbered from 0: {self.sites}")
        limits = (RATE_MIN_BYTES_PER_S, RATE_MAX_BYTES_PER_S)
        _check("up", self.up, (n,), *limits)
        _check("down", self.down, (n,), *limits)
        _check("pair", self.pair, (n, n), *limits, infinite=True)
        _check("latency_s", self.latency_s, (n, n), 0, LATENCY_MAX_S)
        _check("loss", self.loss, (n, n), 0, LOSS_MAX)
        _check("site_up", self.site_up, (m,), *limits, infinite=True)
        _check("site_down", self.site_down, (m,), *limits, infinite=True)
        for values in (self.up, self.down, self.pair, self.latency_s, self.loss):
            values.flags.writeable = False
        self.site_up.flags.writeable = False
        self.site_down.flags.writeable = False

    @property
    def count(self) -> int:
        return len(self.sites)

    @property
    def members(self) -> tuple[tuple[int, ...], ...]:
        """Return the participants of each site, ascending."""
        found: list[list[int]] = [[] for _ in set(self.sites)]
        for peer, site in enumerate(self.sites):
            found[site].append(peer)
        return tuple(map(tuple, found))

    def across(self) -> NDArray[np.bool_]:
        """Return whether two participants are of different sites, bool[n, n]."""
        sites = np.asarray(self.sites)
        different: NDArray[np.bool_] = sites[:, None] != sites[None, :]
        return different

    def alone_bytes_per_s(self) -> F64:
        """Return the rate of a transfer that shares its lines with nothing else, float64[n, n]."""
        sites = np.asarray(self.sites)
        rates = np.minimum(np.minimum(self.up[:, None], self.down[None, :]), self.pair)
        lines = np.minimum(self.site_up[sites][:, None], self.site_down[sites][None, :])
        return np.where(self.across(), np.minimum(rates, lines), rates)


def measured(
    count: int,
    *,
    up: Sequence[float | None] = (),
    down: Sequence[float | None] = (),
    pair: Pairs | None = None,
    latency_s: Pairs | None = None,
    loss: Pairs | None = None,
    sites: Sequence[int] = (),
    site_up: Mapping[int, float] | None = None,
    site_down: Mapping[int, float] | None = None,
) -> Network:
    """Return a network from what was measured.

    Rates are in bytes per second, see ``Network`` for the rest. An unknown uplink is as fast as the
    fastest pair that was seen to leave it, because it carried that; if none was, as the median of
    the known uplinks; if none is, the default. Downlinks likewise. An unknown pair is limited by
    nothing of its own. An unknown latency is that of the way back; else the median of the known
    ones; else the default. Unknown loss is none. Without ``sites`` they follow from the latencies
    that were measured.
    """
    if not 1 <= count <= PEERS_MAX:
        raise ConfigError(f"a network has 1 to {PEERS_MAX} peers, not {count}")
    rates = _matrix(count, pair, RATE_MIN_BYTES_PER_S, RATE_MAX_BYTES_PER_S)
    ways = _matrix(count, latency_s, 0, LATENCY_MAX_S)
    lost = _matrix(count, loss, 0, LOSS_MAX)
    if not sites:
        sites = sites_by_latency(ways)
    elif len(sites) != count:
        raise ConfigError(f"{count} peers, but the sites of {len(sites)}")
    names = sorted(set(sites))
    ways = np.where(np.isnan(ways), ways.T, ways)
    known = ways[~np.isnan(ways)]
    ways[np.isnan(ways)] = np.median(known) if known.size else LATENCY_DEFAULT_S
    np.fill_diagonal(ways, 0)
    return Network(
        up=_ends(count, up, rates),
        down=_ends(count, down, rates.T),
        pair=np.where(np.isnan(rates), math.inf, rates),
        latency_s=ways,
        loss=np.where(np.isnan(lost), 0, lost),
        sites=tuple(names.index(site) for site in sites),
        site_up=_lines(names, site_up),
        site_down=_lines(names, site_down),
    )


def uniform(count: int, bytes_per_s: float, latency_s: float) -> Network:
    """Return a network of equal links both ways, with sites of one peer each."""
    pairs = {(i, j): latency_s for i in range(count) for j in range(count) if i != j}
    rates = [bytes_per_s] * count
    return measured(count, up=rates, down=rates, latency_s=pairs, sites=range(count))


def sites_by_latency(latency_s: F64, within_s: float = SAME_SITE_LATENCY_S) -> tuple[int, ...]:
    """Return the site of each peer, as far as latencies show it.

    Peers are of one site if a chain of near pairs joins them, near both ways; NaN is unknown.

    Sites are numbered in the order of their first peer.
    """
    count = len(latency_s)
    near = latency_s <= within_s  # NaN is never near
    near &= near.T
    sites = [-1] * count
    for first in range(count):
        if sites[first] >= 0:
            continue
        sites[first] = number = max(sites) + 1
        found = [first]
        for peer in found:
            for other in np.flatnonzero(near[peer]):
                if sites[other] < 0:
                    sites[other] = number
                    found.append(int(other))
    return tuple(sites)


def _check(
    name: str,
    values: F64,
    shape: tuple[int, ...],
    lo: float,
    hi: float,
    *,
    infinite: bool = False,
) -> None:
    if values.shape != shape or values.dtype != np.float64:
        raise ConfigError(f"{name} of a network: {values.dtype}{values.shape}, not float64{shape}")
    good = (values >= lo) & (values <= hi)  # NaN is neither
    if infinite:
        good |= values == math.inf
    if not good.all():
        raise ConfigError(f"{name} of a network: {values[~good][0]:g} is not from {lo:g} to {hi:g}")


def _known(value: float | None, lo: float, hi: float) -> float:
    """Return a value within bounds, or NaN for what is unknown or cannot be."""
    if value is None or not math.isfinite(value) or value < 0 or (value == 0 and lo > 0):
        return math.nan
    return min(max(float(value), lo), hi)


def _matrix(count: int, pairs: Pairs | None, lo: float, hi: float) -> F64:
    found = np.full((count, count), math.nan)
    for (src, dst), value in (pairs or {}).items():
        if not (0 <= src < count and 0 <= dst < count):
            raise ConfigError(f"a measurement from {src} to {dst} in a network of {count}")
        if src != dst:
            found[src, dst] = _known(value, lo, hi)
    return found


def _ends(count: int, given: Sequence[float | None], rates: F64) -> F64:
    """Return the rate of each uplink, given the rates of pairs by row.

    Given them by column, return that of each downlink.
    """
    if given and len(given) != count:
        raise ConfigError(f"{count} peers, but the links of {len(given)}")
    limits = (RATE_MIN_BYTES_PER_S, RATE_MAX_BYTES_PER_S)
    ends = np.array([_known(value, *limits) for value in given or [None] * count])
    seen = np.where(np.isnan(rates), 0, rates).max(axis=1)
    ends = np.where(np.isnan(ends) & (seen > 0), seen, ends)
    known = ends[~np.isnan(ends)]
    usual = float(np.median(known)) if known.size else RATE_DEFAULT_BYTES_PER_S
    return np.where(np.isnan(ends), usual, ends)


def _lines(names: Sequence[int], given: Mapping[int, float] | None) -> F64:
    limits = (RATE_MIN_BYTES_PER_S, RATE_MAX_BYTES_PER_S)
    found = [_known((given or {}).get(name), *limits) for name in names]
    return np.array([math.inf if math.isnan(rate) else rate for rate in found])
