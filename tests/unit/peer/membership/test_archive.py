"""An archive follows the log outside the view: it holds the state and never votes."""

from __future__ import annotations

import pytest
from harness.cluster import Cluster, Host, peer_id

from atoll.peer.membership.phase import Phase
from atoll.peer.membership.view import ARCHIVE


def with_archive(names: str = "abc") -> tuple[Cluster, Host]:
    cluster = Cluster(names)
    cluster.form(names)
    host = cluster.add("z", ARCHIVE)
    for name in names:
        cluster.link(name, "z")
    cluster.until(lambda: host.round >= 3, limit_s=10.0)
    return cluster, host


def follows(cluster: Cluster, host: Host, within_s: float = 2.0) -> None:
    goal = cluster.committed + 3
    cluster.until(lambda: cluster.committed >= goal, limit_s=10.0)
    cluster.until(lambda: host.round >= goal, limit_s=within_s)


def test_it_follows_and_is_in_no_view() -> None:
    cluster, host = with_archive()
    for _ in range(5):
        follows(cluster, host)
    cluster.run(15.0)
    follows(cluster, host)
    assert host.node.phase is Phase.LEARNER
    assert all(peer_id("z") not in view.peers for view in cluster.checker.views.values())
    assert cluster.host("a").notes.count("join") <= 5  # it is not dropped again and again


def test_nobody_waits_for_an_archive() -> None:
    cluster, host = with_archive()
    usual_s = cluster.until_round("abc", 20)
    cluster.stuck = lambda to, donor: to is host
    assert cluster.until_round("abc", 20) < 1.2 * usual_s
    assert "hold" not in cluster.noted("hold")


def test_it_has_no_vote() -> None:
    """Two of three die: the archive does not make it a quorum."""
    cluster, host = with_archive()
    cluster.kill("b")
    cluster.kill("c")
    before = cluster.committed
    cluster.run(20.0)
    assert cluster.committed <= before + 1
    assert host.node.view is None


@pytest.mark.parametrize("victim", ["a", "b"])
def test_it_goes_on_following_after_a_death_and_a_change_of_coordinator(victim: str) -> None:
    cluster, host = with_archive()
    cluster.kill(victim)
    follows(cluster, host, 10.0)
    cluster.restart(victim)
    follows(cluster, host, 10.0)


def test_it_follows_through_a_fork() -> None:
    cluster, host = with_archive("ab")
    cluster.kill("a")
    goal = cluster.committed + 3
    cluster.until(lambda: cluster.host("b").round >= goal, limit_s=10.0)
    cluster.until(lambda: host.round >= goal, limit_s=10.0)
    assert host.state.chain in {cluster.host("b").state.chain} | set(cluster.checker.truth)


def test_a_cut_off_archive_comes_back() -> None:
    cluster, host = with_archive()
    cluster.isolate("z")
    cluster.until_round("abc", 30)
    cluster.heal()
    follows(cluster, host, 10.0)


def test_it_leaves_at_once() -> None:
    cluster, host = with_archive()
    cluster.leave("z")
    cluster.until(lambda: not host.alive, limit_s=5.0)
    cluster.until_round("abc")
