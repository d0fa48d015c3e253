"""Catching up, simulated: donors of different speed, dying, lying, moving on; real proofs."""

from __future__ import annotations

import random

import pytest
from harness.donors import (
    CHUNK_BYTES,
    Donor,
    History,
    World,
    donors_of,
    goal_of,
    own_of,
    sha,
)

from atoll.peer import learning as ln
from atoll.peer.catchup import AGREE_S, PROGRESS_S
from atoll.peer.views import ARCHIVE, Member


def history_of(rounds: int, chunks: int = 32, fragments: int = 1) -> History:
    history = History(chunks, fragments)
    while history.last < rounds:
        history.commit()
    return history


def reached(world: World, history: History, number: int) -> bool:
    return bool(world.done) and world.done[-1] == ln.Done(
        number, history.chain(number), history.digest(number)
    )


def begin(world: World, history: History, donors: list[Donor], own: int = 0) -> None:
    if own:
        world.own = history.states[own]
    world.feed(ln.Aim(goal_of(history, donors), own_of(history, own) if own else ln.Own()))


def names(world: World, text: str) -> list[str]:
    return [line for line in world.said if text in line]


def test_a_learner_with_nothing_gets_the_state() -> None:
    history = history_of(7)
    donors = donors_of(history, [1000.0, 1000.0, 1000.0])
    world = World(donors, 1e6)
    begin(world, history, donors)
    world.run(lambda: world.done)
    assert reached(world, history, 7)
    assert world.own == history.states[7]
    assert all(donor.sent > 5 * CHUNK_BYTES for donor in donors), "all have helped"


def test_a_laggard_gets_entries_and_no_chunk() -> None:
    history = history_of(9)
    donors = donors_of(history, [1000.0] * 3)
    world = World(donors, 1e6)
    begin(world, history, donors, own=6)
    world.run(lambda: world.done)
    assert reached(world, history, 9)
    assert world.received < 3 * 32 * (8 + 2 + 5 * 32 + 1)


def test_what_the_log_has_dropped_is_taken_as_chunks() -> None:
    history = history_of(20)
    donors = donors_of(history, [1000.0] * 3)
    for donor in donors:
        donor.log = 2
    world = World(donors, 1e6)
    begin(world, history, donors, own=10)
    world.run(lambda: world.done)
    assert reached(world, history, 20)


def test_entries_are_not_taken_when_chunks_are_cheaper() -> None:
    history = history_of(30)
    donors = donors_of(history, [1000.0] * 3)
    world = World(donors, 1e6)
    begin(world, history, donors, own=2)
    world.run(lambda: world.done)
    assert reached(world, history, 30)
    assert world.received < 32 * (CHUNK_BYTES + 2 + 5 * 32) * 1.2


def test_a_doubtful_state_is_confirmed_and_only_the_wrong_chunk_comes() -> None:
    history = history_of(5)
    donors = donors_of(history, [1000.0] * 3)
    world = World(donors, 1e6)
    world.own = [b"?" * 64, *history.states[5][1:]]
    world.feed(ln.Aim(goal_of(history, donors, doubtful=True), own_of(history, 5)))
    world.run(lambda: world.done)
    assert reached(world, history, 5)
    assert world.own == history.states[5]
    heads_bytes = 32 * (2 + 5 * 32)
    assert world.received == heads_bytes + CHUNK_BYTES


def test_own_bytes_that_are_wrong_without_anybody_knowing_are_found_by_the_digest() -> None:
    history = history_of(6)
    donors = donors_of(history, [1000.0] * 3)
    world = World(donors, 1e6)
    world.own = [b"?" * 64, *history.states[5][1:]]
    world.feed(ln.Aim(goal_of(history, donors), own_of(history, 5)))
    world.run(lambda: world.done)
    assert reached(world, history, 6)
    assert names(world, "confirmed by a donor")


def test_the_same_goal_is_done_at_once() -> None:
    history = history_of(5)
    donors = donors_of(history, [1000.0])
    world = World(donors, 1e6)
    begin(world, history, donors, own=5)
    assert reached(world, history, 5)
    assert world.received == 0


