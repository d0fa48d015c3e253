"""The rules of the schedule, one by one, and what it refuses."""

from __future__ import annotations

import pytest

from atoll.collectives.errors import LocalProtocolError, RemoteProtocolError
from atoll.collectives.schedule.plan import NOBODY, ReducePlan
from atoll.collectives.schedule.routes import Routes, ring, star, tree
from atoll.collectives.schedule.schedule import (
    LEAD_CHUNKS_MIN,
    FrameAdmission,
    FrameKind,
    Idle,
    OutgoingFrame,
)
from atoll.collectives.schedule.tree import SPREAD_CHUNKS, TreeSchedule


def schedule_of(
    weights: list[float], owners: list[int], me: int = 0, shape: Routes | None = None
) -> TreeSchedule:
    ids = tuple(bytes([p]) for p in range(len(weights)))
    return TreeSchedule(ReducePlan(ids, tuple(weights), tuple(owners), shape), me)


def arrive(schedule: TreeSchedule, src: int, *chunks: int) -> None:
    for chunk in chunks:
        assert schedule.admit(src, FrameKind.CONTRIB, chunk) is FrameAdmission.ACCEPT
        schedule.arrived(src, chunk)


def finish(schedule: TreeSchedule, chunk: int) -> None:
    while schedule.next_fold(chunk) is not None:
        if schedule.folded(chunk) and schedule.is_root(chunk):
            schedule.final(chunk)


def test_own_parts_stay_near_the_results_of_their_root() -> None:
    schedule = schedule_of([1, 1], [0] + [1] * 8)
    for chunk in range(1, 1 + LEAD_CHUNKS_MIN):
        assert schedule.next_send(1) == OutgoingFrame(FrameKind.CONTRIB, chunk)
    assert schedule.next_send(1) is Idle.WAIT
    schedule.final(1)
    assert schedule.next_send(1) == OutgoingFrame(FrameKind.CONTRIB, 1 + LEAD_CHUNKS_MIN)
    assert schedule.next_send(1) is Idle.WAIT


def test_own_parts_leave_for_all_roots_at_the_same_pace() -> None:
    schedule = schedule_of([1, 1, 1, 1], [0] + [1] * 20 + [2] * 20 + [3])
    assert schedule.next_send(3) == OutgoingFrame(
        FrameKind.CONTRIB, 41
    )  # its only one: out of the count
    for index in range(SPREAD_CHUNKS):
        assert schedule.next_send(1) == OutgoingFrame(FrameKind.CONTRIB, 1 + index)
    assert schedule.next_send(1) is Idle.PACED
    assert schedule.next_send(2) == OutgoingFrame(FrameKind.CONTRIB, 21)
    assert schedule.next_send(1) == OutgoingFrame(FrameKind.CONTRIB, 1 + SPREAD_CHUNKS)
    assert schedule.next_send(1) is Idle.PACED
    schedule.broken(2)
    assert schedule.next_send(1) == OutgoingFrame(FrameKind.CONTRIB, 2 + SPREAD_CHUNKS)


def test_of_two_roots_by_the_same_way_the_one_with_the_smaller_share_comes_first() -> None:
    """Participant 3 sends to 1 for root 1, which owns 8 chunks, and for root 2, which owns 16."""
    up = ((-1, 0, 0, 1), (1, -1, 1, 1), (2, 2, -1, 1), (3, 3, 3, -1))
    schedule = schedule_of([0, 0, 0, 1], [1] * 8 + [2] * 16, 3, Routes("sites", up, up))
    sent = []
    while isinstance(send := schedule.next_send(1), OutgoingFrame):
        sent.append(send.chunk)
    assert send is Idle.WAIT, "for results, and not for itself"
    assert sorted(sent) == [0, 1, 2, 3, 8, 9, 10, 11]


