"""Deaths, silence and partitions, and the order in which they happen."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence

import pytest
from harness.cluster import Cluster, peer_id
from harness.faults import busy_with, lose, orders, when_held

from atoll.peer.membership import events as ev
from atoll.peer.membership import messages as ms
from atoll.peer.membership.phase import Phase
from atoll.peer.membership.timing import Timing
from atoll.peer.membership.view import Ballot, Rules

FAILURE_S = Timing().failure_s


def at_idle(cluster: Cluster) -> Callable[[], bool]:
    return lambda: all(h.reducing is None for h in cluster.living())


def reducing(cluster: Cluster) -> Callable[[], bool]:
    return busy_with(cluster, "c")


def between_ready_and_commit(cluster: Cluster) -> Callable[[], bool]:
    return when_held(cluster, "c")


MOMENTS = [at_idle, reducing, between_ready_and_commit]


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("victim", ["a", "b", "d"])
def test_one_death_costs_less_than_a_second_after_it_shows(
    victim: str, moment: Callable[[Cluster], Callable[[], bool]]
) -> None:
    cluster = Cluster("abcd")
    cluster.form("abcd")
    cluster.until(moment(cluster))
    cluster.kill(victim)  # the broken link makes everyone probe, the probe is refused
    assert cluster.until_round("abcd".replace(victim, "")) < 1.0


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("order", orders("a", "b"))
def test_coordinator_and_a_member_die_together(
    order: Sequence[str], moment: Callable[[Cluster], Callable[[], bool]]
) -> None:
    cluster = Cluster("abcde")
    cluster.form("abcde")
    cluster.until(moment(cluster))
    for name in order:
        cluster.kill(name)
    assert cluster.until_round("cde") < 2.0


@pytest.mark.parametrize("victim", ["a", "b"])
def test_silence_is_death_after_the_failure_time(victim: str) -> None:
    cluster = Cluster("abc")
    cluster.form("abc")
    cluster.pause(victim)
    others = "abc".replace(victim, "")
    took_s = cluster.until_round(others)
    assert FAILURE_S / 2 < took_s < FAILURE_S + 1.5
    cluster.resume(victim)
    assert cluster.until_round("abc") < 2.0


def test_a_coordinator_that_was_stopped_does_not_take_the_others_for_dead() -> None:
    """SIGSTOP of one of two: after it goes on, nobody has been voted out."""
    cluster = Cluster("ab")
    cluster.rules = Rules(policy="majority")  # else b, alone of two, would have gone on
    cluster.form("ab")
    cluster.pause("a")
    cluster.run(20.0)
    cluster.resume("a")
    assert cluster.until_round("ab") < 1.0
    assert cluster.in_one_view("ab")
    assert not cluster.noted("excluded")


def test_a_member_that_was_stopped_does_not_stand_for_election() -> None:
    cluster = Cluster("ab")
    cluster.form("ab")
    cluster.pause("b")
    cluster.run(2.0)
    cluster.resume("b")
    cluster.until_round("ab")
    assert not cluster.noted("coordinator-lost")


def test_dead_member_is_voted_out_lazily_but_eagerly_when_the_quorum_is_thin() -> None:
    cluster = Cluster("abcde")
    cluster.form("abcde")
    died_s = cluster.now_s
    cluster.kill("e")
    cluster.until(lambda: cluster.in_one_view("abcd"))
    assert 7.7 < cluster.now_s - died_s < 9.0
    cluster.kill("d")
    cluster.kill("c")  # two of four with the tie-breaker: the next loss would cost the quorum
    died_s = cluster.now_s
    cluster.until(lambda: cluster.in_one_view("ab"))
    assert 2.2 < cluster.now_s - died_s < 3.5


def test_minority_halts_and_says_for_whom_it_waits() -> None:
    cluster = Cluster("abc")
    cluster.form("abc")
    cluster.kill("b")
    cluster.kill("c")
    before = cluster.committed
    cluster.run(30.0)
    assert cluster.committed <= before + 1
    assert "no-quorum" in cluster.host("a").notes


def waiting(cluster: Cluster, name: str) -> tuple[str, float]:
    peers, since_s = cluster.host(name).node.heartbeats.waiting
    return "".join(sorted(chr(peer[0]) for peer in peers)), since_s


def test_a_candidate_without_a_quorum_says_so_once_per_loss() -> None:
    cluster = Cluster("abcde")
    cluster.form("abcde")
    for _ in range(2):
        cluster.isolate("de")
        cluster.pause("a")
        cluster.pause("b")
        cluster.pause("c")
        before = Counter(cluster.noted("no-quorum"))
        cluster.run(20.0)
        told = [*(Counter(cluster.noted("no-quorum")) - before).elements()]
        assert sorted(set(told)) == sorted(told)  # d or e, or each of them once
        assert set(told) <= {"d", "e"}
        assert told
        cluster.heal()
        cluster.until_round("abcde", limit_s=10.0)
    text = next(line for line in cluster.trace if "note no-quorum" in line)
    assert "2 of 5 voters answer" in text
    assert text.count("(silent ") == 3


def test_without_a_coordinator_nobody_repeats_its_last_words() -> None:
    """c was late for the barrier when a and b died: now the election waits, for them."""
    cluster = Cluster("abcde")
    cluster.form("abcde")
    cluster.host("c").inner_s = 1000.0
    cluster.until_round("abcde", 1)
    cluster.run(2.0)
    assert waiting(cluster, "d")[0] == "c"
    for name in "abe":
        cluster.kill(name)
    cluster.run(20.0)
    for name in "cd":  # not in the moment in which a new ballot has heard nobody yet
        cluster.until(lambda name=name: waiting(cluster, name)[0] == "abe", limit_s=1.0)
        assert 18.0 < waiting(cluster, name)[1] < 21.6
    assert set(cluster.noted("no-quorum")) <= {"c", "d"}


def test_a_coordinator_without_a_quorum_waits_for_the_dead() -> None:
    cluster = Cluster("abc")
    cluster.form("abc")
    cluster.kill("b")
    cluster.kill("c")
    cluster.run(10.0)
    names, since_s = waiting(cluster, "a")
    assert names == "bc"
    assert 9.0 <= since_s < 10.5


def test_a_quick_election_is_no_loss_of_the_quorum() -> None:
    cluster = Cluster("abcde")
    cluster.form("abcde")
    cluster.pause("a")
    cluster.until_round("bcde")
    assert not cluster.noted("no-quorum")
    assert all(host.node.election for host in cluster.living())
    assert cluster.host("b").node.election.waiting_for() is None  # type: ignore[union-attr]


def test_minority_side_of_a_partition_commits_nothing_and_comes_back() -> None:
    cluster = Cluster("abcde")
    cluster.form("abcde")
    cluster.isolate("ab")  # the coordinator is on the small side
    cluster.until_round("cde")
    alone = cluster.host("a").round
    cluster.run(5.0)
    assert cluster.host("a").round == alone
    cluster.heal()
    cluster.until(lambda: cluster.in_one_view("abcde"), limit_s=5.0)
    cluster.until_round("abcde", limit_s=5.0)


def test_a_decided_view_known_only_to_its_dead_proposer_survives() -> None:
    """The coordinator admits d, decides by one vote besides its own, and dies before telling."""
    cluster = Cluster("abcd")
    cluster.form("abc")
    lose(cluster, ms.Install)
    lose(cluster, ms.Accepted, to="b")
    lose(cluster, ms.Accepted, to="c")
    lose(cluster, ms.Redirect)
    for other in "abc":
        cluster.link(other, "d")
    cluster.host("d").trains = True
    before = cluster.host("a").node.view
    assert before is not None
    cluster.until(lambda: cluster.host("a").node.view != before)
    decided = cluster.host("a").node.view
    assert decided is not None
    cluster.kill("a")
    cluster.heal()
    assert cluster.host("b").node.view == before
    cluster.until_round("bcd")
    assert cluster.checker.views[decided.lineage, decided.number] == decided


def two(tie_breaker: bool, policy: str = "auto") -> tuple[Cluster, str, str]:
    cluster = Cluster("ab")
    cluster.rules = Rules(policy=policy)
    cluster.form("ab")
    return (cluster, "b", "a") if tie_breaker else (cluster, "a", "b")


@pytest.mark.parametrize("tie_breaker", [True, False])
def test_lone_survivor_of_two_goes_on_when_the_other_is_refused(tie_breaker: bool) -> None:
    cluster, victim, survivor = two(tie_breaker)
    cluster.kill(victim)
    assert cluster.until_round(survivor) < 1.0
    view = cluster.host(survivor).node.view
    assert view is not None
    assert view.fork is not tie_breaker  # with the tie-breaker there is a quorum
    cluster.restart(victim)
    assert cluster.until_round("ab") < 2.0


def test_lone_follower_of_two_waits_for_a_silent_other_under_majority() -> None:
    cluster, victim, survivor = two(tie_breaker=False, policy="majority")
    cluster.cut.add(frozenset((peer_id("a"), peer_id("b"))))
    cluster.run(60.0)
    view = cluster.host(survivor).node.view
    assert view is not None
    assert not view.fork
    assert cluster.host(victim).round > cluster.host(survivor).round  # the tie-breaker goes on
    cluster.heal()
    assert cluster.until_round("ab") < 3.0
    assert len(cluster.checker.views) == len({n for _, n in cluster.checker.views})


def test_lone_follower_keeps_asking_whether_the_silent_other_is_gone() -> None:
    """Silent at first (cut off), refused later: the fork comes then, without another hint."""
    cluster, victim, survivor = two(tie_breaker=False)
    cluster.cut.add(frozenset((peer_id("a"), peer_id("b"))))
    cluster.kill(victim)
    cluster.run(5.0)
    cluster.give(survivor, ev.LinkDown(peer_id(victim), "timeout"))
    cluster.cut.clear()
    assert cluster.until_round(survivor) < 3.0


def test_a_peer_that_a_fork_left_behind_follows_it() -> None:
    """c is cut off, a dies, b forks: c's own lineage has no future, and c must learn that."""
    cluster = Cluster("abc")
    cluster.form("abc")
    cluster.isolate("c")
    cluster.until(lambda: cluster.in_one_view("ab"))
    cluster.kill("a")
    cluster.until_round("b")
    cluster.heal()
    assert cluster.until_round("bc") < 5.0
    views = {host.node.view for host in cluster.living()}
    assert len(views) == 1
    assert all(view is not None and view.ancestors for view in views)