def test_a_slow_donor_costs_less_than_a_tenth() -> None:
    """Three donors, one twenty times slower; the joiner's link is what limits."""
    history = history_of(2, chunks=400)
    link = 10_000.0
    donors = donors_of(history, [0.8 * link, 0.8 * link, 0.04 * link])
    world = World(donors, link)
    begin(world, history, donors)
    world.run(lambda: world.done)
    assert reached(world, history, 2)
    frame_bytes = CHUNK_BYTES + 2 + 9 * 32
    ideal_s = 400 * frame_bytes / link
    assert world.now_s < 1.1 * ideal_s, f"{world.now_s:.1f} s, ideal {ideal_s:.1f} s"
    assert world.received < 1.05 * 400 * frame_bytes


def test_a_donor_that_dies_is_replaced_and_one_that_comes_back_is_used() -> None:
    history = history_of(3, chunks=200)
    donors = donors_of(history, [2000.0] * 3)
    world = World(donors, 1e6)
    begin(world, history, donors)
    world.at(4.0, lambda: world.kill(donors[2]))
    world.at(6.0, lambda: world.revive(donors[2]))
    sent_before: list[int] = []
    world.at(6.0, lambda: sent_before.append(donors[2].sent))
    world.run(lambda: world.done)
    assert reached(world, history, 3)
    assert donors[2].sent > sent_before[0]
    assert not world.machine.supply.excluded


def test_a_donor_that_hangs_does_not_hold_up_the_end() -> None:
    history = history_of(3, chunks=64)
    donors = donors_of(history, [2000.0, 2000.0, 1e-3])
    world = World(donors, 1e6)
    begin(world, history, donors)
    world.run(lambda: world.done, limit_s=40.0)
    assert reached(world, history, 3)


@pytest.mark.parametrize("lie", ["bytes", "length", "same", "heads", "digest", "blob"])
def test_a_lying_donor_is_named_and_left_out(lie: str) -> None:
    history = history_of(6)
    donors = donors_of(history, [1000.0] * 4)
    donors[1].lie = lie
    if lie in ("heads", "blob"):
        for honest in donors[2:]:
            honest.delay_s = 0.2  # so that the liar is asked first
        donors[0].delay_s = 0.2
    world = World(donors, 1e6)
    if lie == "heads":
        begin(world, history, donors, own=4)
        donors[0].log = 0  # only the liar and the two others have heads
    else:
        begin(world, history, donors)
    world.run(lambda: world.done)
    assert reached(world, history, 6)
    if lie != "blob":
        assert len(names(world, "is left out")) == 1
        assert list(world.machine.supply.excluded) == [donors[1].member.peer]


def test_a_lying_coordinator_is_not_believed() -> None:
    history = history_of(4)
    donors = donors_of(history, [1000.0] * 3)
    donors[0].lie = "digest"
    world = World(donors, 1e6)
    begin(world, history, donors)
    world.run(lambda: world.failed)
    assert not world.done
    assert AGREE_S <= world.now_s < AGREE_S + 5
    wrong = sha(b"lie", history.digest(4)).hex()[:8]
    assert history.digest(4).hex()[:8] in world.failed[0]
    assert wrong in world.failed[0] or "says" in world.failed[0]


def test_without_a_coordinator_among_the_donors_three_must_agree() -> None:
    history = history_of(4)
    donors = donors_of(history, [1000.0] * 4)
    donors[3].lie = "digest"
    world = World(donors, 1e6)
    goal = goal_of(history, donors)
    world.feed(ln.Aim(type(goal)(goal.round, goal.chain, b"", goal.donors), ln.Own()))
    world.run(lambda: world.done)
    assert reached(world, history, 4)


def test_archives_give_chunks_but_have_no_voice() -> None:
    history = history_of(4)
    donors = donors_of(history, [1000.0, 1000.0, 1000.0, 1000.0])
    for liar in donors[1:3]:
        liar.member = Member(liar.member.peer, 1, ARCHIVE, liar.member.address)
        liar.lie = "digest"
    world = World(donors, 1e6)
    begin(world, history, donors)
    world.run(lambda: world.done)
    assert reached(world, history, 4)
    assert len(world.machine.supply.excluded) == 2


