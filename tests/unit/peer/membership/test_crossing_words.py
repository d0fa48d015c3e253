"""Words that cross, come late, or are of an attempt, a view or a wish that has passed."""

from __future__ import annotations

from itertools import combinations

import pytest
from harness.cluster import LINEAGE, Cluster, Host, peer_id
from harness.faults import begins_of, busy_with, lose, when_held

from atoll.peer.membership import events as ev
from atoll.peer.membership import messages as ms
from atoll.peer.membership.coordinator import Coordinator
from atoll.peer.membership.operations import Operation
from atoll.peer.membership.view import REPLICA, WITNESS, Rules, View
from atoll.peer.rounds.entries import REDUCE

SUM = Operation(REDUCE, 1000, "sum", "float32")


def lead_of(cluster: Cluster, name: str = "a") -> Coordinator:
    lead = cluster.host(name).node.coordinator
    assert lead is not None
    return lead


def view_of(cluster: Cluster, name: str) -> View:
    view = cluster.host(name).node.view
    assert view is not None
    return view


def participants(begin: ms.Begin) -> str:
    return "".join(peer[:1].decode() for peer in begin.participants)


def capture(cluster: Cluster, kind: type, to: str) -> list[tuple[bytes, object]]:
    """Keep what is said of this kind to a peer from now on: it has not arrived yet."""
    kept: list[tuple[bytes, object]] = []
    before = cluster.hold

    def hold(source: bytes, peer: bytes, message: object) -> bool:
        if isinstance(message, kind) and peer == peer_id(to):
            kept.append((source, message))
            return True
        return before(source, peer, message)

    cluster.hold = hold
    return kept


# ---------------------------------------------------------------- what the shell says late


@pytest.mark.parametrize("name", ["a", "b"])
def test_the_outcome_of_an_order_that_is_not_needed_any_more_changes_nothing(name: str) -> None:
    """Two ways to the state were under way, and the other one has brought it."""
    cluster = Cluster("ab")
    cluster.form("ab")
    host = cluster.host(name)
    own = host.node.follower
    before = own.round, own.chain, own.digest, own.epoch
    told = [*host.told]
    cluster.give(name, ev.CaughtUp(own.round - 1, b"x" * 32, b"d" * 32))
    cluster.give(name, ev.CatchUpFailed("the donor has gone"))
    assert (own.round, own.chain, own.digest, own.epoch) == before
    assert host.told == told
    assert not {"load-failed", "unsynced"} & {*host.notes}
    cluster.until_round("ab", 2)


def test_a_broken_edge_of_an_attempt_that_is_over_is_none_of_the_next() -> None:
    cluster = Cluster("abc")
    cluster.form("abc")
    cluster.chunk_s = 0.5
    cluster.until(busy_with(cluster, "b"))
    first = cluster.host("b").node.follower.begins[cluster.committed + 1]
    begins = begins_of(cluster)
    cluster.kill("c")
    cluster.until(lambda: bool(begins) and cluster.host("b").reducing == begins[-1])
    number = begins[-1].round
    assert (first.round, first.attempt < begins[-1].attempt) == (number, True)
    cluster.give("b", ev.ReduceFailed(number, first.attempt, (peer_id("a"),), "it was reset"))
    assert not cluster.noted("miss")
    cluster.until_round("ab", 1)
    assert len(begins) == 1 or begins[1].round > number


# ---------------------------------------------------------------- doubt


def test_who_hears_late_that_its_bytes_differ_keeps_the_result_that_it_has_said_to_hold() -> None:
    """Others may have counted it: its state is fetched anew after the commit."""
    cluster = Cluster("abc")
    cluster.form("abc")
    host = cluster.host("c")
    late = capture(cluster, ms.Resync, "c")
    host.flipped = b"one bit"
    cluster.until(lambda: bool(late))
    cluster.until(when_held(cluster, "c"))
    source, resync = late[0]
    cluster.give("c", ev.Received(source, resync))
    assert host.node.follower.held
    assert not host.node.follower.unsynced
    assert "doubt" in host.notes
    cluster.hold = lambda source, peer, message: False
    cluster.until(lambda: host.flipped == b"", limit_s=5.0)
    cluster.until_round("abc", 2)


# ---------------------------------------------------------------- between two attempts


def test_a_trainer_that_comes_between_two_attempts_with_another_call_is_not_in_the_second() -> None:
    """c has died in a reduction, and b's trainer has ended; its next one wants a step."""
    cluster = Cluster("abc")
    cluster.form("abc")
    cluster.call_of = lambda host: SUM
    cluster.until_round("abc", 2)
    cluster.chunk_s = 0.5
    begins = begins_of(cluster)
    cluster.until(lambda: bool(begins) and busy_with(cluster, "b")() and busy_with(cluster, "a")())
    number = begins[-1].round
    lose(cluster, ms.Finals, count=2)  # so that there is a moment between the two
    host = cluster.host("b")
    cluster.kill("c")
    cluster.until(lambda: number in host.node.follower.closed)
    cluster.detach("b")
    cluster.call_of = lambda host: None if host.name == "b" else SUM
    host.told.clear()
    cluster.give("b", ev.Attached())
    own = host.node.follower
    cluster.give("b", ev.Submitted(own.round, own.epoch, 1.0))
    cluster.until(lambda: bool(host.told))
    assert host.told == [("missed", number)]
    cluster.until(lambda: cluster.host("a").round == number)
    assert participants(cluster.host("a").log[-1].begin) == "a"
    assert cluster.host("a").log[-1].begin.operation == SUM


