"""Draw rounds and events as a Chrome trace, which Perfetto and chrome://tracing open.

Each peer is a process of the trace; its track has a slice for each of its rows, and in that the
slices of computing, waiting and exchange, in this order, which is how a round goes. Times are
microseconds since the first round. Rows carry the clocks of the peers that have sent them: where
those differ, so do the tracks.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

TRACK = 1  # the number of the one track that each peer has
OF_ALL = 0  # the process of the events that are of no single peer
INSTANTS = frozenset({"view", "fork", "ban", "error", "checkpoint", "trainer"})  # types of events
US = 1e6
ARGUMENTS = (
    "attempts",
    "peers",
    "counted",
    "loss",
    "heldout_loss",
    "tokens",
    "steps",
    "predicted_s",
    "error",
)


def chrome_trace(events: Iterable[dict[str, Any]], rounds: int) -> dict[str, Any]:
    """Return the last ``rounds`` rounds of these events and rows as a trace, in plain types."""
    known = list(events)
    rows = _last_rounds([event for event in known if event["kind"] == "row"], rounds)
    if not rows:
        return {"traceEvents": [], "displayTimeUnit": "ms"}
    peers = sorted({str(row["peer"]) for row in rows})
    numbers = {peer: number for number, peer in enumerate(peers, 1)}
    origin_s = min(row["unix_s"] - _of(row, "took_s") for row in rows)
    found = [_named(OF_ALL, "events of the run")]
    for peer, number in numbers.items():
        found.append(_named(number, f"peer {peer}"))
        end_us = 0
        for row in sorted((r for r in rows if r["peer"] == peer), key=lambda r: float(r["unix_s"])):
            slices = _slices(row, number, origin_s, end_us)
            end_us = slices[0]["ts"] + slices[0]["dur"]
            found += slices
    found += _instants(known, numbers, origin_s)
    began = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(origin_s))
    return {"traceEvents": found, "displayTimeUnit": "ms", "otherData": {"began": began}}


def _last_rounds(rows: list[dict[str, Any]], rounds: int) -> list[dict[str, Any]]:
    """Return the rows of the last rounds: back to where some peer would have more of them.

    They count in the order in which they were written: the numbers of rounds go back with a
    checkpoint or a rollback, and clocks differ.
    """
    left: dict[str, int] = {}
    found = []
    for row in reversed(rows):
        if left.get(row["peer"], rounds) <= 0:
            break
        left[row["peer"]] = left.get(row["peer"], rounds) - (row["last"] - row["first"] + 1)
        found.append(row)
    return found


def _named(process: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": "process_name", "pid": process, "tid": 0, "args": {"name": name}}


def _slices(
    row: dict[str, Any], process: int, origin_s: float, least_us: int
) -> list[dict[str, Any]]:
    """Return the slice of a row and those in it, from ``least_us`` on: tracks do not overlap."""
    end_us = max(least_us, _micros(row["unix_s"] - origin_s))
    begin_us = max(least_us, _micros(row["unix_s"] - _of(row, "took_s") - origin_s))
    exchange_us = max(begin_us, end_us - _micros(_of(row, "exchange_s")))
    wait_us = max(begin_us, exchange_us - _micros(_of(row, "wait_s")))
    computed_us = min(wait_us, begin_us + _micros(_of(row, "compute_s")))
    first, last = row["first"], row["last"]
    name = f"round {last}" if first == last else f"rounds {first} to {last}"
    arguments = {key: row[key] for key in ARGUMENTS if key in row}
    moved = {"sent_bytes": sum(row["sent"]), "received_bytes": sum(row["received"])}
    late = ", ".join(row.get("waited_for", ()))
    found = [_slice(process, name, begin_us, end_us, arguments | moved)]
    parts = (
        ("compute", begin_us, computed_us, {"compute_s": _of(row, "compute_s")}),
        (f"wait for {late}" if late else "wait", wait_us, exchange_us, {"waited_for": late}),
        ("exchange", exchange_us, end_us, {"exchange_s": _of(row, "exchange_s")}),
    )
    found += [_slice(process, what, at, to, more) for what, at, to, more in parts if to > at]
    return found


def _slice(
    process: int, name: str, begin_us: int, end_us: int, arguments: dict[str, Any]
) -> dict[str, Any]:
    place = {"pid": process, "tid": TRACK, "ts": begin_us, "dur": end_us - begin_us}
    return {"ph": "X", "name": name, "cat": name.split()[0], **place, "args": arguments}


def _instants(
    events: list[dict[str, Any]], numbers: dict[str, int], origin_s: float
) -> list[dict[str, Any]]:
    """Return kills, views, forks and the like since then, at the peer that they are about."""
    found = []
    for event in events:
        if event.get("type") not in INSTANTS or event["unix_s"] < origin_s:
            continue
        process = numbers.get(str(event.get("peer", "")), OF_ALL)
        scope = {"s": "p" if process else "g", "pid": process, "tid": TRACK if process else 0}
        at_us = _micros(event["unix_s"] - origin_s)
        text = {"text": str(event.get("text", ""))}
        name = {"ph": "i", "name": event["kind"], "cat": event["type"]}
        found.append({**name, "ts": at_us, **scope, "args": text})
    return found


def _micros(seconds: float) -> int:
    return round(seconds * US)


def _of(row: dict[str, Any], name: str) -> float:
    return float(row.get(name, 0.0))
