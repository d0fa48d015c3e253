"""What the daemon's log keeps for `atoll status`: the last events, and forks and rollbacks."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from atoll.peer.daemon import event_log as journal_module
from atoll.peer.daemon.event_log import (
    HISTORY_CHARACTERS_MAX,
    HISTORY_KEPT,
    HISTORY_KINDS,
    EventLog,
    RoundLines,
)
from atoll.peer.membership.messages import Begin
from atoll.peer.membership.operations import Operation
from atoll.peer.membership.view import Member, View, short
from atoll.peer.rounds.entries import GATHER, INIT, STEP
from atoll.peer.telemetry.rows import RoundTimes

ME = Member(b"a" * 32, 1)
SPENT = f"compute 18.0, exchange 3.1, wait 0.2 for {short(b'b' * 32)}"
TIMES = RoundTimes(21.3, 18.0, 0.16, 3.14, (b"b" * 32,))
VIEW = View(b"L" * 32, 3, (ME,), ME.peer, 7, b"c" * 32)
FORK = replace(VIEW, lineage=b"M" * 32, number=4, fork=True)
BACK = replace(VIEW, number=4, base_round=6, rollback=True)


def event_log() -> EventLog:
    return EventLog(lambda line: None)


def told(of: EventLog) -> list[tuple[str, str]]:
    return [(event["kind"], event["text"]) for event in of.history]


def test_a_fork_is_remembered_once_and_in_full_after_its_flag_has_faded() -> None:
    kept = event_log()
    kept.installed(FORK)
    text = f"lineage 4c4c goes on as 4d4d: {FORK.describe()}"
    kept.note("fork", text)
    kept.installed(replace(FORK, number=5, fork=False))
    assert told(kept) == [("fork", text)]


def test_a_joiner_that_is_told_of_nothing_sees_the_flags_of_its_first_view() -> None:
    kept = event_log()
    kept.installed(replace(FORK, rollback=True))
    assert told(kept) == [
        ("rollback", "rounds after 7 are lost"),
        ("fork", replace(FORK, rollback=True).describe()),
    ]


def test_a_rollback_is_remembered_and_is_the_last_error() -> None:
    kept = event_log()
    kept.installed(BACK)
    kept.note("rollback", "rounds after 6 are lost: nobody alive held them")
    kept.installed(replace(BACK, number=5, rollback=False))
    assert told(kept) == [("rollback", "rounds after 6 are lost: nobody alive held them")]
    assert kept.last_error.startswith("rounds after 6 are lost")


def test_views_without_flags_and_other_events_leave_no_trace() -> None:
    kept = event_log()
    kept.installed(VIEW)
    kept.note("view", VIEW.describe())
    kept.note("link", "link to b ended")
    assert told(kept) == []
    assert [event["kind"] for event in kept.events] == ["view", "link"]


def test_any_number_of_meetings_leaves_room_for_what_is_ours() -> None:
    kept = event_log()
    kept.installed(FORK)
    for number in range(1000):
        kept.note("fork", f"met lineage {number:x} of somebody; ours is at round 7")
        kept.note("yield", f"giving way to lineage {number:x}" + "x" * 10_000)
    kinds = [kind for kind, _ in told(kept)]
    assert kinds.count("fork") == 1
    assert kinds.count("met") == kinds.count("yield") == HISTORY_KEPT
    assert len(kinds) <= HISTORY_KEPT * len(HISTORY_KINDS)
    assert max(len(text) for _, text in told(kept)) <= HISTORY_CHARACTERS_MAX


def test_every_event_is_said_and_published_with_its_fields() -> None:
    said: list[str] = []
    published: list[dict[str, Any]] = []
    kept = EventLog(said.append)
    kept.note("limits", "before anybody listens")
    kept.publish = published.append
    kept.note("view", "view 3", view=3)
    assert [line.split(maxsplit=1)[1] for line in said] == [
        "limits     before anybody listens",
        "view       3",
    ]
    assert [(event["kind"], event["view"]) for event in published] == [("view", 3)]


def test_the_words_of_others_are_one_line_and_move_no_cursor() -> None:
    said: list[str] = []
    kept = EventLog(said.append)
    kept.note("refused", "they say: \x1b[2Jgone\n12:00:00 view       a forged line")
    assert said[0].isprintable()
    assert said[0].endswith("refused    they say: ?[2Jgone?12:00:00 view       a forged line")
    assert kept.last_error.isprintable()


# ---------------------------------------------------------------- a line for each round


def begin(number: int, kind: str = STEP, peers: int = 2) -> Begin:
    participants = tuple(bytes([n]) * 32 for n in range(peers))
    operation = Operation(GATHER) if kind == GATHER else None
    blob = bytes(4 * peers) if kind == GATHER else b""
    tag = (b"L" * 32, 1, number, 1, kind, participants, (1.0,) * peers)
    return Begin(*tag, blob, operation=operation)


class Said:
    """What a daemon that sends a megabyte in each round says of them."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.fields: list[dict[str, object]] = []
        self.sent_bytes = 0
        self.loss: float | None = 2.3125
        self.came = asyncio.Event()
        self.rounds = RoundLines(
            SimpleNamespace(
                note=self._note,
                sent_for_rounds_bytes=lambda: self.sent_bytes,
                new_loss=lambda: self.loss,
            )
        )

    def _note(self, kind: str, text: str, **fields: object) -> None:
        assert kind == journal_module.ROUND
        self.lines.append(text)
        self.came.set()
        self.fields.append(fields)

    def commit(self, what: Begin, *, takes_part: bool = True) -> None:
        self.sent_bytes += 1_000_000
        self.rounds.committed(what, TIMES, takes_part=takes_part)


