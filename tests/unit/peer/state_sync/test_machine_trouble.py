"""Catching up among members that hang or deceive, with goals that go back and wrong memory."""

from __future__ import annotations

import pytest
from harness.donors import CHUNK_BYTES, Store, World, donors_of, goal_of, own_of, sha
from harness.sync_worlds import begin, history_of, names, reached

from atoll.collectives.digests import strong_digest
from atoll.peer.state_sync import assembly
from atoll.peer.state_sync import events as ev
from atoll.peer.state_sync.assembly import OWN_S, ChunkTable
from atoll.peer.state_sync.machine import USUAL_S

# ---------------------------------------------------------------- members that hang or deceive


def test_a_member_that_never_answers_is_not_waited_for_long() -> None:
    history = history_of(4)
    donors = donors_of(history, [1000.0] * 3)
    donors[2].lie = "silence"
    world = World(donors, 1e6)
    begin(world, history, donors, own=3)
    world.run(lambda: world.done, limit_s=5.0)
    assert reached(world, history, 4)


def test_a_member_that_hangs_after_an_answer_is_not_waited_for_long() -> None:
    history = history_of(4)
    donors = donors_of(history, [100_000.0] * 3)
    donors[2].round = 3
    world = World(donors, 1e6)
    begin(world, history, donors, own=3)
    world.run(lambda: world.now_s >= 1.0)
    assert not world.done, "it may name the digest soon"
    donors[2].lie = "silence"
    world.run(lambda: world.done, limit_s=5.0)
    assert reached(world, history, 4)


def test_a_coordinator_that_hangs_is_waited_for_until_the_group_has_another() -> None:
    history = history_of(4)
    donors = donors_of(history, [1000.0] * 4)
    donors[0].lie = "silence"
    world = World(donors, 1e6)
    begin(world, history, donors, own=3)
    world.run(lambda: world.now_s >= 10.0)
    assert not world.done
    world.feed(ev.SetGoal(goal_of(history, donors[1:]), ev.OwnState()))
    world.run(lambda: world.done, limit_s=15.0)


def test_one_wrong_member_of_three_is_left_out() -> None:
    history = history_of(4)
    donors = donors_of(history, [1000.0] * 3)
    donors[2].lie = "digest"
    world = World(donors, 1e6)
    begin(world, history, donors, own=2)
    world.run(lambda: world.done, limit_s=10.0)
    assert reached(world, history, 4)
    assert list(world.machine.donors.excluded) == [donors[2].member.peer]
    assert names(world, "it names another state of round 4")


@pytest.mark.parametrize("lie", ["no heads", "no answer about heads"])
def test_a_donor_that_only_claims_a_log_costs_seconds(lie: str) -> None:
    history = history_of(100)
    donors = donors_of(history, [100_000.0] * 3)
    for donor in donors[:2]:
        donor.log = 5
    donors[2].lie = lie
    world = World(donors, 1e6)
    begin(world, history, donors, own=10)
    world.run(lambda: world.done, limit_s=2 * OWN_S)
    assert reached(world, history, 100)


def test_a_donor_that_gives_no_heads_counts_as_one_without_a_log() -> None:
    history = history_of(100)
    donors = donors_of(history, [10.0] * 3)
    donors[0].log = donors[1].log = 5
    donors[2].lie = "no heads"
    world = World(donors, 1e6)
    begin(world, history, donors, own=10)
    world.run(
        lambda: names(world, "does not send the rounds that it says it has"), limit_s=2 * OWN_S
    )
    world.run(lambda: world.now_s > 2 * OWN_S)  # it is asked for its state again meanwhile
    assert not world.machine.donors.pieces.reaches_back(11)
    assert world.machine.donors.pieces.reaches_back(96)


# ---------------------------------------------------------------- goals that go back, memory


