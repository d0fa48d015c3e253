"""One probe at a time, and not while others send."""

from __future__ import annotations

from atoll.peer.measuring.turns import AGAIN_S, TURN_S, ProbeTurns

A, B = b"a" * 32, b"b" * 32


def test_one_at_a_time_until_it_is_over() -> None:
    turns = ProbeTurns()
    assert turns.ask(A, 0.0, busy=False)
    assert not turns.ask(B, 0.1, busy=False)
    turns.over(B)
    assert not turns.ask(B, 0.2, busy=False), "it was not B's turn"
    turns.over(A)
    assert turns.ask(B, 0.3, busy=False)


def test_whoever_says_nothing_more_loses_its_turn() -> None:
    turns = ProbeTurns()
    assert turns.ask(A, 0.0, busy=False)
    assert not turns.ask(B, TURN_S - 0.01, busy=False)
    assert turns.ask(B, TURN_S, busy=False)


def test_nobody_while_the_links_are_needed() -> None:
    turns = ProbeTurns()
    assert not turns.ask(A, 0.0, busy=True)
    assert turns.ask(A, 0.1, busy=False)


def test_the_others_come_first() -> None:
    """A peer that asks again and again cannot keep the turn for itself."""
    turns = ProbeTurns()
    assert turns.ask(A, 0.0, busy=False)
    turns.over(A)
    assert not turns.ask(A, 0.1, busy=False)
    assert turns.ask(B, 0.2, busy=False)
    turns.over(B)
    assert turns.ask(A, AGAIN_S, busy=False)
