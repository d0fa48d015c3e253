"""A peer is in one probe at a time, as the one that sends or the one that receives."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from itertools import count

from hypothesis import given
from hypothesis import strategies as st

from atoll.peer.links.probe_schedule import (
    AGAIN_S,
    PROBE_S_MAX,
    REFUSED_S,
    TURN_S,
    UNUSED_S,
    ProbeTurns,
)

A, B, C, ME = b"a" * 32, b"b" * 32, b"c" * 32, b"m" * 32


def test_one_at_a_time_until_it_is_over() -> None:
    turns = ProbeTurns(ME)
    assert turns.ask(A, 0.0, busy=False)
    assert turns.given(0.1)
    assert not turns.ask(B, 0.1, busy=False)
    turns.over(B, 0.2)
    assert not turns.ask(B, 0.2, busy=False), "it was not B's turn"
    turns.over(A, 0.3)
    assert not turns.given(0.3)
    assert turns.ask(B, 0.3, busy=False)


def test_whoever_says_nothing_more_loses_its_turn() -> None:
    turns = ProbeTurns(ME)
    assert turns.ask(A, 0.0, busy=False)
    assert not turns.ask(B, TURN_S - 0.01, busy=False)
    assert turns.ask(B, TURN_S, busy=False)


def test_nobody_while_the_links_are_needed() -> None:
    turns = ProbeTurns(ME)
    assert not turns.ask(A, 0.0, busy=True)
    assert turns.ask(A, 0.1, busy=False)


def test_the_others_come_first() -> None:
    """A peer that asks again and again cannot keep the turn for itself."""
    turns = ProbeTurns(ME)
    assert turns.ask(A, 0.0, busy=False)
    turns.over(A, UNUSED_S)
    assert not turns.ask(A, 1.0, busy=False)
    assert turns.ask(B, 1.1, busy=False)
    turns.over(B, 3.0)
    assert turns.ask(A, AGAIN_S, busy=False)


def test_who_gives_its_turn_back_unused_may_have_another() -> None:
    turns = ProbeTurns(ME)
    assert turns.ask(A, 0.0, busy=False)
    turns.over(A, UNUSED_S - 0.1)
    assert turns.ask(A, 1.0, busy=False)


def test_nobody_is_let_in_by_who_sends_a_probe_itself() -> None:
    turns = ProbeTurns(ME)
    turns.asks()
    assert turns.begins(0.0)
    assert not turns.ask(A, 0.1, busy=False)
    turns.ends()
    assert turns.ask(A, 0.2, busy=False)


def test_of_two_that_ask_each_other_one_gives_in() -> None:
    first, second = ProbeTurns(A), ProbeTurns(B)
    first.asks()
    second.asks()
    assert not first.ask(B, 0.0, busy=False)
    assert second.ask(A, 0.0, busy=False)
    assert first.begins(0.1)
    second.ends()  # it was refused


def test_who_has_given_its_turn_away_does_not_begin() -> None:
    """B waits for C's answer, lets A in meanwhile, and does not use C's turn when it comes."""
    turns = ProbeTurns(B)
    turns.asks()
    assert turns.ask(A, 0.0, busy=False)
    assert not turns.begins(0.1)
    turns.ends()
    turns.over(A, 3.0)
    turns.asks()
    assert turns.begins(3.1)


class Crowd:
    """Peers that all want to probe each other, on a virtual clock; messages take their time."""

    def __init__(self, draw: random.Random) -> None:
        self.draw, self.now_s = draw, 0.0
        self.peers = [bytes([n]) * 32 for n in range(draw.randint(2, 6))]
        self.turns = {peer: ProbeTurns(peer) for peer in self.peers}
        self.left = {peer: [p for p in self.peers if p != peer] for peer in self.peers}
        self.not_before_s: dict[tuple[bytes, bytes], float] = {}
        self.idle = set(self.peers)
        self.probed: set[bytes] = set()  # who sends or receives a probe just now
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        for peer in self.peers:
            draw.shuffle(self.left[peer])
            self.after(draw.random(), lambda peer=peer: self.look(peer))

    def after(self, delay_s: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now_s + delay_s, next(self._order), what))

    def say(self, what: Callable[[], None]) -> None:
        self.after(self.draw.uniform(0.001, 0.15), what)

    def look(self, me: bytes) -> None:
        self.after(0.25, lambda: self.look(me))
        if me not in self.idle or self.turns[me].given(self.now_s):
            return
        due = [p for p in self.left[me] if self.now_s >= self.not_before_s.get((me, p), 0.0)]
        if due:
            self.idle.remove(me)
            self.turns[me].asks()
            self.say(lambda: self.asked(me, due[0]))

    def asked(self, me: bytes, peer: bytes) -> None:
        granted = self.turns[peer].ask(me, self.now_s, busy=False)
        self.say(lambda: self.answered(me, peer, granted))

    def answered(self, me: bytes, peer: bytes, granted: bool) -> None:
        if granted and self.turns[me].begins(self.now_s):
            assert not {me, peer} & self.probed, "two probes meet"
            self.probed |= {me, peer}
            lasts_s = self.draw.uniform(0.2, PROBE_S_MAX + 0.5)  # its last bytes arrive meanwhile
            self.after(lasts_s, lambda: self.sent(me, peer))
        else:
            self.not_before_s[me, peer] = self.now_s + REFUSED_S
            self.ended(me, peer, granted)

    def sent(self, me: bytes, peer: bytes) -> None:
        self.probed -= {me, peer}
        self.left[me].remove(peer)
        self.ended(me, peer, True)

    def ended(self, me: bytes, peer: bytes, granted: bool) -> None:
        self.turns[me].ends()
        self.idle.add(me)
        if granted:
            self.say(lambda: self.turns[peer].over(me, self.now_s))

    def run(self, until_s: float) -> None:
        while any(self.left.values()) and self.now_s < until_s:
            self.now_s, _, what = heapq.heappop(self._events)
            what()


@given(st.integers(0, 2**32))
def test_probes_never_meet_and_all_come_about(seed: int) -> None:
    crowd = Crowd(random.Random(seed))
    ways = len(crowd.peers) * (len(crowd.peers) - 1)
    crowd.run(until_s=8.0 * ways)
    assert not any(crowd.left.values())
