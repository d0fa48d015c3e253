"""Proposers of a view's Paxos, and the choice of the next view's base."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import pytest
from harness.elections import (
    CHAIN,
    LINEAGE,
    NEXT,
    OTHER,
    TIMING,
    VIEW,
    A,
    B,
    C,
    D,
    E,
    Q,
    R,
    sent,
    view_of,
)

from atoll.peer.membership.consensus import BaseWait, Electorate, Proposer, base_of
from atoll.peer.membership.events import Effect, Note
from atoll.peer.membership.messages import Accept, Prepare, Promise, Report, Run
from atoll.peer.membership.view import (
    ANCESTORS_MAX,
    Ballot,
    Member,
    Rules,
    View,
    chain_after,
    follows,
    forked,
    is_quorum,
)

# ---------------------------------------------------------------- proposers


@dataclass
class Known(Electorate):
    """Hold what a candidate knows of its voters beside the view."""

    later: View | None = None
    gone: Collection[bytes] = ()

    def renewed(self, bootstrap_view: View) -> View:
        return self.later or bootstrap_view

    def departed(self) -> Collection[bytes]:
        return self.gone


class Candidate:
    """B stands for election in some view; ``promise`` gives it answers."""

    def __init__(self, view: View = VIEW, me: bytes = B, **options: Any) -> None:
        self.effects: list[Effect] = []
        self.ballot = Ballot(2, me)
        self.proposer = Proposer(view, self.ballot, TIMING, self.effects.append, 0.0, **options)

    def promise(self, source: bytes, report: Report, accepted: Accept | None = None) -> None:
        ballot, proposal = (accepted.ballot, accepted.proposal) if accepted else (None, None)
        answer = Promise(LINEAGE, 3, self.ballot, report, ballot, proposal)
        self.proposer.on_promise(source, answer)

    def chosen(self, now_s: float = 1.0, lone_ok: bool = False) -> View | None:
        self.proposer.step(now_s, set(), lone_ok)  # a quorum is there: the gathering begins
        self.proposer.step(now_s + 2 * TIMING.gather_s, set(), lone_ok)
        return self.proposer.proposal


def held(round_number: int, *runs: tuple[int, int, bytes], holds: bool = True) -> Report:
    """Committed up to ``round_number``, READY for these (round, attempt, root)."""
    return Report(round_number, CHAIN, holds, tuple(Run(n, a, 0, root) for n, a, root in runs))


def after(chain: bytes, *steps: tuple[int, bytes]) -> bytes:
    for number, root in steps:
        chain = chain_after(chain, number, 0, root)
    return chain


def test_prepare_goes_to_all_and_is_repeated_to_those_who_have_not_answered() -> None:
    candidate = Candidate()
    candidate.proposer.step(0.0, set(), lone_ok=False)
    assert [peer for peer, _ in sent(candidate.effects, Prepare)] == [A, B, C]
    candidate.effects.clear()
    candidate.promise(B, Report(4, CHAIN, True))
    candidate.proposer.step(TIMING.repeat_s / 2, set(), lone_ok=False)
    assert not candidate.effects
    candidate.proposer.step(TIMING.repeat_s, set(), lone_ok=False)
    assert [peer for peer, _ in sent(candidate.effects, Prepare)] == [A, C]


def test_no_value_without_a_quorum_of_promises() -> None:
    candidate = Candidate()
    candidate.promise(B, Report(4, CHAIN, True))
    assert candidate.chosen() is None
    candidate.promise(C, Report(4, CHAIN, True))
    view = candidate.chosen(2.0)
    assert view is not None
    assert (view.peers, view.coordinator, view.number) == ((A, B, C), B, 4)


def test_an_election_keeps_who_has_not_promised_yet() -> None:
    """Unless it is gone; and who has promised stays whatever is said of it."""
    candidate = Candidate(view_of(A, B, C, D, E), electorate=Known(gone={A, C}))
    for peer in (B, C, D):
        candidate.promise(peer, Report(4, CHAIN, True))
    view = candidate.chosen()
    assert view is not None
    assert view.peers == (B, C, D, E)


@pytest.mark.parametrize("promised", [(B, C, D), (A, B)], ids=["most", "half with the first"])
def test_those_who_promise_are_a_quorum_of_the_next_view(promised: tuple[bytes, ...]) -> None:
    candidate = Candidate(view_of(A, B, C, D))
    for peer in promised:
        candidate.promise(peer, Report(4, CHAIN, True))
    view = candidate.chosen()
    assert view is not None
    assert view.peers == (A, B, C, D)
    assert is_quorum(view, promised)


def test_promises_for_another_ballot_or_of_strangers_are_ignored() -> None:
    candidate = Candidate()
    late = Promise(LINEAGE, 3, Ballot(1, B), Report(4, CHAIN, True))
    candidate.proposer.on_promise(C, late)
    candidate.promise(E, Report(4, CHAIN, True))
    assert not candidate.proposer.promises


@pytest.mark.parametrize(
    ("reports", "base"),
    [
        ([Report(4, CHAIN, True), Report(4, CHAIN, True)], (4, CHAIN)),
        ([Report(5, OTHER, True), Report(4, CHAIN, True)], (5, OTHER)),  # one lost a COMMIT
        # Perhaps committed: keep it.
        ([held(4, (5, 1, R)), Report(4, CHAIN, True)], (5, after(CHAIN, (5, R)))),
        # The higher attempt.
        ([held(4, (5, 1, Q)), held(4, (5, 2, R))], (5, after(CHAIN, (5, R)))),
        ([held(4, (5, 2, R)), held(4, (5, 1, Q))], (5, after(CHAIN, (5, R)))),
        # Committed beats any attempt.
        ([held(4, (5, 9, Q)), Report(5, OTHER, True)], (5, OTHER)),
        # Several in flight: the last up to which every round stands in some report.
        ([held(4, (5, 1, Q), (6, 2, R)), held(4)], (6, after(CHAIN, (5, Q), (6, R)))),
        ([held(4, (6, 2, R)), held(4)], (4, CHAIN)),  # 6 is not committed without 5
        ([held(4, (5, 1, R), (7, 3, Q)), held(4)], (5, after(CHAIN, (5, R)))),
        ([held(5, (6, 2, R)), Report(5, CHAIN, False)], (6, after(CHAIN, (6, R)))),
    ],
)
def test_base_is_the_highest_that_may_have_been_committed(
    reports: list[Report], base: tuple[int, bytes]
) -> None:
    candidate = Candidate()
    for peer, report in zip((B, C), reports, strict=True):
        candidate.promise(peer, report)
    view = candidate.chosen()
    assert view is not None
    assert (view.base_round, view.base_chain) == base


def test_a_base_is_what_can_have_been_committed() -> None:
    """C's memory is bad. A, who does not answer yet, may have committed what it shares with B, or,
    for all that B and C can know, with C: neither may be chosen before A answers."""
    candidate = Candidate()
    candidate.promise(B, held(4, (5, 1, Q)))
    candidate.promise(C, held(4, (5, 1, R)))
    assert candidate.chosen() is None
    assert candidate.chosen(TIMING.lost_s - 1) is None
    candidate.promise(A, Report(5, after(CHAIN, (5, Q)), True))
    view = candidate.chosen(TIMING.lost_s - 0.5)
    assert view is not None
    assert (view.base_round, view.base_chain) == (5, after(CHAIN, (5, Q)))


def test_half_with_the_tie_breaker_outweighs_the_other_half() -> None:
    candidate = Candidate(view_of(A, B, C, D))
    for peer, root in ((A, Q), (B, Q), (C, R), (D, R)):
        candidate.promise(peer, held(4, (5, 1, root)))
    view = candidate.chosen()
    assert view is not None
    assert view.base_chain == after(CHAIN, (5, Q)), "those of A may be committed"
    assert R > Q


@pytest.mark.parametrize("on_lost", ["halt", "rollback"])
def test_a_disputed_base_counts_as_lost_in_the_end(on_lost: str) -> None:
    candidate = Candidate(replace(VIEW, rules=Rules(on_lost=on_lost)))
    candidate.promise(B, held(4, (5, 1, Q)))
    candidate.promise(C, held(4, (5, 1, R)))
    assert candidate.chosen() is None
    view = candidate.chosen(TIMING.lost_s + 2)
    assert (view is None) is (on_lost == "halt")
    assert view is None or (view.rollback and view.base_round == 4)
    (note,) = [e for e in candidate.effects if isinstance(e, Note)]
    assert "round 5 has two results" in note.text


def test_the_accepted_value_of_the_highest_ballot_binds() -> None:
    other = replace(NEXT, coordinator=C)
    candidate = Candidate()
    candidate.promise(B, Report(9, OTHER, True), Accept(LINEAGE, 3, Ballot(0, A), NEXT))
    candidate.promise(C, Report(4, CHAIN, True), Accept(LINEAGE, 3, Ballot(1, C), other))
    assert candidate.chosen() == other


def test_a_result_on_top_of_another_attempt_does_not_hold_the_base() -> None:
    """6 may have been committed on top of 5.3; who holds 6 has 5.1 only, who holds 5.3 has no 6."""
    candidate = Candidate()
    candidate.promise(B, held(4, (5, 1, R), (6, 2, Q)))
    candidate.promise(C, held(4, (5, 3, Q)))
    assert candidate.chosen() is None
    candidate.promise(A, held(4, (5, 3, Q), (6, 2, Q)))
    view = candidate.chosen(2.0)
    assert view is not None
    assert (view.base_round, view.base_chain) == (6, after(CHAIN, (5, Q), (6, Q)))


@pytest.mark.parametrize("holds", [True, False])
def test_only_who_has_the_state_before_a_result_holds_the_one_after_it(holds: bool) -> None:
    candidate = Candidate()
    candidate.promise(B, held(4, (5, 1, R), holds=holds))
    candidate.promise(C, Report(4, CHAIN, False))
    assert (candidate.chosen() is not None) is holds


def test_a_fork_that_somebody_has_accepted_binds_nobody_else() -> None:
    """It is another history; adopted by a quorum it would leave the quorum without a view."""
    pair = view_of(A, B, C, D, E)
    alone = forked(replace(NEXT, members=(Member(E, 1),), coordinator=E), Ballot(3, E))
    candidate = Candidate(pair)
    candidate.promise(B, Report(4, CHAIN, True))
    candidate.promise(C, Report(4, CHAIN, True))
    candidate.promise(D, Report(4, CHAIN, True), Accept(LINEAGE, 3, Ballot(1, E), alone))
    view = candidate.chosen()
    assert view is not None
    assert (view.peers, view.lineage, view.fork) == ((A, B, C, D, E), LINEAGE, False)


def test_a_fork_is_proposed_to_nobody_whom_it_leaves_out() -> None:
    """Their votes could decide nothing and would block their own coordinator's proposals."""
    candidate = Candidate(view_of(A, B))
    candidate.promise(B, Report(4, CHAIN, True))
    view = candidate.chosen(lone_ok=True)
    assert view is not None
    assert view.fork
    assert [peer for peer, _ in sent(candidate.effects, Accept)] == [B]


