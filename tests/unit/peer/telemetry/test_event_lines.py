"""Events as lines: times that people mean, choosing, and what a line says."""

from __future__ import annotations

import time
from typing import Any

import pytest

from atoll.collectives.errors import ConfigError
from atoll.peer.telemetry.event_file import UNIX_S_MAX
from atoll.peer.telemetry.event_lines import chosen, event_line, moment

NOW = time.mktime((2026, 11, 26, 14, 30, 0, 0, 0, -1))
HOUR = 3600.0


def event(kind: str, about: str, ago_s: float, **more: Any) -> dict[str, Any]:
    return {"unix_s": NOW - ago_s, "kind": kind, "type": about, "text": f"{kind} it was", **more}


ROW = {
    "unix_s": NOW,
    "kind": "row",
    "peer": "5d7bfdcb",
    "first": 41,
    "last": 41,
    "took_s": 21.3,
    "compute_s": 18.0,
    "wait_s": 0.2,
    "exchange_s": 3.1,
    "waited_for": ["4547bf59"],
    "sent": [4_000_000, 0, 100_000, 0],
    "loss": 2.3125,
}
EVENTS = [event("view", "view", 2 * HOUR), event("dead", "view", 600), event("disk", "error", 5)]


@pytest.mark.parametrize(
    ("text", "ago_s"),
    [
        ("10m", 600.0),
        ("1.5h", 1.5 * HOUR),
        ("2d", 48 * HOUR),
        ("14:03", 27 * 60.0),
        ("14:29:58", 2.0),
        ("14:31", 24 * HOUR - 60.0),
        ("2026-11-26T14:03", 27 * 60.0),
        ("2026-11-25 14:30", 24 * HOUR),
        ("2026-11-26", 14.5 * HOUR),
    ],
)
def test_times_that_people_mean(text: str, ago_s: float) -> None:
    assert moment(text, NOW) == NOW - ago_s


@pytest.mark.parametrize("text", ["", "soon", "10", "25:00", "-3m", "2026-13-01"])
def test_what_is_no_time_is_an_error_that_says_what_is(text: str) -> None:
    with pytest.raises(ConfigError, match="is no time"):
        moment(text, NOW)


def test_events_are_chosen_by_time_kind_and_type_and_rows_only_where_they_are_asked_for() -> None:
    both = [*EVENTS, ROW]
    assert list(chosen(both)) == EVENTS
    assert list(chosen(both, {"row"})) == [ROW]
    assert list(chosen(both, {"view"})) == EVENTS[:2]
    assert list(chosen(both, {"dead", "row"})) == [EVENTS[1], ROW]
    assert list(chosen(both, since_unix_s=NOW - HOUR)) == EVENTS[1:]
    assert list(chosen(both, (), NOW - HOUR, NOW - 60)) == [EVENTS[1]]


def test_lines() -> None:
    assert event_line(EVENTS[1]) == "2026-11-26 14:20:00  dead        it was"
    assert event_line(ROW) == (
        "2026-11-26 14:30:00  row         5d7bfdcb  round 41  21.3 s (compute 18.0, exchange 3.1,"
        " wait 0.2 for 4547bf59)  4.1 MB sent  loss 2.312"
    )
    assert event_line(ROW | {"heldout_loss": 2.75}).endswith("  loss 2.312  held-out 2.75")


def test_the_last_time_that_a_row_may_have_is_a_line() -> None:
    assert event_line(ROW | {"unix_s": UNIX_S_MAX})[:4] in (
        "9999",
        "1000",
    )  # by this machine's zone


def test_files_of_others_move_no_cursor() -> None:
    strange = {"unix_s": NOW, "kind": "x\x1b[2J", "text": "\x1b[2Jgone\n"}
    assert event_line(strange).isprintable()
    assert event_line(ROW | {"peer": "\x1b[2J", "waited_for": ["\n"]}).isprintable()
