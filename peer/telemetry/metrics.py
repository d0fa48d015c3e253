"""Write what a daemon knows in the text format of Prometheus.

Names have base units, and labels few values: purposes, phases, kinds of events, and the peers of
the view, which are bounded. Counters are of this daemon's life. Pure: from `atoll status` and rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    InfoMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.registry import Collector

from atoll.collectives.version import VERSION
from atoll.peer.daemon.event_log import EVENT_TYPES
from atoll.peer.membership.view import REPLICA

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PHASES = ("compute", "wait", "exchange")
REACHABLE = {"reachable": 1.0, "outbound": 0.0}  # of other states nothing is known

Status = dict[str, Any]
Row = dict[str, Any]


def metrics_text(status: Status, rows: Iterable[Row]) -> bytes:
    """Return the metrics of a daemon; ``rows``: the last ones of each peer, in order."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(status, {str(row["peer"]): row for row in rows}))
    return generate_latest(registry)


class _Collector(Collector):
    """Hand one look at a daemon to the library, which writes it down."""

    def __init__(self, status: Status, rows: dict[str, Row]) -> None:
        self._status, self._rows = status, rows

    def collect(self) -> Iterator[Metric]:
        yield from _of_the_run(self._status)
        yield from _of_rounds(self._status)
        yield from _of_bytes(self._status)
        yield from _of_events(self._status)
        yield from _of_peers(self._status, self._rows)


def _of_the_run(status: Status) -> Iterator[Metric]:
    names = {"run": status["run"], "peer": status["peer"], "role": status["role"]}
    yield InfoMetricFamily("atoll", "The daemon", value={**names, "version": VERSION})
    yield _gauge("uptime_seconds", "Since the daemon was started", status["uptime_s"])
    yield _gauge("parameters", "Of the model", status["parameters"])
    yield _gauge("members", "Peers in the view", len(status["members"]))
    yield _gauge("joiners", "Peers that join, as the coordinator knows", len(status["learners"]))
    yield _gauge("in_view", "1: this peer is in the run's view", status["view"] > 0)
    yield _gauge("coordinator", "1: this peer leads", status["coordinator"] == status["peer"])
    yield _gauge("fork", "1: the view goes on without a majority", status["fork"])
    yield _gauge("synced", "1: this peer has the run's state", status["synced"])
    if status["role"] == REPLICA:
        has = bool(status["trainer"])
        yield _gauge("trainer_attached", "1: a training script is attached", has)
    if (known := REACHABLE.get(status["reach"]["state"])) is not None:
        yield _gauge("reachable", "1: other peers can dial this one", known)


def _of_rounds(status: Status) -> Iterator[Metric]:
    spent = status["rounds_spent"]
    yield _gauge("round", "The last round that was committed", status["round"])
    yield _counter("rounds", "Rounds committed here", spent["rounds"])
    yield SummaryMetricFamily(
        "atoll_round_seconds",
        "From one commit to the next",
        count_value=spent["rounds"],
        sum_value=spent["took_s"],
    )
    phases = CounterMetricFamily(
        "atoll_round_phase_seconds", "How that time was spent", labels=["phase"]
    )
    for phase in PHASES:
        phases.add_metric([phase], spent[f"{phase}_s"])
    yield phases
    if status["last_commit_unix_s"]:
        at_s = status["last_commit_unix_s"]
        yield _gauge("last_commit_timestamp_seconds", "When a round was committed last", at_s)


def _of_bytes(status: Status) -> Iterator[Metric]:
    for way in ("sent", "received"):
        moved = CounterMetricFamily(f"atoll_{way}_bytes", f"Bytes {way}", labels=["purpose"])
        for purpose, count in status["bytes"][way].items():
            moved.add_metric([purpose], count)
        yield moved
    again = status["bytes"]["sent_again"]
    yield _counter("sent_again_bytes", "Bytes of rounds sent again, after broken attempts", again)
    links = GaugeMetricFamily(
        "atoll_links_bytes_per_second", "What this peer's links have carried", labels=["direction"]
    )
    for way, key in (("sent", "up_bytes_per_s"), ("received", "down_bytes_per_s")):
        links.add_metric([way], status["own_links"][key])
    yield links


def _of_events(status: Status) -> Iterator[Metric]:
    events = CounterMetricFamily("atoll_events", "Lines of the log", labels=["kind", "type"])
    counts = status["event_counts"]
    for kind, about in sorted(EVENT_TYPES.items()):  # with zeros: an increase is seen from there on
        events.add_metric([kind, about], counts.get(kind, 0))
    yield events


def _of_peers(status: Status, rows: dict[str, Row]) -> Iterator[Metric]:
    """Yield what is known of the peers of the view and of joiners, and of nobody else."""
    members = [*status["members"], *status["learners"]]
    told = [(m["peer"], rows[m["peer"]]) for m in members if m["peer"] in rows]
    linked = _of_each("connected", "1: this peer has a connection to it")
    trips = _of_each("round_trip_seconds", "Least round trip to it")
    for member in status["members"]:
        if not member["you"]:
            linked.add_metric([member["peer"]], member["state"] == "connected")
            if member["rtt_ms"]:
                trips.add_metric([member["peer"]], 1e-3 * member["rtt_ms"])
    yield from (linked, trips)
    for name, text, key in (
        ("round", "The last round that it has told of", "last"),
        ("loss", "The loss that its trainer has reported", "loss"),
        ("heldout_loss", "The held-out loss that its trainer has reported last", "heldout_loss"),
        ("tokens", "The tokens that its trainer has counted", "tokens"),
        ("memory_bytes", "Memory of its daemon", "memory_bytes"),
        ("row_timestamp_seconds", "When its last row was made, by its clock", "unix_s"),
    ):
        each = _of_each(name, text)
        for peer, row in told:
            if row.get(key) is not None:
                each.add_metric([peer], row[key])
        yield each
    phases = _of_each("round_phase_seconds", "How it has spent its last round", "phase")
    for peer, row in told:
        for phase in PHASES:
            rounds = row["last"] - row["first"] + 1
            phases.add_metric([peer, phase], row.get(f"{phase}_s", 0.0) / rounds)
    yield phases


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"atoll_{name}", text, value=float(value))


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(f"atoll_{name}", text, value=float(value))


def _of_each(name: str, text: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"atoll_peer_{name}", text, labels=["peer", *labels])
