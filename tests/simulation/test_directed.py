"""Directed tests for faults that random seeds seldom show: they cost availability, not safety.

The mutation gate (simulation/mutants.py) runs them with the fault planted; then they must fail.
"""

from __future__ import annotations

import pytest
from harness.cluster import Cluster, peer_id
from harness.faults import lose

from atoll.peer.membership import events as ev
from atoll.peer.membership import messages as ms
from atoll.peer.membership.member import MemberState
from atoll.peer.membership.node import Node
from atoll.peer.membership.phase import Phase
from atoll.peer.membership.view import WITNESS, Member, Rules
from simulation.seal import Seal


def test_a_replica_does_not_vote_for_what_others_hold() -> None:
    """Votes without copies let a round commit that one death can lose."""
    said: list[ev.Effect] = []
    follower = MemberState(Member(peer_id("a"), 1), said.append)
    notice = ms.Notice(b"L" * 32, 1, 1, 1, 0, b"r" * 32)
    assert follower.on_notice(notice) is None
    witness = MemberState(Member(peer_id("w"), 1, "witness"), said.append)
    assert witness.on_notice(notice) is not None


def test_a_round_is_not_committed_with_one_copy() -> None:
    """A witness makes the quorum, but the only copy would die with its holder."""
    cluster = Cluster("ab")
    cluster.add("w", "witness")
    cluster.form("abw")
    cluster.detach("b")
    lose(cluster, ms.Repair)
    alone = (peer_id("a"),)
    lead = cluster.host("a").node

    def only_a_takes_part() -> bool:
        begins = lead.follower.begins.values()
        return any(begin.participants == alone for begin in begins)

    cluster.until(only_a_takes_part)
    before = cluster.committed
    cluster.run(1.0)
    assert cluster.committed == before


def test_a_view_known_only_to_its_dead_proposer_survives() -> None:
    """Every acceptor tells all voters: the proposer may die when only it could count."""
    cluster = Cluster("abcd")
    cluster.form("abcd")
    cluster.kill("a")
    standing = {Phase.CANDIDATE, Phase.COORDINATOR}
    cluster.until(lambda: any(cluster.host(n).node.phase in standing for n in "bcd"))
    proposer = next(n for n in "bcd" if cluster.host(n).node.phase in standing)
    lose(cluster, ms.Install)
    others = "bcd".replace(proposer, "")
    view = cluster.host(proposer).node.view
    assert view is not None
    cluster.until(lambda: cluster.host(proposer).node.view != view)
    cluster.run(3 * cluster.delay_s)
    views = {cluster.host(name).node.view for name in others}
    assert views == {cluster.host(proposer).node.view}


def test_one_deaf_member_does_not_end_a_view() -> None:
    """c hears nobody and stands again and again; the others hear their coordinator."""
    cluster = Cluster("abc")
    cluster.form("abc")
    cluster.one_way |= {(peer_id("a"), peer_id("c"))}
    cluster.run(5.0)
    assert cluster.host("a").leads
    assert not cluster.noted("coordinator-lost").count("b")
    assert cluster.host("b").node.view == cluster.host("a").node.view
    assert not cluster.host("b").node.frozen


def test_a_coordinator_without_a_quorum_begins_nothing() -> None:
    cluster = Cluster("abcde")
    cluster.form("abcde")
    cluster.isolate("ab")
    cluster.run(2.0)
    before = len(cluster.trace)
    cluster.run(3.0)
    said = [line for line in cluster.trace[before:] if "a->" in line]
    assert not [line for line in said if " Begin " in line]
    assert "no-quorum" in cluster.host("a").notes


def test_a_doubted_member_keeps_what_it_is_ready_for() -> None:
    """RESYNC must not take READY back: a candidate's report would miss a committed round, or find
    that nobody holds it."""
    cluster = Cluster("abc")
    cluster.form("abc")
    host = cluster.host("b")
    cluster.until(lambda: bool(host.node.follower.held))
    view, own = host.node.view, host.node.follower
    assert view is not None
    held = dict(own.held)
    order = ms.Resync(view.lineage, view.number, own.round, b"d" * 32)
    cluster.give("b", ev.Received(view.coordinator, order))
    assert own.held == held
    assert own.report().holds


