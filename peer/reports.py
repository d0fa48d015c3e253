"""What the trainer and the data plane report, told to the follower and to the coordinator.

Each report changes a fact about this peer; the heartbeat that follows at once carries the news, so
that nobody waits a quarter of a second for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from atoll.peer import events as ev
from atoll.peer.messages import Miss
from atoll.peer.views import short

if TYPE_CHECKING:
    from atoll.peer.membership import Node

__all__ = ["Reports"]


class Reports:
    def __init__(self, node: Node) -> None:
        self._node = node
        self.handlers: dict[type, Callable[[Any], None]] = {
            ev.Attached: self._on_attached,
            ev.Detached: self._on_detached,
            ev.Offered: self._on_offered,
            ev.Submitted: self._on_submitted,
            ev.Reduced: self._on_reduced,
            ev.ReduceFailed: self._on_reduce_failed,
            ev.Applied: self._on_applied,
            ev.Progressed: self._on_progressed,
            ev.StateLoaded: self._on_state_loaded,
            ev.StateFailed: self._on_state_failed,
        }

    # ------------------------------------------------------------ the trainer

    def _on_attached(self, _: ev.Attached) -> None:
        self._node.follower.attached = True
        self._node.beats.soon()

    def _on_detached(self, _: ev.Detached) -> None:
        self._node.follower.detached()
        self._node.beats.soon()

    def _on_offered(self, event: ev.Offered) -> None:
        self._node.follower.offer = event.blob
        self._node.beats.soon()

    def _on_submitted(self, event: ev.Submitted) -> None:
        self._node.follower.submitted(event)
        self._node.beats.soon()

    # ------------------------------------------------------------ the data plane

    def _on_reduced(self, event: ev.Reduced) -> None:
        node = self._node
        ready = node.follower.on_reduced(event.round, event.attempt, event.root)
        if ready is not None and node.view is not None and not node.frozen():
            node.emit(ev.Send(node.view.coordinator, ready))

    def _on_reduce_failed(self, event: ev.ReduceFailed) -> None:
        node = self._node
        begin = node.follower.begin
        if begin is None or (begin.round, begin.attempt) != (event.round, event.attempt):
            return
        if not event.peers:
            node.follower.spoilt()
        missing = event.peers or (node.me.peer,)
        names = ", ".join(short(peer) for peer in missing)
        node.emit(ev.Note("miss", f"round {event.round}: {names}: {event.why}"))
        miss = Miss(begin.lineage, begin.view, event.round, event.attempt, missing)
        if node.view is not None:
            node.emit(ev.Send(node.view.coordinator, miss))
        for peer in event.peers:
            node.probe(peer)

    def _on_applied(self, event: ev.Applied) -> None:
        self._node.follower.digest = event.digest
        self._node.follower.digest_round = event.round
        self._node.beats.soon()

    def _on_progressed(self, event: ev.Progressed) -> None:
        self._node.beats.progress_bytes = event.total_bytes

    def _on_state_loaded(self, event: ev.StateLoaded) -> None:
        self._node.follower.on_loaded(event.round, event.chain, event.digest)
        self._node.beats.soon()

    def _on_state_failed(self, event: ev.StateFailed) -> None:
        self._node.follower.loading = None  # the coordinator repeats LEARN
        self._node.emit(ev.Note("load-failed", f"loading the state failed: {event.why}"))
