"""Carry out what the coordinator tells members: take part, vote, fetch, apply, start over.

Signed statements are checked here, before they reach the follower.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from atoll.peer.membership import messages as ms
from atoll.peer.membership.eligibility import too_few_trainers, wrong_weights
from atoll.peer.membership.events import Note, Send

if TYPE_CHECKING:
    from atoll.peer.membership.node import Node


class Orders:
    def __init__(self, node: Node) -> None:
        self._node = node
        self._refused: tuple[bytes, int, int] | None = None
        own = node.follower
        self.handlers: dict[type, Callable[[bytes, Any], None]] = {
            ms.AskFinals: lambda _, ask: own.on_ask_finals(ask),
            ms.Begin: self._on_begin,
            ms.Commit: self._on_commit,
            ms.CoordinatorBeat: self._on_beat,
            ms.Notice: self._on_notice,
            ms.Repair: lambda _, repair: own.on_repair(repair),
            ms.Resync: self._on_resync,
            ms.Yield: lambda _, order: node.yield_to(order.winner, "our coordinator says so"),
        }

    def _on_begin(self, source: bytes, begin: ms.Begin) -> None:
        own, view = self._node.follower, self._node.view
        wrong = ""
        if view is not None:
            wrong = too_few_trainers(begin, view, own.terms)
            wrong = wrong or wrong_weights(begin, view, own.terms)
        if wrong:
            self._refuse(source, begin, wrong)
            return
        ready = None if self._node.frozen() else self._node.follower.on_begin(begin)
        if ready is not None:
            self._node.emit(Send(source, ready))

    def _refuse(self, source: bytes, begin: ms.Begin, wrong: str) -> None:
        """Note once of each attempt why we take no part: BEGIN is repeated."""
        attempt = (begin.lineage, begin.view, begin.attempt)
        if attempt != self._refused:
            self._refused = attempt
            text = f"round {begin.round} attempt {begin.attempt} is rejected: {wrong}"
            self._node.emit(Note("rejected", text, source))

    def _on_beat(self, source: bytes, beat: ms.CoordinatorBeat) -> None:
        self._node.heartbeats.heard(beat)
        if beat.commit is not None:
            self._on_commit(source, beat.commit)  # in case it was lost
        self._aim(beat.round, beat.chain)

    def _on_commit(self, source: bytes, commit: ms.Commit) -> None:
        node = self._node
        if commit.round > node.follower.round and node.signatures.genuine(source, commit):
            node.follower.committed(commit.round, commit.chain)
            self._aim(commit.round, commit.chain)
            ready = None if node.frozen() else node.follower.ready()  # the next round's turn
            if ready is not None and node.view is not None:
                node.emit(Send(node.view.coordinator, ready))

    def _aim(self, round_number: int, chain: bytes) -> None:
        if self._node.view is not None:
            self._node.syncing.aim(round_number, chain, self._node.view)

    def _on_notice(self, source: bytes, notice: ms.Notice) -> None:
        ready = None if self._node.frozen() else self._node.follower.on_notice(notice)
        if ready is not None:
            self._node.emit(Send(source, ready))

    def _on_resync(self, source: bytes, _: ms.Resync) -> None:
        """Doubt our bytes and download those of the others.

        Not while we are READY, which must not be taken back; the next round's digest asks again.
        (Nobody is READY for a round after the next.)
        """
        own = self._node.follower
        if own.is_replica and own.round + 1 not in own.held:
            own.suspect = True
            own.fell_behind("this peer's state is not that of most others, downloading theirs")
            self._aim(own.round, own.chain)
