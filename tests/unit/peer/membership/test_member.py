"""A member's side of rounds, message by message."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

import pytest

from atoll.peer.membership.events import (
    Abort,
    Applied,
    Apply,
    Effect,
    Fetch,
    ListFinal,
    Note,
    Reduce,
    Submitted,
    Undo,
)
from atoll.peer.membership.events import TellTrainer as Tell
from atoll.peer.membership.member import MemberState
from atoll.peer.membership.messages import (
    INIT,
    STEP,
    AskFinals,
    Begin,
    Miss,
    Notice,
    Ready,
    Repair,
    Report,
    Run,
)
from atoll.peer.membership.operations import Operation
from atoll.peer.membership.view import WITNESS, Member, View, chain_after, genesis_chain
from atoll.peer.membership.witness_owners import Owners
from atoll.peer.rounds.entries import REDUCE, ROUNDS_IN_FLIGHT_MAX

ME, OTHER = b"m" * 32, b"o" * 32
LINEAGE, ROOT = b"L" * 32, b"r" * 32
SUM = Operation(REDUCE, 1000, "sum", "float32")
GENESIS = genesis_chain(LINEAGE)
T = TypeVar("T")


class Bench:
    """A follower at round 3, synced, and what it emits."""

    def __init__(self) -> None:
        self.effects: list[Effect] = []
        self.own = MemberState(Member(ME, 1), self.effects.append)
        self.own.round, self.own.chain = 3, b"3" * 32
        self.own._last_of = {0: 3}

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

    def run(self, number: int, attempt: int, root: bytes = ROOT) -> Run:
        """Hold the result of this round too."""
        self.begin(number, attempt)
        self.own.on_reduced(number, attempt, root)
        assert number in self.own.held
        return Run(number, attempt, 0, root)

    def submit(self, base_round: int = 3, epoch: int = 1) -> None:
        self.own.submitted(Submitted(base_round, epoch, 1.0))


def after(chain: bytes, *numbers: int) -> bytes:
    for number in numbers:
        chain = chain_after(chain, number, 0, ROOT)
    return chain


def view(base_round: int, base_chain: bytes, *, rollback: bool = False) -> View:
    return View(LINEAGE, 3, (Member(ME, 1),), ME, base_round, base_chain, rollback=rollback)


# ---------------------------------------------------------------- attempts and commits


def test_begin_reduce_ready_commit_apply() -> None:
    bench = Bench()
    bench.submit()
    begin = bench.begin()
    assert bench.took(Reduce) == [Reduce(begin)]
    ready = bench.own.on_reduced(4, 1, ROOT)
    chain = after(b"3" * 32, 4)
    assert ready == Ready(LINEAGE, 2, 4, 1, ROOT)
    bench.own.committed(4, chain)
    assert [type(e) for e in bench.effects] == [Apply, Tell]
    assert (bench.own.round, bench.own.chain) == (4, chain)
    assert not bench.own.submissions
    bench.took(Apply)
    bench.own.committed(4, chain)  # again
    assert not bench.effects


def test_a_base_of_another_history_counts_no_rounds_that_changed_nothing() -> None:
    """Steps may lead there, of which no later view may say that they have changed nothing."""
    bench = Bench()
    own, view = bench.own, View(LINEAGE, 3, (Member(ME, 1), Member(OTHER, 1)), ME, 3, b"3" * 32)
    own.on_install(view)
    for number in (4, 5, 6):
        begin = Begin(LINEAGE, 3, number, 1, REDUCE, (ME,), (1.0,), operation=SUM)
        own.on_begin(begin)
        own.on_reduced(number, 1, ROOT)
        own.committed(number, chain_after(own.chain, number, 0, ROOT), number - 3)
    assert (own.round, own.unchanged) == (6, 3)
    own.on_install(replace(view, number=4, base_round=5, base_chain=b"elsewhere".ljust(32)))
    assert (own.known[0], own.unchanged, own.is_behind) == (5, 0, True)


def test_another_trainer_does_not_answer_for_the_one_that_was_asked() -> None:
    """It comes between two attempts at a collective, with a step, which is no part of the sum."""
    bench = Bench()
    bench.own.submitted(Submitted(3, 1, 1.0, operation=SUM))
    tag = (LINEAGE, 2, 4)
    first = Begin(*tag, 1, REDUCE, (ME, OTHER), (1.0, 1.0), operation=SUM)
    bench.own.on_begin(first)
    assert bench.took(Reduce) == [Reduce(first)]
    bench.own.detached()
    bench.own.came(waits=True)
    bench.own.on_ask_finals(AskFinals(*tag, 1))
    bench.submit()
    second = Begin(*tag, 2, REDUCE, (ME, OTHER), (1.0, 1.0), operation=SUM)
    assert bench.own.on_begin(second) == Miss(*tag, 2, (ME,)), "the others go on without us"
    assert not bench.took(Reduce)
    assert not bench.own.contributes


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
    bench.ready()
    bench.begin(number=5, attempt=2)
    assert bench.own.report().runs == (Run(4, 1, 0, ROOT),)
    assert not bench.own.unsynced
    bench.own.committed(4, after(b"3" * 32, 4))  # the coordinator's beat
    assert bench.own.round == 4


def test_a_commit_applies_all_that_lead_to_it_in_order() -> None:
    bench = Bench()
    for number in (6, 4, 5):
        bench.run(number, attempt=number)
    bench.effects.clear()
    bench.own.committed(6, after(b"3" * 32, 4, 5, 6))
    assert [apply.begin.round for apply in bench.took(Apply)] == [4, 5, 6]
    assert bench.own.previous == (5, after(b"3" * 32, 4, 5))
    assert bench.own.chain == after(b"3" * 32, 4, 5, 6)


def test_results_that_lead_elsewhere_are_not_applied() -> None:
    """Of an attempt that was given up: another was committed."""
    bench = Bench()
    bench.run(4, 1, b"q" * 32)
    bench.run(5, 2)
    bench.effects.clear()
    bench.own.committed(5, after(b"3" * 32, 4, 5))
    assert bench.took(Apply) == []
    assert bench.own.unsynced
    assert bench.own.round == 3


def test_ready_is_said_about_the_next_round_only() -> None:
    bench = Bench()
    bench.begin(5, 2)
    assert bench.own.on_reduced(5, 2, ROOT) is None
    assert bench.own.report().runs == ()
    bench.begin(4, 3)
    assert bench.own.on_reduced(4, 3, ROOT) is not None
    assert [run.root for run in bench.own.runs()] == [ROOT, b""]
    assert bench.own.report().runs == (Run(4, 3, 0, ROOT),)
    bench.own.committed(4, after(b"3" * 32, 4))
    assert bench.own.ready() == Ready(LINEAGE, 2, 5, 2, ROOT)  # its turn has come
    assert [run.root for run in bench.own.runs()] == [ROOT]


def test_a_gap_is_not_jumped_over() -> None:
    bench = Bench()
    bench.run(5, 2)
    bench.own.committed(5, after(b"3" * 32, 5))
    assert bench.own.round == 3
    assert bench.own.unsynced


def test_a_commit_that_is_far_ahead_costs_no_time() -> None:
    bench = Bench()
    bench.own.committed((1 << 62) - 1, b"x" * 32)
    assert bench.own.unsynced


def test_what_is_held_stays_in_the_report_of_one_that_fell_behind() -> None:
    """The coordinator may have counted it: taken back, a committed round could be lost."""
    bench = Bench()
    run = bench.run(4, 1)
    bench.own.committed(5, b"x" * 32)  # the COMMIT of 4 was lost
    assert bench.own.unsynced
    assert bench.own.report().runs == (run,)


def test_a_witness_keeps_its_vote_when_begin_comes_after_notice() -> None:
    effects: list[Effect] = []
    own = MemberState(Member(ME, 1, WITNESS), effects.append)
    own.round, own.chain = 3, b"3" * 32
    assert own.on_notice(Notice(LINEAGE, 2, 4, 5, 0, ROOT)) is not None
    own.on_begin(Begin(LINEAGE, 2, 4, 5, STEP, (OTHER,), (1.0,)))
    assert own.report().runs == (Run(4, 5, 0, ROOT),)
    own.on_begin(Begin(LINEAGE, 2, 4, 6, STEP, (OTHER,), (1.0,)))
    assert own.report().runs == ()  # that attempt is given up


def test_a_witness_that_owns_says_nothing_of_the_result() -> None:
    """It reduces, votes when it is asked as all witnesses do, and forgets with the commit."""
    effects: list[Effect] = []
    own = MemberState(Member(ME, 1, WITNESS), effects.append)
    own.life = 7
    own.round, own.chain = 3, b"3" * 32

    def begin(attempt: int, life: int) -> Begin:
        owners = Owners((ME,), (life,), 4096, 4096, "int8")
        return Begin(LINEAGE, 2, 4, attempt, STEP, (OTHER,), (1.0,), owners=owners)

    own.on_begin(begin(1, life=6))
    assert not effects, "that was an earlier process"
    begun = begin(2, life=7)
    own.on_begin(begun)
    assert effects == [Abort(4, 1), Reduce(begun)]
    assert own.on_reduced(4, 2, ROOT) is None
    assert own.on_notice(Notice(LINEAGE, 2, 4, 2, 0, ROOT)) is not None
    effects.clear()
    own.committed(4, after(b"3" * 32, 4))
    assert effects == [Abort(4, 2)]
    assert own.round == 4


def test_an_ended_attempt_lists_its_chunks_and_says_nothing_more() -> None:
    bench = Bench()
    bench.begin()
    bench.effects.clear()
    bench.own.on_ask_finals(AskFinals(LINEAGE, 2, 4, 9))
    assert not bench.effects  # another attempt
    bench.own.on_ask_finals(AskFinals(LINEAGE, 2, 4, 1))
    assert bench.effects == [ListFinal(4, 1)]
    assert bench.own.on_reduced(4, 1, ROOT) is None  # too late: it will not be committed
    bench.own.on_repair(Repair(LINEAGE, 2, 4, 1, OTHER))
    assert bench.took(Fetch) == []
    bench.begin(attempt=2)
    assert bench.own.on_reduced(4, 2, ROOT) is not None


def test_rounds_far_ahead_are_not_begun() -> None:
    bench = Bench()
    for number in (3 + ROUNDS_IN_FLIGHT_MAX, 4 + ROUNDS_IN_FLIGHT_MAX):
        bench.begin(number=number)
    assert set(bench.own.begins) == {3 + ROUNDS_IN_FLIGHT_MAX}


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
    assert bool(bench.own.submissions) is (told is None)


def test_submission_during_the_initial_round_waits() -> None:
    bench = Bench()
    bench.own.round = 0
    bench.own._last_of.clear()
    bench.own.on_begin(Begin(LINEAGE, 2, 1, 1, INIT, (OTHER,), (1.0,), b"blob"))
    bench.submit(0)
    assert bench.own.submissions


def test_trainer_of_a_peer_outside_the_attempt_is_told_that_it_missed() -> None:
    bench = Bench()
    bench.submit()
    bench.begin(peers=(OTHER,))
    ready = bench.own.on_reduced(4, 1, ROOT)
    assert ready is not None
    bench.took(Tell)
    bench.own.committed(4, after(b"3" * 32, 4))
    assert bench.took(Tell) == [Tell("missed", 4, 1)]


def test_detached_trainer_takes_its_submission_along_unless_it_is_being_read() -> None:
    bench = Bench()
    bench.own.attached = True
    bench.submit()
    bench.own.detached()
    assert not bench.own.submissions
    bench.submit()
    bench.begin()
    bench.own.detached()
    assert bench.own.submissions


def test_spoilt_contribution_makes_room_for_the_next_submission() -> None:
    bench = Bench()
    bench.submit()
    bench.begin()
    bench.own.unusable(4, "unreadable")
    assert bench.took(Tell) == [Tell("missed", 4, 1, text="unreadable")]
    bench.submit(4)
    assert bench.own.submissions  # for the attempt after this one
    bench.begin(attempt=2)
    bench.took(Tell)
    bench.submit(4)
    assert bench.took(Tell) == [Tell("missed", 4, 1)]  # the new attempt is under way


# ---------------------------------------------------------------- views


def test_install_applies_what_is_the_new_base() -> None:
    bench = Bench()
    bench.ready()
    bench.effects.clear()
    bench.own.on_install(view(4, after(b"3" * 32, 4)))
    assert bench.own.round == 4
    assert len(bench.took(Apply)) == 1


def test_install_on_the_old_base_drops_the_attempt() -> None:
    bench = Bench()
    bench.ready()
    bench.own.on_install(view(3, b"3" * 32))
    assert (bench.own.round, bench.own.held, bench.own.begins) == (3, {}, {})
    assert not bench.own.unsynced


@pytest.mark.parametrize("base", [(4, b"x" * 32), (9, b"9" * 32)])
def test_install_on_a_base_that_we_lack(base: tuple[int, bytes]) -> None:
    bench = Bench()
    bench.ready()
    bench.own.on_install(view(*base))
    assert bench.own.unsynced


def test_first_view_of_a_void_run() -> None:
    effects: list[Effect] = []
    own = MemberState(Member(ME, 1), effects.append)
    own.on_install(view(0, GENESIS))
    assert (own.round, own.chain, own.unsynced) == (0, GENESIS, False)


def test_a_rollback_leaves_us_astray_until_we_have_gone_back() -> None:
    bench = Bench()
    bench.ready()
    bench.own.committed(4, after(b"3" * 32, 4))
    bench.own.on_install(view(3, b"3" * 32, rollback=True))
    assert bench.own.unsynced
    assert bench.own.previous == (3, b"3" * 32)
    assert bench.own.report() == Report(0, b"", holds=False)  # ours is another history now


@pytest.mark.parametrize(
    ("base", "rollback"), [((3, b"3" * 32), False), ((3, b"z" * 32), True), ((2, b"2" * 32), True)]
)
def test_no_other_way_back_is_taken_by_oneself(base: tuple[int, bytes], rollback: bool) -> None:
    bench = Bench()
    bench.ready()
    bench.own.committed(4, after(b"3" * 32, 4))
    bench.effects.clear()
    bench.own.on_install(view(*base, rollback=rollback))
    assert bench.took(Undo) == []
    assert bench.own.unsynced
    assert bench.own.diverged
    assert not bench.own.report().holds


def test_what_a_view_has_taken_back_is_no_commit() -> None:
    """An older order is done when the view has gone back: where it leads nobody stands any more."""
    bench = Bench()
    bench.ready()
    bench.own.committed(4, after(b"3" * 32, 4))
    bench.own.on_install(view(2, b"2" * 32, rollback=True))
    assert bench.own.position == (2, b"2" * 32)
    bench.own.caught_up(8, b"8" * 32)
    assert bench.own.position == (2, b"2" * 32)
    bench.own.diverged = False
    bench.own.caught_up(2, b"2" * 32)
    assert bench.own.known == bench.own.position == (2, b"2" * 32)


def test_the_digest_of_a_round_that_was_taken_back_is_none_of_ours() -> None:
    """Ignore a report of what was applied before the view had gone back."""
    bench = Bench()
    bench.own.on_applied(Applied(3, b"d" * 32))
    bench.own.on_applied(Applied(4, b"e" * 32))
    assert (bench.own.digest, bench.own.digest_round) == (b"d" * 32, 3)


def test_a_witness_moves_on_without_holding_anything() -> None:
    effects: list[Effect] = []
    own = MemberState(Member(ME, 1, WITNESS), effects.append)
    own.on_install(view(3, b"3" * 32))
    own.committed(9, b"9" * 32)
    assert (own.round, own.chain, own.unsynced) == (9, b"9" * 32, False)
    own.on_install(view(5, b"5" * 32))
    assert (own.round, own.unsynced) == (5, False)
    assert effects == []
    assert not own.report().holds
