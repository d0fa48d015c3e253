"""Runs of entries in one answer: from donors that are stale, silent or wrong in the middle."""

from __future__ import annotations

import pytest
from harness.donors import Donor, History, Store, World, donors_of, goal_of, own_of, step
from harness.sync_worlds import begin, history_of, reached

from atoll.peer.membership.view import Member
from atoll.peer.state_sync import assembly
from atoll.peer.state_sync import events as ev
from atoll.peer.state_sync.verification import part_head

ODD = Member(b"\x09" * 32, 1, address="h9:1")


def moving(world: World, history: History, donors: list[Donor], own: int, every_s: float) -> None:
    """The run goes on meanwhile; ``donors`` with it."""

    def commit() -> None:
        history.commit()
        for donor in donors:
            donor.round = history.last
        mine = own_of(history, own) if own else ev.OwnState()
        world.feed(ev.SetGoal(goal_of(history, list(world.donors.values())), mine))
        if history.last < 40:
            world.at(world.now_s + every_s, commit)

    world.at(every_s, commit)


@pytest.mark.parametrize("own", [0, 10])
def test_a_stale_donor_with_a_long_log_does_not_keep_a_learner_from_the_chunks(own: int) -> None:
    """It seems to have every old entry, and has nothing that leads to the goal."""
    history = history_of(20)
    donors = donors_of(history, [3000.0] * 4)
    for donor in donors:
        donor.log = 4
    donors[3].round, donors[3].log = 5, 100
    world = World(donors, 1e6)
    begin(world, history, donors, own=own)
    moving(world, history, donors[:3], own, 2.0)
    world.run(lambda: world.done, limit_s=10.0)
    assert not world.failed


def test_the_only_keeper_of_entries_may_hang() -> None:
    """What was asked of it is not waited for: the chunks themselves come from the others."""
    history = history_of(13)
    donors = donors_of(history, [1e5] * 3)
    for donor in donors:
        donor.log = 1
    donors.append(Donor(ODD, history, 1e5, 13, log=100, lie="stuck"))
    world = World(donors, 1e6)
    begin(world, history, donors, own=10)
    moving(world, history, donors, 10, 1.0)
    world.run(lambda: world.done, limit_s=20.0)
    assert not world.failed


class WrongFrom(Donor):
    """Its entries are right up to some round."""

    def piece(self, message):  # type: ignore[no-untyped-def]
        if not message.entry:
            return super().piece(message)
        history, chunk = self.history, message.chunk
        frame = b""
        for number in range(message.entry, min(message.last, self.round) + 1):
            data = history.entries[number][chunk] if number < 13 else bytes(8)
            frame += part_head(history.entry_proof(number, chunk), 8, same=False) + data
        return message.entry, frame


def test_what_comes_before_a_wrong_part_counts_and_the_rest_is_had_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def replay(self: Store, chunk: int, head: object, data: memoryview) -> None:
        number = head.round  # type: ignore[attr-defined]
        assert number > self.version[chunk], "an entry comes twice"
        self.data[chunk], self.version[chunk] = step(self.data[chunk], bytes(data)), number

    monkeypatch.setattr(Store, "replay", replay)
    history = history_of(15)
    donors = donors_of(history, [1000.0] * 3)
    for donor in donors:
        donor.log = 3
    donors.append(WrongFrom(ODD, history, 1000.0, 15, log=100))
    world = World(donors, 1e6)
    begin(world, history, donors, own=10)
    world.run(lambda: world.done, limit_s=20.0)
    assert reached(world, history, 15)
    assert list(world.machine.donors.excluded) == [ODD.peer]


def test_a_run_beyond_a_goal_that_goes_back_is_not_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assembly, "REVIEW_CHUNKS", 5)  # as 1000 of a model of 100,000 chunks
    history = history_of(16, 60)
    donors = donors_of(history, [4000.0] * 3)
    world = World(donors, 1e6)
    begin(world, history, donors, own=10)

    def back() -> None:
        assert not world.done
        for donor in donors:
            donor.round = 14
        world.feed(ev.SetGoal(goal_of(history, donors, 14), own_of(history, 10)))

    world.at(0.6, back)
    world.run(lambda: world.done, limit_s=20.0)
    assert reached(world, history, 14)