def test_frozen_voter_is_outbid() -> None:
    """c cannot hear the coordinator and freezes b; the coordinator takes b back by a new view."""
    cluster = Cluster("abc")
    cluster.form("abc")
    view = cluster.host("a").node.view
    assert view is not None
    ballot = Ballot(7, peer_id("c"))
    cluster.host("b").node.election.acceptor.on_prepare(  # type: ignore[union-attr]
        peer_id("c"), ballot, cluster.host("b").node.follower.report()
    )
    assert cluster.host("b").node.frozen
    assert cluster.until_round("abc") < 2.0
    later = cluster.host("a").node.view
    assert later is not None
    assert later.number > view.number
    assert later.coordinator == peer_id("a")


def test_lost_coordinator_of_a_yielded_view_is_found_again() -> None:
    """Who has yielded to a candidate that dies must not take itself for a living coordinator."""
    cluster = Cluster("abc")
    cluster.form("abc")
    lose(cluster, ms.Promise)
    cluster.isolate("a")
    cluster.until(lambda: cluster.host("b").node.phase is Phase.CANDIDATE)
    cluster.cut.clear()
    cluster.until(lambda: cluster.host("a").node.phase is not Phase.COORDINATOR, limit_s=10.0)
    cluster.kill("b")
    cluster.heal()
    assert cluster.until_round("ac") < 6.0


