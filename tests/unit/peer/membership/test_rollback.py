"""Nobody alive holds what was committed: the run halts, or goes back and says so."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from harness.cluster import Cluster
from harness.faults import when_held

from atoll.peer.membership.election import Election
from atoll.peer.membership.messages import Accept, Accepted
from atoll.peer.membership.timing import Timing
from atoll.peer.membership.view import WITNESS, Ballot, Rules, View, forked


def view_of(cluster: Cluster, name: str) -> View:
    view = cluster.host(name).node.view
    assert view is not None
    return view


def lone_copy(on_lost: str, timing: Timing | None = None) -> Cluster:
    """Two replicas, two witnesses: a trained alone while b was cut off."""
    cluster = Cluster("", timing)
    cluster.rules = Rules(on_lost=on_lost, policy="majority")
    for name in "abvw":
        cluster.add(name, WITNESS if name in "vw" else "replica")
    cluster.found("a")
    for i, name in enumerate("abvw"):
        for other in "abvw"[:i]:
            cluster.link(name, other)
    cluster.until(lambda: cluster.in_one_view("abvw"))
    cluster.train("a")
    cluster.train("b")
    cluster.until(lambda: all(cluster.host(n).round >= 3 for n in "abvw"))
    cluster.isolate("b")
    cluster.until_round("a", 3)
    return cluster


def only_copy_dies(on_lost: str) -> Cluster:
    cluster = lone_copy(on_lost)
    cluster.kill("a")
    cluster.heal()
    return cluster


def test_the_run_halts_and_says_so_while_the_only_copy_is_gone() -> None:
    cluster = only_copy_dies("halt")
    before = cluster.committed
    cluster.run(40.0)
    assert cluster.committed == before
    assert "base-lost" in {note for host in cluster.living() for note in host.notes}
    assert not any(view.rollback for view in cluster.checker.views.values())


def test_going_back_is_flagged_and_training_goes_on_from_what_is_left() -> None:
    cluster = only_copy_dies("rollback")
    cluster.tracing = True
    lost, left = cluster.committed, cluster.host("b").round
    assert left < lost
    cluster.until(lambda: bool(cluster.checker.rollbacks), limit_s=40.0)
    view = cluster.checker.rollbacks[0]
    assert view.base_round == left
    for witness in "vw":  # what it knew before is no position from which anybody could follow
        own = cluster.host(witness).node.follower
        assert own.previous[0] < own.round
    cluster.until(lambda: cluster.host("b").round > left + 2, limit_s=20.0)
    assert "rollback" in cluster.host("b").notes
    # Whoever knows of more rounds says from which one it goes back to which, and both states.
    said = "\n".join(cluster.trace)
    pattern = rf"goes back from round {lost} \(state [0-9a-f]{{16}}\) to round {left} \(state"
    assert re.search(pattern, said), said
    assert not view_of(cluster, "b").rollback or view_of(cluster, "b").number == view.number


def test_a_rollback_is_not_hasty() -> None:
    cluster = only_copy_dies("rollback")
    cluster.run(4.0)
    assert not cluster.checker.rollbacks


def test_what_one_voter_holds_is_never_rolled_back() -> None:
    cluster = Cluster("abc")
    cluster.rules = Rules(on_lost="rollback", policy="majority")
    cluster.form("abc")
    cluster.until(when_held(cluster, "b"))
    cluster.kill("a")
    cluster.until_round("bc", limit_s=10.0)
    assert not cluster.checker.rollbacks


@pytest.mark.parametrize("on_lost", ["halt", "rollback"])
def test_a_holder_that_is_back_in_time_saves_everything(on_lost: str) -> None:
    cluster = lone_copy(on_lost)
    cluster.pause("a")
    cluster.cut.clear()
    cluster.run(4.0)
    assert not cluster.checker.rollbacks
    cluster.heal()
    cluster.until_round("ab", limit_s=20.0)
    assert not cluster.checker.rollbacks


def test_a_holder_that_is_back_too_late_takes_what_is_left() -> None:
    cluster = lone_copy("rollback")
    cluster.pause("a")
    cluster.cut.clear()
    cluster.until(lambda: bool(cluster.checker.rollbacks), limit_s=40.0)
    back_to = cluster.checker.rollbacks[0].base_round
    assert cluster.host("a").round > back_to
    cluster.until(lambda: cluster.host("b").round > back_to + 1, limit_s=10.0)
    cluster.heal()
    cluster.until(lambda: cluster.in_one_view("abvw"), limit_s=20.0)
    goal = cluster.host("b").round + 2
    cluster.until(lambda: all(cluster.host(n).round >= goal for n in "ab"), limit_s=20.0)
    chains = {cluster.host(n).state.chain for n in "ab" if cluster.host(n).round == goal}
    assert len(chains) == 1
    assert "reload" in [kind for kind, _ in cluster.host("a").told[-20:]]


# ---------------------------------------------------------------- catching up in an election


def frozen(cluster: Cluster) -> Election:
    """The election as c sees it, which has promised to b and is held up there."""
    cluster.form("abc")
    cluster.hold = lambda source, peer, message: isinstance(message, Accept)
    cluster.kill("a")
    cluster.until(lambda: (e := cluster.host("c").node.election) is not None and e.acceptor.frozen)
    election = cluster.host("c").node.election
    assert election is not None
    return election


def test_who_has_caught_up_since_its_promise_promises_again() -> None:
    cluster = Cluster("abc")
    frozen(cluster)
    own = cluster.host("c").node.follower
    own.round, own.chain = own.round + 3, b"3" * 32
    candidate = cluster.host("b").node.election

    def reported() -> int:
        promises = candidate.candidate.promises if candidate and candidate.candidate else {}
        promise = promises.get(cluster.host("c").peer)
        return promise.report.round if promise is not None else 0

    cluster.until(lambda: reported() == own.round, limit_s=1.0)


@pytest.mark.parametrize("behind", [False, True])
def test_nobody_goes_back_alone_from_what_it_has_caught_up_with(behind: bool) -> None:
    """A fork that was chosen by what we held before; else it is an ordinary one."""
    cluster = Cluster("abc")
    election = frozen(cluster)
    own = cluster.host("c").node.follower
    ballot = Ballot(election.acceptor.promised.number + 1, cluster.host("b").peer)
    base_round = own.round - 1 if behind else own.round
    proposal = replace(
        forked(replace(election.view, number=election.view.number + 1), ballot),
        base_round=base_round,
        rollback=True,
    )
    election.on_accept(Accept(election.view.lineage, election.view.number, ballot, proposal))
    accepted = election.acceptor.accepted
    assert (accepted is None or accepted.proposal != proposal) is behind


def test_who_has_voted_to_go_back_keeps_what_the_others_go_back_to() -> None:
    """The one that is ahead wakes up before the view is decided. Whoever followed it there had
    neither, and the run halted (seed 886)."""
    cluster = lone_copy("rollback")
    a, b = cluster.host("a"), cluster.host("b")
    ahead, left = a.round, b.round
    assert left < ahead
    cluster.pause("a")
    cluster.cut.clear()
    cluster.hold = lambda source, peer, message: isinstance(message, Accepted)
    cluster.until(lambda: _votes_for(b.node.election) == left, 60.0)
    cluster.resume("a")
    cluster.detach("a")
    cluster.run(1.0)
    assert b.node.follower.unsynced  # it knows of a commit that it does not hold, and leaves it
    assert b.round == left
    cluster.hold = lambda source, peer, message: False
    cluster.until(lambda: bool(view_of(cluster, "b").rollback), 60.0)
    assert not b.node.follower.diverged
    cluster.until(lambda: b.round > left, 60.0)


def test_who_votes_to_go_back_downloads_no_later_rounds_any_more() -> None:
    """Their last holder has gone, and all that is lacking is under way. Whoever got there had left
    the state that the view begins with: no living member had it, and the run halted for ever."""
    cluster = lone_copy("rollback", replace(Timing(), lost_s=0.5))
    a, b = cluster.host("a"), cluster.host("b")
    left = b.round
    a.hangs = True
    cluster.run(0.3)
    cluster.cut.clear()
    cluster.stuck = lambda host, donor: True  # nothing comes, and the download waits for it
    cluster.until(lambda: b.node.follower.unsynced, 5.0)
    cluster.run(0.05)
    cluster.hold = lambda source, peer, message: (
        a.peer in (source, peer) or isinstance(message, Accepted)
    )
    cluster.until(lambda: _votes_for(b.node.election) == left, 60.0)
    cluster.stuck = lambda host, donor: False
    cluster.run(2.0)
    assert b.round == left
    cluster.hold = lambda source, peer, message: a.peer in (source, peer)
    cluster.until(lambda: view_of(cluster, "b").rollback, 60.0)
    cluster.until(lambda: b.round > left, 60.0)
    cluster.hold = lambda source, peer, message: False
    a.hangs = False
    cluster.heal()
    cluster.until_round("abvw", 2, limit_s=60.0)


def _votes_for(election: Election | None) -> int:
    """Return the base of the view that a peer has voted for, -1 if there is none."""
    vote = election.acceptor.accepted if election is not None else None
    return vote.proposal.base_round if vote is not None else -1
