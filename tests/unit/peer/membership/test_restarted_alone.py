"""Test that who comes back and could go on alone looks first for who may have gone on already."""

from __future__ import annotations

from harness.cluster import Cluster
from harness.host import Host

from atoll.peer.membership import events as ev
from atoll.peer.membership.view import Rules


def two(policy: str = "auto", min_trainers: int = 1) -> Cluster:
    cluster = Cluster("")
    cluster.rules = Rules(policy, min_trainers=min_trainers)
    cluster.is_durable = True
    for name in "ab":
        cluster.add(name)
    cluster.form("ab")
    return cluster


def lineage_of(cluster: Cluster, name: str) -> bytes:
    view = cluster.host(name).node.view
    assert view is not None
    return view.lineage


def test_the_tie_breaker_does_no_round_again_that_the_other_has_done_meanwhile() -> None:
    """Observed with real daemons: b, behind a router, came back to a after three seconds."""
    cluster = two()
    cluster.kill("a")
    cluster.until_round("b", 5)
    cluster.isolate("b")
    before, lineage = cluster.host("b").round, lineage_of(cluster, "b")
    cluster.restart("a")
    cluster.run(4.0)
    assert cluster.host("a").round < before  # it has begun no round
    cluster.heal()
    assert cluster.until_round("ab", 2) < 10.0
    assert lineage_of(cluster, "a") == lineage_of(cluster, "b") == lineage  # b's, which was a fork


def test_rounds_that_one_remembers_survive_another_that_has_begun_anew() -> None:
    """Observed with two daemons that left, one after the other, and were started again."""
    cluster = two(min_trainers=2)
    before, lineage = cluster.committed, lineage_of(cluster, "a")
    cluster.kill("b")
    cluster.kill("a")
    del cluster.homes["a"]  # it was the last to leave, and forgets

    def founds(host: Host) -> None:
        cluster.deliver(host, ev.Found(b"N" * 32, cluster.rules))

    cluster.restart("a", founds)
    cluster.restart("b")
    assert cluster.until(lambda: cluster.in_one_view("ab"), limit_s=30.0) < 6.0
    assert lineage_of(cluster, "a") not in (lineage, b"N" * 32)  # a fork of the old one
    cluster.until_round("ab", 2)
    assert cluster.committed > before


def test_where_nobody_listens_it_goes_on_at_once() -> None:
    cluster = two()
    cluster.kill("a")
    cluster.kill("b")
    cluster.restart("a")
    assert cluster.until_round("a", 2) < 5.0


def test_it_goes_on_alone_when_it_has_looked_for_a_while() -> None:
    cluster = two()
    cluster.kill("a")
    cluster.isolate("b")
    cluster.restart("a")
    took_s = cluster.until_round("a", 2)
    assert cluster.timing.fork_max_s <= took_s < cluster.timing.fork_max_s + 5.0
    assert cluster.noted("restarted").count("a") == 1


def test_where_the_others_may_not_go_on_it_need_not_look_for_them() -> None:
    cluster = two("majority")
    cluster.kill("a")
    cluster.isolate("b")
    cluster.restart("a")
    assert cluster.until_round("a", 2) < 5.0