@pytest.mark.parametrize(("first", "second"), list(itertools.permutations("abcde", 2)))
def test_any_two_of_five_die_one_after_the_other(first: str, second: str) -> None:
    cluster = Cluster("abcde")
    cluster.form("abcde")
    cluster.kill(first)
    cluster.run(0.3)
    cluster.kill(second)
    rest = "".join(sorted(set("abcde") - {first, second}))
    assert cluster.until_round(rest) < 3.0


def test_a_base_that_nobody_alive_holds_halts_the_run_and_is_announced_once() -> None:
    """d and e fell behind and cannot load; all who hold the last commit die one by one."""
    cluster = Cluster("abcde")
    cluster.form("abcde")
    cluster.stuck = lambda host, donor: True
    cluster.isolate("de")
    goal = cluster.committed + 2
    cluster.until(lambda: all(cluster.host(n).round == goal for n in "abc"))
    cluster.heal()
    cluster.until(lambda: cluster.in_one_view("abcde"), limit_s=0.1)
    cluster.until(lambda: all(cluster.host(n).node.follower.unsynced for n in "de"))
    for victim, rest in (("a", "bcde"), ("b", "cde")):
        cluster.kill(victim)
        cluster.until(lambda rest=rest: cluster.in_one_view(rest))
    cluster.kill("c")
    before = cluster.committed
    cluster.run(20.0)
    assert cluster.committed == before
    assert 1 <= len(cluster.noted("base-lost")) <= 2  # by each candidate that is left


def test_a_coordinator_without_a_quorum_does_not_keep_its_voters() -> None:
    """b is dead; e hears a, which coordinates and hears nobody else, and all who are left."""
    cluster = Cluster("abcde")
    cluster.form("abcde")
    cluster.cut |= {frozenset((peer_id("a"), peer_id(name))) for name in "cd"}
    cluster.kill("b")
    cluster.until_round("cde", 3, limit_s=4 * FAILURE_S)
    cluster.heal()
    cluster.until_round("acde", 2)
