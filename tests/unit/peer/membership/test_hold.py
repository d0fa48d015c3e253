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
