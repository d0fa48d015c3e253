"""Tell the follower and the coordinator what the trainer and the data plane report.

Each report changes a fact about this peer; the heartbeat that follows at once carries the news, so
that nobody waits a quarter of a second for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from atoll.peer.membership import events as ev
from atoll.peer.membership.kept_chunks import DIGEST_BYTES, KEPT_MAX
from atoll.peer.membership.messages import Finals, Miss
from atoll.peer.membership.view import short

if TYPE_CHECKING:
    from atoll.peer.membership.node import Node


class Reports:
    def __init__(self, node: Node) -> None:
        self._node = node
        self.handlers: dict[type, Callable[[Any], None]] = {
            ev.Attached: self._on_attached,
            ev.Detached: self._on_detached,
            ev.Offered: self._on_offered,
            ev.Submitted: self._on_submitted,
            ev.AttemptReduced: self._on_reduced,
            ev.ReduceFailed: self._on_reduce_failed,
            ev.Applied: self._on_applied,
            ev.Progressed: self._on_progressed,
            ev.FinalChunks: self._on_final_chunks,
            ev.CaughtUp: self._on_caught_up,
            ev.CatchUpFailed: self._on_catch_up_failed,
            ev.Restored: self._on_restored,
            ev.Configured: self._on_configured,
        }

    # ------------------------------------------------------------ the trainer

    def _on_attached(self, event: ev.Attached) -> None:
        self._node.follower.came(event.waits)
        self._node.heartbeats.soon()

    def _on_detached(self, _: ev.Detached) -> None:
        self._node.follower.detached()
        self._node.heartbeats.soon()

    def _on_offered(self, event: ev.Offered) -> None:
        self._node.follower.offer = event.blob
        self._node.heartbeats.soon()

    def _on_submitted(self, event: ev.Submitted) -> None:
        self._node.follower.submitted(event)
        self._node.heartbeats.soon()

    # ------------------------------------------------------------ the data plane

    def _on_reduced(self, event: ev.AttemptReduced) -> None:
        node = self._node
        ready = node.follower.on_reduced(event.round, event.attempt, event.root)
        if ready is None or node.view is None or node.frozen():
            return
        node.emit(ev.Send(node.view.coordinator, ready))

    def _on_reduce_failed(self, event: ev.ReduceFailed) -> None:
        node = self._node
        begin = node.follower.begins.get(event.round)
        if begin is None or begin.attempt != event.attempt:
            return
        if not event.peers:
            node.follower.unusable(event.round, event.why)
        missing = event.peers or (node.me.peer,)
        names = ", ".join(short(peer) for peer in event.peers)
        what = f"the exchange with {names} fails" if names else "this peer cannot take part"
        node.emit(ev.Note("miss", f"round {event.round}: {what}: {event.why}"))
        miss = Miss(begin.lineage, begin.view, event.round, event.attempt, missing)
        if node.view is not None:
            node.emit(ev.Send(node.view.coordinator, miss))
        for peer in event.peers:
            node.probe(peer)

    def _on_final_chunks(self, event: ev.FinalChunks) -> None:
        """Tell the coordinator what is left of an attempt that is over."""
        node = self._node
        begin = node.follower.begins.get(event.round)
        if begin is not None and begin.attempt == event.attempt and node.view is not None:
            tag = (begin.lineage, begin.view)
            digests = event.digests[: DIGEST_BYTES * KEPT_MAX]
            finals = Finals(*tag, event.round, event.attempt, digests, event.missing)
            node.emit(ev.Send(node.view.coordinator, finals))

    def _on_applied(self, event: ev.Applied) -> None:
        self._node.follower.digest = event.digest
        self._node.follower.digest_round = event.round
        self._node.heartbeats.soon()

    def _on_progressed(self, event: ev.Progressed) -> None:
        self._node.heartbeats.progress_bytes = event.total_bytes

    def _on_caught_up(self, event: ev.CaughtUp) -> None:
        self._node.syncing.on_caught_up(event)
        self._node.heartbeats.soon()

    def _on_catch_up_failed(self, event: ev.CatchUpFailed) -> None:
        self._node.syncing.on_failed(event.why)

    def _on_restored(self, event: ev.Restored) -> None:
        own = self._node.follower
        own.round, own.chain = event.round, event.chain
        own.digest, own.digest_round = event.digest, event.round

    def _on_configured(self, event: ev.Configured) -> None:
        node = self._node
        node.spec, node.rounds_in_flight = event.spec, event.rounds_in_flight
        node.follower.fragments, node.follower.terms = event.fragments, event.terms
        if node.coordinator is not None:
            node.coordinator.in_flight_max = event.rounds_in_flight
