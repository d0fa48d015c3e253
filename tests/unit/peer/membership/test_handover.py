"""The coordinator hands over: on request, when it leaves, and never to one that cannot."""

from __future__ import annotations

import pytest
from harness.cluster import Cluster, peer_id
from harness.faults import busy_with

from atoll.peer.membership import events as ev
from atoll.peer.membership import messages as ms
from atoll.peer.membership.view import View


def view_of(cluster: Cluster, name: str) -> View:
    view = cluster.host(name).node.view
    assert view is not None
    return view


def coordinator(cluster: Cluster) -> str:
    leaders = [host for host in cluster.living() if host.leads]
    return max(leaders, key=lambda host: view_of(cluster, host.name).number).name


@pytest.mark.parametrize("successor", ["b", "c", ""])
def test_the_one_asked_for_coordinates_from_the_next_view_on(successor: str) -> None:
    cluster = Cluster("abc")
    cluster.form("abc")
    cluster.give("a", ev.HandOver(peer_id(successor) if successor else b""))
    wanted = successor or "b"
    cluster.until(lambda: view_of(cluster, wanted).coordinator == peer_id(wanted), limit_s=2.0)
    assert cluster.until_round("abc") < 1.0
    assert coordinator(cluster) == wanted
    assert cluster.in_one_view("abc")
    assert not cluster.noted("coordinator-lost")
    number = view_of(cluster, "a").number
    cluster.until_round("abc", 10)
    assert view_of(cluster, "a").number == number  # once


def test_a_handover_waits_for_the_round_under_way() -> None:
    cluster = Cluster("abc")
    cluster.form("abc")
    cluster.until(busy_with(cluster, "b"))
    before = cluster.committed
    cluster.give("a", ev.HandOver(peer_id("c")))
    cluster.until(lambda: coordinator(cluster) == "c", limit_s=2.0)
    assert cluster.committed == before + 1


def test_nobody_is_handed_to_who_is_behind_dead_or_a_stranger() -> None:
    cluster = Cluster("abcd")
    cluster.form("abcd")
    cluster.stuck = lambda host, donor: host.name == "c"
    cluster.isolate("c")
    cluster.until_round("abd")
    cluster.heal()
    cluster.until(lambda: cluster.host("c").node.follower.unsynced)
    cluster.kill("d")
    for successor in (peer_id("c"), peer_id("d"), peer_id("z"), peer_id("a")):
        cluster.give("a", ev.HandOver(successor))
        cluster.run(1.0)
        assert coordinator(cluster) == "a"
    cluster.until_round("ab")


def test_a_handover_that_had_to_wait_happens_when_the_heir_is_there() -> None:
    cluster = Cluster("abc")
    cluster.form("abc")
    cluster.stuck = lambda host, donor: True
    own, view = cluster.host("c").node.follower, view_of(cluster, "c")
    cluster.until(lambda: not own.held)
    order = ms.Resync(view.lineage, view.number, own.round, own.digest)
    cluster.give("c", ev.Received(peer_id("a"), order))
    assert own.unsynced
    cluster.give("a", ev.HandOver(peer_id("c")))
    cluster.run(0.5)
    assert coordinator(cluster) == "a"
    cluster.stuck = lambda host, donor: False
    cluster.until(lambda: view_of(cluster, "c").coordinator == peer_id("c"), limit_s=10.0)
    cluster.until_round("abc")


def test_only_the_coordinator_hands_over() -> None:
    cluster = Cluster("abc")
    cluster.form("abc")
    cluster.give("b", ev.HandOver(peer_id("c")))
    cluster.until_round("abc", 5)
    assert coordinator(cluster) == "a"


def test_the_heir_dies_with_the_view_decided() -> None:
    cluster = Cluster("abc")
    cluster.form("abc")
    cluster.give("a", ev.HandOver(peer_id("b")))
    cluster.until(lambda: view_of(cluster, "b").coordinator == peer_id("b"), limit_s=2.0)
    cluster.kill("b")
    assert cluster.until_round("ac", limit_s=5.0) < 3.0


def test_a_handover_in_a_void_run() -> None:
    cluster = Cluster("ab")
    cluster.found("a")
    cluster.link("a", "b")
    cluster.until(lambda: cluster.in_one_view("ab"))
    cluster.give("a", ev.HandOver())
    cluster.until(lambda: view_of(cluster, "b").coordinator == peer_id("b"), limit_s=2.0)
    cluster.train("a")
    cluster.until_round("ab", 3)


def test_the_lone_coordinator_keeps_its_office() -> None:
    cluster = Cluster("a")
    cluster.form("a")
    cluster.give("a", ev.HandOver())
    cluster.until_round("a", 5)
    assert coordinator(cluster) == "a"