def test_going_back_is_a_choice_of_the_founder_and_flagged() -> None:
    view = replace(view_of(A, B, C, base=7), rules=Rules(on_lost="rollback"))
    candidate = Candidate(view)
    candidate.promise(B, Report(4, CHAIN, True))
    candidate.promise(C, Report(6, OTHER, True))
    assert candidate.chosen() is None
    assert candidate.chosen(TIMING.lost_s - 1) is None  # a holder may be back
    decided = candidate.chosen(TIMING.lost_s + 2)
    assert decided is not None
    assert decided.rollback
    assert (decided.base_round, decided.base_chain) == (6, OTHER)
    (note,) = [e for e in candidate.effects if isinstance(e, Note)]
    assert "round 7" in note.text
    assert "back to round 6" in note.text


def test_nothing_to_go_back_to_halts_whatever_the_founder_chose() -> None:
    candidate = Candidate(replace(VIEW, rules=Rules(on_lost="rollback")))
    candidate.promise(B, Report(4, CHAIN, False))
    candidate.promise(C, Report(4, CHAIN, False))
    assert candidate.chosen() is None
    assert candidate.chosen(TIMING.lost_s + 2) is None


def test_one_wait_for_a_lost_base_however_many_ballots_it_takes() -> None:
    """Candidates outbid each other in turns that are shorter than the wait."""
    wait = BaseWait()
    rolls_back = replace(view_of(A, B, C, base=7), rules=Rules(on_lost="rollback"))
    chosen = []
    for turn in range(5):
        candidate = Candidate(rolls_back, wait=wait)
        candidate.promise(B, Report(4, CHAIN, True))
        candidate.promise(C, Report(6, OTHER, True))
        chosen.append(candidate.chosen(turn * 0.3 * TIMING.lost_s))
    assert chosen[:4] == [None] * 4
    assert chosen[4] is not None
    assert chosen[4].rollback
    wait = BaseWait()  # a holder has come back meanwhile: the next loss has a wait of its own
    for turn, lost in enumerate((True, False, True)):
        candidate = Candidate(rolls_back, wait=wait)
        candidate.promise(B, Report(4, CHAIN, True))
        candidate.promise(C, Report(6 if lost else 7, OTHER, True))
        assert (candidate.chosen(turn * 0.7 * TIMING.lost_s) is None) is lost


