"""A member's side of rounds, message by message."""

from __future__ import annotations

from typing import TypeVar

import pytest

from atoll.peer.events import Abort, Apply, Effect, Fetch, LoadState, Note, Reduce, Submitted
from atoll.peer.events import TellTrainer as Tell
from atoll.peer.follower import Follower
from atoll.peer.messages import INIT, STEP, Begin, Commit, Learn, Ready, Repair
from atoll.peer.views import Member, View, chain_after, genesis_chain

ME, OTHER = b"m" * 32, b"o" * 32
LINEAGE, ROOT = b"L" * 32, b"r" * 32
GENESIS = genesis_chain(LINEAGE)
T = TypeVar("T")


class Bench:
    """A follower at round 3, synced, and what it emits."""

    def __init__(self) -> None:
        self.effects: list[Effect] = []
        self.own = Follower(ME, self.effects.append)
        self.own.round, self.own.chain = 3, b"3" * 32

    def took(self, kind: type[T]) -> list[T]:
        found = [effect for effect in self.effects if isinstance(effect, kind)]
        self.effects.clear()
        return found

    def begin(self, number: int = 4, attempt: int = 1, peers: tuple[bytes, ...] = (ME,)) -> Begin:
        begin = Begin(LINEAGE, 2, number, attempt, STEP, peers, (1.0,) * len(peers))
        self.own.on_begin(begin)
        return begin

    def ready(self, attempt: int = 1) -> Ready:
        self.begin(attempt=attempt)
        ready = self.own.on_reduced(4, attempt, ROOT)
        assert ready is not None
        return ready

    def submit(self, base_round: int = 3, epoch: int = 1) -> None:
        self.own.submitted(Submitted(base_round, epoch, 1.0))


def learn(number: int, donor: bytes = OTHER) -> Learn:
    return Learn(LINEAGE, 2, number, bytes([number]) * 32, b"d" * 32, Member(donor, 1))


def view(base_round: int, base_chain: bytes) -> View:
    return View(LINEAGE, 3, (Member(ME, 1),), ME, base_round, base_chain)


# ---------------------------------------------------------------- attempts and commits


def test_begin_reduce_ready_commit_apply() -> None:
    bench = Bench()
    bench.submit()
    begin = bench.begin()
    assert bench.took(Reduce) == [Reduce(begin)]
    ready = bench.own.on_reduced(4, 1, ROOT)
    chain = chain_after(b"3" * 32, 4, (ME,), (1.0,), ROOT)
    assert ready == Ready(LINEAGE, 2, 4, 1, chain)
    bench.own.on_commit(Commit(LINEAGE, 2, 4, 1, chain))
    assert [type(e) for e in bench.effects] == [Apply, Tell]
    assert (bench.own.round, bench.own.chain) == (4, chain)
    assert not bench.own.arrived
    bench.took(Apply)
    bench.own.on_commit(Commit(LINEAGE, 2, 4, 1, chain))  # again
    assert not bench.effects


def test_a_non_participant_waits_and_fetches_when_told() -> None:
    bench = Bench()
    begin = bench.begin(peers=(OTHER,))
    assert bench.took(Reduce) == []
    bench.own.on_repair(Repair(LINEAGE, 2, 4, 1, OTHER))
    assert bench.took(Fetch) == [Fetch(begin, OTHER)]
    assert bench.own.on_reduced(4, 1, ROOT) is not None
    bench.own.on_repair(Repair(LINEAGE, 2, 4, 1, OTHER))
    assert bench.took(Fetch) == []  # it has the result


def test_a_newer_attempt_replaces_an_older_one_and_not_the_other_way() -> None:
    bench = Bench()
    bench.begin(attempt=2)
    bench.took(Reduce)
    bench.begin(attempt=1)
    bench.begin(attempt=2)
    assert not bench.effects
    newer = bench.begin(attempt=3)
    assert bench.effects == [Abort(4, 2), Reduce(newer)]
    assert bench.own.on_reduced(4, 2, ROOT) is None  # too late


def test_a_commit_without_our_copy_makes_us_unsynced() -> None:
    bench = Bench()
    bench.begin()
    bench.own.committed(4, b"x" * 32)
    assert bench.own.unsynced
    assert [n.kind for n in bench.took(Note)] == ["unsynced"]
    bench.begin(attempt=2)
    assert bench.took(Reduce) == []  # unsynced: takes no part


def test_a_begin_of_a_later_round_does_not_take_back_our_ready() -> None:
    """COMMIT was lost: round 4 may rest on our vote, so its result must stay in our report."""
    bench = Bench()
    ready = bench.ready()
    bench.begin(number=5, attempt=2)
    assert bench.own.report().ready_chain == ready.chain
    assert not bench.own.unsynced
    bench.own.committed(4, ready.chain)  # the coordinator's beat
    assert bench.own.round == 4


def test_begin_of_a_past_round_is_ignored() -> None:
    bench = Bench()
    bench.begin(number=3)
    bench.begin(number=2)
    assert not bench.effects


# ---------------------------------------------------------------- the trainer


@pytest.mark.parametrize(
    ("base_round", "epoch", "begun", "told"),
    [
        (3, 1, False, None),
        (4, 1, False, None),  # it was told that it missed round 4, which was then given up
        (2, 1, False, Tell("missed", 3, 1)),
        (3, 1, True, Tell("missed", 4, 1)),
        (3, 0, False, Tell("reload", 3, 1)),
        (3, 0, True, Tell("reload", 3, 1)),
    ],
)
def test_submissions(base_round: int, epoch: int, begun: bool, told: Tell | None) -> None:
    bench = Bench()
    if begun:
        bench.begin(peers=(OTHER,))
    bench.effects.clear()
    bench.submit(base_round, epoch)
    assert bench.took(Tell) == ([told] if told else [])
    assert bench.own.arrived is (told is None)


