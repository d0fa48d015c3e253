"""Digests of the state, compared by the coordinator: agreement, minorities, ties and their end."""

from __future__ import annotations

import pytest

from atoll.peer.membership.coordinator import Comparison
from atoll.peer.membership.events import Effect, Note, Send
from atoll.peer.membership.member import MemberState
from atoll.peer.membership.messages import Heartbeat, Resync
from atoll.peer.membership.roster import Roster
from atoll.peer.membership.timing import Timing
from atoll.peer.membership.view import Member, View

RIGHT, WRONG = b"r" * 32, b"w" * 32
LINEAGE = b"L" * 32


class Desk:
    """A coordinator, the first of ``names``, that compares what it holds with what it hears."""

    def __init__(self, names: str, digest: bytes = RIGHT) -> None:
        self.emitted: list[Effect] = []
        self.members = {name: Member(name.encode() * 32, 1) for name in names}
        me = self.members[names[0]]
        view = View(LINEAGE, 1, tuple(self.members.values()), me.peer, 4, b"c" * 32)
        self.roster = Roster(view, me.peer, Timing(), 0.0)
        self.own = MemberState(me, self.emitted.append)
        self.own.round = self.own.digest_round = 5
        self.own.digest = digest
        self.comparison = Comparison(view, me.peer, self.emitted.append)

    def hear(self, name: str, digest: bytes, *, number: int = 5, unsynced: bool = False) -> None:
        beat = Heartbeat(
            LINEAGE, 1, 1, number, b"c" * 32, digest, number, True, (), (), False, 0, unsynced, 0
        )
        assert self.roster.heard(self.members[name].peer, beat, 0.0)
        self.step()

    def step(self) -> None:
        self.comparison.step(self.own, self.roster, {m.peer for m in self.members.values()})

    def resynced(self) -> list[str]:
        names = {member.peer: name for name, member in self.members.items()}
        sent = [e for e in self.emitted if isinstance(e, Send) and isinstance(e.message, Resync)]
        return [names[effect.peer] for effect in sent]

    def noted(self) -> list[str]:
        return [effect.kind for effect in self.emitted if isinstance(effect, Note)]


def test_a_minority_takes_the_state_again_and_the_run_goes_on() -> None:
    desk = Desk("abc")
    desk.hear("b", RIGHT)
    desk.hear("c", WRONG)
    assert desk.resynced() == ["c"]
    assert not desk.comparison.halted
    desk.step()
    assert desk.resynced() == ["c"]  # told once


@pytest.mark.parametrize("who", ["coordinator", "other"])
def test_a_tie_halts_until_one_that_was_catching_up_decides_it(who: str) -> None:
    """It has computed the same round by itself from the round before."""
    desk = Desk("abc", WRONG if who == "coordinator" else RIGHT)
    desk.hear("c", b"o" * 32, number=4, unsynced=True)
    desk.hear("b", RIGHT if who == "coordinator" else WRONG)
    assert "differs without a majority" in desk.comparison.halted
    for _ in range(3):
        desk.step()
    assert desk.noted() == ["diverged"]  # said once
    desk.hear("c", RIGHT)
    assert not desk.comparison.halted
    assert desk.noted() == ["diverged", "agreed", "diverged"]
    assert desk.resynced() == ["a" if who == "coordinator" else "b"]


def test_a_tie_stays_one_while_somebody_may_still_speak() -> None:
    desk = Desk("abcd")
    desk.hear("c", b"o" * 32, number=4, unsynced=True)
    desk.hear("d", b"o" * 32, number=4, unsynced=True)
    desk.hear("b", WRONG)
    assert desk.comparison.halted
    desk.hear("c", b"o" * 32, number=4)  # it has caught up, and not yet told with what
    assert desk.comparison.halted
    assert desk.noted() == ["diverged"]
    desk.hear("c", WRONG)  # two of the three who have a say
    assert not desk.comparison.halted
    assert desk.resynced() == ["a"]


def test_two_against_two_halt_for_good() -> None:
    desk = Desk("abcd")
    desk.hear("b", RIGHT)
    desk.hear("c", WRONG)
    assert not desk.comparison.halted  # the fourth has not spoken
    desk.hear("d", WRONG)
    assert "leaves or a majority agrees" in desk.comparison.halted
    assert desk.resynced() == []
    desk.step()
    assert desk.noted() == ["diverged"]


def test_alone_there_is_nothing_to_compare() -> None:
    desk = Desk("a")
    desk.step()
    assert desk.emitted == []