def test_in_a_cradle_no_tie_breaker_founds_alone() -> None:
    """A holds nothing; B, who has not answered yet, may hold the run."""
    bootstrap_view = view_of(A, B, base=0, number=0)
    candidate = Candidate(bootstrap_view, me=A)
    candidate.promise(A, Report(0, CHAIN, True))
    assert candidate.chosen() is None
    candidate.promise(B, Report(3, OTHER, True))
    first = candidate.chosen(2.0)
    assert first is not None
    assert (first.base_round, first.base_chain) == (3, OTHER)


def test_a_first_view_names_only_who_has_promised() -> None:
    """The others may have no incarnation yet."""
    candidate = Candidate(view_of(A, B, C, base=0, number=0), me=A)
    for peer in (A, B):
        candidate.promise(peer, Report(0, CHAIN, True))
    first = candidate.chosen()
    assert first is not None
    assert first.peers == (A, B)


def test_a_first_view_names_the_incarnations_of_now() -> None:
    bootstrap_view = view_of(A, B, base=0, number=0)
    later = replace(
        bootstrap_view,
        members=(bootstrap_view.members[0], replace(bootstrap_view.members[1], inc=9)),
    )
    candidate = Candidate(bootstrap_view, me=A, electorate=Known(later))
    candidate.promise(A, Report(3, CHAIN, True))
    candidate.promise(B, Report(3, CHAIN, True))
    first = candidate.chosen()
    assert first is not None
    assert [member.inc for member in first.members] == [bootstrap_view.members[0].inc, 9]


