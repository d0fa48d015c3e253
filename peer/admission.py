"""Who comes in and who goes out, and how those behind get the state.

Theory. A joiner is a *learner* outside the view until it holds the state of the last commit; then
it enters with the next planned view. It and every member that fell behind load the state while
the boundary between two rounds is held for them. The hold is bounded: it lasts only while bytes
arrive. A learner that stalls is dropped, and may ask again after a growing pause and of another
donor; one that falls silent is dropped as fast as a member counts as dead. At most
max(1, old voters - 1) learners enter at once, so that the old voters alone stay a quorum.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from atoll.peer.events import Effect, Note, Send
from atoll.peer.follower import Follower
from atoll.peer.messages import Heartbeat, Learn
from atoll.peer.roster import Roster
from atoll.peer.timing import Timing
from atoll.peer.views import MEMBERS_MAX, Member, View, short, successors

__all__ = ["BACKOFF_MAX_S", "DROPPED_MAX", "LEARNERS_MAX", "Admission"]

LEARNERS_MAX = 64  # pending joiners; more are asked to come back (a flood must not fill memory)
BACKOFF_MAX_S = 60.0  # of a learner that keeps stalling: it must not hold up every boundary
DROPPED_MAX = 1024  # joiners whose pause is remembered, the latest
_BACKOFF_MIN_S = 1.0


@dataclass(slots=True)
class Learner:
    member: Member
    heard_s: float
    beat: Heartbeat | None = None


@dataclass(slots=True)
class Load:
    """An order to load the state, and when bytes last arrived for it."""

    learn: Learn
    progress_bytes: int
    progress_s: float
    sent_s: float


class Admission:
    """Part of the coordinator; reads its follower (the own state) and its roster."""

    def __init__(
        self,
        view: View,
        me: bytes,
        own: Follower,
        roster: Roster,
        timing: Timing,
        emit: Callable[[Effect], None],
    ) -> None:
        self.view = view
        self.me = me
        self._own = own
        self._roster = roster
        self._timing = timing
        self._emit = emit
        self.learners: dict[bytes, Learner] = {}
        self.leaving: set[bytes] = set()
        self._loads: dict[bytes, Load] = {}
        self._not_before_s: dict[bytes, float] = {}  # when a dropped learner may ask again
        self._stalls: dict[bytes, int] = {}  # loads of a peer that have stalled

    # ------------------------------------------------------------ facts

    def on_join(self, member: Member, now_s: float) -> None:
        """Note who asks; a peer of the view that asks with a newer incarnation has died."""
        known = self.learners.get(member.peer)
        if known is not None and known.member.inc >= member.inc:
            known.heard_s = now_s
            return
        banned = now_s < self._not_before_s.get(member.peer, now_s)
        if banned or len(self.learners) >= LEARNERS_MAX:
            return
        in_view = self.view.member(member.peer)
        if in_view is not None:
            if in_view.inc >= member.inc:
                return
            self._roster.refused(member.peer)
        self.learners[member.peer] = Learner(member, now_s)
        self._emit(Note("join", f"{short(member.peer)} asks to join", member.peer))

    def on_beat(self, source: bytes, beat: Heartbeat, now_s: float) -> bool:
        """True if the heartbeat is a learner's."""
        learner = self.learners.get(source)
        if learner is None or beat.inc != learner.member.inc:
            return False
        learner.beat = beat
        learner.heard_s = now_s
        return True

    def take_over(self, before: Admission) -> None:
        """Joiners that the view before left waiting need not ask again."""
        waiting = before.learners.items()
        self.learners = {p: x for p, x in waiting if self.view.member(p) != x.member}
        entered = set(self.view.peers)
        self._not_before_s = {p: t for p, t in before._not_before_s.items() if p not in entered}
        self._stalls = {p: n for p, n in before._stalls.items() if p not in entered}

    # ------------------------------------------------------------ loading the state

    def hold(self, alive: set[bytes], now_s: float) -> bool:
        """Have learners and laggards load the state; true while the boundary is held for them."""
        self._drop_silent(now_s)
        wanting = self._laggards(alive)
        wanting += [x.member for x in self.learners.values() if not self._has_learnt(x)]
        for peer in self._loads.keys() - {member.peer for member in wanting}:
            del self._loads[peer]
        held = [self._order_load(member, alive, now_s) for member in wanting]
        return any(held)

    def help_laggards(self, alive: set[bytes], now_s: float) -> None:
        """While a round is under way: its quorum may need the votes of those behind."""
        for member in self._laggards(alive):
            self._order_load(member, alive, now_s)

    def _laggards(self, alive: set[bytes]) -> list[Member]:
        behind = self._roster.unsynced() & alive
        if self._own.unsynced:
            behind.add(self.me)
        return [self._member(peer) for peer in sorted(behind)]

    def _order_load(self, member: Member, alive: set[bytes], now_s: float) -> bool:
        peer = member.peer
        donor = self._donor(peer, alive)
        if donor is None:
            return self._digest_pending()
        learn = self._learn_from(donor)
        beat = self._beat(peer)
        progress_bytes = beat.progress_bytes if beat else 0
        load = self._loads.get(peer)
        if load is None or load.learn != learn:
            self._emit(Send(peer, learn))
            stuck = load is not None and load.progress_bytes == progress_bytes
            since_s = load.progress_s if load and stuck else now_s
            load = self._loads[peer] = Load(learn, progress_bytes, since_s, now_s)
        elif now_s - load.sent_s >= self._timing.repair_s:
            load.sent_s = now_s
            self._emit(Send(peer, learn))  # the order or its outcome may have been lost
        if load.progress_bytes != progress_bytes:
            load.progress_bytes, load.progress_s = progress_bytes, now_s
        if now_s - load.progress_s < self._timing.learner_stall_s:
            return True
        if peer in self.learners:
            self._stalls[peer] = stalls = self._stalls.get(peer, 0) + 1
            self._drop(peer, now_s, _BACKOFF_MIN_S * 2.0 ** min(stalls - 1, 10), "no progress")
        return False

    def _learn_from(self, donor: Member) -> Learn:
        own = self._own
        digest = own.digest if donor.peer == self.me else self._roster.digest_of(donor.peer)
        return Learn(self.view.lineage, self.view.number, *self._goal(), digest, donor)

    def _goal(self) -> tuple[int, bytes]:
        """The state that everyone should reach: ours, or the view's base while we lack that."""
        own = self._own
        if own.unsynced and not own.doubtful:
            return self.view.base_round, self.view.base_chain
        return own.round, own.chain

    def _donor(self, learner: bytes, alive: set[bytes]) -> Member | None:
        """A living, synced replica whose digest is known: rather not the coordinator."""
        own = self._own
        others = [p for p in self._roster.synced(*self._goal()) if p in alive and p != learner]
        if others:
            return self._member(others[self._stalls.get(learner, 0) % len(others)])
        own_known = own.round == 0 or own.digest_round == own.round
        if learner != self.me and not own.unsynced and own_known:
            return self._member(self.me)
        return None

    def _digest_pending(self) -> bool:
        """Nobody has reported the digest of the last commit yet: a moment's wait."""
        return not self._own.unsynced and self._own.digest_round != self._own.round

    def forgive(self, pause_s: float) -> None:
        for learner in self.learners.values():
            learner.heard_s += pause_s
        for load in self._loads.values():
            load.progress_s += pause_s

    def _member(self, peer: bytes) -> Member:
        member = self.view.member(peer)
        assert member is not None
        return member

    def _beat(self, peer: bytes) -> Heartbeat | None:
        learner = self.learners.get(peer)
        return learner.beat if learner else self._roster.beats.get(peer)

    def _has_learnt(self, learner: Learner) -> bool:
        beat = learner.beat
        if beat is None or beat.unsynced:
            return False
        return (beat.round, beat.chain) == (self._own.round, self._own.chain)

    def _drop_silent(self, now_s: float) -> None:
        for peer, learner in list(self.learners.items()):
            if now_s - learner.heard_s > self._timing.failure_s:
                self._drop(peer, now_s, _BACKOFF_MIN_S, "silent")

    def _drop(self, peer: bytes, now_s: float, pause_s: float, why: str) -> None:
        del self.learners[peer]
        self._loads.pop(peer, None)
        pause_s = min(pause_s, BACKOFF_MAX_S)
        self._not_before_s.pop(peer, None)
        self._not_before_s[peer] = now_s + pause_s  # the latest last
        past = [p for p, t in self._not_before_s.items() if now_s - t > BACKOFF_MAX_S]
        for old in past or list(self._not_before_s)[:-DROPPED_MAX]:  # forgotten: this stays small
            del self._not_before_s[old]
            self._stalls.pop(old, None)
        text = f"{short(peer)} dropped as a joiner: {why}; it may ask again in {pause_s:.0f} s"
        self._emit(Note("join", text, peer))

    # ------------------------------------------------------------ the next view

    def next_view(self, alive: set[bytes], now_s: float, *, admit: bool = True) -> View | None:
        """The view that membership asks for, or None if the present one will do."""
        gone = self._roster.removable(now_s) | self.leaving
        back = {p for p, x in self.learners.items() if self._is_newer(x.member)}
        kept = [
            m
            for m in self.view.members
            if (m.peer not in gone and m.peer not in back)
            or (m.peer == self.me and self.me not in self.leaving)
        ]
        ready = [x.member for x in self.learners.values() if admit and self._has_learnt(x)]
        room = min(max(1, len(kept) - 1), MEMBERS_MAX - len(kept))
        members = tuple(kept + ready[:room])
        if members == self.view.members or not members:
            return None
        coordinator = self._heir(alive, members) if self.me in self.leaving else self.me
        if coordinator is None:
            return None
        return replace(
            self.view,
            number=self.view.number + 1,
            members=members,
            coordinator=coordinator,
            base_round=self._own.round,
            base_chain=self._own.chain,
            fork=False,
        )

    def _is_newer(self, member: Member) -> bool:
        in_view = self.view.member(member.peer)
        return in_view is not None and in_view.inc < member.inc

    def _heir(self, alive: set[bytes], members: tuple[Member, ...]) -> bytes | None:
        """Whom a leaving coordinator hands over to: the first successor that holds the state.

        While there is none, those behind load it: the leaver may hold its only copy.
        """
        staying = {member.peer for member in members}
        heirs = [p for p in successors(self.view) if p in alive and p in staying]
        synced = self._roster.synced(self._own.round, self._own.chain)
        return next((p for p in heirs if p in synced), None)
