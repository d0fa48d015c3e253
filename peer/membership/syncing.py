"""Bring a peer that is behind to the group's state while the run goes on.

Theory. Whoever is behind knows a *target*: the last commit that it has heard of, or the base of its
view. It asks its shell to reach it (StartSync) and hears after every step where the state now
stands (CaughtUp). The target moves on with every commit; a newer one replaces the order under way,
which keeps what it has received. The peer is *synced* in the moment in which state and target are
the same. Nobody waits for it: donors go on training, and a member takes part again from the next
BEGIN on. It is synced by CaughtUp alone, never by comparing its own notes, because a step may be
under way while the target changes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from atoll.peer.membership.events import CaughtUp, Goal, Note, StartSync, Undo
from atoll.peer.membership.view import REPLICA, Member, View

if TYPE_CHECKING:
    from atoll.peer.membership.node import Node


PAUSE_MAX_S = 30.0  # between attempts that fail: each costs messages and a line
DOUBLINGS_MAX = 10  # more would not make the pause any longer


class StateSync:
    """Follow the target, and have the state brought to it, for the life of a node."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._target = (0, b"")
        self._donors: View | None = None  # whose replicas hold it ...
        self._archives: tuple[Member, ...] = ()  # ... and who else does
        self._asked: Goal | None = None
        self._ask_again_s = 0.0
        self._failures = 0  # one after the other, of this view
        self._foreign = True  # our state may belong to another history than the target

    # ------------------------------------------------------------ where to go

    def aim(
        self,
        round_number: int,
        chain: bytes,
        donors: View,
        *,
        anew: bool = False,
        archives: tuple[Member, ...] = (),
    ) -> None:
        """Note that the group stands there, as the target to reach.

        ``anew``: this view's word counts, even if it goes back.
        """
        if self._donors is None or donors != self._donors:
            self._failures = 0
        if anew or round_number >= self._target[0]:
            self._target = (round_number, chain)
            self._donors, self._archives = donors, archives

    @property
    def rounds_behind(self) -> int:
        return max(0, self._target[0] - self._node.follower.round)

    def excluded(self) -> None:
        """Note that what comes next may be another history."""
        self._foreign = True
        self._asked = None

    def step(self) -> None:
        """Have the shell work on the latest target while we are behind."""
        node, own = self._node, self._node.follower
        view = self._donors
        if not own.unsynced or view is None:
            self._asked = None
            self._foreign &= node.view is None
            return
        if self._target[0] == 0 or not own.is_replica:  # nothing to load
            own.move_to(*self._target)
            own.suspect = own.diverged = False
            return
        lead = view.member(view.coordinator)
        attests = lead is not None and lead.role == REPLICA and lead.peer != node.me.peer
        able = (m for m in view.members if m.role == REPLICA and m.peer != node.me.peer)
        donors = (*able, *self._archives)
        coordinator = view.coordinator if attests else b""
        goal = Goal(*self._target, coordinator, donors, own.suspect)
        if goal != self._asked or node.now_s >= self._ask_again_s > 0:
            self._asked, self._ask_again_s = goal, 0.0
            if self._target == own.previous and not own.suspect:
                own.previous = (0, b"")  # once; if it cannot be undone any more, it is fetched
                node.emit(Undo(*self._target))
            else:
                node.emit(StartSync(goal))

    # ------------------------------------------------------------ where we are

    def on_caught_up(self, event: CaughtUp) -> None:
        own = self._node.follower
        if not own.unsynced or self._asked is None:
            return  # the outcome of an older order
        self._failures = 0
        steps = event.round - own.round
        if steps != 0 or event.chain != own.chain:
            own.previous = (own.round, own.chain) if steps == 1 else (0, b"")
        stale = self._foreign or own.suspect or steps != 1 or own.round == 0
        own.drop_passed(event.round)
        own.round, own.chain = event.round, event.chain
        own.digest, own.digest_round = event.digest, event.round
        own.suspect = False
        if stale:
            own.reload()
        else:
            own.missed()  # like any round that began without us
        if (event.round, event.chain) == self._target:
            own.unsynced = own.diverged = self._foreign = False
            self._asked = None

    def on_failed(self, why: str) -> None:
        """Repeat, after a pause, the order that has ended without success."""
        node, own = self._node, self._node.follower
        if own.unsynced:
            node.emit(Note("load-failed", f"the state cannot be downloaded: {why}"))
            pause_s = min(node.timing.repair_s * 2**self._failures, PAUSE_MAX_S)
            self._ask_again_s = node.now_s + pause_s
            self._failures = min(self._failures + 1, DOUBLINGS_MAX)
