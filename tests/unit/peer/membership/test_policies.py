"""Who goes on when others are gone: the table of design/membership.md, and forks that meet.

The first to found is members[0], the tie-breaker, and coordinates.
"""

from __future__ import annotations

import pytest
from harness.cluster import LINEAGE, Cluster, Host, peer_id

from atoll.peer.membership import events as ev
from atoll.peer.membership import messages as ms
from atoll.peer.membership.forks import RIVAL_S
from atoll.peer.membership.timing import Timing
from atoll.peer.membership.view import WITNESS, Rules, View

FORK_MIN_S, FORK_MAX_S = Timing().fork_min_s, Timing().fork_max_s


def run_of(names: str, policy: str = "auto", on_fork: str = "auto", **timing: float) -> Cluster:
    """``w`` is a witness."""
    cluster = Cluster("", Timing(**timing))
    cluster.rules = Rules(policy=policy, on_fork=on_fork)
    for name in names:
        cluster.add(name, WITNESS if name == "w" else "replica")
    form(cluster, names)
    return cluster


def form(cluster: Cluster, names: str) -> None:
    cluster.found(names[0])
    for i, name in enumerate(names):
        for other in names[:i]:
            cluster.link(name, other)
    cluster.until(lambda: cluster.in_one_view(names))
    for name in names.replace("w", ""):
        cluster.train(name)
    cluster.until(lambda: all(cluster.host(n).round >= 3 for n in names))


def view_of(cluster: Cluster, name: str) -> View:
    view = cluster.host(name).node.view
    assert view is not None
    return view


def silence(cluster: Cluster, names: str) -> None:
    """Their machines lose power: nobody refuses anything."""
    for name in names:
        cluster.host(name).off = True
        cluster.kill(name)


def lineages(cluster: Cluster) -> set[bytes]:
    return {host.node.view.lineage for host in cluster.living() if host.node.view is not None}


def one_run_again(cluster: Cluster, names: str, limit_s: float = 20.0) -> float:
    took_s = cluster.until(lambda: cluster.in_one_view(names), limit_s)
    return took_s + cluster.until_round(names, limit_s=limit_s)


# ---------------------------------------------------------------- the table


@pytest.mark.parametrize("policy", ["majority", "any", "auto"])
@pytest.mark.parametrize("refuses", [True, False], ids=["refused", "silent"])
def test_of_two_the_tie_breaker_goes_on_at_once_in_its_lineage(policy: str, refuses: bool) -> None:
    cluster = run_of("ab", policy)
    if refuses:
        cluster.kill("b")
    else:
        silence(cluster, "b")
    assert cluster.until_round("a", limit_s=3.0) < (0.5 if refuses else 2.0)
    assert lineages(cluster) == {LINEAGE}
    assert not view_of(cluster, "a").fork


@pytest.mark.parametrize("policy", ["any", "auto"])
def test_of_two_the_other_goes_on_as_a_fork_after_the_wait(policy: str) -> None:
    cluster = run_of("ab", policy)
    silence(cluster, "a")
    took_s = cluster.until_round("b", limit_s=FORK_MAX_S + 3.0)
    assert FORK_MIN_S <= took_s <= FORK_MAX_S + 2.0
    view = view_of(cluster, "b")
    assert view.fork
    assert view.ancestors == (LINEAGE,)
    assert "fork" in cluster.host("b").notes  # never without an event


@pytest.mark.parametrize("policy", ["any", "auto"])
def test_of_two_the_other_forks_at_once_when_the_address_refuses(policy: str) -> None:
    cluster = run_of("ab", policy)
    cluster.kill("a")
    assert cluster.until_round("b", limit_s=5.0) < 1.0
    assert view_of(cluster, "b").fork


@pytest.mark.parametrize("refuses", [True, False], ids=["refused", "silent"])
def test_of_two_the_other_halts_under_majority_and_says_so(refuses: bool) -> None:
    cluster = run_of("ab", "majority")
    if refuses:
        cluster.kill("a")
    else:
        silence(cluster, "a")
    before = cluster.committed
    cluster.run(30.0)
    assert cluster.committed <= before + 1  # one whose COMMIT was under way
    assert cluster.noted("no-quorum") == ["b"]
    assert not view_of(cluster, "b").fork