def test_a_witness_votes_for_an_attempt_of_which_it_has_missed_the_begin() -> None:
    """It has voted for the one before, whose results have died with those who had called it."""
    cluster = Cluster("abcde")
    for name in "vw":
        cluster.add(name, WITNESS)
    cluster.form("abcdevw")
    cluster.call_of = lambda host: SUM
    for name in "ade":
        cluster.detach(name)
    cluster.until_round("abcde", 2)
    begins = begins_of(cluster)
    before = cluster.hold
    own = cluster.host("w").node.follower
    cluster.until(lambda: bool(begins))
    cluster.hold = lambda source, peer, message: (
        (source in map(peer_id, "devw") and isinstance(message, ms.Ready | ms.Heartbeat))
        or before(source, peer, message)
    )
    number = begins[0].round
    cluster.until(lambda: number in own.held)
    first = own.held[number].run
    cluster.kill("b")
    cluster.kill("c")
    cluster.until(lambda: bool(cluster.noted("give-up")), limit_s=5.0)
    cluster.hold = lambda source, peer, message: (
        (peer == peer_id("w") and isinstance(message, ms.Begin)) or before(source, peer, message)
    )
    cluster.train("d")

    def has_voted_again() -> bool:
        return number in own.held and own.held[number].run.attempt > first.attempt

    cluster.until(has_voted_again, limit_s=10.0)
    assert own.begins[number].attempt == first.attempt
    cluster.until(lambda: own.round >= number, limit_s=10.0)
    last = next(begin for begin in reversed(begins) if begin.round == number)
    assert last.attempt > first.attempt
    assert participants(last) == "d"


def test_a_witness_that_owns_may_hear_of_the_result_before_its_own_work_is_reported() -> None:
    """It has sent the last chunks, and makes the root of many: its vote is not said twice."""
    cluster = Cluster("")
    cluster.outbound |= {*"bc"}
    for name in "avbcdef":
        cluster.add(name, WITNESS if name == "v" else REPLICA)
    cluster.form("avbcdef")
    cluster.run(cluster.timing.linking_s + 1.0)
    cluster.call_of = lambda host: SUM
    for name in "adef":
        cluster.detach(name)
    cluster.until_round("abc", 2)
    peer, own = peer_id("v"), cluster.host("v").node.follower
    reported: list[ev.AttemptReduced] = []
    deliver = cluster.deliver

    def deliver_later(host: Host, event: ev.Event) -> None:
        if host.peer == peer and isinstance(event, ev.AttemptReduced):
            reported.append(event)
        else:
            deliver(host, event)

    cluster.deliver = deliver_later  # type: ignore[method-assign]
    for name in "def":
        cluster.kill(name)
    votes = capture(cluster, ms.Ready, "a")  # v's is needed now
    cluster.until(lambda: bool(own.held) and bool(reported), limit_s=5.0)
    number = own.round + 1
    before = own.held[number]
    assert reported[-1].round == number
    said = len(votes)
    cluster.deliver = deliver  # type: ignore[method-assign]
    cluster.give("v", reported[-1])
    assert own.held[number] is before
    assert len(votes) == said
    cluster.hold = lambda source, to, message: False
    cluster.until_round("abc", 2)


# ---------------------------------------------------------------- founding


def alone_in_the_cradle() -> tuple[Cluster, list[tuple[bytes, object]]]:
    """Return a run that two of three have founded, and the word of it on its way to the third.

    What c has promised did not get through, nor what the others have said since.
    """
    cluster = Cluster("abc")
    named = ms.BootstrapConfig(founders=tuple(f"{name}:1" for name in "abc"))
    for name in "abc":
        cluster.give(name, named)
    redirects: list[tuple[bytes, object]] = []

    def hold(source: bytes, peer: bytes, message: object) -> bool:
        if isinstance(message, ms.Redirect) and peer == peer_id("c"):
            redirects.append((source, message))
            return True
        return peer_id("c") in (source, peer) and not isinstance(message, ms.BootstrapHello)

    cluster.hold = hold
    for one, other in ("ab", "ac", "bc"):
        cluster.link(one, other)
    cluster.until(lambda: bool(redirects), limit_s=20.0)
    assert view_of(cluster, "c").number == 0
    assert peer_id("c") not in view_of(cluster, "a").peers
    return cluster, redirects


def test_a_founder_without_which_the_run_was_founded_joins_it() -> None:
    cluster, redirects = alone_in_the_cradle()
    cluster.hold = lambda source, peer, message: False
    cluster.give("c", ev.Received(*redirects[-1]))
    assert cluster.host("c").node.view is None
    cluster.until(lambda: cluster.in_one_view("abc"), limit_s=10.0)


