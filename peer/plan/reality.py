"""Compare what a round should take with what it does take, from the rows of all. Pure.

What should be is what `atoll plan` predicts, with what this run has measured in place of guesses:
training as long as that of the slowest trainer, the exchange as the coordinator's plan promises it,
round trips as its links have them. So the difference is what the model of a round does not know.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

import numpy as np

from atoll.collectives.planning.network_model import measured
from atoll.collectives.units import duration
from atoll.optim.run_spec import RunSpec
from atoll.peer.net.byte_counts import PURPOSES, ROUNDS
from atoll.peer.plan.model import HOSTS_MAX, WAITING_METHODS, around_exchange, slow_start_s
from atoll.peer.telemetry.rows import RoundRow, RowTable, brief

ROWS_COMPARED: Final = 10  # of each peer, the last: what is now, and one late round is no verdict


@dataclass(frozen=True, slots=True)
class RoundTime:
    """Hold the seconds of a round: as predicted, and the median of the last ones."""

    predicted_s: float
    measured_s: float

    @property
    def text(self) -> str:
        """Return the two as `atoll status` shows them."""
        beyond = self.measured_s / self.predicted_s - 1
        predicted, took = duration(self.predicted_s), duration(self.measured_s)
        return f"predicted {predicted}, measured {took} ({beyond:+.0%})"


def round_time(
    table: RowTable,
    members: Collection[bytes],
    coordinator: bytes,
    spec: RunSpec,
    parameters: int,
) -> RoundTime | None:
    """Return what a round should take and takes; None where one of the two is not known.

    Not known it is before the coordinator has planned, for methods whose rounds are under way while
    hosts train, and in runs of more peers than a plan is for.
    """
    rows = {peer: _counted(table.rows(peer)) for peer in members}
    peers = sorted(peer for peer, found in rows.items() if found)
    promised = [row.predicted_s for row in rows.get(coordinator, ()) if row.predicted_s]
    waits = spec.method in WAITING_METHODS and spec.rounds_in_flight == 1
    if not waits or not promised or not 2 <= len(peers) <= HOSTS_MAX:
        return None
    training_s = max(median(_each(rows[peer], "compute_s")) for peer in peers)
    trip_s, begins_s = _on_links(table, peers, coordinator, rows, promised[-1], training_s)
    parts = around_exchange(parameters, trip_s, promised[-1], begins_s)
    took_s = median(seconds for peer in peers for seconds in _each(rows[peer], "took_s"))
    return RoundTime(training_s + sum(part.seconds for part in parts), took_s)


def _counted(rows: Sequence[RoundRow]) -> list[RoundRow]:
    """Return the last rows of rounds that were trained for; the first has only parameters."""
    return [row for row in rows if row.counted and row.first > 1][-ROWS_COMPARED:]


def _each(rows: Sequence[RoundRow], name: str) -> list[float]:
    """Return a time of each row, by the rounds that it is of."""
    return [float(getattr(row, name)) / (row.last - row.first + 1) for row in rows]


def _on_links(
    table: RowTable,
    peers: Sequence[bytes],
    coordinator: bytes,
    rows: dict[bytes, list[RoundRow]],
    exchange_s: float,
    idle_s: float,
) -> tuple[float, float]:
    """Return the longest round trip to the coordinator, and what it costs that streams were idle.

    Bytes of rounds are taken as sent to all others alike.
    """
    index = {brief(peer): n for n, peer in enumerate(peers)}
    lead, place = index.get(brief(coordinator)), PURPOSES.index(ROUNDS)
    latency_s: dict[tuple[int, int], float] = {}
    carried = np.zeros((len(peers), len(peers)))
    for n, peer in enumerate(peers):
        for link in table.links(peer):
            if link.rtt_s and link.peer in index:
                latency_s[n, index[link.peer]] = link.rtt_s / 2
        rounds = sum(row.last - row.first + 1 for row in rows[peer])
        sent = sum(row.sent[place] for row in rows[peer])
        carried[n] = sent / rounds / (len(peers) - 1)
        carried[n, n] = 0.0
    if not latency_s:
        return 0.0, 0.0
    network = measured(len(peers), latency_s=latency_s)
    trips = network.latency_s if lead is None else network.latency_s[lead]
    return 2 * float(trips.max()), slow_start_s(network, carried, exchange_s, idle_s)