def test_submission_during_the_initial_round_waits() -> None:
    bench = Bench()
    bench.own.round = 0
    bench.own.on_begin(Begin(LINEAGE, 2, 1, 1, INIT, (OTHER,), (1.0,), b"blob"))
    bench.submit(0)
    assert bench.own.arrived


def test_trainer_of_a_peer_outside_the_attempt_is_told_that_it_missed() -> None:
    bench = Bench()
    bench.submit()
    bench.begin(peers=(OTHER,))
    ready = bench.own.on_reduced(4, 1, ROOT)
    assert ready is not None
    bench.took(Tell)
    bench.own.committed(4, ready.chain)
    assert bench.took(Tell) == [Tell("missed", 4, 1)]


def test_detached_trainer_takes_its_submission_along_unless_it_is_being_read() -> None:
    bench = Bench()
    bench.own.attached = True
    bench.submit()
    bench.own.detached()
    assert not bench.own.arrived
    bench.submit()
    bench.begin()
    bench.own.detached()
    assert bench.own.arrived


def test_spoilt_contribution_makes_room_for_the_next_submission() -> None:
    bench = Bench()
    bench.submit()
    bench.begin()
    bench.own.spoilt()
    assert bench.took(Tell) == [Tell("missed", 4, 1)]
    bench.submit(4)
    assert bench.own.arrived  # for the attempt after this one
    bench.begin(attempt=2)
    bench.took(Tell)
    bench.submit(4)
    assert bench.took(Tell) == [Tell("missed", 4, 1)]  # the new attempt is under way


# ---------------------------------------------------------------- loading the state


def test_learn_loads_once_per_order_and_only_when_behind() -> None:
    bench = Bench()
    bench.own.on_learn(learn(5), in_view=True)
    assert bench.took(LoadState) == []  # synced: a late order
    bench.own.committed(5, bytes([5]) * 32)
    bench.own.on_learn(learn(5), in_view=True)
    bench.own.on_learn(learn(5), in_view=True)
    assert bench.took(LoadState) == [LoadState(learn(5))]
    other = learn(5, donor=ME)
    bench.own.on_learn(other, in_view=True)
    assert bench.took(LoadState) == [LoadState(other)]  # another donor
    bench.own.on_learn(learn(4), in_view=True)
    assert bench.took(LoadState) == []  # overtaken


def test_outcomes_of_older_loads_do_not_count() -> None:
    bench = Bench()
    bench.own.on_loaded(2, b"2" * 32, b"d" * 32)
    assert bench.own.round == 3
    bench.own.committed(5, bytes([5]) * 32)
    bench.own.on_learn(learn(5), in_view=True)
    bench.own.on_loaded(4, bytes([4]) * 32, b"d" * 32)
    assert bench.own.unsynced
    bench.own.on_loaded(5, bytes([5]) * 32, b"d" * 32)
    assert (bench.own.round, bench.own.unsynced, bench.own.epoch) == (5, False, 2)
    assert bench.took(Tell)[-1] == Tell("reload", 5, 2)


def test_joiner_that_holds_the_state_loads_nothing() -> None:
    bench = Bench()
    same = Learn(LINEAGE, 2, 3, b"3" * 32, b"d" * 32, Member(OTHER, 1))
    bench.own.on_learn(same, in_view=False)
    assert not bench.effects
    bench.own.on_learn(learn(2), in_view=False)  # another history, of which ours is no part
    assert bench.took(LoadState) == [LoadState(learn(2))]


def test_resync_loads_the_same_round_again_but_never_takes_back_a_ready() -> None:
    bench = Bench()
    same = Learn(LINEAGE, 2, 3, b"3" * 32, b"d" * 32, Member(OTHER, 1))
    bench.ready()
    bench.own.resync("digest")
    assert not bench.own.unsynced
    bench = Bench()
    bench.own.resync("digest")
    assert bench.own.unsynced
    bench.own.on_learn(same, in_view=True)
    assert bench.took(LoadState) == [LoadState(same)]
    bench.own.on_loaded(3, b"3" * 32, b"d" * 32)
    assert not bench.own.doubtful


# ---------------------------------------------------------------- views


def test_install_applies_what_is_the_new_base() -> None:
    bench = Bench()
    ready = bench.ready()
    bench.effects.clear()
    bench.own.on_install(view(4, ready.chain))
    assert bench.own.round == 4
    assert len(bench.took(Apply)) == 1


def test_install_on_the_old_base_drops_the_attempt() -> None:
    bench = Bench()
    bench.ready()
    bench.own.on_install(view(3, b"3" * 32))
    assert (bench.own.round, bench.own.ready, bench.own.begin) == (3, None, None)
    assert not bench.own.unsynced


@pytest.mark.parametrize("base", [(4, b"x" * 32), (9, b"9" * 32)])
def test_install_on_a_base_that_we_lack(base: tuple[int, bytes]) -> None:
    bench = Bench()
    bench.ready()
    bench.own.on_install(view(*base))
    assert bench.own.unsynced


def test_first_view_of_a_void_run() -> None:
    effects: list[Effect] = []
    own = Follower(ME, effects.append)
    own.on_install(view(0, GENESIS))
    assert (own.round, own.chain, own.unsynced) == (0, GENESIS, False)
