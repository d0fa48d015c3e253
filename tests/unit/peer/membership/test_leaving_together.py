"""Crowds that leave at once, at every moment of a round: the view without them comes in time."""

from __future__ import annotations

import pytest
from harness.cluster import Cluster, peer_id
from harness.faults import busy_with, when_held

from atoll.peer.membership.phase import Phase

MOMENTS = {"between rounds": None, "in a reduce": busy_with, "when results are there": when_held}


def _seven(moment: str) -> Cluster:
    cluster = Cluster("abcdefg")
    cluster.form("abcdefg")
    happens = MOMENTS[moment]
    if happens is not None:
        cluster.until(happens(cluster, "b"))
    return cluster


def _leave_and_go_on(cluster: Cluster, going: str, apart_s: float = 0.0) -> int:
    """How many views it took until all of them were gone, which must be soon."""
    before = len(cluster.checker.views)
    for name in going:
        cluster.leave(name)
        cluster.run(apart_s)
    stay = "".join(sorted({*"abcdefg"} - {*going}))
    took_s = cluster.until(lambda: not {*going}.intersection(h.name for h in cluster.living()))
    assert took_s < 1.0, cluster.tail()  # agreed, and not after the leavers' four seconds
    views = len(cluster.checker.views) - before
    cluster.until_round(stay)
    assert cluster.in_one_view(stay)
    return views


@pytest.mark.parametrize("moment", sorted(MOMENTS))
@pytest.mark.parametrize("going", ["cdefg", "abcde", "bcdefg", "abcdef", "efg"])
def test_most_of_seven_leave_and_the_rest_go_on(moment: str, going: str) -> None:
    """Those who stay are no quorum: the round that is open cannot be committed without leavers, and
    the view without them must not wait for it."""
    _leave_and_go_on(_seven(moment), going)


def test_a_crowd_does_not_wait_for_a_long_round() -> None:
    """Take nobody along: they would be gone before it is decided, and the quorum with them."""
    cluster = Cluster("abcdefg")
    cluster.form("abcdefg")
    usual_s, cluster.chunk_s = cluster.chunk_s, 3.0
    cluster.until(busy_with(cluster, "b"))
    for name in "cdefg":
        cluster.leave(name)
    assert cluster.until(lambda: len(cluster.living()) == 2) < 1.0
    cluster.chunk_s = usual_s
    cluster.until_round("ab")


@pytest.mark.parametrize("apart_s", [0.001, 0.01, 0.1, 0.3])
def test_they_need_not_leave_at_the_same_moment(apart_s: float) -> None:
    _leave_and_go_on(_seven("in a reduce"), "cdefg", apart_s)


def test_a_crowd_goes_with_two_views() -> None:
    """Who asks while a view is being voted on goes with the next, all of them together."""
    assert _leave_and_go_on(_seven("between rounds"), "cdefg") <= 2


def test_who_comes_back_after_leaving_is_not_sent_away() -> None:
    cluster = _seven("between rounds")
    for name in "fg":
        cluster.leave(name)
    cluster.until(lambda: cluster.host("f").node.phase is Phase.LEFT)
    cluster.restart("f")
    cluster.until(lambda: cluster.in_one_view("abcdef"))
    cluster.until_round("abcdef")
    lead = cluster.host("a").node.coordinator
    assert lead is not None
    assert peer_id("f") not in lead.admission.leaving
