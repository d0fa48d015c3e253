"""One probe at a time, and never in a reduction."""

from __future__ import annotations

from atoll.peer.measuring.turns import AGAIN_S, TURN_S, Turns

A, B = b"a" * 32, b"b" * 32


def test_one_at_a_time_until_it_is_over() -> None:
    turns = Turns()
    assert turns.ask(A, 0.0, reducing=False)
    assert not turns.ask(B, 0.1, reducing=False)
    turns.over(B)
    assert not turns.ask(B, 0.2, reducing=False), "it was not B's turn"
    turns.over(A)
    assert turns.ask(B, 0.3, reducing=False)


def test_whoever_says_nothing_more_loses_its_turn() -> None:
    turns = Turns()
    assert turns.ask(A, 0.0, reducing=False)
    assert not turns.ask(B, TURN_S - 0.01, reducing=False)
    assert turns.ask(B, TURN_S, reducing=False)


def test_nobody_in_a_reduction() -> None:
    turns = Turns()
    assert not turns.ask(A, 0.0, reducing=True)
    assert turns.ask(A, 0.1, reducing=False)


def test_the_others_come_first() -> None:
    """A peer that asks again and again cannot keep the turn for itself."""
    turns = Turns()
    assert turns.ask(A, 0.0, reducing=False)
    turns.over(A)
    assert not turns.ask(A, 0.1, reducing=False)
    assert turns.ask(B, 0.2, reducing=False)
    turns.over(B)
    assert turns.ask(A, AGAIN_S, reducing=False)
