"""Small faults for scripts: lose, repeat or delay chosen messages; every order of some events."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import permutations

from atoll.peer.membership.messages import Begin
from harness.cluster import Cluster, peer_id

__all__ = ["begins_of", "busy_with", "lose", "orders", "ready_nowhere_committed", "when_held"]


def lose(cluster: Cluster, kind: type, to: str = "", count: int = 1_000_000) -> None:
    """Lose the next messages of this kind, to that host or to everyone."""
    left = count
    before = cluster.hold

    def hold(source: bytes, peer: bytes, message: object) -> bool:
        nonlocal left
        if isinstance(message, kind) and left > 0 and (not to or peer == peer_id(to)):
            left -= 1
            return True
        return before(source, peer, message)

    cluster.hold = hold


def begins_of(cluster: Cluster) -> list[Begin]:
    """Return what is begun from now on."""
    found: list[Begin] = []
    before = cluster.hold

    def note(source: bytes, peer: bytes, message: object) -> bool:
        if isinstance(message, Begin) and message not in found:
            found.append(message)
        return before(source, peer, message)

    cluster.hold = note
    return found


def busy_with(cluster: Cluster, name: str) -> Callable[[], bool]:
    """This host is reducing, so a round is under way."""
    return lambda: cluster.host(name).reducing is not None


def when_held(cluster: Cluster, name: str) -> Callable[[], bool]:
    """This host is READY and nothing is committed."""
    return lambda: bool(cluster.host(name).node.follower.held)


def ready_nowhere_committed(cluster: Cluster, names: str) -> Callable[[], bool]:
    return lambda: all(cluster.host(n).node.follower.held for n in names)


def orders(*events: str) -> list[Sequence[str]]:
    """Simultaneous events in every order, for parametrisation."""
    return list(permutations(events))
