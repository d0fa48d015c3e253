"""What has become true in a run, for ever: views and commits, and which of them may stand together.

Quorums are counted here anew, without the protocol's own function: a search whose judge makes the
mistake of the judged finds nothing.
"""

from __future__ import annotations

from collections.abc import Collection

from atoll.peer.membership import messages as ms
from atoll.peer.membership.view import View

__all__ = ["Facts", "check_commit", "view_of", "with_commit", "with_view"]

Facts = frozenset[tuple[object, ...]]


def view_of(facts: Facts, lineage: bytes, number: int) -> View | None:
    for fact in facts:
        if fact[:3] == ("view", lineage, number):
            assert isinstance(fact[3], View)
            return fact[3]
    return None


def with_commit(facts: Facts, within: View, begin: ms.Begin, chain: bytes) -> Facts:
    """A peer in view ``within`` has applied this round: who forks may take an attempt with it that
    others have not committed, so the lineage is the applier's."""
    number = begin.view if begin.lineage == within.lineage else within.number
    fact = ("commit", within.lineage, begin.round, number, chain)
    for known in facts:
        if known[:3] == fact[:3]:
            assert known == fact, f"invariant 2: two histories of round {begin.round}"
        view = known[3]
        if (
            known[:2] == ("view", within.lineage)
            and isinstance(view, View)
            and view.number > number
        ):
            _survives(view, begin.round, chain)
    return facts | {fact}


def with_view(facts: Facts, view: View, proof: ms.Proof | None) -> Facts:
    """A peer has entered this view."""
    fact = ("view", view.lineage, view.number, view)
    if fact in facts:
        return facts  # a process that was started again is back in it
    for known in facts:
        if known[:3] == fact[:3]:
            assert known == fact, f"invariant 1: two views {view.number}"
        if known[:2] == ("commit", view.lineage):
            _, _, number, within, chain = known
            if within < view.number:  # type: ignore[operator]
                _survives(view, number, chain)
    _check_decided(facts, view, proof)
    return facts | {fact}


def _check_decided(facts: Facts, view: View, proof: ms.Proof | None) -> None:
    """By those who could: the voters of the view before it."""
    assert proof is not None, f"view {view.number} without votes"
    before = view_of(facts, proof.lineage, proof.view)
    assert before is not None, f"view {view.number} follows view {proof.view}, which never was"
    votes = {vote.peer for vote in proof.votes}
    if view.fork:
        lone = set(view.peers) <= votes and view.lineage != before.lineage
        assert lone, f"view {view.number} is no lawful fork"
        assert len(before.members) == 2, f"view {view.number} forks from a view of three"
    else:
        assert _is_quorum(before, votes), f"view {view.number} was elected without a quorum"


def check_commit(facts: Facts, commit: ms.Commit, holders: Collection[bytes]) -> None:
    """The coordinator says so, and these hold the result."""
    view = view_of(facts, commit.lineage, commit.view)
    assert view is not None
    assert _is_quorum(view, holders), f"round {commit.round} was committed without a quorum"


def _is_quorum(view: View, peers: Collection[bytes]) -> bool:
    """More than half; of a view of two, the first alone too."""
    present = len({*peers} & {*view.peers})
    missing = len(view.peers) - present
    return present > missing or (present == missing and view.peers[0] in peers)


def _survives(view: View, number: object, chain: object) -> None:
    assert isinstance(number, int)
    assert view.base_round >= number, f"invariant 5: view {view.number} forgets round {number}"
    if view.base_round == number:
        assert view.base_chain == chain, f"invariant 5: view {view.number} rewrites {number}"
