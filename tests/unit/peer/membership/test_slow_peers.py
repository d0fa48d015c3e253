"""Processes without a processor for a while, on machines that live: slow, and not dead."""

from __future__ import annotations

import pytest
from harness.cluster import Cluster, peer_id

from atoll.peer.membership.failure_detector import PEAK_WINDOW_S

NAMES = "abcd"


def running() -> Cluster:
    cluster = Cluster(NAMES)
    cluster.form(NAMES)
    return cluster


def starve(cluster: Cluster, name: str, away_s: float, for_s: float, awake_s: float = 0.1) -> None:
    """The process gets a processor for ``awake_s`` at a time only."""
    end_s = cluster.now_s + for_s
    while cluster.now_s < end_s:
        cluster.pause(name)
        cluster.run(away_s)
        cluster.resume(name)
        cluster.run(awake_s)


def view_of(cluster: Cluster, name: str) -> str:
    view = cluster.host(name).node.view
    assert view is not None
    return "".join(sorted(n for n in NAMES if view.member(peer_id(n)) is not None))


def test_a_stopped_member_is_left_out_soon_and_keeps_its_place_for_a_while() -> None:
    cluster = running()
    cluster.pause("d")
    cluster.until_round("abc", limit_s=3.0)
    assert view_of(cluster, "a") == NAMES
    took_s = cluster.until(lambda: view_of(cluster, "a") == "abc")
    assert took_s > cluster.timing.remove_s - 3.0
    cluster.resume("d")
    cluster.until_round(NAMES)


def test_of_three_a_stopped_member_stays_until_the_removal_time() -> None:
    """One that is gone goes sooner there: one more loss would cost the quorum."""
    cluster = Cluster("abc")
    cluster.form("abc")
    cluster.pause("c")
    cluster.run(cluster.timing.remove_eager_s + 2.0)
    assert view_of(cluster, "a") == "abc"


def test_a_stopped_coordinator_is_replaced_within_three_seconds() -> None:
    cluster = running()
    cluster.pause("a")
    cluster.until_round("bcd", limit_s=3.0)
    assert view_of(cluster, "b") == NAMES  # its place is kept
    cluster.resume("a")
    cluster.until_round(NAMES)


@pytest.mark.parametrize("who", ["a", "d"])
def test_a_starved_process_costs_no_attempt_and_no_view(who: str) -> None:
    """``a`` coordinates."""
    cluster = running()
    before = cluster.host("b").node.view
    starve(cluster, who, away_s=1.8, for_s=40.0)
    assert cluster.host("b").node.view == before
    assert cluster.noted("coordinator-lost") == []
    assert cluster.noted("retry") == []


def test_who_is_usually_late_is_waited_for_longer() -> None:
    """Longer than for one that was never late (``slow_s``): the rounds begin without that one."""
    cluster = running()
    starve(cluster, "d", away_s=1.8, for_s=10.0)
    cluster.pause("d")
    cluster.run(0.5)
    before = cluster.host("a").node.follower.round
    cluster.run(cluster.timing.slow_s + 0.4)
    assert cluster.host("a").node.follower.round == before
    cluster.resume("d")
    cluster.until_round(NAMES)
    assert cluster.noted("retry") == []


def test_a_machine_that_goes_while_it_was_starved_is_out_within_ten_seconds() -> None:
    cluster = running()
    starve(cluster, "d", away_s=1.8, for_s=20.0)
    cluster.isolate("d")
    cluster.until(lambda: view_of(cluster, "a") == "abc", limit_s=10.0)
    cluster.until_round("abc", limit_s=1.0)


def test_who_is_late_says_so_once() -> None:
    cluster = running()
    starve(cluster, "d", away_s=1.5, for_s=20.0)
    assert cluster.noted("late") == ["d"]
    cluster.run(PEAK_WINDOW_S)
    starve(cluster, "d", away_s=1.5, for_s=8.0)
    assert cluster.noted("late") == ["d", "d"]


def test_who_is_stopped_again_is_left_out_as_soon_as_before() -> None:
    cluster = running()
    for _ in range(3):
        cluster.pause("d")
        cluster.until_round("abc", limit_s=3.0)
        cluster.run(2.0)
        cluster.resume("d")
        cluster.until_round(NAMES, limit_s=5.0)


def test_who_was_restarted_again_and_again_is_left_out_as_soon_as_before() -> None:
    """The time until a process is there again says nothing about its machine."""
    cluster = Cluster("")
    cluster.is_durable = True
    for name in NAMES:
        cluster.add(name)
    cluster.form(NAMES)
    for _ in range(4):
        cluster.kill("d")
        cluster.run(1.5)
        cluster.restart("d")
        cluster.run(1.5)
    cluster.pause("d")
    cluster.until_round("abc", limit_s=2.6)