def test_a_joiner_far_behind_does_not_enter() -> None:
    cluster = Cluster("abc")
    cluster.form("abc")
    cluster.load_s = 1.0
    cluster.add("d")
    for name in "abc":
        cluster.link(name, "d")
    cluster.until(lambda: cluster.in_one_view("abcd"), limit_s=20.0)
    assert cluster.host("d").round >= cluster.host("a").round - 1


def test_a_late_lesson_of_an_older_view_does_not_stick() -> None:
    """LEARN of the former coordinator comes after that of its heir: the joiner must not go back
    to a view in which nobody answers it any more."""
    cluster = Cluster("ab")
    cluster.form("ab")
    cluster.load_s = 3.0
    for name in "ab":
        cluster.host(name).inner_s = 1.0
    lessons: list[tuple[bytes, ms.SyncTarget]] = []

    def remember(source: bytes, peer: bytes, message: object) -> bool:
        if isinstance(message, ms.SyncTarget) and message.decided is not None:
            lessons.append((source, message))
        return False

    cluster.hold = remember
    cluster.add("d")
    cluster.link("a", "d")
    cluster.link("b", "d")
    cluster.until(lambda: bool(lessons))
    cluster.leave("a")
    cluster.until(lambda: cluster.host("b").leads)
    cluster.run(1.0)
    cluster.give("d", ev.Received(*lessons[0]))
    cluster.until(lambda: cluster.in_one_view("bd"), limit_s=15.0)


@pytest.mark.parametrize("on_lost", ["halt", "rollback"])
def test_a_witness_that_leads_does_not_wait_for_ever(on_lost: str) -> None:
    """Nobody alive holds what the witness knows to be committed: as its rules say, it goes back,
    or says so. A witness never lacks anything itself."""
    cluster = Cluster("")
    cluster.rules = Rules("majority", on_lost)
    for name in "vwab":
        cluster.add(name, WITNESS if name in "vw" else "replica")
    cluster.found("v")
    for i, name in enumerate("vwab"):
        for other in "vwab"[:i]:
            cluster.link(name, other)
    cluster.until(lambda: cluster.in_one_view("vwab"))
    for name in "ab":
        cluster.train(name)
    cluster.until(lambda: all(cluster.host(n).round >= 3 for n in "vwab"))
    cluster.kill("b")
    cluster.run(1.0)
    cluster.host("a").inner_s = cluster.load_s / 4
    cluster.restart("b")  # and enters a few rounds behind
    host = cluster.host("b")
    cluster.until(lambda: cluster.in_one_view("vwab") and host.node.follower.unsynced)
    assert cluster.host("v").leads
    cluster.kill("a")
    left = host.round
    assert left < cluster.committed
    if on_lost == "halt":
        cluster.until(lambda: bool(cluster.noted("base-lost")), limit_s=30.0)
    else:
        cluster.until(lambda: host.round > left + 2, limit_s=30.0)
        assert cluster.checker.rollbacks


class SignedCluster(Cluster):
    def make_node(self, member: Member) -> Node:
        return Node(member, self.timing, Seal(member.peer))


def test_a_fork_of_strangers_is_no_forgery() -> None:
    """f has lost its coordinator in a view that was formed after b, c and e had gone: their votes
    for their fork are genuine, but no voter of its own view stands for them."""
    cluster = SignedCluster("abcdef")
    cluster.rules = Rules("any")
    cluster.form("abcdef")
    cluster.isolate("bce")
    cluster.until(lambda: cluster.in_one_view("adf"), limit_s=20.0)
    fork, host = cluster.host("b").node, cluster.host("f")
    cluster.until(lambda: fork.view is not None and fork.view.fork, limit_s=20.0)
    assert fork.view is not None
    cluster.isolate("f")
    cluster.until(lambda: host.node.phase is Phase.CANDIDATE)
    before = host.node.view
    install = ms.Install(fork.view, fork.proof)
    cluster.give("f", ev.Received(peer_id("b"), install))
    assert "unproven" in host.notes
    assert host.node.view == before
