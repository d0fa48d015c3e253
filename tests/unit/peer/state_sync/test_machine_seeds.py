"""Catching up under seeded faults: deaths, cut streams, lies, rollbacks, rounds that go on."""

from __future__ import annotations

import random

import pytest
from harness.donors import Donor, History, World, donors_of, goal_of, own_of, sha

from atoll.peer.state_sync import events as ev


@pytest.mark.parametrize("block", range(6))
def test_seeds_end_with_the_right_state_or_a_named_failure(block: int) -> None:
    for seed in range(10 * block, 10 * block + 10):
        try:
            play(seed)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error}") from error


def play(seed: int) -> None:
    choice = random.Random(seed)
    chunks, fragments = choice.randint(3, 60), choice.randint(1, 3)
    history = History(chunks, fragments)
    for _ in range(choice.randint(0, 11)):
        history.commit()
    count = choice.randint(1, 5)
    donors = donors_of(history, [10 ** choice.uniform(2.0, 4.0) for _ in range(count)])
    for donor in donors:
        donor.log = choice.choice([0, 1, 3, 100])
        donor.delay_s = choice.choice([0.001, 0.1])
    if count >= 4 and choice.random() < 0.6:  # the coordinator and two others stay honest
        donors[choice.randint(1, count - 1)].lie = choice.choice(
            ["bytes", "length", "same", "heads", "digest", "blob"]
        )
    world = World(donors, 10 ** choice.uniform(3.0, 5.0), seed)
    own = choice.randint(0, history.last)
    truth = [history]
    rollbacks = choice.random() < 0.5
    if own:
        world.own = history.states[own]
    start = own_of(history, own) if own else ev.OwnState()
    world.feed(ev.SetGoal(goal_of(history, donors), start))

    def commit() -> None:
        history = truth[0]
        if rollbacks and choice.random() < 0.2 and history.last > 3:
            truth[0] = history = history.fork_at(history.last - 1, b"%d" % history.last)
            for donor in donors:
                donor.history, donor.round = history, history.last
        history.commit()
        for donor in donors:
            if choice.random() < 0.9:
                donor.history, donor.round = history, history.last
        aim(world, truth[0], donors)
        if history.last < 25 and world.now_s < 60:
            world.at(world.now_s + choice.uniform(0.2, 5.0), commit)

    def strike() -> None:
        donor = choice.choice(donors)
        if choice.random() < 0.5:
            world.cut_stream(donor)
        else:
            world.kill(donor)
            world.at(world.now_s + choice.uniform(0.5, 8.0), lambda: world.revive(donor))
        if world.now_s < 60:
            world.at(world.now_s + choice.uniform(1.0, 20.0), strike)

    if choice.random() < 0.7:
        world.at(choice.uniform(0.1, 3.0), commit)
    if choice.random() < 0.5:
        world.at(choice.uniform(0.1, 10.0), strike)

    def settled() -> bool:
        if world.now_s > 75:  # everybody is in step again, and the machine asks again
            for donor in donors:
                donor.history, donor.round = truth[0], truth[0].last
                donor.alive = True
        if world.failed and world.machine.next_deadline_s() is None:
            world.failed.clear()
            aim(world, truth[0], donors)
        here = world.stands_at(truth[0])
        return here and (world.now_s > 75 or not world._events)

    world.at(76.0, lambda: aim(world, truth[0], donors))
    world.run(settled, limit_s=900.0)
    assert world.own == truth[0].states[truth[0].last]
    honest = {donor.member.peer for donor in donors if not donor.lie}
    if truth[0] is history:  # who has not heard of a rollback names other digests
        assert not honest & world.machine.donors.excluded.keys()


def aim(world: World, history: History, donors: list[Donor]) -> None:
    own = ev.OwnState()
    if world.done:
        last = world.done[-1]
        own = ev.OwnState(last.round, last.chain, last.digest, sha(history.blob))
    world.feed(ev.SetGoal(goal_of(history, donors), own))