def test_a_goal_that_goes_back_to_the_own_state_is_done_at_once() -> None:
    history = history_of(6)
    donors = donors_of(history, [100.0] * 3)
    world = World(donors, 1e6)
    begin(world, history, donors, own=5)
    world.run(lambda: world.received)
    world.feed(ev.SetGoal(goal_of(history, donors, 5), own_of(history, 5)))
    assert reached(world, history, 5)
    assert world.machine.next_deadline_s() is None
    assert all(world.machine.donors.pieces.outstanding(d.member.peer) == 0 for d in donors)


def test_chunks_beyond_a_goal_that_went_down_are_wanted_again() -> None:
    history = history_of(6)
    donors = donors_of(history, [1000.0] * 3)
    world = World(donors, 1e6)
    begin(world, history, donors)
    world.run(lambda: world.received > 5 * CHUNK_BYTES)
    for donor in donors:
        donor.round = 5
    world.feed(ev.SetGoal(goal_of(history, donors, 5), ev.OwnState()))
    world.run(lambda: world.done, limit_s=30.0)
    assert reached(world, history, 5)
    assert world.own == history.states[5]
    assert not world.machine.donors.excluded


def test_own_bytes_that_are_not_what_was_noted_cost_their_chunk_and_no_donor() -> None:
    history = history_of(5)
    donors = donors_of(history, [1000.0] * 3)
    world = World(donors, 1e6)
    world.own = [b"?" * 64, *history.states[5][1:]]
    world.noted = {0: strong_digest(history.states[5][0])}
    world.feed(ev.SetGoal(goal_of(history, donors, suspect=True), own_of(history, 5)))
    world.run(lambda: world.done)
    assert reached(world, history, 5)
    assert world.own == history.states[5]
    assert not world.machine.donors.excluded
    assert world.received == 33 * (6 + 5 * 32) + CHUNK_BYTES


def test_a_large_state_is_looked_at_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assembly, "REVIEW_CHUNKS", 7)
    history = history_of(9, chunks=100)
    donors = donors_of(history, [100_000.0] * 3)
    world = World(donors, 1e6)
    begin(world, history, donors, own=6)
    pull = world.machine.donors.pieces
    world.run(lambda: pull.wanted)
    assert pull.wanted <= 7
    world.run(lambda: world.done)
    assert reached(world, history, 9)


def test_missed_rounds_are_not_worth_another_line_unless_they_take_long() -> None:
    history = history_of(6)
    donors = donors_of(history, [1000.0] * 3)
    for own, delay_s, lines in ((5, 0.01, 0), (3, 0.01, 1), (5, USUAL_S / 2, 1)):
        world = World(donors, 1e6)
        for donor in donors:
            donor.delay_s = delay_s
        begin(world, history, donors, own=own)
        world.run(lambda world=world: world.done)  # type: ignore[misc]
        assert len(names(world, "downloading the state")) == lines


def test_own_chunks_that_were_overwritten_do_not_count_as_own_any_more() -> None:
    history = history_of(6)
    store = Store(32, 1, history.states[5])
    table = ChunkTable(store, sha(history.blob))
    table.take_state(3, 6, history.digest(6), b"donor")
    table.go_back(5)
    table.seed(5)
    assert store.version == {chunk: 5 for chunk in range(32) if chunk != 3}


def test_a_question_that_an_earlier_task_left_open_does_not_make_a_member_silent() -> None:
    history = history_of(4)
    donors = donors_of(history, [100_000.0] * 3)
    donors[2].lie = "silence"
    world = World(donors, 1e6)
    begin(world, history, donors, own=3)
    world.run(lambda: world.now_s >= 1.0)
    world.feed(ev.Cancel())
    world.run(lambda: world.now_s >= 20.0)
    donors[2].lie = ""
    donors[2].delay_s = 0.4  # there and back in less than what counts as silence
    begin(world, history, donors, own=3)
    world.run(lambda: world.now_s >= 20.5)
    assert not world.machine.donors.attestation.agreed, "its word is waited for"
    world.run(lambda: world.done, limit_s=25.0)
