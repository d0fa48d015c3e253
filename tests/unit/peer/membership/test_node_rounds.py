"""Rounds over several machines: the beginning of a run, the barrier, digests."""

from __future__ import annotations

import pytest
from harness.cluster import Cluster, peer_id, short

from atoll.peer.membership import events as ev
from atoll.peer.membership import messages as ms
from atoll.peer.membership.timing import Timing


def formed_void(names: str, timing: Timing | None = None) -> Cluster:
    cluster = Cluster(names, timing)
    cluster.found(names[0])
    for i, name in enumerate(names):
        for other in names[:i]:
            cluster.link(name, other)
    cluster.until(lambda: cluster.in_one_view(names))
    return cluster


# ---------------------------------------------------------------- log entry 1


def test_the_first_offer_initialises_the_run_and_the_others_reload() -> None:
    cluster = formed_void("abc")
    begins: list[ms.Begin] = []
    before = cluster.hold

    def note(source: bytes, peer: bytes, message: object) -> bool:
        begins.extend([message] if isinstance(message, ms.Begin) else [])
        return before(source, peer, message)

    cluster.hold = note
    for name in "cb":
        cluster.give(name, ev.Offered(b"spec of " + name.encode()))
    cluster.run(2 * cluster.delay_s)
    cluster.give("a", ev.Offered(b"spec of a"))
    cluster.until(lambda: all(cluster.host(n).round == 1 for n in "abc"))
    first = [begin for begin in begins if begin.round == 1]
    assert {begin.counted for begin in first} == {(peer_id("c"),)}  # it was heard first
    assert {len(begin.participants) for begin in first} == {3}  # all hand it on
    assert [cluster.host(n).told for n in "abc"] == [[("reload", 1)]] * 3


def test_coordinator_without_a_trainer_fetches_the_initial_state() -> None:
    cluster = formed_void("abc")
    cluster.train("b")
    cluster.until_round("abc", 3)
    assert not cluster.host("a").node.follower.attached


def test_initialising_peer_that_dies_or_fails_makes_way_for_the_next() -> None:
    cluster = formed_void("abcd")
    cluster.unusable = "b"
    cluster.give("b", ev.Offered(b"spec"))
    cluster.until(lambda: "miss" in cluster.host("b").notes)
    cluster.give("c", ev.Offered(b"spec"))  # b goes on offering
    cluster.until(lambda: all(cluster.host(n).round == 1 for n in "abcd"), limit_s=5.0)


def test_a_void_run_takes_joiners_and_survives_its_founder() -> None:
    cluster = formed_void("abc")
    cluster.kill("a")
    cluster.until(lambda: cluster.in_one_view("bc"))
    cluster.add("d")
    cluster.link("c", "d")
    cluster.until(lambda: cluster.in_one_view("bcd"))
    for name in "bcd":
        cluster.train(name)
    cluster.until_round("bcd", 3)


# ---------------------------------------------------------------- the barrier


def test_a_trainer_that_comes_after_begin_is_missed_at_once() -> None:
    cluster = Cluster("abc")
    cluster.form("abc")
    host = cluster.host("c")
    cluster.detach("c")
    cluster.until(lambda: bool(host.node.follower.begins) and not host.reducing)
    (begin,) = host.node.follower.begins.values()
    host.told.clear()
    cluster.give("c", ev.Attached())
    cluster.give("c", ev.Submitted(host.round, host.node.follower.epoch, 1.0))
    assert host.told == [("missed", begin.round)]
    assert not host.node.follower.submissions


def test_a_submission_that_crossed_the_commit_is_missed_at_once() -> None:
    cluster = Cluster("ab")
    cluster.form("ab")
    host = cluster.host("b")
    cluster.until(lambda: not host.node.follower.begins)
    host.told.clear()
    host.trains = False
    cluster.give("b", ev.Submitted(host.round - 1, host.node.follower.epoch, 1.0))
    assert host.told == [("missed", host.round)]


def test_a_submission_of_an_older_epoch_reloads() -> None:
    cluster = Cluster("ab")
    cluster.form("ab")
    host = cluster.host("b")
    host.told.clear()
    host.trains = False
    cluster.give("b", ev.Submitted(host.round, host.node.follower.epoch - 1, 1.0))
    assert host.told == [("reload", host.round)]


