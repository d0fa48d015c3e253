"""Simultaneous events in every order, lost, doubled and late messages, and repeatability."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from harness.cluster import Cluster
from harness.faults import busy_with, lose, orders, when_held

from atoll.peer.membership import messages as ms


def act(cluster: Cluster, what: str) -> None:
    """One event of a permutation: "kill b", "join d", "leave a", "restart c"."""
    verb, name = what.split()
    if verb == "kill":
        cluster.kill(name)
    elif verb == "leave":
        cluster.leave(name)
    elif verb == "restart":
        cluster.kill(name)
        cluster.restart(name)
    else:
        cluster.add(name)
        cluster.host(name).trains = True
        for other in cluster.living():
            if other.name != name:
                cluster.link(name, other.name)


CASES = [
    *orders("kill a", "kill b"),
    *orders("kill a", "join f"),
    *orders("kill b", "join f"),
    *orders("leave a", "kill b"),
    *orders("leave b", "kill a"),
    *orders("leave a", "join f"),
    *orders("leave a", "leave b"),
    *orders("restart a", "kill b"),
    *orders("restart b", "kill a"),
    *orders("restart a", "restart b"),
    *orders("restart b", "leave a", "join f"),
]
MOMENTS: list[Callable[[Cluster, str], Callable[[], bool]]] = [
    lambda cluster, name: lambda: True,
    busy_with,
    when_held,
]


@pytest.mark.parametrize("moment", MOMENTS, ids=["idle", "reduce", "ready"])
@pytest.mark.parametrize("events", CASES, ids=", ".join)
def test_simultaneous_events(
    events: Sequence[str], moment: Callable[[Cluster, str], Callable[[], bool]]
) -> None:
    cluster = Cluster("abcde")
    cluster.form("abcde")
    cluster.until(moment(cluster, "c"))
    for event in events:
        act(cluster, event)
    leaving = {event.split()[1] for event in events if event.startswith("leave")}
    staying = "".join(h.name for h in cluster.living() if h.name not in leaving)
    assert cluster.until_round(staying) < 5.0


@pytest.mark.parametrize("order", orders("commit", "death"))
def test_coordinator_dies_around_its_commit(order: Sequence[str]) -> None:
    """COMMIT reaches one member, or none, before the coordinator is dead."""
    cluster = Cluster("abc")
    cluster.form("abc")
    cluster.until(when_held(cluster, "c"))
    number = cluster.host("c").round + 1
    lose(cluster, ms.Commit, to="b")
    lose(cluster, ms.CoordinatorBeat)
    if order[0] == "commit":
        cluster.until(lambda: cluster.host("c").round == number)
    cluster.kill("a")
    cluster.heal()
    cluster.until_round("bc")  # the checker knows if round `number` was rewritten


@pytest.mark.parametrize("kind", [ms.Commit, ms.Begin, ms.Ready])
@pytest.mark.parametrize("to", ["", "b"])
def test_lost_message_heals_by_a_heartbeat(kind: type, to: str) -> None:
    cluster = Cluster("abc")
    cluster.form("abc")
    lose(cluster, kind, to="a" if kind is ms.Ready else to, count=2)
    took_s = cluster.until_round("abc")
    assert took_s < 1.0
    assert "unsynced" not in cluster.noted("unsynced")


@pytest.mark.parametrize("copies", [2, 3])
def test_doubled_messages_change_nothing(copies: int) -> None:
    cluster = Cluster("abc")
    cluster.copies = lambda message: copies
    cluster.form("abc", rounds=5)
    cluster.kill("a")
    cluster.until_round("bc")
    cluster.restart("a")
    cluster.until_round("abc")


@pytest.mark.parametrize("kind", [ms.Commit, ms.Begin, ms.Ready, ms.SyncTarget, ms.Install])
def test_messages_out_of_order(kind: type) -> None:
    cluster = Cluster("abc")
    cluster.late_s = lambda message: 0.4 if isinstance(message, kind) else 0.0
    cluster.form("abc")
    cluster.kill("b")
    cluster.until_round("ac")
    cluster.restart("b")
    assert cluster.until_round("abc") < 10.0


def script() -> list[str]:
    cluster = Cluster("abcd")
    cluster.form("abcd")
    cluster.kill("a")
    cluster.run(2.0)
    cluster.restart("a")
    cluster.pause("b")
    cluster.run(3.0)
    cluster.resume("b")
    cluster.isolate("c")
    cluster.run(3.0)
    cluster.heal()
    cluster.leave("d")
    cluster.run(3.0)
    return cluster.trace


def test_the_same_script_twice_gives_the_same_trace() -> None:
    first, second = script(), script()
    assert len(first) > 1000
    assert "\n".join(first).encode() == "\n".join(second).encode()
