"""Several rounds of different fragments in flight: their order, their retries, view changes."""

from __future__ import annotations

import pytest
from harness.cluster import Cluster, Host, peer_id
from harness.faults import lose
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.peer.membership import events as ev
from atoll.peer.membership import messages as ms
from atoll.peer.membership.coordinator import Coordinator
from atoll.peer.membership.view import View

FRAGMENTS = 4


def flying(names: str, in_flight: int = 2, rounds: int = 6) -> Cluster:
    cluster = Cluster(names)
    cluster.fragments = FRAGMENTS
    cluster.chunks = 2 * FRAGMENTS
    for name in names:
        cluster.give(name, ev.Configured("spec", FRAGMENTS, in_flight))
    cluster.form(names, rounds)
    return cluster


def lead_of(cluster: Cluster, name: str = "a") -> Coordinator:
    lead = cluster.host(name).node.coordinator
    assert lead is not None
    return lead


def view_of(host: Host) -> View:
    assert host.node.view is not None
    return host.node.view


def both_open(cluster: Cluster) -> bool:
    return len(lead_of(cluster).attempts) == 2


def applied(cluster: Cluster, name: str) -> list[int]:
    marks = [line.split() for line in cluster.trace if f" {name} applied " in line]
    return [int(words[-1]) for words in marks]


# ---------------------------------------------------------------- the order


@pytest.mark.parametrize("in_flight", [1, 2, 4])
def test_at_most_so_many_rounds_are_open_and_they_commit_in_order(in_flight: int) -> None:
    cluster = flying("abc", in_flight)
    open_at_once = 0
    for _ in range(2000):
        open_at_once = max(open_at_once, len(lead_of(cluster).attempts))
        fragments = [attempt.begin.fragment for attempt in lead_of(cluster).attempts.values()]
        assert len(set(fragments)) == len(fragments)
        cluster.advance()
    assert open_at_once == in_flight
    for name in "abc":
        numbers = applied(cluster, name)
        assert numbers == list(range(1, numbers[-1] + 1))


def test_a_later_round_that_is_finished_first_waits_for_its_turn() -> None:
    """6 is held by all before 5 can be committed: it follows with no reduction of its own."""
    cluster = flying("abc")
    cluster.until(lambda: both_open(cluster))
    first, second = sorted(lead_of(cluster).attempts)
    cluster.hold = lambda source, peer, message: isinstance(message, ms.Ready | ms.Heartbeat)
    cluster.until(lambda: all(second in cluster.host(n).node.follower.held for n in "abc"))
    cluster.run(0.3)
    assert not lead_of(cluster).attempts[second].ready
    assert cluster.committed == first - 1
    cluster.hold = lambda source, peer, message: False
    cluster.until(lambda: all(cluster.host(n).round >= second for n in "abc"), limit_s=2.0)
    assert applied(cluster, "b")[-2:] == [first, second] or applied(cluster, "b")[-1] > second


@pytest.mark.parametrize("kind", [ms.Begin, ms.Ready, ms.Commit])
def test_lost_messages_heal_with_several_rounds_in_flight(kind: type) -> None:
    cluster = flying("abc")
    lose(cluster, kind, count=4)
    assert cluster.until_round("abc", 4) < 3.0


def test_membership_changes_once_no_round_is_open() -> None:
    cluster = flying("ab")
    cluster.add("c")
    cluster.give("c", ev.Configured("spec", FRAGMENTS, 2))
    cluster.host("c").trains = True
    cluster.link("a", "c")
    cluster.link("b", "c")
    cluster.until(lambda: cluster.in_one_view("abc"), limit_s=10.0)
    cluster.until_round("abc", 6)


# ---------------------------------------------------------------- deaths


@pytest.mark.parametrize("victim", ["a", "b", "c"])
def test_one_dies_while_two_rounds_are_open(victim: str) -> None:
    cluster = flying("abc")
    cluster.until(lambda: both_open(cluster))
    cluster.kill(victim)
    cluster.until_round("abc".replace(victim, ""), 4, limit_s=5.0)
    cluster.restart(victim)
    cluster.give(victim, ev.Configured("spec", FRAGMENTS, 2))
    cluster.until_round("abc", 4, limit_s=10.0)


