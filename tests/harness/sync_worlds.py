"""Beginnings and ends of the simulated syncs of harness/donors.py."""

from __future__ import annotations

from atoll.peer.state_sync import events as ev
from harness.donors import Donor, History, World, goal_of, own_of


def history_of(rounds: int, chunks: int = 32, fragments: int = 1) -> History:
    history = History(chunks, fragments)
    while history.last < rounds:
        history.commit()
    return history


def reached(world: World, history: History, number: int) -> bool:
    return bool(world.done) and world.done[-1] == ev.Synced(
        number, history.chain(number), history.digest(number)
    )


def begin(world: World, history: History, donors: list[Donor], own: int = 0) -> None:
    if own:
        world.own = history.states[own]
    world.feed(ev.SetGoal(goal_of(history, donors), own_of(history, own) if own else ev.OwnState()))


def names(world: World, text: str) -> list[str]:
    return [line for line in world.said if text in line]
