"""Keep what all members have measured, at the coordinator: a ``Network`` to plan with. No clock.

Each member tells the coordinator its row of the table, when that is news (``RowTimes``).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from statistics import median

import numpy as np

from atoll.collectives import units
from atoll.collectives.planning.network_model import (
    F64,
    RATE_MIN_BYTES_PER_S,
    Network,
    measured,
)
from atoll.peer.links.messages import LinkRow

# The rate that a way within one machine is said to have, which nobody measures: 10 Gbit/s.
LOCAL_BYTES_PER_S = 1.25e9
LOSS_SHOWN = 0.0005  # what rounds to a tenth of a percent
# A row is sent when a value differs by this share from what was said last, and every ROW_S in case
# the coordinator has lost it; never more often than every ROW_PAUSE_S, and in a large view so that
# the coordinator hears ten rows a second.
CHANGED = 0.2
# What leaves or enters a peer is told when it has grown by less: the plan had held it back, and the
# next one lets it grow on.
GROWN = 0.05
CHANGED_RTT_S, CHANGED_LOSS = 0.002, 0.002  # smaller differences are noise
ROW_S = 300.0
ROW_PAUSE_S = 2.0
ROW_PAUSE_PER_MEMBER_S = 0.1


class LinkTable:
    """Keep the last row of each member of the view.

    What a row says is believed within the bounds of ``measured``, and only about links of who sent
    it.
    """

    def __init__(self) -> None:
        self._rows: dict[bytes, LinkRow] = {}

    def put(self, peer: bytes, row: LinkRow) -> None:
        self._rows[peer] = row

    def keep(self, members: Collection[bytes]) -> None:
        """Drop the rows of all peers but ``members``."""
        self._rows = {peer: row for peer, row in self._rows.items() if peer in members}

    def out(self, source: bytes, target: bytes) -> float:
        """Return the rate from one peer to another in bytes per second; 0 if unknown."""
        row = self._rows.get(source)
        return (row.out[row.peers.index(target)] or 0.0) if row and target in row.peers else 0.0

    def bbr(self, participants: Collection[bytes]) -> tuple[bool, ...]:
        """Return, for each peer in ascending order, whether losses need not slow its streams."""
        rows = (self._rows.get(peer) for peer in sorted(participants))
        return tuple(row is not None and row.bbr for row in rows)

    def gaps(self, participants: Collection[bytes], apart: Collection[tuple[int, int]] = ()) -> int:
        """Count the ways, from each to each other, of which the rate or the round trip is unknown.

        ``apart``: pairs without a link, as positions in ascending order of peer id; no way there.

        A rate is known where somebody has measured it, and where it is known what leaves the one
        end and what enters the other: measured, or capped by its operator. Ways within one machine
        say nothing of that. A round trip is that of the way back.
        """
        everyone = set(participants)
        rows = {peer: row for peer, row in self._rows.items() if peer in everyone}
        measured_ways, trips = set(), set()
        for peer, row in rows.items():
            for other, rtt_s, out in zip(row.peers, row.rtt_s, row.out, strict=True):
                if out:
                    measured_ways.add((peer, other))
                if rtt_s:
                    trips |= {(peer, other), (other, peer)}
        remote = {way for way in measured_ways if self.out(*way) != LOCAL_BYTES_PER_S}
        leaving = {p for p, _ in remote} | {p for p, row in rows.items() if row.up or row.up_cap}
        entering = {p for _, p in remote} | {
            p for p, row in rows.items() if row.down or row.down_cap
        }
        order = sorted(everyone)
        nowhere = {way for n, m in apart for way in ((order[n], order[m]), (order[m], order[n]))}
        return sum(
            (one, other) not in trips
            or ((one, other) not in measured_ways and not (one in leaving and other in entering))
            for one in everyone
            for other in everyone
            if one != other and (one, other) not in nowhere
        )

    def has_ends(self, participants: Collection[bytes]) -> bool:
        """Return whether it is known what leaves and what enters each of these, not bounds alone.

        Rounds have shown it, or probes that lasted, or the peer's operator has capped it.
        """
        everyone = set(participants)
        rows = {peer: row for peer, row in self._rows.items() if peer in everyone}
        known = {
            (peer, other): other in row.bounds
            for peer, row in rows.items()
            for other, out in zip(row.peers, row.out, strict=True)
            if out and other in everyone and self.out(peer, other) != LOCAL_BYTES_PER_S
        }
        # A way that is limited by its slow end shows nothing of the other one.
        for seen, end in ((("up", "up_cap"), 0), (("down", "down_cap"), 1)):
            sure = {peer for peer, row in rows.items() if any(getattr(row, name) for name in seen)}
            bound = {way[end] for way, is_bound in known.items() if is_bound}
            if everyone - sure - ({way[end] for way in known} - bound):
                return False
        return True

    def network(self, participants: Sequence[bytes]) -> Network:
        """Return the network of these peers in ascending order of peer id, whatever order is given.

        A round trip is the same from both ends: the smaller one has met fewer queues. An uplink has
        at least what one of its pairs has, and at most what its peer allows itself. Raises
        ConfigError for nobody.
        """
        order = sorted(participants)
        index = {peer: n for n, peer in enumerate(order)}
        pair: dict[tuple[int, int], float] = {}
        latency_s: dict[tuple[int, int], float] = {}
        loss: dict[tuple[int, int], float] = {}
        up: list[float | None] = [None] * len(order)
        down: list[float | None] = [None] * len(order)
        for peer, n in index.items():
            row = self._rows.get(peer)
            if row is None:
                continue
            up[n], down[n] = row.up, row.down
            for other, rtt_s, out, lost in zip(
                row.peers, row.rtt_s, row.out, row.loss, strict=True
            ):
                m = index.get(other, n)
                if m == n:
                    continue  # it takes no part, or the row is about its sender
                if out:
                    pair[n, m] = out
                if rtt_s:
                    latency_s[n, m] = rtt_s / 2
                if lost is not None:
                    loss[n, m] = lost
        both = {(n, m): min(way, latency_s.get((m, n), way)) for (n, m), way in latency_s.items()}
        _fill_beside_local(pair, up, down)
        ends = [self._ends_of(peer) for peer in order]
        for (n, m), rate in pair.items():
            up[n], down[m] = _larger(up[n], rate), _larger(down[m], rate)
        bounds = {
            (n, index[other])
            for peer, n in index.items()
            if peer in self._rows
            for other in self._rows[peer].bounds
            if other in index
        }
        _fill_between_known(pair, ends, bounds)
        found = measured(len(order), up=up, down=down, pair=pair, latency_s=both, loss=loss)
        return replace(
            found,
            up=np.minimum(found.up, self._caps(order, "up_cap")),
            down=np.minimum(found.down, self._caps(order, "down_cap")),
        )

    def _ends_of(self, peer: bytes) -> tuple[float | None, float | None]:
        """Return what rounds have shown to leave and to enter a peer, or what it allows itself."""
        row = self._rows.get(peer)
        if row is None:
            return None, None
        return (
            min(filter(None, (row.up, row.up_cap)), default=None),
            min(filter(None, (row.down, row.down_cap)), default=None),
        )

    def _caps(self, order: Sequence[bytes], which: str) -> F64:
        """Return what each peer in this order allows itself; infinite where that is anything."""
        rows = (self._rows.get(peer) for peer in order)
        caps = [(getattr(row, which) or math.inf) if row is not None else math.inf for row in rows]
        return np.array([max(cap, RATE_MIN_BYTES_PER_S) for cap in caps])


def describe(network: Network) -> str:
    """Describe a network in one line, for the log."""
    peers = range(network.count)
    pairs = [(i, j) for i in peers for j in peers if i != j]
    if not pairs:
        return "no links"
    trips = [
        units.duration(2 * s) for s in sorted(float(network.latency_s[pair]) for pair in pairs)
    ]
    alone = network.alone_bytes_per_s()
    rates = [units.rate(speed) for speed in sorted(float(alone[pair]) for pair in pairs)]
    loss = max(float(network.loss[pair]) for pair in pairs)
    losses = f"up to {loss:.2%} loss" if loss >= LOSS_SHOWN else "no loss"
    return f"{units.count(len(pairs), 'link')}: {units.span(trips)}, {units.span(rates)}, {losses}"


def _fill_between_known(
    pair: dict[tuple[int, int], float],
    ends: Sequence[tuple[float | None, float | None]],
    bounds: Collection[tuple[int, int]],
) -> None:
    """Give ways what rounds have shown both of their ends to have, where nobody has measured them.

    Those of which only a bound is known get it, too.

    So they have a pace as all others have: streams without one beside streams that keep to theirs
    fill the queues of both, and make a round up to twice as long (docs/log.md).
    """
    for n, (leaves, _) in enumerate(ends):
        for m, (_, enters) in enumerate(ends):
            if n != m and leaves and enters and ((n, m) not in pair or (n, m) in bounds):
                pair[n, m] = min(leaves, enters)


def _fill_beside_local(
    pair: dict[tuple[int, int], float], up: Sequence[float | None], down: Sequence[float | None]
) -> None:
    """Give a rate to the unmeasured ways of peers that share a machine with others.

    It is what their links to other machines are known to have, or usually have where nothing is
    known: what is within the machine says nothing of those.
    """
    shared = {n for way, rate in pair.items() if rate == LOCAL_BYTES_PER_S for n in way}
    if not shared:
        return
    leaving, entering = dict(enumerate(up)), dict(enumerate(down))
    for (n, m), rate in pair.items():
        if rate != LOCAL_BYTES_PER_S:
            leaving[n] = max(leaving[n] or 0.0, rate)
            entering[m] = max(entering[m] or 0.0, rate)
    usual = [rate for rate in (*leaving.values(), *entering.values()) if rate]
    if not usual:
        return
    for n, leaves in leaving.items():
        for m, enters in entering.items():
            if n != m and (n, m) not in pair and (n in shared or m in shared):
                pair[n, m] = min(leaves or median(usual), enters or median(usual))


def _larger(known: float | None, rate: float) -> float | None:
    """Return the larger rate, but None for an end of which nothing else is known.

    Such an end is left to ``measured``.
    """
    return known if known is None else max(known, rate)


# ---------------------------------------------------------------- when to tell a row


@dataclass(slots=True)
class RowTimes:
    """Keep what this member has told the coordinator of its view, and when."""

    said: LinkRow | None = None
    at_s: float = float("-inf")
    to: tuple[bytes, int] = (b"", 0)  # the coordinator and the number of its view

    def due(self, row: LinkRow, to: tuple[bytes, int], members: int, now_s: float) -> bool:
        """Return whether the coordinator is to be told this row now.

        ``to``: the coordinator and the number of its view; it keeps rows of that view alone.
        """
        age_s = now_s - self.at_s
        if age_s < max(ROW_PAUSE_S, ROW_PAUSE_PER_MEMBER_S * members):
            return False
        return to != self.to or age_s >= ROW_S or has_changed(self.said, row)

    def sent(self, row: LinkRow, to: tuple[bytes, int], now_s: float) -> None:
        self.said, self.to, self.at_s = row, to, now_s


def has_changed(before: LinkRow | None, after: LinkRow) -> bool:
    """Return whether somebody who knows ``before`` should know ``after``."""
    if before is None or set(before.peers) != set(after.peers):
        return True
    if set(before.bounds) != set(after.bounds):
        return True
    ends = ("up", "down", "up_cap", "down_cap")
    if any(_differs(getattr(before, end), getattr(after, end)) for end in ends):
        return True
    if _has_grown(before.up, after.up) or _has_grown(before.down, after.down):
        return True  # the plan had held it back
    old = {peer: n for n, peer in enumerate(before.peers)}
    for n, peer in enumerate(after.peers):
        m = old[peer]
        if (
            _differs(before.out[m], after.out[n])
            or _differs(before.rtt_s[m], after.rtt_s[n], CHANGED_RTT_S)
            or _differs(before.loss[m], after.loss[n], CHANGED_LOSS)
        ):
            return True
    return False


def _has_grown(before: float | None, after: float | None) -> bool:
    return before is not None and after is not None and after > (1 + GROWN) * before


def _differs(before: float | None, after: float | None, at_least: float = 0.0) -> bool:
    if before is None or after is None:
        return before is not after
    return abs(after - before) > max(at_least, CHANGED * before)
