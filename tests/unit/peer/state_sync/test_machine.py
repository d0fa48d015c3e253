"""Catching up, simulated: donors of different speed, dying, lying, moving on; real proofs."""

from __future__ import annotations

import pytest
from harness.donors import (
    CHUNK_BYTES,
    World,
    donors_of,
    goal_of,
    own_of,
    sha,
)
from harness.sync_worlds import begin, history_of, names, reached

from atoll.peer.membership.view import ARCHIVE, Member
from atoll.peer.state_sync import events as ev
from atoll.peer.state_sync.machine import AGREE_S, PROGRESS_S


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
    assert world.received < 3 * 32 * (8 + 6 + 5 * 32 + 1)


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
    world.feed(ev.SetGoal(goal_of(history, donors, suspect=True), own_of(history, 5)))
    world.run(lambda: world.done)
    assert reached(world, history, 5)
    assert world.own == history.states[5]
    heads_bytes = 32 * (6 + 5 * 32)
    assert world.received == heads_bytes + CHUNK_BYTES


def test_own_bytes_that_are_wrong_without_anybody_knowing_are_found_by_the_digest() -> None:
    history = history_of(6)
    donors = donors_of(history, [1000.0] * 3)
    world = World(donors, 1e6)
    world.own = [b"?" * 64, *history.states[5][1:]]
    world.feed(ev.SetGoal(goal_of(history, donors), own_of(history, 5)))
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
    assert not world.machine.donors.excluded


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
        assert len(names(world, "is not asked for the state any more")) == 1
        assert list(world.machine.donors.excluded) == [donors[1].member.peer]


def test_a_lying_coordinator_is_not_believed() -> None:
    history = history_of(4)
    donors = donors_of(history, [1000.0] * 3)
    donors[0].lie = "digest"
    world = World(donors, 1e6)
    begin(world, history, donors)
    world.run(lambda: world.failed)
    assert not world.done
    assert AGREE_S <= world.now_s < AGREE_S + 5
    blob_digest, wrong_root = sha(history.blob), sha(b"lie", history.trees[4].root)
    wrong = sha(blob_digest, wrong_root).hex()[:8]
    assert history.digest(4).hex()[:8] in world.failed[0]
    assert wrong in world.failed[0]


def test_without_a_coordinator_among_the_donors_three_must_agree() -> None:
    history = history_of(4)
    donors = donors_of(history, [1000.0] * 4)
    donors[3].lie = "digest"
    world = World(donors, 1e6)
    goal = goal_of(history, donors)
    world.feed(ev.SetGoal(type(goal)(goal.round, goal.chain, b"", goal.donors), ev.OwnState()))
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
    assert len(world.machine.donors.excluded) == 2


def test_members_that_have_no_state_to_give_are_not_waited_for() -> None:
    """Two laggards at once: neither can attest anything to the other."""
    history = history_of(4)
    donors = donors_of(history, [1000.0, 1000.0])
    donors[1].lie = "empty"
    world = World(donors, 1e6)
    begin(world, history, donors, own=2)
    world.run(lambda: world.done, limit_s=AGREE_S)
    assert reached(world, history, 4)
    assert not donors[1].sent


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
            world.feed(ev.SetGoal(goal_of(history, donors), ev.OwnState()))
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
        world.feed(ev.SetGoal(goal_of(other, donors), ev.OwnState()))

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
    world.feed(ev.Cancel())
    assert world.machine.next_deadline_s() is None
    assert all(world.machine.donors.pieces.outstanding(d.member.peer) == 0 for d in donors)
