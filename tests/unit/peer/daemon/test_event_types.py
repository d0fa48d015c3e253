"""Each kind of event is of one type, and events carry it."""

from __future__ import annotations

from typing import Any

from harness.event_kinds import kinds_emitted

from atoll.peer.daemon.event_log import EVENT_TYPES, EventLog

TYPES = {
    "round",
    "view",
    "link",
    "sync",
    "plan",
    "checkpoint",
    "fork",
    "ban",
    "error",
    "trainer",
}


def test_the_table_has_every_kind_that_the_source_emits_and_no_other() -> None:
    found = kinds_emitted()
    missing = {kind: where for kind, where in found.items() if kind not in EVENT_TYPES}
    assert not missing, f"kinds without a type: {missing}"
    gone = EVENT_TYPES.keys() - found.keys()
    assert not gone, f"nobody emits these: {gone}"
    assert set(EVENT_TYPES.values()) == TYPES


def test_events_are_stored_with_their_type() -> None:
    recorded: list[dict[str, Any]] = []
    log = EventLog(lambda line: None)
    log.record = recorded.append
    log.note("dead", "b is gone: it was silent", peer="b")
    assert [(e["kind"], e["type"], e["peer"]) for e in recorded] == [("dead", "view", "b")]
    assert log.events == recorded


def test_checkpoints_of_the_home_are_recorded_and_not_printed() -> None:
    said: list[str] = []
    recorded: list[dict[str, Any]] = []
    log = EventLog(said.append)
    log.record = recorded.append
    log.note("saved", "round 20 in 12 ms")
    assert [event["type"] for event in recorded] == ["checkpoint"]
    assert said == []
    assert log.events == []