@pytest.mark.parametrize(("victim", "limit_s"), [("a", 3.5), ("b", 2.0), ("w", 2.0)])
@pytest.mark.parametrize("names", ["wab", "abw"])
def test_two_and_a_witness_survive_any_one_under_majority(
    names: str, victim: str, limit_s: float
) -> None:
    cluster = run_of(names, "majority")
    silence(cluster, victim)
    rest = names.replace(victim, "")
    assert cluster.until_round(rest.replace("w", ""), limit_s=10.0) < limit_s + 0.5
    assert lineages(cluster) == {LINEAGE}


def test_three_under_auto_do_not_fork() -> None:
    cluster = run_of("abc", "auto")
    silence(cluster, "ab")
    before = cluster.committed
    cluster.run(30.0)
    assert cluster.committed <= before + 1
    assert lineages(cluster) == {LINEAGE}


def test_auto_follows_the_size_of_the_view() -> None:
    """Of three one leaves; then there are two, and either may go on alone."""
    cluster = run_of("abc", "auto")
    cluster.leave("c")
    cluster.until(lambda: cluster.in_one_view("ab"))
    silence(cluster, "a")
    assert cluster.until_round("b", limit_s=FORK_MAX_S + 3.0) >= FORK_MIN_S


def test_under_any_the_last_of_five_goes_on() -> None:
    cluster = run_of("abcde", "any")
    silence(cluster, "abcd")
    took_s = cluster.until_round("e", limit_s=FORK_MAX_S + 5.0)
    assert took_s >= FORK_MIN_S
    assert view_of(cluster, "e").peers == (peer_id("e"),)


def test_under_any_those_who_are_left_go_on_together() -> None:
    cluster = run_of("abcde", "any")
    silence(cluster, "abc")
    cluster.until_round("de", limit_s=FORK_MAX_S + 5.0)
    one_run_again(cluster, "de")
    assert len(lineages(cluster)) == 1


def test_a_coordinator_without_a_quorum_forks_under_any_too() -> None:
    cluster = run_of("abcde", "any")
    silence(cluster, "bcd")
    cluster.until_round("ae", limit_s=FORK_MAX_S + 5.0)


def test_a_witness_alone_has_nothing_to_go_on_with() -> None:
    cluster = run_of("awb", "any")
    silence(cluster, "ab")
    before = cluster.committed
    cluster.run(40.0)
    assert cluster.committed == before


# ---------------------------------------------------------------- when they meet