def test_retry_of_the_first_while_the_second_is_held() -> None:
    """c does not get the first round's BEGIN; it dies when the others hold the second's result."""
    cluster = flying("abc")
    cluster.until(lambda: not lead_of(cluster).attempts)
    number = cluster.committed + 1
    cluster.hold = lambda source, peer, message: (
        isinstance(message, ms.Begin) and message.round == number and peer == peer_id("c")
    )
    cluster.until(lambda: all(number + 1 in cluster.host(name).node.follower.held for name in "ab"))
    assert not lead_of(cluster).attempts[number + 1].ready  # they lack the round before
    assert cluster.committed == number - 1
    cluster.kill("c")
    cluster.until_round("ab", 4, limit_s=5.0)
    begins = [line for line in cluster.trace if f"a->b Begin {number}." in line]
    later = [line for line in cluster.trace if f"a->b Begin {number + 1}." in line]
    assert (begins[0].split()[-1], begins[-1].split()[-1]) == ("abc", "ab")
    assert [line.split()[-1] for line in later] == ["abc", "ab"]


def test_a_given_up_round_is_begun_anew_with_the_later_one_that_is_open() -> None:
    """Nobody can do 5 any more: 6 goes back with it, because a view would wait for 6, and 6 for 5,
    which is not begun before the view."""
    cluster = flying("abc")
    cluster.until(lambda: not lead_of(cluster).attempts)
    cluster.chunk_s = 0.2
    cluster.until(lambda: both_open(cluster))
    first, second = sorted(lead_of(cluster).attempts)
    broken = lead_of(cluster).attempts[first].begin
    for name in "abc":
        del cluster.host(name).jobs[first]  # it will have no result
        cluster.give(name, ev.ReduceFailed(first, broken.attempt, (), "not a number"))
    cluster.until(lambda: "give-up" in cluster.host("a").notes, limit_s=5.0)
    assert second not in lead_of(cluster).attempts
    cluster.until_round("abc", 4, limit_s=20.0)


def test_the_coordinator_dies_while_one_holds_only_the_later_round() -> None:
    """b has said READY for 7, c holds 8 without 7: 8 cannot have been committed, and must not
    become a base that nobody can reach."""
    cluster = flying("abc")
    cluster.until(lambda: not lead_of(cluster).attempts)
    number = cluster.committed + 1
    cluster.hold = lambda source, peer, message: (
        isinstance(message, ms.Begin | ms.Repair)
        and message.round == number
        and peer == peer_id("c")
    )
    cluster.until(lambda: number + 1 in cluster.host("c").node.follower.held)
    cluster.kill("a")
    cluster.hold = lambda source, peer, message: False
    cluster.until_round("bc", 3, limit_s=5.0)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 4), st.sampled_from("abcd"), st.integers(0, 400), st.integers(0, 3))
def test_somebody_dies_at_any_moment_with_any_number_in_flight(
    in_flight: int, victim: str, moment: int, lost: int
) -> None:
    """The checker sees to the invariants: nothing committed is lost or rewritten."""
    cluster = flying("abcd", in_flight)
    for _ in range(moment):
        cluster.advance()
    lose(cluster, ms.Commit, count=lost)
    cluster.run(0.002)
    cluster.kill(victim)
    cluster.until_round("abcd".replace(victim, ""), 4, limit_s=10.0)


# ---------------------------------------------------------------- submissions


def test_each_fragment_has_its_own_submission() -> None:
    cluster = flying("ab", 2)
    host = cluster.host("b")
    own = host.node.follower
    for name in "ab":
        cluster.host(name).hangs = True
    cluster.until(lambda: not own.begins, limit_s=5.0)
    cluster.run(1.0)
    host.told.clear()
    for fragment in range(FRAGMENTS):
        cluster.give("b", ev.Submitted(own.round, own.epoch, 1.0 + fragment, fragment))
    assert host.told == []
    beat = host.node.heartbeats.heartbeat()
    assert dict(zip(beat.arrived, beat.weights, strict=True)) == {
        fragment: 1.0 + fragment for fragment in range(FRAGMENTS)
    }


def test_missing_one_fragments_round_does_not_touch_the_others() -> None:
    cluster = flying("ab", 2)
    host = cluster.host("b")
    own = host.node.follower
    cluster.until(lambda: bool(own.begins))
    begin = next(iter(own.begins.values()))
    other = (begin.fragment + 2) % FRAGMENTS
    host.told.clear()
    cluster.give("b", ev.Submitted(own.round, own.epoch, 1.0, begin.fragment))
    assert host.told == [("missed", begin.round)]
    cluster.give("b", ev.Submitted(own.round, own.epoch, 1.0, other))
    assert host.told == [("missed", begin.round)]
    assert other in own.submissions
