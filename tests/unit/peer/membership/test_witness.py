"""A witness votes and holds nothing: as member, as coordinator, as the tie-breaker."""

from __future__ import annotations

import pytest
from harness.cluster import Cluster
from harness.faults import lose

from atoll.peer.membership import events as ev
from atoll.peer.membership import messages as ms
from atoll.peer.membership.view import WITNESS, Rules, View


def run_of(names: str, **rules: str) -> Cluster:
    """``v`` and ``w`` are witnesses; the first is the tie-breaker and coordinates."""
    cluster = Cluster("")
    cluster.rules = Rules(**rules)
    for name in names:
        cluster.add(name, WITNESS if name in "vw" else "replica")
    cluster.found(names[0])
    for i, name in enumerate(names):
        for other in names[:i]:
            cluster.link(name, other)
    cluster.until(lambda: cluster.in_one_view(names))
    for name in names:
        if name not in "vw":
            cluster.train(name)
    cluster.until(lambda: all(cluster.host(n).round >= 3 for n in names))
    return cluster


def view_of(cluster: Cluster, name: str) -> View:
    view = cluster.host(name).node.view
    assert view is not None
    return view


def replicas(names: str) -> str:
    return "".join(name for name in names if name not in "vw")


@pytest.mark.parametrize("names", ["abw", "wab", "awb", "wabc", "vwab", "abcvw"])
def test_a_run_with_witnesses_trains_and_they_hold_nothing(names: str) -> None:
    cluster = run_of(names)
    cluster.until_round(names, 5)
    for name in names:
        if name in "vw":
            host = cluster.host(name)
            assert not host.jobs
            assert not host.log
            assert host.loads == 0
            assert "unsynced" not in host.notes
            assert all(name[0] != chr(p[0]) for p in participants(cluster))


def participants(cluster: Cluster) -> set[bytes]:
    found: set[bytes] = set()
    for host in cluster.living():
        for entry in host.log:
            found |= set(entry.begin.participants)
    return found


@pytest.mark.parametrize("names", ["wab", "abw"])
@pytest.mark.parametrize("kind", [ms.Notice, ms.Commit, ms.Begin, ms.Ready])
def test_lost_messages_heal(names: str, kind: type) -> None:
    cluster = run_of(names)
    lose(cluster, kind, count=3)
    assert cluster.until_round(names) < 4.0


def test_a_witness_is_asked_only_where_its_vote_is_needed_and_copies_are_there() -> None:
    cluster = run_of("abw")
    start = len(cluster.trace)
    cluster.until_round("abw", 3)
    assert not any("Notice" in line for line in cluster.trace[start:])  # a and b are a quorum
    cluster.kill("b")
    cluster.until_round("aw", 3)
    assert any("a->w Notice" in line for line in cluster.trace)


@pytest.mark.parametrize("names", ["wab", "awb", "abw", "wabc", "vwabc"])
@pytest.mark.parametrize("restart", [True, False])
def test_any_one_may_die(names: str, restart: bool) -> None:
    for victim in names:
        cluster = run_of(names)
        cluster.kill(victim)
        rest = names.replace(victim, "")
        cluster.until_round(rest, limit_s=5.0)
        if restart:
            cluster.restart(victim)
            cluster.until_round(names, limit_s=10.0)


def test_a_witness_that_missed_commits_is_never_unsynced() -> None:
    cluster = run_of("abw")
    cluster.isolate("w")
    cluster.until_round("ab", 5)
    cluster.heal()
    assert cluster.until_round("abw", 1, limit_s=5.0) < 2.0
    assert cluster.host("w").loads == 0
    assert "unsynced" not in cluster.host("w").notes


def test_a_witness_coordinator_whose_replicas_die_waits_for_them() -> None:
    """The run does not go on without anybody who holds the state."""
    cluster = run_of("wab", policy="majority")
    cluster.kill("a")
    cluster.kill("b")
    before = cluster.committed
    cluster.run(20.0)
    assert cluster.committed <= before + 1


def test_a_joining_witness_enters_at_once() -> None:
    cluster = run_of("ab")
    cluster.add("w", WITNESS)
    cluster.link("a", "w")
    cluster.link("b", "w")
    cluster.until(lambda: cluster.in_one_view("abw"), limit_s=2.0)
    assert cluster.host("w").loads == 0
    cluster.until_round("abw")


def test_a_witness_as_the_only_successor_may_take_over_while_replicas_live() -> None:
    cluster = run_of("awb", policy="majority")
    cluster.leave("a")
    cluster.until(lambda: not cluster.host("a").alive)
    cluster.until_round("wb", limit_s=5.0)
    assert cluster.in_one_view("wb")


def test_a_witness_does_not_carry_a_round_of_which_only_one_copy_exists() -> None:
    """w would be a quorum with a; b lives and has to hold it first."""
    cluster = run_of("abw")
    cluster.host("b").hangs = True  # its trainer: so that S is {a}
    cluster.detach("b")
    before = cluster.committed
    cluster.until(lambda: not cluster.host("a").node.coordinator.attempts)  # type: ignore[union-attr]
    cluster.hold = lambda source, peer, message: isinstance(message, ms.Repair)
    cluster.run(3.0)
    assert cluster.committed <= before + 1
    cluster.hold = lambda source, peer, message: False
    cluster.until_round("ab", limit_s=5.0)


def test_a_notice_moves_no_replica_and_no_older_attempt_is_attested() -> None:
    cluster = run_of("abw")
    own, view = cluster.host("w").node.follower, view_of(cluster, "w")
    cluster.until(lambda: not own.begins)
    tag = (view.lineage, view.number)

    def told(name: str, attempt: int, root: bytes, number: int) -> list[ms.Ready]:
        notice = ms.Notice(*tag, number, attempt, 0, root)
        node = cluster.host(name).node
        effects = node.handle(ev.Received(view.coordinator, notice), cluster.now_s)
        sends = [e.message for e in effects if isinstance(e, ev.Send)]
        return [m for m in sends if isinstance(m, ms.Ready)]

    number = own.round + 1
    assert told("b", 900, b"x" * 32, number) == []
    (ready,) = told("w", 900, b"x" * 32, number)
    assert (ready.attempt, ready.root) == (900, b"x" * 32)
    assert told("w", 899, b"y" * 32, number) == []
    (again,) = told("w", 900, b"y" * 32, number)
    assert again.root == b"x" * 32  # what it said, it has said
    assert told("w", 900, b"x" * 32, own.round) == []
    assert told("w", 900, b"x" * 32, own.round + 100) == []
    assert own.report().runs[0].root == b"x" * 32
    assert not own.report().holds
