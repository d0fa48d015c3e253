"""Faults that strike one round after another: what each of them may cost the others.

The soak found them: a member that hears nobody broke the open round again and again, a change of
views began waits anew, and whatever moved anywhere hid that a round stood still.
"""

from __future__ import annotations

from harness.cluster import Cluster, peer_id
from harness.faults import begins_of, busy_with, lose

from atoll.peer.membership import messages as ms
from atoll.peer.membership.link_graph import BROKEN_MIN_S, BrokenPaths
from atoll.peer.membership.phase import Phase

A, B, C, D = (peer_id(name) for name in "abcd")


# ---------------------------------------------------------------- a member that hears nobody


def test_who_alone_does_not_hear_the_coordinator_breaks_no_round() -> None:
    """e takes nothing in for a while, as behind a path whose other end does not read."""
    cluster = Cluster("abcde")
    cluster.form("abcde")
    view = cluster.host("a").node.view
    for other in "abcd":
        cluster.one_way.add((peer_id(other), peer_id("e")))
    cluster.until(lambda: cluster.host("e").node.phase is Phase.CANDIDATE)
    assert not cluster.host("e").node.frozen
    before = cluster.committed
    cluster.run(5.0)
    assert cluster.host("a").node.view == view
    assert cluster.committed > before + 5, "the others go on without it"
    cluster.one_way.clear()
    cluster.until(lambda: cluster.host("e").node.phase is Phase.MEMBER, 2.0)
    cluster.until_round("abcde", 3, 5.0)
    assert cluster.host("a").node.view == view


def test_a_host_that_was_cut_off_for_a_moment_costs_no_view() -> None:
    cluster = Cluster("abcd")
    cluster.form("abcd")
    view = cluster.host("a").node.view
    cluster.isolate("d")
    cluster.run(2.0)
    cluster.heal()
    cluster.until_round("abcd", 3, 5.0)
    assert cluster.host("a").node.view == view


def test_two_that_stand_at_once_do_not_yield_to_each_other() -> None:
    """Neither has promised itself when the other asks."""
    cluster = Cluster("abc", delay_s=0.06)  # longer than between two questions: they cross
    cluster.form("abc")
    cluster.isolate("a")
    asked = cluster.hold
    cluster.hold = lambda source, peer, message: isinstance(message, ms.Prepare)
    standing = lambda: all(cluster.host(n).node.phase is Phase.CANDIDATE for n in "bc")  # noqa: E731
    cluster.until(standing, limit_s=2.0)
    cluster.hold = asked
    assert cluster.until_round("bc", 1, 5.0) < 1.2


def test_a_coordinator_that_hears_too_few_is_replaced_soon() -> None:
    """It takes nothing in of three of five, and says so; b hears it and all others."""
    cluster = Cluster("abcde")
    cluster.form("abcde")
    cluster.one_way |= {(peer_id(other), A) for other in "cde"}
    cluster.until(lambda: any(cluster.host(n).leads for n in "bcde"), 2.5)
    cluster.until_round("bcde", 2, 5.0)


# ---------------------------------------------------------------- waits that a view change keeps


def test_a_new_coordinator_knows_how_long_phases_take() -> None:
    """Or it would wait for a trainer that hangs as if nothing were known: 30 s."""
    cluster = Cluster("abcd")
    cluster.form("abcd")
    cluster.until_round("abcd", 3)
    cluster.host("d").hangs = True
    cluster.until(busy_with(cluster, "b"))
    cluster.kill("a")
    assert cluster.until_round("bc", 2, 60.0) < cluster.timing.straggle_min_s + 2.0


def test_a_new_view_does_not_begin_the_wait_for_a_late_trainer_anew() -> None:
    cluster = Cluster("abcd")
    cluster.form("abcd")
    cluster.until_round("abcd", 3)
    cluster.host("d").hangs = True
    cluster.until(lambda: {*cluster.host("a").node.heartbeats.waiting[0]} == {D}, 5.0)
    began_s = cluster.now_s
    cluster.run(2.0)
    cluster.leave("c")
    cluster.until(lambda: cluster.in_one_view("abd"))
    cluster.run(0.5)
    cluster.kill("a")  # b has waited as long as a has
    cluster.until_round("b", 1, 10.0)
    assert cluster.now_s - began_s < cluster.timing.straggle_min_s + 1.0


def test_the_first_round_of_a_view_waits_for_a_silent_member_half_as_long() -> None:
    """It says at once that it has come into the view, or its word is lost."""
    cluster = Cluster("abcde")
    cluster.form("abcde")
    cluster.run(2.0)  # else its kernel has answered when the links were made, a moment ago
    cluster.one_way |= {(C, peer_id(other)) for other in "abde"}
    cluster.kill("a")
    cluster.until(lambda: cluster.host("b").leads, 3.0)
    timing = cluster.timing
    assert cluster.until_round("bde", 1, 5.0) < timing.failure_s / 2 + 0.3


# ---------------------------------------------------------------- paths that carry nothing


def test_one_fault_is_found_piece_by_piece() -> None:
    paths = BrokenPaths()
    paths.note([(A, C)], 100.0)
    paths.note([(B, C)], 100.0 + BROKEN_MIN_S - 1.0)
    paths.step(100.0 + BROKEN_MIN_S + 1.0)
    assert paths.pairs == {(A, C), (B, C)}, "the first is not tried before the last is found"
    paths.note([(B, D)], 100.0 + BROKEN_MIN_S + 2.0, is_stall=False)
    assert paths.pairs == {(A, C), (B, C), (B, D)}
    assert paths.stalls == 2


def test_what_others_move_does_not_hide_a_round_that_stands_still() -> None:
    """d catches up beside it, and is served."""
    cluster = Cluster("abcd")
    cluster.form("abcd")
    cluster.detach("d")
    cluster.until_round("abc", 2)
    begins = begins_of(cluster)
    cluster.broken_s = 10.0  # streams look well for so long
    cluster.cut.add(frozenset((B, C)))
    cluster.until(lambda: bool(begins), 5.0)
    last = begins[-1]
    lead = cluster.host("a").node.coordinator
    assert lead is not None
    began_s = cluster.now_s

    def moving() -> bool:
        host = cluster.host("d")
        host.node.heartbeats.progress_bytes += 1
        return begins[-1].attempt > last.attempt

    cluster.until(moving, 10.0)
    assert cluster.now_s - began_s < cluster.timing.stall_s + 1.0


def test_votes_that_were_promised_to_nobody_else_come_back() -> None:
    """b has promised c, which then gets no further: the coordinator outbids it, as ever."""
    cluster = Cluster("abc")
    cluster.form("abc")
    lose(cluster, ms.Promise, count=3)
    cluster.isolate("a")
    cluster.until(lambda: any(cluster.host(n).node.frozen for n in "bc"), 3.0)
    cluster.heal()
    cluster.until_round("abc", 3, 5.0)
