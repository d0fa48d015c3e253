"""Decide who comes into the view and who goes out of it.

Theory. A joiner stays outside the view at first. It catches up while the run goes on (syncing.py)
and enters with the next planned view when it is at most one round behind; the last step it does as
a member. Nobody waits for it, with one exception: who has reached the state of some round three
times and found that the run had gone on, or has been behind for long because donors that reduce all
the time leave little of their links, gets one boundary held, for a bounded time. A joiner that
makes no progress is dropped and may ask again after a growing pause; one that falls silent is
dropped as fast as a member counts as dead. At most max(1, old voters - 1) joiners enter at once, so
that the old voters alone stay a quorum. An archive is a joiner that never enters.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from atoll.collectives.units import duration
from atoll.peer.membership.events import Effect, Note, Send
from atoll.peer.membership.member import MemberState
from atoll.peer.membership.messages import ARCHIVES_TOLD_MAX, Heartbeat, SyncTarget
from atoll.peer.membership.probation import graduated, rounds_left
from atoll.peer.membership.roster import Roster
from atoll.peer.membership.timing import Timing
from atoll.peer.membership.view import (
    ARCHIVE,
    MEMBERS_MAX,
    WITNESS,
    Banned,
    Member,
    View,
    is_quorum,
    outbound_of,
    short,
    successors,
)

JOINERS_MAX = 64  # pending joiners, and as many archives (a flood must not fill memory)
BACKOFF_MAX_S = 60.0  # of a joiner that keeps stalling
DROPPED_MAX = 1024  # joiners whose pause is remembered, the latest
TRIES_MAX = 3  # states that a peer reaches too late before a boundary is held for it ...
MEMBER_TRIES_MAX = 1  # ... with a trainer that could take part
# Who can only dial out is written into the view for whoever draws partners by it. That alone makes
# a new one, but no sooner after the last: what is found out at first may change once more.
PATHS_S = 5.0
JOINER_PATIENCE = 12.0  # a joiner is held for after so many times what a member with a trainer is
HOLD_MAX_S = 30.0  # as long as the slowest trainer is waited for
EXCHANGES_KEPT = 3  # the shortest counts: one in which something was wrong takes longer
HOLD_PAUSES = 10.0  # and again only after so many times the hold: rounds lose a tenth at most
_BACKOFF_MIN_S = 1.0


@dataclass(slots=True)
class Joiner:
    member: Member
    heard_s: float
    beat: Heartbeat | None = None
    beat_s: float = 0.0
    progress_bytes: int = -1
    progress_s: float = 0.0


@dataclass(slots=True)
class CatchUpHold:
    """Describe a peer that reaches states, but each of them too late."""

    round: int
    since_s: float
    tries: int = 0
    held_since_s: float | None = None
    held_until_s: float = 0.0
    is_over: bool = False  # the hold: it has lasted long enough, or nothing came of it
    progress_bytes: int = -1
    progress_s: float = 0.0

    def gets_on(self, beat: Heartbeat, now_s: float, stall_s: float) -> bool:
        """Note what a peer has moved by now; return whether it has moved something lately."""
        if beat.progress_bytes != self.progress_bytes:
            self.progress_bytes, self.progress_s = beat.progress_bytes, now_s
        return now_s - self.progress_s <= stall_s


class Admission:
    """Decide which joiners enter the next view, and which members leave.

    It is a part of the coordinator, and reads its follower (the own state) and its roster.
    """

    def __init__(
        self,
        view: View,
        me: bytes,
        own: MemberState,
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
        self.joiners: dict[bytes, Joiner] = {}
        self._since_s: float | None = None  # when this view was first looked at
        self.leaving: set[bytes] = set()
        self.addresses: dict[bytes, str] = {}  # that linked peers advertise now
        self._min_trainers = view.rules.min_trainers  # what members ask for, the last of them
        self.successor: bytes | None = None  # whom to hand over to; empty: to the first that can
        self._catch_ups: dict[bytes, CatchUpHold] = {}
        self._held = (-1, 0.0)  # after which round a boundary was held last, and since when
        self._rounds_s: tuple[float, ...] = ()  # how long the last exchanges took
        self._not_before_s: dict[bytes, float] = {}  # when a dropped joiner may ask again
        self._stalls: dict[bytes, int] = {}

    # ------------------------------------------------------------ facts

    def on_join(self, member: Member, now_s: float) -> None:
        """Note who asks to come in.

        A peer of the view that asks with a newer incarnation has died.
        """
        known, is_archive = self.joiners.get(member.peer), member.role == ARCHIVE
        if known is not None and known.member.inc >= member.inc:
            known.heard_s = now_s
            return
        paused = now_s < self._not_before_s.get(member.peer, now_s)
        if paused or self.view.is_banned(member.peer):
            return
        in_view = self.view.member(member.peer)
        alike = [x for x in self.joiners.values() if (x.member.role == ARCHIVE) == is_archive]
        if known is None and in_view is None and len(alike) >= JOINERS_MAX:
            return
        if in_view is not None:
            if in_view.inc >= member.inc:
                return
            self._roster.refused(member.peer)
        self.joiners[member.peer] = Joiner(member, now_s, progress_s=now_s)
        what = "follows as an archive" if member.role == ARCHIVE else "asks to join"
        self._emit(Note("join", f"{short(member.peer)} {what}", member.peer))

    def on_beat(self, source: bytes, beat: Heartbeat, now_s: float) -> bool:
        """Note a heartbeat of a joiner; return False if it is not a joiner's."""
        joiner = self.joiners.get(source)
        if joiner is None or beat.inc != joiner.member.inc:
            return False
        if beat.progress_bytes != joiner.progress_bytes or not beat.unsynced:
            joiner.progress_bytes, joiner.progress_s = beat.progress_bytes, now_s
        joiner.beat = beat
        joiner.beat_s = joiner.heard_s = now_s
        if self._differs(beat):
            self._emit(Send(source, self._sync_target(joiner, now_s)))
        return True

    def _differs(self, beat: Heartbeat) -> bool:
        """Return whether a joiner has other bytes than we have of the same state.

        It may have caught up on what somebody gave it who has left since, and is not let in: of
        two that differ nobody can say who is right.
        """
        own = self._own
        if beat.digest_round != beat.round:
            return False
        if (beat.round, beat.chain) not in ((own.round, own.chain), own.previous):
            return False
        ours = own.digest_after(beat.round)
        return bool(ours and beat.digest) and beat.digest != ours

    def knows(self, peer: bytes) -> bool:
        """Return whether somebody outside has asked here lately, whatever has come of it."""
        banned = self.view.is_banned(peer)
        return peer in self.joiners or peer in self._not_before_s or banned

    def take_over(self, before: Admission) -> None:
        """Take over the joiners and leavers of the view before, as its coordinator.

        Joiners that it left waiting need not ask again.
        """
        waiting = before.joiners.items()
        self.joiners = {p: x for p, x in waiting if self.view.member(p) != x.member}
        entered = set(self.view.peers)
        self._not_before_s = {p: t for p, t in before._not_before_s.items() if p not in entered}
        self._stalls = {p: n for p, n in before._stalls.items() if p not in entered}
        self.successor = (
            before.successor if not before.successor or before.successor in entered else None
        )
        lives = {member.peer for member in before.view.members if member in self.view.members}
        self.leaving = before.leaving & lives  # or a crowd would go one by one, a view for each
        self._held, self._rounds_s = before._held, before._rounds_s
        self._catch_ups = before._catch_ups  # ``hold`` forgets who is not there any more

    def ask_trainers(self, count: int) -> None:
        """Let rounds need so many trainers from the next view on."""
        self._min_trainers = count

    def can_finish(self, staying: set[bytes]) -> bool:
        """Return whether a round that is open can be committed by those who are staying.

        If not, leaving aborts it: a view without the leavers waits for the round, and they would go
        before it is decided, with the quorum.
        """
        return self.me in staying and is_quorum(self.view, staying)

    # ------------------------------------------------------------ joiners

    def announce(self, now_s: float) -> None:
        """Tell all joiners where the run stands; four times a second, like a beat.

        Those that are silent or download nothing are dropped. Who may ask again and does not counts
        as one that has not asked here: it may have no way to.
        """
        self._not_before_s = {p: t for p, t in self._not_before_s.items() if now_s < t}
        for peer, joiner in list(self.joiners.items()):
            if now_s - joiner.heard_s > self._timing.failure_s:
                self._drop(peer, now_s, _BACKOFF_MIN_S, "nothing is heard of it")
            elif self._stalls_others(joiner, now_s):
                self._stalls[peer] = stalls = self._stalls.get(peer, 0) + 1
                self._drop(
                    peer, now_s, _BACKOFF_MIN_S * 2.0 ** min(stalls - 1, 10), "it downloads nothing"
                )
            else:
                self._emit(Send(peer, self._sync_target(joiner, now_s)))

    def _stalls_others(self, joiner: Joiner, now_s: float) -> bool:
        """Return whether a joiner makes no progress and takes the place of one that does.

        An archive keeps nobody waiting.
        """
        idle_s = now_s - joiner.progress_s
        return idle_s > self._timing.joiner_stall_s and joiner.member.role != ARCHIVE

    def _sync_target(self, joiner: Joiner, now_s: float) -> SyncTarget:
        tag, own = (self.view.lineage, self.view.number), self._own
        goal = (own.round, own.chain)
        if own.unsynced:
            goal = (self.view.base_round, self.view.base_chain)
        beat = joiner.beat
        # One whose heartbeats go elsewhere follows another lineage, which may be gone.
        recent = now_s - joiner.beat_s <= self._timing.failure_s
        knows = recent and beat is not None and (beat.lineage, beat.view) == tag
        view = None if knows else self.view
        digest = own.digest_after(own.round) if goal == (own.round, own.chain) else b""
        return SyncTarget(*tag, *goal, view, self._archives(joiner.member), digest)

    def _archives(self, to: Member) -> tuple[Member, ...]:
        """Return the archives that have our state, or had it a moment ago."""
        own = self._own
        near = [
            x.member
            for x in self.joiners.values()
            if x.member.role == ARCHIVE
            and x.beat is not None
            and x.member != to
            and (x.beat.round, x.beat.chain) in ((own.round, own.chain), own.previous)
        ]
        return tuple(near[:ARCHIVES_TOLD_MAX])

    def has_caught_up(self, joiner: Joiner) -> bool:
        """Return whether a joiner may enter the view: it is at most one round behind.

        A witness may once a heartbeat of it has come, an archive never.
        """
        beat, own = joiner.beat, self._own
        if beat is None or joiner.member.role == ARCHIVE:
            return False
        if joiner.member.role == WITNESS:
            return True
        position = (beat.round, beat.chain)
        if position == (own.round, own.chain):
            return not beat.unsynced and not self._differs(beat)
        has_state = beat.digest_round == beat.round > 0
        return position == own.previous and has_state and not self._differs(beat)

    def hold(self, alive: set[bytes], now_s: float) -> bool:
        """Return whether the boundary waits for somebody who cannot keep up, while it gets on.

        For all of them together it waits no longer than for one.
        """
        behind = self._behind(alive)
        if not behind and not self._catch_ups:
            return False  # as nearly always
        lagging = {p for p in alive if p in behind or self._lags(p)}
        kept = lagging | self.joiners.keys() & behind.keys()
        self._catch_ups = {p: catch_up for p, catch_up in self._catch_ups.items() if p in kept}
        waits = False
        for peer, beat in behind.items():
            catch_up = self._catch_ups.setdefault(peer, CatchUpHold(beat.round, now_s))
            if beat.round != catch_up.round:
                catch_up.round, catch_up.tries = beat.round, catch_up.tries + 1
            if catch_up.held_since_s is None and self._is_hopeless(peer, beat, catch_up, now_s):
                catch_up.held_since_s = now_s
                text = f"round {self._own.round + 1} waits up to {duration(self._hold_s)} for"
                self._emit(Note("hold", f"{text} {short(peer)}, which cannot keep up", peer))
            if self._waits_for(catch_up, beat, now_s):
                waits = True
                continue
            since_s, until_s = catch_up.held_since_s, catch_up.held_until_s
            if since_s is not None and now_s - since_s > HOLD_PAUSES * (until_s - since_s):
                self._catch_ups[peer] = CatchUpHold(beat.round, now_s)
        return waits and self._has_patience(now_s)

    def _has_patience(self, now_s: float) -> bool:
        """Return whether the boundary after this round may be held any longer."""
        number, since_s = self._held
        if number != self._own.round:
            self._held = (self._own.round, now_s)
            return True
        return now_s - since_s < self._hold_s

    def exchanged(self, took_s: float) -> None:
        """Note how long the exchange of a round has taken that is committed."""
        self._rounds_s = (*self._rounds_s, took_s)[-EXCHANGES_KEPT:]

    @property
    def _hold_s(self) -> float:
        """Return how long a boundary waits: who lacks a round copies it in the time of one."""
        return max(
            self._timing.hold_s, min((*self._rounds_s, HOLD_MAX_S)) if self._rounds_s else 0.0
        )

    def _waits_for(self, catch_up: CatchUpHold, beat: Heartbeat, now_s: float) -> bool:
        """Return whether the boundary is held for this peer now."""
        gets_on, since_s = (
            catch_up.gets_on(beat, now_s, self._timing.stall_s),
            catch_up.held_since_s,
        )
        if since_s is None or catch_up.is_over:
            return False
        catch_up.held_until_s = now_s
        catch_up.is_over = not gets_on or now_s - since_s >= self._hold_s
        return not catch_up.is_over

    def _lags(self, peer: bytes) -> bool:
        """Return whether the last heartbeat of a member names another state than ours.

        It may be synced, with the round before: one that reaches each state when the next round has
        begun without it is synced for a moment in every round, and takes part in none.
        """
        beat, own = self._roster.heartbeats.get(peer), self._own
        return beat is not None and (beat.round, beat.chain) != (own.round, own.chain)

    def _behind(self, alive: set[bytes]) -> dict[bytes, Heartbeat]:
        found = {p: b for p, b in self._roster.heartbeats.items() if p in alive and b.unsynced}
        for peer, joiner in self.joiners.items():
            is_archive = joiner.member.role == ARCHIVE
            if joiner.beat is not None and not is_archive and not self.has_caught_up(joiner):
                found[peer] = joiner.beat
        return found

    def _is_hopeless(
        self, peer: bytes, beat: Heartbeat, catch_up: CatchUpHold, now_s: float
    ) -> bool:
        """Return whether a peer reaches states too late, or none.

        Donors that reduce all the time have little of their links left for it.
        """
        waited_s = now_s - catch_up.since_s
        if peer not in self.joiners and beat.attached:
            return catch_up.tries >= MEMBER_TRIES_MAX or waited_s >= self._timing.behind_s
        has_state = beat.digest_round == beat.round > 0
        late = has_state and catch_up.tries >= TRIES_MAX
        return late or waited_s >= JOINER_PATIENCE * self._timing.behind_s

    def discount_pause(self, pause_s: float) -> None:
        for joiner in self.joiners.values():
            joiner.heard_s += pause_s
            joiner.progress_s += pause_s

    def _drop(self, peer: bytes, now_s: float, pause_s: float, why: str) -> None:
        role = self.joiners.pop(peer).member.role
        pause_s = min(pause_s, BACKOFF_MAX_S)
        self._not_before_s.pop(peer, None)
        self._not_before_s[peer] = now_s + pause_s  # the latest last
        for old in list(self._not_before_s)[:-DROPPED_MAX]:  # forgotten: this stays small
            del self._not_before_s[old]
            self._stalls.pop(old, None)
        what = "archive" if role == ARCHIVE else "joiner"
        text = (
            f"{short(peer)} is no {what} any more: {why}; it may ask again in {duration(pause_s)}"
        )
        self._emit(Note("join", text, peer))

    # ------------------------------------------------------------ the next view

    def next_view(
        self,
        alive: set[bytes],
        now_s: float,
        *,
        admit: bool = True,
        spared: Collection[bytes] = (),
    ) -> View | None:
        """Return the view that membership asks for, or None if the present one will do.

        None as well while nobody can take over. ``spared``: who is not voted out for its silence.
        """
        if self._since_s is None:
            self._since_s = now_s
        bans = self._own.bans.due(self.view, alive)
        gone = self._roster.removable(now_s).difference(spared) | self.leaving
        other_rules = self._min_trainers != self.view.rules.min_trainers
        named = self._members()
        left = rounds_left(self.view, self._own.completed)
        done = bool(left) and not all(left.values())  # who has served counts from the next view on
        may_change = self.successor is not None or done
        other_paths = now_s - self._since_s >= PATHS_S
        other_paths &= self._outbound() & self.view.peer_set != {*self.view.outbound}
        may_change |= other_rules or other_paths or named != self.view.members
        if not (bans or gone or self.joiners or may_change):
            return None
        out = {ban.peer for ban in (*self.view.banned, *bans)}
        gone |= out
        back = {p for p, x in self.joiners.items() if self._is_newer(x.member)}
        kept = [m for m in named if m.peer not in gone and m.peer not in back]
        admit = admit and now_s - self._since_s >= self._timing.admit_s
        able = (x for p, x in self.joiners.items() if admit and p not in out)
        ready = [x.member for x in able if self.has_caught_up(x)]
        room = min(max(1, len(kept) - 1), MEMBERS_MAX - len(kept))
        members = tuple(kept + ready[:room])
        leaves = self.me in self.leaving
        successor = (
            self._successor(alive, members) if leaves or self.successor is not None else None
        )
        coordinator = successor or (None if leaves else self.me)
        if not members or coordinator is None:
            return None
        same = members == self.view.members and coordinator == self.me
        if same and not done and not bans and not other_rules and not other_paths:
            return None
        following = self._next(members, coordinator, (self._own.round, self._own.chain), bans)
        outbound = self._outbound().intersection(member.peer for member in members)
        return replace(following, outbound=tuple(sorted(outbound)))

    def _outbound(self) -> set[bytes]:
        """Return who can only dial out, as they say themselves; the silent, as the view says."""
        joining = ((peer, joiner.beat) for peer, joiner in self.joiners.items())
        silent = {*self.view.outbound}.difference(self._roster.heartbeats)
        said = {peer for peer, beat in joining if beat is not None and beat.outbound}
        return self._roster.outbound() | said | silent

    def _members(self) -> tuple[Member, ...]:
        """Return the members with the addresses that they advertise now: restarts may move them."""
        members, now = self.view.members, self.addresses
        moved = [m for m in members if now.get(m.peer, "") not in ("", m.address)]
        if not moved:
            return members
        return tuple(replace(m, address=now[m.peer]) if m in moved else m for m in members)

    def lacks_base(self, alive: set[bytes]) -> bool:
        """Return whether the run cannot go on from here, because its base is missing.

        We lack the last commit or, as a witness, which never holds one, hear nobody that has it.
        """
        own = self._own
        if own.is_replica or own.round == 0:
            return own.is_behind
        return not alive.intersection(self._roster.has_synced(own.round, own.chain))

    def to_synced(self, alive: set[bytes]) -> View | None:
        """Return a view whose coordinator has the last commit, or None if nobody alive has it.

        We lack that commit: the run must not wait for our transfer.
        """
        own, view = self._own, self.view
        base = max(own.position, (view.base_round, view.base_chain))
        able = [peer for peer in self._roster.has_synced(*base) if peer in alive]
        if not able:
            return None
        text = f"this peer lacks round {base[0]}; {short(able[0])} has it and takes over"
        self._emit(Note("hand-over", text))
        return self._next(view.members, able[0], base)

    def _next(
        self,
        members: tuple[Member, ...],
        coordinator: bytes,
        base: tuple[int, bytes],
        bans: tuple[Banned, ...] = (),
    ) -> View:
        following = replace(
            self.view,
            number=self.view.number + 1,
            members=members,
            outbound=outbound_of(self.view, members),
            coordinator=coordinator,
            base_round=base[0],
            base_chain=base[1],
            fork=False,
            rollback=False,
            newcomers=(),
            absent=(),
            banned=(*self.view.banned, *bans),
            rules=replace(self.view.rules, min_trainers=self._min_trainers),
        )
        return graduated(self.view, following, self._own.completed, self._own.terms)

    def _is_newer(self, member: Member) -> bool:
        in_view = self.view.member(member.peer)
        return in_view is not None and in_view.inc < member.inc

    def _successor(self, alive: set[bytes], members: tuple[Member, ...]) -> bytes | None:
        """Return whom to hand over to: the first successor with the state, or the one asked for.

        None while there is nobody; then those behind catch up: a leaver may hold the only copy.
        """
        staying = {member.peer: member.role for member in members}
        able = [p for p in successors(self.view) if p in alive and p in staying]
        if self.successor and self.me not in self.leaving:
            able = [p for p in able if p == self.successor]
        synced = self._roster.has_synced(self._own.round, self._own.chain)
        if self._own.round > 0 and not synced:
            return None  # a witness may follow us, but somebody has to have the state
        return next((p for p in able if p in synced or staying[p] == WITNESS), None)