def test_a_founder_that_wants_to_leave_is_gone_when_it_hears_that_the_run_is_elsewhere() -> None:
    cluster, redirects = alone_in_the_cradle()
    cluster.leave("c")
    assert cluster.host("c").alive
    cluster.give("c", ev.Received(*redirects[-1]))
    assert not cluster.host("c").alive
    cluster.run(5.0)
    assert cluster.in_one_view("ab")


def test_a_run_that_one_founds_with_a_state_begins_there() -> None:
    cluster = Cluster("ab")
    cluster.give("a", ev.Restored(5, b"5" * 32, b"d" * 32))
    cluster.found("a")
    view = view_of(cluster, "a")
    assert (view.base_round, view.base_chain, view.since) == (5, b"5" * 32, 5)


def test_who_founds_a_run_anew_has_no_view_to_tell_one_that_never_left_the_old_one() -> None:
    """a slept while the three others were started again: it comes to them once they are in."""
    cluster = Cluster("abcd")
    cluster.rules = Rules("any")
    cluster.found("a")
    for one, other in combinations("abcd", 2):
        cluster.link(one, other)
    cluster.until(lambda: cluster.in_one_view("abcd"))
    number = view_of(cluster, "a").number
    cluster.pause("a")
    voters = ms.BootstrapConfig(
        voters=tuple(map(peer_id, "abcd")), lineage=LINEAGE, number=number, rules=cluster.rules
    )
    cluster.hold = lambda source, peer, message: isinstance(message, ms.Promise)
    for name in "bcd":
        cluster.kill(name)
        cluster.restart(name, lambda host: cluster.deliver(host, voters))
    founders = [cluster.host(name).node for name in "bcd"]
    cluster.until(lambda: all(node.view is not None for node in founders), limit_s=20.0)
    assert all(view_of(cluster, name).number == 0 for name in "bcd")
    told = capture(cluster, ms.Install, "a")
    cluster.resume("a")
    cluster.run(2.0)
    assert not told
    cluster.hold = lambda source, peer, message: False
    cluster.until(lambda: cluster.in_one_view("abcd"), limit_s=60.0)
    assert LINEAGE in view_of(cluster, "a").ancestors


def test_who_missed_a_ban_is_not_told_of_views_before_the_run_went_on_as_another() -> None:
    """It was in none of them."""
    cluster = Cluster("abcdef")
    cluster.form("ab")
    cluster.kill("a")
    cluster.until(lambda: view_of(cluster, "b").fork, limit_s=30.0)
    for name in "cdef":
        for other in "bcdef"[: "bcdef".index(name)]:
            cluster.link(name, other)
    cluster.until(lambda: cluster.in_one_view("bcdef"), limit_s=20.0)
    before = view_of(cluster, "b")
    cluster.hold = lambda source, peer, message: peer == peer_id("d")
    cluster.outlaws.convict(peer_id("f"), [*map(peer_id, "bcde")], stands_alone=True)
    cluster.until(lambda: view_of(cluster, "b").is_banned(peer_id("f")), limit_s=1.0)
    assert view_of(cluster, "d") == before
    told: list[View] = []

    def hold(source: bytes, peer: bytes, message: object) -> bool:
        if isinstance(message, ms.Install) and peer == peer_id("d"):
            told.append(message.decided)
        return False

    cluster.hold = hold
    cluster.until(lambda: view_of(cluster, "d").is_banned(peer_id("f")), limit_s=5.0)
    assert {view.lineage for view in told} == {before.lineage}
    assert min(view.number for view in told) > before.number
    cluster.until(lambda: cluster.in_one_view("bcde"))


# ---------------------------------------------------------------- leaving


def test_who_is_asked_twice_to_leave_goes_no_later() -> None:
    cluster = Cluster("abc")
    cluster.form("abc")
    lose(cluster, ms.Leave)  # so nobody agrees
    cluster.leave("c")
    by_s = cluster.host("c").node.leave_by_s
    cluster.run(2.0)
    cluster.leave("c")
    assert cluster.host("c").node.leave_by_s == by_s
    cluster.until(lambda: not cluster.host("c").alive, limit_s=2.1)


def test_who_is_leaving_does_not_join_the_lineage_that_its_own_gives_way_to() -> None:
    cluster = Cluster("abcde")
    cluster.rules = Rules("any")
    cluster.form("abcde")
    for name in "abcd":
        cluster.host(name).inner_s = 1.0
    cluster.host("e").inner_s = 0.02
    cluster.isolate("e")
    cluster.run(15.0)
    assert cluster.host("e").round > cluster.host("a").round + 100
    orders = capture(cluster, ms.Yield, "b")
    cluster.cut.clear()
    lose(cluster, ms.Leave)
    for name in "abcd":
        cluster.link(name, "e")
    cluster.until(lambda: bool(orders), limit_s=10.0)
    cluster.leave("b")
    assert cluster.host("b").alive
    cluster.give("b", ev.Received(*orders[-1]))
    assert not cluster.host("b").alive
    assert "yield" not in cluster.host("b").notes
    cluster.hold = lambda source, peer, message: False
    cluster.until(lambda: cluster.in_one_view("acde"), limit_s=40.0)
