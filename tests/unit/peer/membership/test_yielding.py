"""A lineage gives way to another, which dies before it has let the losers in."""

from __future__ import annotations

import pytest
from harness.cluster import Cluster

from atoll.peer.membership.view import Rules


def forked(policy: str) -> Cluster:
    """Four members, and a lone fork that is far ahead of them; they have just met."""
    cluster = Cluster("abcde")
    cluster.rules = Rules(policy)
    cluster.form("abcde")
    for name in "abcd":
        cluster.host(name).inner_s = 1.0
    cluster.host("e").inner_s = 0.02
    cluster.isolate("e")
    cluster.run(30.0)
    assert cluster.host("e").round > cluster.host("a").round + 100
    cluster.heal()
    cluster.until(lambda: any("yield" in cluster.host(n).notes for n in "abcd"), limit_s=30.0)
    return cluster


def test_the_losers_go_on_together_when_the_winner_dies_before_they_are_in() -> None:
    cluster = forked("any")
    cluster.kill("e")
    before = cluster.host("a").round
    cluster.until(lambda: cluster.in_one_view("abcd"), limit_s=40.0)
    cluster.until(lambda: all(cluster.host(n).round > before + 1 for n in "abcd"), limit_s=20.0)
    view = cluster.host("a").node.view
    assert view is not None
    assert len(view.ancestors) >= 1  # what the dead one had goes on as another lineage


def test_the_winner_lets_them_in_when_it_lives() -> None:
    cluster = forked("any")
    ahead = cluster.host("e").round
    cluster.until(lambda: cluster.in_one_view("abcde"), limit_s=30.0)
    cluster.until(lambda: cluster.host("a").round > ahead, limit_s=20.0)
    assert all("genesis" not in cluster.host(name).notes for name in "abcde")


def test_it_comes_back_when_they_have_gone_on() -> None:
    """They are forks of one run, which meet, and one gives way: nobody stays outside."""
    cluster = forked("any")
    cluster.kill("e")
    cluster.until(lambda: cluster.in_one_view("abcd"), limit_s=40.0)
    cluster.restart("e")
    for name in "abcd":
        cluster.link("e", name)
    cluster.until(lambda: cluster.in_one_view("abcde"), limit_s=60.0)


@pytest.mark.parametrize("deaths", ["a", "ab"])
def test_some_of_them_die_with_it(deaths: str) -> None:
    """A majority of the four is needed; with less, they wait and say for whom."""
    cluster = forked("any")
    cluster.kill("e")
    for name in deaths:
        cluster.kill(name)
    rest = [name for name in "abcd" if name not in deaths]
    cluster.run(40.0)
    if len(rest) > 2:
        assert cluster.in_one_view(rest)
    else:
        for name in rest:
            assert "2 of the 4 members" in cluster.host(name).node.bootstrap.describe()
