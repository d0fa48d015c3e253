"""What the daemon's log keeps for `atoll status`: the last events, and forks and rollbacks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from atoll.peer.group.views import Member, View
from atoll.peer.journal import HISTORY_CHARACTERS_MAX, HISTORY_KEPT, HISTORY_KINDS, Journal

ME = Member(b"a" * 32, 1)
VIEW = View(b"L" * 32, 3, (ME,), ME.peer, 7, b"c" * 32)
FORK = replace(VIEW, lineage=b"M" * 32, number=4, fork=True)
BACK = replace(VIEW, number=4, base_round=6, rollback=True)


def journal() -> Journal:
    return Journal(lambda line: None)


def told(of: Journal) -> list[tuple[str, str]]:
    return [(event["kind"], event["text"]) for event in of.history]


def test_a_fork_is_remembered_once_and_in_full_after_its_flag_has_faded() -> None:
    kept = journal()
    kept.installed(FORK)
    text = f"lineage 4c4c goes on as 4d4d: {FORK.describe()}"
    kept.note("fork", text)
    kept.installed(replace(FORK, number=5, fork=False))
    assert told(kept) == [("fork", text)]


def test_a_joiner_that_is_told_of_nothing_sees_the_flags_of_its_first_view() -> None:
    kept = journal()
    kept.installed(replace(FORK, rollback=True))
    assert told(kept) == [
        ("rollback", "rounds after 7 are lost"),
        ("fork", replace(FORK, rollback=True).describe()),
    ]


def test_a_rollback_is_remembered_and_is_the_last_error() -> None:
    kept = journal()
    kept.installed(BACK)
    kept.note("rollback", "rounds after 6 are lost: nobody alive held them")
    kept.installed(replace(BACK, number=5, rollback=False))
    assert told(kept) == [("rollback", "rounds after 6 are lost: nobody alive held them")]
    assert kept.last_error.startswith("rounds after 6 are lost")


def test_views_without_flags_and_other_events_leave_no_trace() -> None:
    kept = journal()
    kept.installed(VIEW)
    kept.note("view", VIEW.describe())
    kept.note("link", "link to b ended")
    assert told(kept) == []
    assert [event["kind"] for event in kept.events] == ["view", "link"]


def test_any_number_of_meetings_leaves_room_for_what_is_ours() -> None:
    kept = journal()
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
    kept = Journal(said.append)
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
    kept = Journal(said.append)
    kept.note("refused", "they say: \x1b[2Jgone\n12:00:00 view       a forged line")
    assert said[0].isprintable()
    assert said[0].endswith("refused    they say: ?[2Jgone?12:00:00 view       a forged line")
    assert kept.last_error.isprintable()
