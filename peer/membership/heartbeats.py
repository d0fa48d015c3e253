"""Send heartbeats: what a peer says of itself four times a second, and at once when it has news.

They come from the daemon, never from the trainer: a training step that holds the GIL must not look
like a death. Most lost messages of the round protocol heal within one heartbeat, because a
heartbeat repeats what READY, OFFER and LEAVE have said. The others heal by a limit of whoever waits
for them: without MISS an attempt stalls, NOTICE is repeated, finals come within ``kept_s`` or not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from atoll.peer.membership.events import Send
from atoll.peer.membership.messages import (
    AskTrainers,
    CoordinatorBeat,
    Heartbeat,
    Leave,
    ObjectIs,
    Offer,
)
from atoll.peer.membership.operations import ObjectSender
from atoll.peer.membership.view import View, plain

if TYPE_CHECKING:
    from atoll.peer.membership.node import Node


class Heartbeats:
    def __init__(self, node: Node) -> None:
        self._node = node
        self.next_s = 0.0
        self.progress_bytes = 0
        self.waiting: tuple[tuple[bytes, ...], float] = ((), 0.0)  # for whom, seconds so far
        self.halted = ""  # why the coordinator begins no round any more ...
        self.held = ""  # ... or not yet
        self._objects = ObjectSender()

    def soon(self) -> None:
        """Let the next heartbeat go at once: somebody waits for what has just changed."""
        self.next_s = self._node.now_s

    def heard(self, beat: CoordinatorBeat) -> None:
        """Keep what the coordinator says of the next commit, for people who ask."""
        self.waiting = (beat.waiting, beat.waiting_s)
        self.halted, self.held = plain(beat.halted), plain(beat.held)

    def step(self) -> None:
        node = self._node
        if node.now_s < self.next_s:
            return
        self.next_s = node.now_s + node.timing.heartbeat_s
        lead = node.coordinator
        if node.view is None:
            node.joining.beat()
        elif lead is not None:
            beat = lead.beat(node.now_s)
            self.heard(beat)
            for peer in node.view.peers:
                if peer != node.me.peer:
                    node.emit(Send(peer, beat))
            lead.admission.teach(node.now_s)
        elif node.view.number > 0:
            self._to_coordinator(node.view)

    def _to_coordinator(self, view: View) -> None:
        node = self._node
        electing = node.election.waiting_for() if node.election else None
        self.waiting = electing or self.waiting  # the lost coordinator's last word counts no more
        tag = (view.lineage, view.number)
        node.emit(Send(view.coordinator, self.heartbeat()))
        if node.follower.offer and node.follower.round == 0:
            node.emit(Send(view.coordinator, Offer(*tag, node.follower.offer)))
        given = node.follower.given
        path = (*tag, view.coordinator in node.linked)
        if self._objects.is_due(given, path, node.now_s):
            node.emit(Send(view.coordinator, ObjectIs(*tag, given)))
        if node.leave_by_s is not None:
            node.emit(Send(view.coordinator, Leave(*tag, node.me.inc)))
        if (asked := node.asked_trainers()) is not None:
            node.emit(Send(view.coordinator, AskTrainers(*tag, asked)))

    def heartbeat(self) -> Heartbeat:
        node, own = self._node, self._node.follower
        acceptor = node.election.acceptor if node.election else None
        tag = (node.view.lineage, node.view.number) if node.view else node.joining.tag
        waiting = sorted(own.submissions.items())
        return Heartbeat(
            *tag,
            inc=node.me.inc,
            round=own.round,
            chain=own.chain,
            digest=own.digest,
            digest_round=own.digest_round,
            attached=own.attached,
            arrived=tuple(fragment for fragment, _ in waiting),
            weights=tuple(submission.weight for _, submission in waiting),
            frozen=acceptor is not None and acceptor.frozen,
            promised=acceptor.promised.number if acceptor else 0,
            unsynced=own.unsynced,
            progress_bytes=self.progress_bytes,
            runs=own.runs(),
            epoch=own.epoch,
            fragments=own.fragments,
            in_flight=node.rounds_in_flight,
            operation=waiting[0][1].operation if waiting else None,
            given=self._objects.digest(own.given),
            terms=own.terms,
            since=own.since,
        )