def test_results_go_before_sums_and_sums_before_own_parts() -> None:
    """Participant 1 of a ring 0 -> 1 -> 2 -> 0: inner for root 2, leaf for root 0."""
    schedule = schedule_of([1, 1, 1], [0, 1, 2], 1, ring([0, 1, 2]))
    arrive(schedule, 0, 2, 1)
    finish(schedule, 2)
    schedule.final(0)  # handed on by 0
    sent = [schedule.next_send(2) for _ in range(3)]
    assert sent == [
        OutgoingFrame(FrameKind.RESULT, 0),
        OutgoingFrame(FrameKind.CONTRIB, 2),
        OutgoingFrame(FrameKind.CONTRIB, 0),
    ]
    assert schedule.next_send(2) is Idle.WAIT, "a result of its own is still to come"
    assert schedule.next_send(0) is Idle.DONE
    assert schedule.destinations == {2}


@pytest.mark.parametrize("root", [0, 3], ids=["own parts", "partial sums"])
def test_no_part_leaves_that_is_held_if_a_result_from_here_is_lost(root: int) -> None:
    """Participant 1 of a ring 0 -> 1 -> 2 -> 3 -> 0 is a leaf for root 0, and inner for root 3."""
    schedule = schedule_of([1] * 4, [root] * 8, 1, ring([0, 1, 2, 3]))
    parts = []
    for chunk in range(6):
        if root == 3:
            arrive(schedule, 0, chunk)
            finish(schedule, chunk)
        if chunk >= 2 * LEAD_CHUNKS_MIN:
            held_if_lost = range(chunk - 2 * LEAD_CHUNKS_MIN + 1)
            assert all(schedule.next_send(2, {c}) is Idle.WAIT for c in held_if_lost)
        sure = range(max(0, chunk - 2 * LEAD_CHUNKS_MIN + 1), chunk)
        parts.append(schedule.next_send(2, set(sure)))
        schedule.final(chunk)
        assert schedule.next_send(2) == OutgoingFrame(FrameKind.RESULT, chunk)
    assert parts == [OutgoingFrame(FrameKind.CONTRIB, chunk) for chunk in range(6)]


def test_a_part_far_ahead_is_held_until_the_base_moves_on() -> None:
    schedule = schedule_of([1, 1, 1], [0] * 10)
    far = 2 * LEAD_CHUNKS_MIN
    arrive(schedule, 1, *range(far))
    assert schedule.admit(1, FrameKind.CONTRIB, far) is FrameAdmission.HOLD
    arrive(schedule, 2, 0)
    finish(schedule, 0)
    assert schedule.admit(1, FrameKind.CONTRIB, far) is FrameAdmission.ACCEPT


def test_parts_are_added_in_the_order_of_participants() -> None:
    schedule = schedule_of([1, 1, 1], [1], 1)
    arrive(schedule, 2, 0)
    assert schedule.next_fold(0) is None
    arrive(schedule, 0, 0)
    order = []
    while (src := schedule.next_fold(0)) is not None:
        assert schedule.next_fold(0) is None, "one at a time"
        order.append(src)
        schedule.folded(0)
    assert order == [0, 1, 2]


def test_repetitions_are_dropped() -> None:
    schedule = schedule_of([1, 1], [0, 1])
    arrive(schedule, 1, 0)
    assert schedule.admit(1, FrameKind.CONTRIB, 0) is FrameAdmission.DROP
    finish(schedule, 0)
    assert schedule.admit(1, FrameKind.CONTRIB, 0) is FrameAdmission.DROP
    assert schedule.admit(1, FrameKind.RESULT, 1) is FrameAdmission.ACCEPT
    schedule.final(1)
    assert schedule.admit(1, FrameKind.RESULT, 1) is FrameAdmission.DROP


@pytest.mark.parametrize(
    ("src", "kind", "chunk", "why"),
    [
        (1, 3, 0, "unknown kind 3"),
        (1, 0, 0, "unknown kind 0"),
        (1, FrameKind.CONTRIB, -1, "chunk -1 of 5"),
        (1, FrameKind.RESULT, 5, "chunk 5 of 5"),
        (3, FrameKind.CONTRIB, 0, "no part"),
        (-1, FrameKind.CONTRIB, 0, "no part"),
        (0, FrameKind.CONTRIB, 0, "no part"),
        (1, FrameKind.CONTRIB, 2, "none of for this peer"),
        (2, FrameKind.CONTRIB, 0, "none of for this peer"),  # its weight is 0
        (1, FrameKind.RESULT, 0, "others hand on"),
        (2, FrameKind.RESULT, 2, "others hand on"),
        (1, FrameKind.CONTRIB, 4, "kept"),
        (1, FrameKind.RESULT, 4, "kept"),
    ],
)
def test_frames_outside_the_schedule_are_refused(src: int, kind: int, chunk: int, why: str) -> None:
    schedule = schedule_of([1, 1, 0], [0, 0, 1, 2, NOBODY])
    with pytest.raises(RemoteProtocolError, match=why):
        schedule.admit(src, kind, chunk)


