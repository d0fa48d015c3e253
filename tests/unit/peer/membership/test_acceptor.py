"""Quorums, and acceptors of a view's Paxos."""

from __future__ import annotations

from dataclasses import replace

from harness.elections import (
    CHAIN,
    LINEAGE,
    NEXT,
    VIEW,
    A,
    B,
    C,
    D,
    E,
    sent,
    view_of,
    vote,
)
from hypothesis import given
from hypothesis import strategies as st

from atoll.peer.membership.consensus import PROPOSALS_MAX, Acceptor
from atoll.peer.membership.events import Effect
from atoll.peer.membership.messages import Accept, Accepted, Promise, Proof, Report
from atoll.peer.membership.view import Ballot, Rules, View, forked, is_quorum

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
    assert acceptor.learn(Accept(LINEAGE, 3, Ballot(1, B), NEXT)) is None
    assert acceptor.on_accepted(A, vote(NEXT, Ballot(1, B))) is None
    assert acceptor.on_accepted(A, vote(NEXT, Ballot(1, B))) is None  # twice the same
    assert acceptor.on_accepted(B, vote(NEXT, Ballot(2, C))) is None  # another ballot
    other = replace(NEXT, base_round=9)
    assert acceptor.on_accepted(C, vote(other, Ballot(1, B))) is None  # another value
    assert decided(acceptor.on_accepted(C, vote(NEXT, Ballot(1, B)))) == NEXT


def test_votes_may_come_before_what_they_are_for() -> None:
    acceptor = Voter().acceptor
    assert acceptor.on_accepted(A, vote(NEXT, Ballot(1, B))) is None
    assert acceptor.on_accepted(B, vote(NEXT, Ballot(1, B))) is None  # decided, and of what?
    assert acceptor.learn(Accept(LINEAGE, 3, Ballot(2, C), NEXT)) is None  # of another ballot
    assert decided(acceptor.learn(Accept(LINEAGE, 3, Ballot(1, B), NEXT))) == NEXT


def test_few_proposals_are_kept_and_the_own_one_always() -> None:
    voter = Voter()
    voter.accept(Ballot(1, B))
    for number in range(100):
        other = replace(NEXT, base_round=number)
        voter.acceptor.learn(Accept(LINEAGE, 3, Ballot(0, A), other))
    assert len(voter.acceptor._proposals) == PROPOSALS_MAX
    voter.acceptor.on_accepted(A, vote(NEXT, Ballot(1, B)))
    assert decided(voter.acceptor.on_accepted(B, vote(NEXT, Ballot(1, B)))) == NEXT


def test_only_the_latest_vote_of_each_voter_is_kept() -> None:
    acceptor = Voter().acceptor
    acceptor.learn(Accept(LINEAGE, 3, Ballot(2, C), NEXT))
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
    for proposal in (NEXT, alone):
        acceptor.learn(Accept(LINEAGE, 3, Ballot(1, A), proposal))
    assert decided(acceptor.on_accepted(A, vote(NEXT, Ballot(1, A)))) == NEXT  # the tie-breaker
    assert decided(acceptor.on_accepted(B, vote(alone, Ballot(1, B)))) == alone
    pair = forked(NEXT, Ballot(2, B))
    view = replace(view_of(A, B, C, D, E), rules=Rules(policy="any"))
    three = Voter(view).acceptor
    three.learn(Accept(LINEAGE, 3, Ballot(2, B), pair))
    assert three.on_accepted(B, vote(pair, Ballot(2, B))) is None
    assert decided(three.on_accepted(C, vote(pair, Ballot(2, B)))) == pair