def test_the_barrier_waits_for_a_straggler_but_not_for_ever() -> None:
    cluster = Cluster("abc")
    cluster.form("abc")
    slow = cluster.host("c")
    slow.inner_s = 1000.0
    cluster.until_round("abc", 1)
    cluster.run(2.0)
    for name in "ab":  # everybody can say who is missing, and since when
        waiting, since_s = cluster.host(name).node.heartbeats.waiting
        assert waiting == (peer_id("c"),)
        assert 1.0 <= since_s < 2.1
    took_s = cluster.until_round("ab", 1)
    assert 0.5 < took_s < 1.5
    assert "stragglers" in cluster.host("a").notes
    goal = cluster.committed  # c fetches the result all the same
    cluster.until(lambda: slow.round == goal, limit_s=0.1)


@pytest.mark.parametrize(
    ("inner_s", "least_s", "most_s"),
    [(0.05, 2.9, 3.2), (4.0, 11.5, 12.5), (20.0, 29.5, 31.0), (200.0, 95.0, 105.0)],
    ids=["the least", "three usual phases", "the most", "half a long phase"],
)
def test_how_long_a_hung_trainer_holds_a_round(
    inner_s: float, least_s: float, most_s: float
) -> None:
    cluster = Cluster("abc")
    cluster.form("abc")
    for name in "abc":
        cluster.host(name).inner_s = inner_s
    cluster.until_round("abc", 6, limit_s=7 * inner_s + 5)
    hung = cluster.host("c")
    hung.hangs = True
    began = cluster.committed
    took_s = cluster.until_round("ab", 1, limit_s=3 * inner_s + 60)
    assert inner_s + least_s < took_s < inner_s + most_s
    assert cluster.until_round("ab", 2, limit_s=3 * inner_s) < 2.9 * inner_s  # one wait only
    assert cluster.committed == began + 3


def test_a_trainer_that_is_slower_by_far_is_waited_for_from_then_on() -> None:
    """It came when the others knew only their own speed."""
    cluster = Cluster("abc")
    cluster.form("abc")
    slow = cluster.host("c")
    slow.inner_s = 5.0
    cluster.until_round("abc", 30, limit_s=60.0)
    assert cluster.noted("stragglers") == ["a"]
    assert cluster.until_round("abc", 3) > 10.0


def test_a_trainer_that_was_stopped_for_long_is_no_measure_of_rounds() -> None:
    cluster = Cluster("abc")
    cluster.form("abc")
    for name in "abc":
        cluster.host(name).inner_s = 10.0
    cluster.until_round("abc", 4)
    hung = cluster.host("c")
    hung.hangs = True
    cluster.run(600.0)
    hung.hangs = False
    cluster.until_round("abc", 2)
    hung.hangs = True
    assert cluster.until_round("ab", 2, limit_s=65.0) > 10.0


def test_a_straggler_that_detaches_is_not_waited_for() -> None:
    cluster = Cluster("abc")
    cluster.form("abc")
    cluster.host("c").inner_s = 1000.0
    cluster.until_round("abc", 1)
    cluster.run(1.0)
    cluster.detach("c")
    assert cluster.until_round("ab", 1) < 1.0


def test_what_a_dead_trainer_had_submitted_still_counts() -> None:
    cluster = Cluster("ab")
    cluster.form("ab")
    cluster.host("a").inner_s = 1.0
    cluster.until(lambda: bool(cluster.host("b").node.follower.submissions))
    number = cluster.host("b").round + 1
    view = cluster.host("a").node.view
    assert view is not None
    cluster.until(lambda: bool(cluster.host("b").node.follower.begins))
    cluster.detach("b")
    (begin,) = cluster.host("b").node.follower.begins.values()
    assert peer_id("b") in begin.participants
    cluster.until(lambda: cluster.host("a").round == number)


def test_unusable_contribution_is_missed_and_the_next_one_is_taken() -> None:
    """Not a number in the only trainer's submission: it must not be reduced again and again."""
    cluster = Cluster("a")
    cluster.form("a")
    host = cluster.host("a")
    cluster.until(lambda: host.reducing is not None)
    begin = host.reducing
    assert begin is not None
    host.told.clear()
    cluster.give("a", ev.ReduceFailed(begin.round, begin.attempt, (), "not a number"))
    host.reducing = None
    assert host.told == [("missed", begin.round)]
    cluster.until_round("a", 2, limit_s=5.0)


