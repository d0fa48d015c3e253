"""Hand a view over to a member that reaches more of the others than its coordinator does.

Theory. Any member can coordinate that has links to a quorum; who can only dial out stands later in
elections, but nobody is barred: who is reachable may be asleep, or behind. Two things speak for
another coordinator afterwards. A member without a link to the coordinator takes part in nothing,
although it lives and others have links to it. And whoever joins has to reach the coordinator, which
it cannot if that can only dial out itself, or has no protocol in common with it. So the view is
handed over, at a boundary, to whoever reaches more members, or as many and can be dialled, or as
many and somebody outside who asks in vain (callers.py). It has to be so for a while, a shorter one
while somebody is cut off: links break and are back, and each change costs a view.

Until then a member that only the coordinator has no link to is not voted out. All this is what
members say of themselves, and nobody can check it. So what it may cost is bounded: nobody is spared
for longer than ``Timing.spare_s``, and a new coordinator stays one for ``Timing.callers_s`` whoever
calls elsewhere. Who makes up links it has not gets to coordinate by that, as it would by its turn.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from atoll.collectives.units import count, duration
from atoll.peer.membership.admission import Admission
from atoll.peer.membership.events import Effect, Note
from atoll.peer.membership.roster import Roster
from atoll.peer.membership.timing import Timing
from atoll.peer.membership.view import View, short


class Succession:
    """Watch, as the coordinator, whether another member would reach more of the others."""

    def __init__(
        self,
        view: View,
        roster: Roster,
        admission: Admission,
        timing: Timing,
        emit: Callable[[Effect], None],
    ) -> None:
        self._view, self._me, self._roster, self._admission = view, roster.me, roster, admission
        self._timing, self._emit = timing, emit
        self._since_s: float | None = None  # since when somebody is better placed ...
        self._cut_off_s: float | None = None  # ... and reaches a member that this peer does not
        self._leads_since_s: float | None = None
        self._heeds_callers = False
        self._spared_since_s: dict[bytes, float] = {}

    def take_over(self, before: Succession) -> None:
        """Go on with what this coordinator knew in the view before."""
        self._since_s, self._cut_off_s = before._since_s, before._cut_off_s
        self._leads_since_s, self._heeds_callers = before._leads_since_s, before._heeds_callers
        self._spared_since_s = before._spared_since_s

    def successor(
        self, alive: Collection[bytes], position: tuple[int, bytes], now_s: float
    ) -> bytes | None:
        """Return whom to hand over to, if somebody has been better placed for long enough.

        ``position``: the round and the chain of our state; a witness need not have it.
        """
        timing = self._timing
        self._leads_since_s = now_s if self._leads_since_s is None else self._leads_since_s
        leads_s = now_s - self._leads_since_s
        self._heeds_callers = leads_s >= timing.callers_s - timing.cut_off_s
        if self._roster.are_alike:
            self._since_s = self._cut_off_s = None
            return None
        better = self._better(alive)
        calling = any(self._reach(peer)[2] for peer in better)
        self._since_s = (self._since_s or now_s) if better else None
        self._cut_off_s = (self._cut_off_s or now_s) if calling or self._cut_off(alive) else None
        long = self._since_s is not None and now_s - self._since_s >= timing.better_s
        cut_off = self._cut_off_s is not None and now_s - self._cut_off_s >= timing.cut_off_s
        if not long and not cut_off:
            return None
        holders = {*self._roster.has_synced(*position), *self._view.witnesses}
        able = [peer for peer in better if peer in holders]
        if not able:
            return None
        chosen = max(able, key=lambda peer: (self._reach(peer), peer in self._view.replicas))
        waited_s = timing.cut_off_s if cut_off else timing.better_s
        text = f"for {duration(waited_s)} {self._why(chosen)}: it takes over"
        self._emit(Note("hand-over", text, chosen))
        self._since_s = self._cut_off_s = None
        return chosen

    def spared(self, alive: Collection[bytes], now_s: float) -> set[bytes]:
        """Return the silent members that are not voted out yet, because others may reach them."""
        cut_off, since_s = self._cut_off(alive), self._spared_since_s
        if not cut_off and not since_s:
            return set()  # as nearly always
        self._spared_since_s = {peer: since_s.get(peer, now_s) for peer in cut_off}
        limit_s = now_s - self._timing.spare_s
        return {peer for peer, began_s in self._spared_since_s.items() if began_s > limit_s}

    def _cut_off(self, alive: Collection[bytes]) -> set[bytes]:
        """Return the silent members that live, as far as others can tell who would reach them."""
        mine = self._lacking(self._me)
        if not mine:
            return set()
        reached = (mine - self._lacking(peer) for peer in self._better(alive))
        return set().union(*reached) - {*alive} - self._roster.gone

    def _better(self, alive: Collection[bytes]) -> list[bytes]:
        """Return the living members that reach more than this peer, in the order of the view."""
        heard, mine = self._roster.heartbeats, self._reach(self._me)
        if mine[:2] >= (0, True) and not any(beat.callers for beat in heard.values()):
            return []  # nobody can be better placed
        others = (peer for peer in self._view.peers if peer in alive and peer in heard)
        return [peer for peer in others if self._reach(peer) > mine]

    def _reach(self, peer: bytes) -> tuple[int, bool, int]:
        """Return what speaks for a member: first that it lacks few links."""
        beat = self._roster.heartbeats.get(peer)
        if beat is None:
            return 0, True, 0
        heeded = beat.callers if self._heeds_callers and peer != self._me else ()
        calling = sum(not self._admission.knows(caller) for caller in heeded)
        return -len(beat.unlinked), not beat.outbound, calling

    def _lacking(self, peer: bytes) -> set[bytes]:
        beat, peers = self._roster.heartbeats.get(peer), self._view.peers
        if beat is None or not beat.unlinked:
            return set()
        return {peers[n] for n in beat.unlinked if n < len(peers)}

    def _why(self, chosen: bytes) -> str:
        here, there = len(self._lacking(self._me)), len(self._lacking(chosen))
        if there < here:
            more = count(here - there, "more member")
            return f"{short(chosen)} has had links to {more} than this peer"
        if self._reach(self._me)[1]:
            return f"{short(chosen)} has been asked by one outside that has no link to this peer"
        return f"nobody could dial this peer, and {short(chosen)} can be dialled"
