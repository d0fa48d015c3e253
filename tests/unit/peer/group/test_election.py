"""One single-decree Paxos: acceptors, proposers, and the choice of the next view's base."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.peer.group.election import Acceptor, Proposer
from atoll.peer.group.events import Effect, Note, Send
from atoll.peer.group.messages import Accept, Accepted, Prepare, Promise, Proof, Report, Run
from atoll.peer.group.timing import Timing
from atoll.peer.group.views import (
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

A, B, C, D, E = (name.encode() * 32 for name in "abcde")
LINEAGE = b"L" * 32
CHAIN, OTHER = b"1" * 32, b"2" * 32
R, Q = b"R" * 32, b"Q" * 32  # roots of results
TIMING = Timing()


def view_of(*peers: bytes, base: int = 4) -> View:
    return View(LINEAGE, 3, tuple(Member(p, 1) for p in peers), peers[0], base, CHAIN)


VIEW = view_of(A, B, C)
NEXT = replace(VIEW, number=4, members=VIEW.members[1:], coordinator=B)


def sent(effects: list[Effect], kind: type) -> list[tuple[bytes, object]]:
    sends = [e for e in effects if isinstance(e, Send)]
    return [(s.peer, s.message) for s in sends if isinstance(s.message, kind)]


# ---------------------------------------------------------------- quorums


@given(st.integers(1, 9), st.data())
def test_any_two_quorums_intersect(count: int, data: st.DataObject) -> None:
    peers = [bytes([i]) * 32 for i in range(1, count + 1)]
    view = view_of(*peers)
    first, second = (data.draw(st.sets(st.sampled_from(peers))) for _ in range(2))
    if is_quorum(view, first) and is_quorum(view, second):
        assert first & second


def test_half_needs_the_tie_breaker() -> None:
    view = view_of(A, B, C, D)
    assert is_quorum(view, {A, D})
    assert not is_quorum(view, {B, C})
    assert is_quorum(view, {B, C, D})
    assert not is_quorum(view, {A, b"x" * 32})  # strangers do not count


# ---------------------------------------------------------------- acceptors


class Voter:
    def __init__(self, view: View = VIEW) -> None:
        self.effects: list[Effect] = []
        self.acceptor = Acceptor(view, self.effects.append)

    def prepare(self, ballot: Ballot) -> Promise | None:
        self.effects.clear()
        self.acceptor.on_prepare(ballot.peer, ballot, Report(4, CHAIN, True))
        answers = sent(self.effects, Promise)
        return answers[0][1] if answers else None  # type: ignore[return-value]

    def accept(self, ballot: Ballot, proposal: View = NEXT) -> list[bytes]:
        self.effects.clear()
        self.acceptor.on_accept(Accept(LINEAGE, 3, ballot, proposal))
        return [peer for peer, _ in sent(self.effects, Accepted)]


def test_promise_freezes_and_excludes_lower_ballots() -> None:
    voter = Voter()
    assert voter.prepare(Ballot(2, B)) is not None
    assert voter.acceptor.frozen
    assert voter.prepare(Ballot(1, C)) is None
    assert voter.prepare(Ballot(2, A)) is None  # the same number of a smaller id
    assert voter.prepare(Ballot(2, B)) is not None  # repeated: the first answer may be lost
    assert voter.accept(Ballot(1, C)) == []
    assert voter.accept(Ballot(0, A)) == []
    assert voter.accept(Ballot(2, B)) == [A, B, C]  # everyone learns of the vote


def test_promise_reports_what_was_accepted() -> None:
    voter = Voter()
    voter.accept(Ballot(0, A))
    promise = voter.prepare(Ballot(1, C))
    assert promise is not None
    assert (promise.accepted_ballot, promise.accepted_view) == (Ballot(0, A), NEXT)


def test_accepting_alone_does_not_freeze() -> None:
    voter = Voter()
    voter.accept(Ballot(0, A))
    assert not voter.acceptor.frozen


def vote(proposal: View, ballot: Ballot) -> Accepted:
    return Accepted(LINEAGE, 3, ballot, proposal)


def decided(outcome: tuple[View, Proof] | None) -> View | None:
    """The decided view, if its proof names enough voters for it."""
    if outcome is None:
        return None
    view, proof = outcome
    assert (proof.lineage, proof.view) == (LINEAGE, 3)
    assert proof.votes
    return view


def test_a_quorum_of_equal_votes_at_one_ballot_decides() -> None:
    acceptor = Voter().acceptor
    assert acceptor.on_accepted(A, vote(NEXT, Ballot(1, B))) is None
    assert acceptor.on_accepted(A, vote(NEXT, Ballot(1, B))) is None  # twice the same
    assert acceptor.on_accepted(B, vote(NEXT, Ballot(2, C))) is None  # another ballot
    other = replace(NEXT, base_round=9)
    assert acceptor.on_accepted(C, vote(other, Ballot(1, B))) is None  # another value
    assert decided(acceptor.on_accepted(C, vote(NEXT, Ballot(1, B)))) == NEXT


def test_only_the_latest_vote_of_each_voter_is_kept() -> None:
    acceptor = Voter().acceptor
    for number in range(2000):
        assert acceptor.on_accepted(C, vote(replace(NEXT, base_round=number), Ballot(1, B))) is None
    assert acceptor.on_accepted(C, vote(NEXT, Ballot(2, C))) is None
    assert len(acceptor._votes) == 1
    assert acceptor.on_accepted(C, vote(NEXT, Ballot(1, B))) is None  # it has voted higher since
    assert acceptor.on_accepted(B, vote(NEXT, Ballot(1, B))) is None
    assert decided(acceptor.on_accepted(B, vote(NEXT, Ballot(2, C)))) == NEXT


def test_a_fork_needs_the_votes_of_all_that_are_in_it() -> None:
    acceptor = Voter(view_of(A, B)).acceptor
    alone = forked(replace(NEXT, members=NEXT.members[:1]), Ballot(1, B))
    assert decided(acceptor.on_accepted(A, vote(NEXT, Ballot(1, A)))) == NEXT  # the tie-breaker
    assert decided(acceptor.on_accepted(B, vote(alone, Ballot(1, B)))) == alone
    pair = forked(NEXT, Ballot(2, B))
    view = replace(view_of(A, B, C, D, E), rules=Rules(policy="any"))
    three = Voter(view).acceptor
    assert three.on_accepted(B, vote(pair, Ballot(2, B))) is None
    assert decided(three.on_accepted(C, vote(pair, Ballot(2, B)))) == pair


# ---------------------------------------------------------------- proposers


class Candidate:
    """B stands for election in some view; ``promise`` gives it answers."""

    def __init__(self, view: View = VIEW, me: bytes = B) -> None:
        self.effects: list[Effect] = []
        self.ballot = Ballot(2, me)
        self.proposer = Proposer(view, me, self.ballot, TIMING, self.effects.append, 0.0)

    def promise(self, source: bytes, report: Report, accepted: Accepted | None = None) -> None:
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
    assert (view.peers, view.coordinator, view.number) == ((B, C), B, 4)


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
    view = candidate.chosen(TIMING.lost_s + 1)
    assert (view is None) is (on_lost == "halt")
    assert view is None or (view.rollback and view.base_round == 4)
    (note,) = [e for e in candidate.effects if isinstance(e, Note)]
    assert "round 5 has two results" in note.text


def test_the_accepted_value_of_the_highest_ballot_binds() -> None:
    other = replace(NEXT, coordinator=C)
    candidate = Candidate()
    candidate.promise(B, Report(9, OTHER, True), vote(NEXT, Ballot(0, A)))
    candidate.promise(C, Report(4, CHAIN, True), vote(other, Ballot(1, C)))
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
    candidate.promise(D, Report(4, CHAIN, True), vote(alone, Ballot(1, E)))
    view = candidate.chosen()
    assert view is not None
    assert (view.peers, view.lineage, view.fork) == ((B, C, D), LINEAGE, False)


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
    assert candidate.chosen(TIMING.lost_s - 1) is None  # a holder may be back
    decided = candidate.chosen(TIMING.lost_s + 1)
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
    assert candidate.chosen(TIMING.lost_s + 1) is None


def test_a_lost_base_is_noted_and_halts() -> None:
    candidate = Candidate(view_of(A, B, C, base=7))
    candidate.promise(B, Report(4, CHAIN, True))
    candidate.promise(C, Report(6, CHAIN, True))
    assert candidate.chosen(TIMING.lost_s + 1) is None
    assert [e.kind for e in candidate.effects if isinstance(e, Note)] == ["base-lost"]
    candidate.promise(A, Report(7, CHAIN, True))
    assert candidate.chosen(TIMING.lost_s + 2) is not None


def test_lone_survivor_forks_whatever_it_has_accepted() -> None:
    candidate = Candidate(view_of(A, B))
    candidate.promise(B, Report(4, CHAIN, True), vote(NEXT, Ballot(0, A)))
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
