"""Bring a peer that is behind to the group's state while the run goes on.

Theory. Whoever is behind knows a *target*: the last commit that it has heard of, or the base of its
view. It asks its shell to reach it (StartSync) and hears after every step where the state now
stands (CaughtUp). The target moves on with every commit; a newer one replaces the order under way,
which keeps what it has received. The peer is *synced* in the moment in which state and target are
the same. Nobody waits for it: donors go on training, and a member takes part again from the next
BEGIN on. It is synced by CaughtUp alone, never by comparing its own notes, because a step may be
under way while the target changes.

A view may go back to what we hold, while we are on the way to rounds that nobody else has any more.
We vote for it only when the order under way is *recalled*: our state is still there when the view
is decided.
"""

from __future__ import annotations

from dataclasses import replace

from atoll.peer.membership.events import CaughtUp, Goal, Note, StartSync, Undo
from atoll.peer.membership.member import MemberState
from atoll.peer.membership.situation import Situation
from atoll.peer.membership.view import REPLICA, Member, View

PAUSE_MAX_S = 30.0  # between attempts that fail: each costs messages and a line
DOUBLINGS_MAX = 10  # more would not make the pause any longer


class StateSync:
    """Follow the target, and have the state brought to it, for the life of a node."""

    def __init__(self, here: Situation, own: MemberState) -> None:
        self._here = here
        self._own = own
        self._target = (0, b"")
        self._donors: View | None = None  # whose replicas hold it ...
        self._archives: tuple[Member, ...] = ()  # ... and who else does
        self._asked: Goal | None = None
        self._recalled = False  # what was asked last is to stay where we are
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
        return max(0, self._target[0] - self._own.round)

    def excluded(self) -> None:
        """Note that what comes next may be another history."""
        self._foreign = True
        self._asked = None

    def recall(self) -> bool:
        """Have the order under way end where we are; return whether none is under way.

        The shell answers as for any order, within its own limits, also when it fails.
        """
        own = self._own
        if self._asked is None or self._ask_again_s > 0 or own.suspect or not own.unsynced:
            return True
        if not self._recalled:
            self._recalled = True
            self._asked = replace(self._asked, round=own.round, chain=own.chain)
            self._here.emit(StartSync(self._asked))
        return False

    def step(self) -> None:
        """Have the shell work on the latest target while we are behind."""
        here, own = self._here, self._own
        view = self._donors
        if not own.unsynced or view is None:
            self._asked = None
            self._foreign &= here.view is None
            return
        if self._target[0] == 0 or not own.is_replica:  # nothing to load
            own.move_to(*self._target)
            return
        lead = view.member(view.coordinator)
        attests = lead is not None and lead.role == REPLICA and lead.peer != here.me.peer
        able = (m for m in view.members if m.role == REPLICA and m.peer != here.me.peer)
        donors = (*able, *self._archives)
        coordinator = view.coordinator if attests else b""
        goal = Goal(*self._target, coordinator, donors, own.suspect)
        if goal != self._asked or here.now_s >= self._ask_again_s > 0:
            self._asked, self._ask_again_s, self._recalled = goal, 0.0, False
            if self._target == own.previous and not own.suspect:
                own.previous = (0, b"")  # once; if it cannot be undone any more, it is fetched
                here.emit(Undo(*self._target))
            else:
                here.emit(StartSync(goal))

    # ------------------------------------------------------------ where we are

    def on_caught_up(self, event: CaughtUp) -> None:
        own = self._own
        if not own.unsynced:
            return  # the outcome of an older order
        if self._recalled:
            self._recalled, self._asked = False, None
            if (event.round, event.chain) == (own.round, own.chain):
                return  # nothing has changed that our trainer is to hear of
        self._failures = 0
        steps = event.round - own.round
        if steps != 0 or event.chain != own.chain:
            own.previous = (own.round, own.chain) if steps == 1 else (0, b"")
        stale = self._foreign or own.suspect or steps != 1 or own.round == 0
        if (event.round, event.chain) == self._target:
            own.unsynced = own.diverged = self._foreign = False
            self._asked = None
        own.caught_up(event.round, event.chain)
        own.digest, own.digest_round = event.digest, event.round
        own.suspect = False
        if stale:
            own.reload()
        else:
            own.missed()  # like any round that began without us

    def on_failed(self, why: str) -> None:
        """Repeat, after a pause, the order that has ended without success."""
        here = self._here
        self._recalled = False
        if self._own.unsynced:
            here.emit(Note("load-failed", f"the state cannot be downloaded: {why}"))
            pause_s = min(here.timing.repair_s * 2**self._failures, PAUSE_MAX_S)
            self._ask_again_s = here.now_s + pause_s
            self._failures = min(self._failures + 1, DOUBLINGS_MAX)
