"""The data plane of the simulated cluster: reductions, transfers of results and of state."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from atoll.peer import events as ev
from atoll.peer.messages import Begin

if TYPE_CHECKING:
    from harness.cluster import Cluster, Host

__all__ = ["DataPlane"]

REDUCE_S = 0.01
LOAD_S = 0.05
RECHECK_S = 0.1  # an attempt that cannot end now is looked at again
BROKEN_S = 0.5  # edges that stay cut are reported after this time
STATES_KEPT = 2  # a donor serves the current state and the one before


class DataPlane:
    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._begun: set[Begin] = set()

    # ------------------------------------------------------------ reducing

    def reduce(self, host: Host, effect: ev.Reduce) -> None:
        if host.name == self._cluster.spoilt:
            begin = effect.begin
            event = ev.ReduceFailed(begin.round, begin.attempt, (), "not a number")
            self._cluster.after(REDUCE_S, lambda: self._cluster.deliver(host, event))
            return
        host.reducing = effect.begin
        if effect.begin not in self._begun:
            self._begun.add(effect.begin)
            started_s = self._cluster.now_s
            self._cluster.after(REDUCE_S, lambda: self._check(effect.begin, started_s, set()))

    def _check(self, begin: Begin, started_s: float, told: set[frozenset[bytes]]) -> None:
        cluster = self._cluster
        group = [cluster.hosts[p] for p in begin.participants]
        reducing = [h for h in group if h.alive and h.reducing is not None]
        reducing = [h for h in reducing if h.reducing == begin]
        if not reducing:
            return
        cut = {
            frozenset((a.peer, b.peer)) for a in group for b in group if cluster.is_data_cut(a, b)
        }
        if len(reducing) == len(group) and not cut and not any(h.paused for h in group):
            root = hashlib.sha256(repr(begin).encode()).digest()
            for host in group:
                self._hold(host, begin, root)
            return
        if cluster.now_s - started_s > BROKEN_S:
            for edge in sorted(cut - told, key=sorted):
                told.add(edge)
                self._report_broken(begin, edge)
        cluster.after(RECHECK_S, lambda: self._check(begin, started_s, told))

    def _report_broken(self, begin: Begin, edge: frozenset[bytes]) -> None:
        for peer in sorted(edge):
            other = next(iter(edge - {peer}))
            host = self._cluster.hosts[peer]
            if host.reducing == begin:
                event = ev.ReduceFailed(begin.round, begin.attempt, (other,), "broken")
                self._cluster.deliver(host, event)

    def _hold(self, host: Host, begin: Begin, root: bytes) -> None:
        if host.garbles:
            root = hashlib.sha256(root + host.peer).digest()
        host.held[begin.view, begin.round, begin.attempt] = root
        self._cluster.deliver(host, ev.Reduced(begin.round, begin.attempt, root))

    def fetch(self, host: Host, effect: ev.Fetch) -> None:
        begin = effect.begin
        holder = self._cluster.hosts[effect.holder]
        root = holder.held.get((begin.view, begin.round, begin.attempt))

        def arrive() -> None:
            if root is not None and holder.alive and not self._cluster.is_data_cut(host, holder):
                self._hold(host, begin, root)

        self._cluster.after(REDUCE_S, arrive)

    def abort(self, host: Host, effect: ev.Abort) -> None:
        host.reducing = None

    # ------------------------------------------------------------ the state

    def apply(self, host: Host, effect: ev.Apply) -> None:
        cluster, number = self._cluster, effect.begin.round
        cluster.checker.committed(effect)
        cluster.committed = max(cluster.committed, number)
        host.reducing = None
        digest = hashlib.sha256(effect.chain + host.flipped).digest()
        self._store(host, number, effect.chain, digest)
        cluster.log(f"{host.name} applied {number}")
        cluster.after(0.001, lambda: cluster.deliver(host, ev.Applied(number, digest)))

    def _store(self, host: Host, number: int, chain: bytes, digest: bytes) -> None:
        if not host.flipped:
            self._cluster.checker.state(number, chain, digest)
        kept = [*host.state.items(), (number, digest)][-STATES_KEPT:]
        host.state = dict(kept)

    def load(self, host: Host, effect: ev.LoadState) -> None:
        learn, cluster = effect.learn, self._cluster
        donor = cluster.hosts[learn.donor.peer]
        host.loads += 1
        order = host.loads
        digest = donor.state.get(learn.round)

        def arrive() -> None:
            if order != host.loads or cluster.stuck(host, donor):
                return  # a newer order has taken its place, or it hangs
            if donor.alive and digest == learn.digest and not cluster.is_data_cut(host, donor):
                host.flipped = b""
                self._store(host, learn.round, learn.chain, digest)
                cluster.deliver(host, ev.StateLoaded(learn.round, learn.chain, digest))
            else:
                cluster.deliver(host, ev.StateFailed("donor gone"))

        cluster.after(cluster.load_s, arrive)