def test_a_lost_base_is_noted_and_halts() -> None:
    candidate = Candidate(view_of(A, B, C, base=7))
    candidate.promise(B, Report(4, CHAIN, True))
    candidate.promise(C, Report(6, CHAIN, True))
    assert candidate.chosen() is None
    assert candidate.chosen(TIMING.lost_s + 2) is None
    assert [e.kind for e in candidate.effects if isinstance(e, Note)] == ["base-lost"]
    candidate.promise(A, Report(7, CHAIN, True))
    assert candidate.chosen(TIMING.lost_s + 3) is not None


def test_lone_survivor_forks_whatever_it_has_accepted() -> None:
    candidate = Candidate(view_of(A, B))
    candidate.promise(B, Report(4, CHAIN, True), Accept(LINEAGE, 3, Ballot(0, A), NEXT))
    assert candidate.chosen() is None
    view = candidate.chosen(2.0, lone_ok=True)
    assert view is not None
    assert view.fork
    assert view.peers == (B,)
    assert view.lineage != LINEAGE
    assert view.ancestors == (LINEAGE,)
    assert not follows(view, VIEW)  # another history
    assert not follows(VIEW, view)


def test_ancestors_are_bounded() -> None:
    view = VIEW
    for number in range(2 * ANCESTORS_MAX):
        view = forked(view, Ballot(number, A))
    assert len(view.ancestors) == ANCESTORS_MAX
    assert view.ancestors[-1] != view.lineage


def test_retries_of_different_candidates_are_spread() -> None:
    moments = {Candidate(me=peer).proposer.retry_at_s for peer in (A, B, C)}
    assert len(moments) == 3
    for moment in moments:
        assert 0.7 * TIMING.ballot_retry_s <= moment <= 1.3 * TIMING.ballot_retry_s


def test_a_round_that_was_not_committed_and_that_nobody_holds_is_not_lost() -> None:
    """After a power cut B has its READY and not the result: that halts nobody who can tell."""
    bare = replace(held(4, (5, 1, R)), missing=(5,))
    candidate = Candidate(view_of(A, B, C, D, E))
    for peer, report in ((B, bare), (C, held(4)), (D, held(4))):
        candidate.promise(peer, report)
    assert base_of(candidate.proposer.view, {B: bare, C: held(4), D: held(4)}).round == 5
    assert candidate.chosen() is None  # A and E may have said READY as well
    candidate.promise(E, held(4))
    view = candidate.chosen(2.0)
    assert view is not None
    assert (view.base_round, view.base_chain, view.rollback) == (4, CHAIN, False)
    assert base_of(VIEW, {B: held(4, (5, 1, R)), C: held(4), A: held(4)}).round == 5  # it is here
