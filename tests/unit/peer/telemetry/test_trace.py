"""Chrome traces: their schema, times in microseconds, and slices that lie in each other."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.peer.telemetry.trace import chrome_trace

START = 1_790_000_000.0
NEEDED = {
    "M": {"name", "pid", "tid", "args"},
    "X": {"name", "cat", "pid", "tid", "ts", "dur", "args"},
    "i": {"name", "cat", "pid", "tid", "ts", "s", "args"},
}


def row(peer: str, number: int, end_s: float, took_s: float, **more: Any) -> dict[str, Any]:
    round_ = {"first": number, "last": number, "took_s": took_s, "sent": [9, 1], "received": [5, 5]}
    return {"unix_s": START + end_s, "kind": "row", "peer": peer, **round_, **more}


def check(trace: dict[str, Any]) -> None:
    """The schema holds, tracks do not overlap, and what is in a round lies in it."""
    assert json.loads(json.dumps(trace)) == trace
    by_track: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for event in trace["traceEvents"]:
        assert event.keys() - {"ph"} == NEEDED[event["ph"]]
        if event["ph"] == "X":
            assert type(event["ts"]) is type(event["dur"]) is int
            assert min(event["ts"], event["dur"]) >= 0
            by_track.setdefault((event["pid"], event["tid"]), []).append(event)
    for slices in by_track.values():
        rounds = [s for s in slices if s["cat"] in ("round", "rounds")]
        parts = [s for s in slices if s not in rounds]
        for series in (rounds, parts):
            for before, after in pairwise(series):
                assert before["ts"] + before["dur"] <= after["ts"]
        for part in parts:
            ends = part["ts"] + part["dur"]
            assert [r for r in rounds if r["ts"] <= part["ts"] and ends <= r["ts"] + r["dur"]]


def test_a_round_has_its_parts_in_order_with_what_they_were_for() -> None:
    of = {"compute_s": 1.0, "wait_s": 0.5, "exchange_s": 0.4, "waited_for": ["b"], "loss": 2.5}
    events = [
        row("a", 7, 2.0, 2.0, **of),
        {"unix_s": START + 1.5, "kind": "dead", "type": "view", "text": "b is gone", "peer": "b"},
        {"unix_s": START + 1.6, "kind": "fork", "type": "fork", "text": "alone"},
        {"unix_s": START + 1.7, "kind": "limits", "type": "plan", "text": "not shown"},
        row("b", 7, 2.25, 1.0, compute_s=0.5),
    ]
    trace = chrome_trace(events, 20)
    check(trace)
    slices = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    assert [(e["name"], e["pid"], e["ts"], e["dur"]) for e in slices] == [
        ("round 7", 1, 0, 2_000_000),
        ("compute", 1, 0, 1_000_000),
        ("wait for b", 1, 1_100_000, 500_000),
        ("exchange", 1, 1_600_000, 400_000),
        ("round 7", 2, 1_250_000, 1_000_000),
        ("compute", 2, 1_250_000, 500_000),
    ]
    assert slices[0]["args"] == {"loss": 2.5, "sent_bytes": 10, "received_bytes": 10}
    assert slices[2]["args"] == {"waited_for": "b"}
    instants = [e for e in trace["traceEvents"] if e["ph"] == "i"]
    assert [(e["name"], e["pid"], e["ts"], e["s"]) for e in instants] == [
        ("dead", 2, 1_500_000, "p"),
        ("fork", 0, 1_600_000, "g"),
    ]
    names = {e["pid"]: e["args"]["name"] for e in trace["traceEvents"] if e["ph"] == "M"}
    assert names == {0: "events of the run", 1: "peer a", 2: "peer b"}


def test_only_the_last_rounds_are_drawn_and_nothing_of_nothing() -> None:
    events = [row(peer, n, float(n), 1.0) for n in range(1, 31) for peer in "ab"]
    names = [e["name"] for e in chrome_trace(events, 3)["traceEvents"] if e["ph"] == "X"]
    assert names == ["round 28", "round 29", "round 30"] * 2
    assert chrome_trace([], 3)["traceEvents"] == []


def test_after_going_back_to_a_checkpoint_the_last_rounds_are_those_that_came_last() -> None:
    before = [row(peer, n, float(n), 1.0) for n in range(900, 910) for peer in "ac"]
    events = before + [row(peer, n, 20.0 + n, 1.0) for n in range(1, 5) for peer in "ab"]
    events.append(row("b", 2**60, 25.0, 1.0))
    slices = [e for e in chrome_trace(events, 4)["traceEvents"] if e["ph"] == "X"]
    assert [(e["pid"], e["name"]) for e in slices] == [
        *((1, f"round {n}") for n in (2, 3, 4)),
        *((2, f"round {n}") for n in (2, 3, 4, 2**60)),
    ]


seconds = st.floats(0, 50)


@given(st.lists(st.tuples(st.sampled_from("abc"), *[seconds] * 5), max_size=20), st.integers(1, 30))
@pytest.mark.filterwarnings("error")
def test_whatever_clocks_say_slices_lie_in_each_other(
    rows: list[tuple[str, float, float, float, float, float]], rounds: int
) -> None:
    names = ("compute_s", "wait_s", "exchange_s")
    events = [
        row(peer, number, end_s, took_s, **dict(zip(names, parts, strict=True)))
        for number, (peer, end_s, took_s, *parts) in enumerate(rows, 1)
    ]
    check(chrome_trace(events, rounds))