def test_in_a_ring_only_the_neighbour_is_heard() -> None:
    schedule = schedule_of([1] * 4, [0, 1, 2, 3], 0, ring([0, 1, 2, 3]))
    with pytest.raises(RemoteProtocolError, match="none of for this peer"):
        schedule.admit(1, FrameKind.CONTRIB, 0)
    assert schedule.admit(3, FrameKind.CONTRIB, 0) is FrameAdmission.ACCEPT
    with pytest.raises(RemoteProtocolError, match="others hand on"):
        schedule.admit(2, FrameKind.RESULT, 2)
    assert schedule.admit(3, FrameKind.RESULT, 2) is FrameAdmission.ACCEPT


def test_what_is_complete_is_judged_again() -> None:
    """Several streams of one peer may bring the same frame."""
    schedule = schedule_of([1, 1], [0, 1])
    for kind, chunk in ((FrameKind.CONTRIB, 0), (FrameKind.RESULT, 1)):
        assert schedule.admit(1, kind, chunk) is FrameAdmission.ACCEPT
        assert schedule.admit(1, kind, chunk) is FrameAdmission.ACCEPT
    schedule.arrived(1, 0)
    schedule.final(1)
    assert schedule.admit(1, FrameKind.CONTRIB, 0) is FrameAdmission.DROP
    assert schedule.admit(1, FrameKind.RESULT, 1) is FrameAdmission.DROP


def test_missing_names_who_is_late_and_not_who_waits_for_it() -> None:
    schedule = schedule_of([1, 1, 1], [0, 1, 2])
    assert schedule.missing() == {1, 2}
    arrive(schedule, 1, 0)
    assert schedule.missing() == {2}
    arrive(schedule, 2, 0)
    finish(schedule, 0)
    assert schedule.missing() == {1, 2}  # now the owners of the results
    assert schedule.admit(1, FrameKind.RESULT, 1) is FrameAdmission.ACCEPT
    schedule.final(1)
    assert schedule.missing() == {2}


def test_who_only_hands_on_is_waited_for_by_those_below() -> None:
    schedule = schedule_of([1] * 4, [0] * 2, 3, tree(4, 2))  # 3 is below 1
    assert schedule.missing() == {1}


def test_chunks_that_only_one_adds_to_are_its_own_business() -> None:
    assert schedule_of([1], [0, 0]).local_chunks() == (0, 1)
    assert schedule_of([0, 1, 0], [1, 0, 1], 1).local_chunks() == (0, 2)
    assert schedule_of([1, 1], [0, 1]).local_chunks() == ()


def test_own_parts_and_sums_are_told_apart() -> None:
    inner = schedule_of([1] * 7, [0], 0, tree(7, 2))  # 1 and 2 have two below them each
    assert not inner.is_own_part(1, 0)
    assert not inner.is_star(0)
    below = schedule_of([1] * 7, [0], 1, tree(7, 2))
    assert below.is_own_part(3, 0)
    assert not below.is_star(0)  # own parts alone, but they are not the whole
    assert not below.is_root(0)
    assert schedule_of([1] * 3, [0], 0, star(3)).is_own_part(2, 0)
    assert schedule_of([1] * 3, [0], 0, star(3)).is_star(0)


def test_misuse_by_the_engine_is_a_local_error() -> None:
    schedule = schedule_of([1, 1], [0, 1])
    schedule.arrived(1, 0)
    with pytest.raises(LocalProtocolError, match="not admitted"):
        schedule.arrived(1, 0)
    schedule.final(1)
    with pytest.raises(LocalProtocolError, match="twice"):
        schedule.final(1)
