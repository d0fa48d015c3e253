"""For whom a boundary waits: who cannot keep up otherwise, once in a while and not for ever."""

from __future__ import annotations

from atoll.peer.membership.admission import HOLD_PAUSES, Admission
from atoll.peer.membership.events import Effect, Note
from atoll.peer.membership.member import MemberState
from atoll.peer.membership.messages import Heartbeat
from atoll.peer.membership.roster import Roster
from atoll.peer.membership.timing import Timing
from atoll.peer.membership.view import Member, View

LINEAGE, TIMING = b"L" * 32, Timing()


def chain(number: int) -> bytes:
    return number.to_bytes(32, "big")


class Boundary:
    """A coordinator and one member on a long way, in a view of three."""

    def __init__(self) -> None:
        self.emitted: list[Effect] = []
        members = tuple(Member(name * 32, 1) for name in (b"a", b"b", b"c"))
        me, self.far = members[0], members[1].peer
        view = View(LINEAGE, 1, members, me.peer, 1, chain(1))
        self.alive = {member.peer for member in members}
        self.roster = Roster(view, me.peer, TIMING, 0.0)
        self.own = MemberState(me, self.emitted.append)
        self.admission = Admission(
            view, me.peer, self.own, self.roster, TIMING, self.emitted.append
        )
        self.now_s = 0.0

    def commit(self, number: int) -> None:
        self.own.round, self.own.chain = number, chain(number)

    def hear(self, number: int, *, unsynced: bool, moved_bytes: int = 0) -> None:
        beat = Heartbeat(
            LINEAGE,
            1,
            1,
            number,
            chain(number),
            b"d" * 32,
            number,
            True,
            (),
            (),
            False,
            0,
            unsynced,
            moved_bytes,
        )
        assert self.roster.heard(self.far, beat, self.now_s)

    def holds(self) -> bool:
        return self.admission.hold(self.alive, self.now_s)

    def noted(self) -> int:
        return sum(isinstance(effect, Note) and effect.kind == "hold" for effect in self.emitted)

    def late_round(self, number: int) -> list[bool]:
        """Each state is reached when the next round has begun without it: whether it is waited for
        before it says that it is behind, and after it."""
        self.commit(number)
        self.now_s += 0.3
        before = self.holds()  # its last word is that it has the round before
        self.hear(number - 1, unsynced=True)
        self.now_s += 0.3
        after = self.holds()
        if not after:  # the next round begins, and it arrives meanwhile
            self.hear(number, unsynced=False)
            self.now_s += 0.4
        return [before, after]


def test_one_that_reaches_each_state_too_late_is_waited_for() -> None:
    """Seen on a way of 300 ms with rounds of 1 s: synced for a moment in every round, in none."""
    boundary = Boundary()
    boundary.hear(1, unsynced=False)
    assert boundary.late_round(2) == [False, False]
    assert boundary.late_round(3) == [False, True]
    assert boundary.noted() == 1
    boundary.hear(3, unsynced=False)
    assert not boundary.holds()  # it is level: the barrier waits for its submission now
    boundary.commit(4)
    boundary.hear(4, unsynced=False)
    assert not boundary.holds()
    assert boundary.noted() == 1


def test_one_that_was_level_in_between_begins_anew() -> None:
    boundary = Boundary()
    boundary.hear(1, unsynced=False)
    assert boundary.late_round(2) == [False, False]
    assert not boundary.holds()  # level, before the next commit
    assert boundary.late_round(3) == [False, False]


def test_one_that_does_not_come_is_waited_for_once_in_a_while() -> None:
    boundary = Boundary()
    boundary.hear(1, unsynced=False)
    for number in (2, 3):
        boundary.late_round(number)
    boundary.now_s += TIMING.hold_s + 0.1
    assert not boundary.holds()
    for number in range(4, 40):
        assert boundary.late_round(number)[1] is False
    assert boundary.noted() == 1
    boundary.now_s += HOLD_PAUSES * TIMING.hold_s
    for number in (40, 41, 42):
        boundary.late_round(number)
    assert boundary.noted() == 2


def test_a_boundary_is_held_as_long_as_an_exchange_takes() -> None:
    """Hold it so long: who lacks a round of 100 MB cannot copy it in less."""
    boundary = Boundary()
    boundary.hear(1, unsynced=False)
    for took_s in (20.0, 9.0, 12.0):
        boundary.admission.exchanged(took_s)
    boundary.late_round(2)
    boundary.late_round(3)
    until_s = boundary.now_s + 9.0
    held, moved_bytes = 0.0, 1
    while boundary.now_s < until_s + 5.0:
        boundary.now_s += 0.5
        moved_bytes += 1
        boundary.hear(2, unsynced=True, moved_bytes=moved_bytes)
        held = boundary.now_s if boundary.holds() else held
    assert until_s - 1.0 <= held <= until_s + 0.5


def test_two_are_not_waited_for_one_after_the_other() -> None:
    boundary = Boundary()
    other = b"c" * 32
    boundary.hear(1, unsynced=False)
    boundary.late_round(2)
    boundary.late_round(3)
    began_s, held, moved_bytes = boundary.now_s, 0.0, 1
    far = boundary.far
    while boundary.now_s < began_s + 3 * TIMING.hold_s:
        boundary.now_s += 0.5
        moved_bytes += 1
        boundary.hear(2, unsynced=True, moved_bytes=moved_bytes)
        if boundary.now_s > began_s + TIMING.hold_s / 2:  # the other one is behind from here on
            boundary.far = other
            boundary.hear(2, unsynced=True, moved_bytes=moved_bytes)
            boundary.far = far
        held = boundary.now_s if boundary.holds() else held
    assert held <= began_s + TIMING.hold_s + 0.5


def test_a_view_in_between_makes_nobody_hopeless_anew() -> None:
    """Hand on who cannot keep up, or each view would cost two rounds and a hold."""
    boundary = Boundary()
    boundary.hear(1, unsynced=False)
    boundary.late_round(2)
    boundary.late_round(3)
    before = boundary.admission
    boundary.admission = Admission(
        before.view, before.me, boundary.own, boundary.roster, TIMING, boundary.emitted.append
    )
    boundary.admission.take_over(before)
    boundary.now_s += 0.5
    boundary.hear(2, unsynced=True, moved_bytes=10)
    assert boundary.holds()
    assert boundary.noted() == 1


def test_the_dead_are_not_waited_for() -> None:
    boundary = Boundary()
    boundary.hear(1, unsynced=False)
    boundary.late_round(2)
    boundary.alive.discard(boundary.far)
    assert boundary.late_round(3) == [False, False]
    assert boundary.noted() == 0


def test_one_that_gets_nothing_is_not_waited_for() -> None:
    """Its path is cut: the round would wait for nothing."""
    boundary = Boundary()
    boundary.admission.exchanged(10.0)
    boundary.hear(1, unsynced=False)
    boundary.late_round(2)
    assert boundary.late_round(3) == [False, True]
    for moved_bytes in range(1, 8):  # it gets on
        boundary.now_s += 1.0
        boundary.hear(2, unsynced=True, moved_bytes=moved_bytes)
        assert boundary.holds()
    boundary.now_s += TIMING.stall_s + 0.1
    assert not boundary.holds()
    boundary.hear(2, unsynced=True, moved_bytes=9)
    assert not boundary.holds(), "once is enough, for a while"