@pytest.mark.parametrize("names", ["ab", "abc", "abcd", "abcde"])
@pytest.mark.parametrize("cut_s", [5.0, 12.0, 25.0])
def test_a_partition_under_any_ends_in_one_lineage(names: str, cut_s: float) -> None:
    cluster = run_of(names, "any")
    away = names[(len(names) + 1) // 2 :]
    cluster.isolate(away)
    cluster.run(cut_s)
    if cut_s > FORK_MAX_S + 2.0:
        assert len(lineages(cluster)) >= 2
    cluster.heal()
    one_run_again(cluster, names)
    assert len(lineages(cluster)) == 1


def test_the_lineage_that_is_further_wins() -> None:
    cluster = run_of("ab", "any")
    cluster.isolate("b")
    cluster.host("a").inner_s = 5.0  # slower than b, once b is on its own
    cluster.run(20.0)
    winner = view_of(cluster, "b").lineage
    assert winner != LINEAGE
    assert cluster.host("b").round > cluster.host("a").round
    cluster.heal()
    one_run_again(cluster, "ab")
    assert lineages(cluster) == {winner}
    assert "yield" in cluster.host("a").notes
    assert "fork" in cluster.host("a").notes


def test_the_slower_fork_gives_way() -> None:
    cluster = run_of("ab", "any")
    cluster.isolate("b")
    cluster.host("b").inner_s = 5.0
    cluster.run(20.0)
    assert len(lineages(cluster)) == 2
    cluster.heal()
    one_run_again(cluster, "ab")
    assert lineages(cluster) == {LINEAGE}
    assert "yield" in cluster.host("b").notes


def test_with_halt_both_lineages_stop_and_say_so() -> None:
    cluster = run_of("ab", "any", "halt")
    cluster.isolate("b")
    cluster.run(15.0)
    assert len(lineages(cluster)) == 2
    cluster.heal()
    cluster.run(5.0)
    rounds = [cluster.host(name).round for name in "ab"]
    cluster.run(20.0)
    assert [cluster.host(name).round for name in "ab"] == rounds
    assert len(lineages(cluster)) == 2
    for name in "ab":
        assert "fork" in cluster.host(name).notes
        lead = cluster.host(name).node.coordinator
        assert lead is not None
        assert "two lineages live" in lead.halted


def test_with_halt_the_end_of_one_lineage_lets_the_other_go_on() -> None:
    cluster = run_of("abc", "any", "halt")
    cluster.isolate("c")
    cluster.run(15.0)
    cluster.heal()
    cluster.run(5.0)
    stopped = cluster.host("b").round
    cluster.kill("a")  # a change of view and of coordinator: it does not end the halt
    cluster.run(RIVAL_S / 2)
    assert cluster.host("b").round == stopped
    cluster.kill("c")
    cluster.run(RIVAL_S + 5.0)
    assert cluster.host("b").round > stopped


def test_of_three_histories_one_is_left() -> None:
    cluster = run_of("abcde", "any")
    cluster.isolate("d")
    cluster.isolate("e")
    cluster.run(14.0)
    assert len(lineages(cluster)) == 3
    cluster.heal()
    one_run_again(cluster, "abcde", 40.0)


def test_forks_of_forks_meet_too() -> None:
    cluster = run_of("abc", "any")
    cluster.isolate("bc")
    cluster.run(14.0)
    cluster.isolate("c")
    cluster.run(14.0)
    assert len(lineages(cluster)) >= 2
    cluster.heal()
    one_run_again(cluster, "abc", 40.0)


def test_a_forks_accept_that_arrives_late_blocks_nobody() -> None:
    """It waits in the socket while the link is cut, and arrives when that heals."""
    cluster = run_of("abcde", "any", fork_min_s=2.0, fork_max_s=2.0)
    cut = peer_id("e")
    late: list[tuple[Host, ev.Received]] = []

    def hold(source: bytes, peer: bytes, message: object) -> bool:
        if source == cut and isinstance(message, ms.Accept):
            late.append((cluster.hosts[peer], ev.Received(source, message)))
        return cut in (source, peer)

    cluster.hold = hold
    cluster.until(lambda: view_of(cluster, "e").fork, limit_s=10.0)
    assert cluster.in_one_view("abcd") is False
    cluster.kill("e")  # nobody is left to meet
    for host, event in late:
        cluster.deliver(host, event)
    cluster.hold = lambda source, peer, message: False
    cluster.until(lambda: cluster.in_one_view("abcd"), limit_s=15.0)
    cluster.until_round("abcd")


def test_a_yielding_coordinator_takes_its_members_along() -> None:
    cluster = run_of("abcde", "any")
    for name in "abc":
        cluster.host(name).inner_s = 20.0
    cluster.isolate("de")
    cluster.run(25.0)
    winner = view_of(cluster, "d").lineage
    assert cluster.host("d").round > cluster.host("a").round
    cluster.heal()
    for name in "abc":
        cluster.host(name).inner_s = 0.05
    one_run_again(cluster, "abcde", 40.0)
    assert lineages(cluster) == {winner}


def test_what_was_trained_on_the_losing_side_is_not_submitted_to_the_winner() -> None:
    """The trainer's epoch changes, and it reloads."""
    cluster = run_of("ab", "any")
    cluster.isolate("b")
    cluster.host("b").inner_s = 3.0
    cluster.run(15.0)
    epoch = cluster.host("b").node.follower.epoch
    cluster.host("b").told.clear()
    cluster.heal()
    one_run_again(cluster, "ab")
    assert cluster.host("b").node.follower.epoch > epoch
    assert "reload" in [kind for kind, _ in cluster.host("b").told]