def test_a_round_that_is_given_up_again_and_again_is_begun_ever_more_rarely() -> None:
    """A peer that is alone submits, every 0.2 s, what cannot be used: no loop without a pause."""
    cluster = Cluster("a")
    cluster.form("a")
    host = cluster.host("a")
    cluster.until(lambda: host.round > 1)
    cluster.unusable = "a"
    before = host.notes.count("give-up")
    cluster.run(60.0)
    assert 4 <= host.notes.count("give-up") - before <= 8
    cluster.unusable = ""
    cluster.until_round("a", 3, limit_s=31.0)


# ---------------------------------------------------------------- invariant 3


@pytest.mark.parametrize("name", ["a", "b"])
def test_minority_digest_loads_the_state_again(name: str) -> None:
    cluster = Cluster("abc")
    cluster.form("abc")
    cluster.host(name).flipped = b"one bit"
    cluster.until(lambda: cluster.host(name).flipped == b"", limit_s=5.0)
    assert "diverged" in cluster.host("a").notes
    cluster.until_round("abc")
    assert not any(h.node.coordinator and h.node.coordinator.halted for h in cluster.living())


@pytest.mark.parametrize("names", ["ab", "abcd"])
def test_no_majority_of_digests_halts(names: str) -> None:
    cluster = Cluster(names)
    cluster.form(names)
    for name in names[: len(names) // 2]:
        cluster.host(name).flipped = b"one bit"
    cluster.until(lambda: "diverged" in cluster.host("a").notes, limit_s=5.0)
    before = cluster.committed
    cluster.run(20.0)
    assert cluster.committed <= before + 1
    lead = cluster.host("a").node.coordinator
    assert lead is not None
    assert "differs without a majority" in lead.halted


def halted(names: str) -> Cluster:
    cluster = Cluster(names)
    cluster.form(names)
    for name in names[: len(names) // 2]:
        cluster.host(name).flipped = b"one bit"
    cluster.until(lambda: "diverged" in cluster.host("a").notes, limit_s=5.0)
    cluster.run(3.0)
    assert cluster.noted("diverged") == ["a"]  # said once
    return cluster


@pytest.mark.parametrize(("names", "leaver"), [("ab", "a"), ("ab", "b"), ("abcd", "a")])
def test_a_halted_run_lets_its_members_go_and_then_goes_on(names: str, leaver: str) -> None:
    cluster = halted(names)
    cluster.leave(leaver)
    assert cluster.until(lambda: not cluster.host(leaver).alive) < 0.5  # agreed, not timed out
    stay = names.replace(leaver, "")
    cluster.until_round(stay, limit_s=5.0)
    assert cluster.in_one_view(stay)
    assert not cluster.noted("coordinator-lost")


def test_a_halted_run_removes_the_dead_and_then_goes_on() -> None:
    cluster = halted("abcd")
    cluster.kill("b")
    cluster.until_round("acd", limit_s=12.0)
    assert cluster.in_one_view("acd")
    assert cluster.host("a").flipped == b""  # now in the minority


def test_a_halted_run_takes_nobody_in() -> None:
    cluster = halted("ab")
    cluster.add("c")
    cluster.link("a", "c")
    cluster.link("b", "c")
    cluster.run(5.0)
    assert cluster.in_one_view("ab")
    cluster.isolate("c")  # it has the bits of a by now; b goes on before it asks
    cluster.leave("a")
    cluster.until_round("b", limit_s=5.0)
    cluster.heal()
    cluster.until_round("bc", limit_s=5.0)


# ---------------------------------------------------------------- different results


def begins(cluster: Cluster) -> list[str]:
    return [line.rsplit(" ", 1)[1] for line in cluster.trace if "a->b Begin" in line]


@pytest.mark.parametrize("name", ["a", "b", "c"])
def test_one_wrong_result_excludes_its_holder(name: str) -> None:
    cluster = Cluster("abc")
    cluster.form("abc")
    host = cluster.host(name)
    host.garbles = True
    cluster.until(lambda: "retry" in cluster.host("a").notes)
    host.garbles = False
    assert cluster.until_round("abc", 1) < 1.0
    assert "abc".replace(name, "") in begins(cluster)
    assert ("reload", host.round) not in host.told  # it has missed the round, and nothing else


@pytest.mark.parametrize("name", ["b", "c"])
def test_a_peer_whose_copies_are_wrong_too_is_left_behind(name: str) -> None:
    cluster = Cluster("abc")
    cluster.form("abc")
    cluster.host(name).garbles = True
    number = cluster.committed + 1
    cluster.until(lambda: cluster.committed == number, limit_s=2.0)
    cluster.until(lambda: "unsynced" in cluster.host(name).notes, limit_s=1.0)
    cluster.host(name).garbles = False
    cluster.until_round("abc", limit_s=5.0)


def test_a_peer_that_was_left_behind_is_asked_again_when_the_quorum_needs_it() -> None:
    cluster = Cluster("abcde")
    cluster.form("abcde")
    cluster.host("b").garbles = True
    slow = peer_id("c")  # so that b's wrong copy is there before the quorum is
    cluster.hold = lambda source, peer, message: (
        source == slow and isinstance(message, ms.Ready | ms.Heartbeat) and len(begins(cluster)) > 3
    )
    lead = cluster.host("a").node.coordinator
    assert lead is not None

    def distrusted() -> set[bytes]:
        return {peer for effort in lead._budgets.values() for peer in effort.distrusted}

    cluster.until(lambda: bool(distrusted()))
    assert distrusted() == {peer_id("b")}
    cluster.host("b").garbles = False
    cluster.hold = lambda source, peer, message: False
    cluster.kill("d")
    cluster.kill("e")
    cluster.until_round("abc", 1, limit_s=5.0)


def test_results_that_differ_without_a_majority_halt_after_three_retries() -> None:
    cluster = Cluster("ab")
    cluster.form("ab")
    before = len(begins(cluster))
    cluster.host("b").garbles = True
    cluster.until(lambda: "diverged" in cluster.host("a").notes, limit_s=5.0)
    cluster.run(5.0)
    assert 4 <= len(begins(cluster)) - before <= 5  # one may have been under way
    assert cluster.noted("diverged") == ["a"]
    shown = next(line for line in cluster.trace if "note diverged" in line)
    assert f" on {short(peer_id('a'))}" in shown
    assert f" on {short(peer_id('b'))}" in shown
    cluster.leave("b")
    cluster.until_round("a", limit_s=5.0)


def test_the_first_reports_do_not_pass_for_all() -> None:
    """Two of three have reported and differ: wait for the third, do not halt."""
    cluster = Cluster("abc")
    cluster.form("abc")
    cluster.late_s = lambda message: 0.3 if isinstance(message, ms.Heartbeat) else 0.0
    cluster.host("b").flipped = b"one bit"
    cluster.until(lambda: cluster.host("b").flipped == b"", limit_s=10.0)
    cluster.until_round("abc")


# ---------------------------------------------------------------- broken data edges


def test_of_two_broken_edges_the_coordinator_is_not_left_out() -> None:
    cluster = Cluster("abc")
    cluster.form("abc")
    cluster.data_cut |= {frozenset((peer_id(x), peer_id("c"))) for x in "ab"}
    assert cluster.until_round("ab", 1) < 6.0
    begins = [line.rsplit(" ", 1)[1] for line in cluster.trace if " Begin " in line]
    assert begins[-1] == "ab"


def test_a_broken_edge_is_not_used_and_leaves_nobody_out() -> None:
    """b owns the result, as it has links to both."""
    cluster = Cluster("abc")
    cluster.form("abc")
    cluster.data_cut.add(frozenset((peer_id("a"), peer_id("c"))))
    assert cluster.until_round("abc", 1) < 2.0
    begins = [line.split(" step ")[1] for line in cluster.trace if " step " in line]
    assert begins[-1] == "abc, b own"
    assert cluster.until_round("abc", 3) < 2.0
    assert len(cluster.noted("retry")) == 1


def test_initial_state_of_a_peer_that_left_is_kept() -> None:
    cluster = formed_void("abc")
    cluster.train("c")
    cluster.until(lambda: all(cluster.host(n).round == 1 for n in "abc"))
    cluster.leave("c")
    cluster.train("a")
    cluster.train("b")
    cluster.until_round("ab", 2)