def test_a_step_has_a_line_of_its_own() -> None:
    said = Said()
    names = ", ".join(short(peer) for peer in begin(1).participants)
    said.commit(begin(1, INIT, 1))
    said.commit(begin(2))
    said.loss = None
    said.commit(begin(3, peers=10))
    said.commit(begin(4), takes_part=False)
    first = short(bytes(32))
    assert said.lines[0] == (
        f"round 1  first parameters  1 peer ({first})  3.1 s ({SPENT})  1 MB sent"
    )
    assert said.lines[1] == (f"round 2  2 peers ({names})  0.0 s ({SPENT})  1 MB sent  loss 2.312")
    assert " and 2 more)" in said.lines[2]
    assert "loss" not in said.lines[2]
    assert said.lines[3] == f"round 4  2 peers ({names})  0.0 s  1 MB sent"
    assert said.fields[1]["loss"] == 2.3125


def test_a_thousand_collectives_have_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order of rounds, and none is forgotten."""
    monkeypatch.setattr(journal_module, "SUMMED_UP_S", 1e-3)

    async def run() -> list[str]:
        said = Said()
        for number in range(2, 1002):
            said.commit(begin(number, GATHER))
        assert said.lines == []
        await said.came.wait()
        said.commit(begin(1002, GATHER))
        said.commit(begin(1003))
        said.commit(begin(1004, GATHER))
        said.rounds.sum_up()  # the daemon ends
        return said.lines

    lines = asyncio.run(run())
    assert [line.partition("  ")[0] for line in lines] == [
        "rounds 2 to 1001",
        "round 1002",
        "round 1003",
        "round 1004",
    ]
    assert "1000 collectives  2 peers" in lines[0]
    assert "1 GB sent  loss 2.312" in lines[0]
    assert "  collective  2 peers" in lines[1]


def test_lines_of_rounds_are_printed_and_published_and_not_kept() -> None:
    printed: list[str] = []
    published: list[dict[str, Any]] = []
    kept = EventLog(printed.append)
    kept.publish = published.append
    kept.note("view", VIEW.describe())
    for number in range(300):
        kept.note("round", f"round {number}", round=number)
    assert [event["kind"] for event in kept.events] == ["view"]
    assert len(printed) == len(published) == 301
