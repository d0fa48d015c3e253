"""Runs with newcomers and with a least number of peers, for scripts in a Cluster."""

from __future__ import annotations

from atoll.peer.membership import events as ev
from atoll.peer.membership import messages as ms
from atoll.peer.membership.messages import Terms
from atoll.peer.membership.view import View
from harness.cluster import Cluster

__all__ = ["come", "held", "members", "new", "running", "view_of", "weights_of_rounds"]


def running(
    names: str, terms: Terms, start: str = "", fragments: int = 1, in_flight: int = 1
) -> Cluster:
    """``start`` found it, the others join when it has trained a little."""
    cluster = Cluster(names)
    cluster.fragments, cluster.chunks = fragments, 4 * fragments
    cluster.checker.probation, cluster.checker.least = terms.probation, terms.least
    cluster.checker.min_trainers = terms.min_trainers
    for name in names:
        cluster.give(name, ev.Configured("spec", fragments, in_flight, terms))
    cluster.form(start or names[0], 3)
    for name in names[len(start or names[0]) :]:
        come(cluster, name)
    return cluster


def come(cluster: Cluster, name: str) -> None:
    for other in cluster.living():
        if other.name != name:
            cluster.link(name, other.name)
    cluster.until(lambda: name in members(cluster))
    cluster.train(name)


def members(cluster: Cluster) -> str:
    view = view_of(cluster)
    return "".join(sorted(cluster.hosts[peer].name for peer in view.peers))


def view_of(cluster: Cluster) -> View:
    views = [host.node.view for host in cluster.living() if host.node.view is not None]
    return max(views, key=lambda view: view.number)


def new(cluster: Cluster) -> dict[str, int]:
    return {cluster.hosts[x.peer].name: x.rounds for x in view_of(cluster).newcomers}


def weights_of_rounds(cluster: Cluster, name: str = "a") -> list[dict[bytes, float]]:
    begins = [entry.begin for entry in cluster.host(name).log]
    return [dict(zip(b.participants, b.weights, strict=True)) for b in begins if b.kind == ms.STEP]


def held(cluster: Cluster, name: str = "a") -> str:
    return cluster.host(name).node.heartbeats.held