def test_nobody_there_is_a_bounded_failure_and_the_next_goal_goes_on() -> None:
    history = history_of(3, chunks=100)
    donors = donors_of(history, [500.0] * 3)
    world = World(donors, 1e6)
    begin(world, history, donors)
    world.at(10.0, lambda: [world.kill(donor) for donor in donors])  # type: ignore[func-returns-value]
    world.run(lambda: world.failed)
    assert world.now_s < 10.0 + PROGRESS_S + 5
    got = world.received
    assert got > 20 * CHUNK_BYTES
    for donor in donors:
        donor.alive = True
    history.commit()
    for donor in donors:
        donor.round = 4
    begin(world, history, donors)
    world.run(lambda: world.done)
    assert reached(world, history, 4)
    assert world.received - got < 100 * (CHUNK_BYTES + 8 + 2 * (2 + 7 * 32)) - got / 2


def test_rounds_go_on_meanwhile() -> None:
    history = history_of(3, chunks=100)
    donors = donors_of(history, [1500.0] * 3)
    world = World(donors, 1e6)
    begin(world, history, donors)

    def commit() -> None:
        if history.last < 15:
            history.commit()
            for donor in donors:
                donor.round = history.last
            world.feed(ln.Aim(goal_of(history, donors), ln.Own()))
            world.at(world.now_s + 1.0, commit)

    world.at(1.0, commit)
    world.run(lambda: reached(world, history, 15))
    assert world.own == history.states[15]


def test_a_rollback_costs_what_the_histories_do_not_share() -> None:
    history = history_of(8, chunks=60)
    other = history.fork_at(7, b"other")
    other.commit()
    other.commit()
    donors = donors_of(history, [700.0] * 3)
    world = World(donors, 1e6)
    begin(world, history, donors, own=5)

    def roll_back() -> None:
        for donor in donors:
            donor.history, donor.round = other, other.last
        world.feed(ln.Aim(goal_of(other, donors), ln.Own()))

    world.at(10.0, roll_back)
    world.run(lambda: world.done)
    if world.done[-1].chain != other.chain(9):
        world.run(lambda: reached(world, other, 9))
    assert reached(world, other, 9)
    assert world.own == other.states[9]


def test_a_store_that_was_overwritten_is_begun_again() -> None:
    history = history_of(3, chunks=60)
    donors = donors_of(history, [500.0] * 3)
    world = World(donors, 1e6)
    begin(world, history, donors)
    world.run(lambda: world.received > 1000)
    assert world.store is not None
    world.store.is_open = False
    world.run(lambda: world.failed)
    begin(world, history, donors)
    world.run(lambda: world.done)
    assert reached(world, history, 3)


def test_cancel_stops_everything() -> None:
    history = history_of(3, chunks=60)
    donors = donors_of(history, [500.0] * 3)
    world = World(donors, 1e6)
    begin(world, history, donors)
    world.run(lambda: world.received > 1000)
    world.feed(ln.Cancel())
    assert world.machine.next_deadline_s() is None
    assert all(world.machine.supply.pull.outstanding(d.member.peer) == 0 for d in donors)


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
    history = history_of(choice.randint(1, 12), chunks, fragments)
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
    begin(world, history, donors, own)

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
        here = reached(world, truth[0], truth[0].last)
        return here and (world.now_s > 75 or not world._events)

    world.at(76.0, lambda: aim(world, truth[0], donors))
    world.run(settled, limit_s=900.0)
    assert world.own == truth[0].states[truth[0].last]
    honest = {donor.member.peer for donor in donors if not donor.lie}
    if truth[0] is history:  # who has not heard of a rollback names other digests
        assert not honest & world.machine.supply.excluded.keys()


def aim(world: World, history: History, donors: list[Donor]) -> None:
    own = ln.Own()
    if world.done:
        last = world.done[-1]
        own = ln.Own(last.round, last.chain, last.digest, sha(history.blob))
    world.feed(ln.Aim(goal_of(history, donors), own))
