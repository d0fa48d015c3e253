"""Sync a peer to the group's state from many donors while the run goes on. Sans-I/O.

    IDLE -> LOOKING    ask every donor what it has, until a digest is agreed (verification.py)
         -> READING    with nothing at hand: get the specification that this digest covers
         -> PREPARING  memory for the state
         -> PULLING    chunks from all donors, entries on top, until every chunk is at the goal
         -> FINISHING  hash the whole; it must have the agreed digest

A newer goal moves the aim and nothing else: what is here stays. A goal of another history costs
what the histories do not share. A failure goes back to IDLE and keeps what has been received.
"""

from __future__ import annotations

import hashlib
from enum import Enum

from atoll.collectives.errors import LocalProtocolError
from atoll.collectives.units import duration, listed
from atoll.peer.membership.events import Goal
from atoll.peer.membership.view import short
from atoll.peer.state_sync import events as ev
from atoll.peer.state_sync import messages as msg
from atoll.peer.state_sync.assembly import StateAssembly
from atoll.peer.state_sync.sources import DonorTable, Piece, digest_of

TICK_S = 0.05  # a laggard should hear soon that donors have applied what it wants
ANSWER_S = 5.0  # to the question for the specification; then another donor is asked
AGREE_S = 30.0  # members that name different digests for so long do not agree
PROGRESS_S = 60.0  # without anything useful: the machine should choose other donors
USUAL_S = 3.0  # one round takes no longer, and is not worth a line
MISMATCHES_MAX = 2  # whole states with a wrong digest: from what was here, then from donors alone


class SyncPhase(Enum):
    IDLE = "idle"
    LOOKING = "looking"
    READING = "reading"
    PREPARING = "preparing"
    PULLING = "pulling"
    FINISHING = "finishing"


_IDLE, _LOOKING, _READING = SyncPhase.IDLE, SyncPhase.LOOKING, SyncPhase.READING
_PREPARING, _PULLING, _FINISHING = SyncPhase.PREPARING, SyncPhase.PULLING, SyncPhase.FINISHING

TRANSITIONS: dict[SyncPhase, frozenset[SyncPhase]] = {
    _IDLE: frozenset({_IDLE, _LOOKING}),
    _LOOKING: frozenset({_IDLE, _READING, _PREPARING, _PULLING}),  # the last two skip what is here
    _READING: frozenset({_IDLE, _PREPARING}),
    _PREPARING: frozenset({_IDLE, _PULLING}),
    _PULLING: frozenset({_IDLE, _FINISHING}),
    _FINISHING: frozenset({_IDLE, _PULLING}),  # back, if the whole has another digest
}


class SyncMachine:
    """Decide what to do next to reach the state of a goal.

    ``handle`` returns effects; call it again at ``next_deadline_s``, with LinkedPeers.
    """

    def __init__(self) -> None:
        self.phase = SyncPhase.IDLE
        self.goal: Goal | None = None
        self._out: list[ev.Effect] = []
        self.donors = DonorTable(self._out)
        self.assembly = StateAssembly(self.donors, self._out)
        self._own = ev.OwnState()
        self._blob_digest = b""  # agreed
        self._blob_asked: tuple[bytes, float] = (b"", float("-inf"))
        self._unagreed_s: dict[int, float] = {}  # since when a round's digest is wanted
        self._finishing: tuple[Goal, bytes] | None = None  # what, and the digest it must have
        self._mismatches = 0
        self._say_s = float("inf")  # when to tell people what is under way
        self._aimed_s = 0.0  # since when something is
        self._now_s = 0.0
        self._unreached_by: set[bytes] = set()  # donors that cannot connect to this peer

    # ------------------------------------------------------------ in and out

    def handle(self, event: ev.Event, now_s: float) -> list[ev.Effect]:
        self._now_s = now_s
        is_news = True
        match event:
            case ev.SetGoal():
                self._set_goal(event.goal, event.own)
            case ev.Cancel():
                self._stop()
            case ev.LinkedPeers():
                self._on_linked(event.peers)
            case ev.DonorMessage():
                is_news = self._on_message(event.source, event.message)
            case ev.PieceArrived():
                self._on_arrived(event)
            case ev.StreamBroken():
                self.donors.pieces.interrupt(event.source)
            case ev.StoreReady():
                self._on_store_ready(event)
            case ev.StoreFailed():
                self._fail(event.why)
            case ev.StateInPlace():
                self._on_in_place()
            case ev.StateRejected():
                self._on_rejected(event)
        if isinstance(event, ev.PieceArrived):
            self._request_pieces()  # a thousand a second: nothing that grows with the state
        elif is_news:  # the next tick is soon enough for what time brings
            self._advance()
        out = self._out[:]
        self._out.clear()
        return out

    def next_deadline_s(self) -> float | None:
        if self.phase in (SyncPhase.IDLE, SyncPhase.PREPARING, SyncPhase.FINISHING):
            return None
        return self._now_s + TICK_S

    def describe(self, now_s: float) -> str:
        """Describe for people which state is on its way, since when, and who has it.

        Return "" if none is.
        """
        if self.phase is SyncPhase.IDLE or self.goal is None:
            return ""
        if self.phase is SyncPhase.FINISHING:
            who = "all of it is here"
        else:
            who = self.donors.describe()
        if self._unreached_by:
            names = listed([short(peer) for peer in sorted(self._unreached_by)])
            who += f"; nothing comes from {names}, which cannot connect to this peer"
        so_far = duration(now_s - self._aimed_s)
        return f"the state of round {self.goal.round} ({so_far} so far), {who}"

    def expects(self, source: bytes, ticket: int) -> Piece | None:
        """Return the piece that this ticket is for, if it is still wanted."""
        is_wanted = self.phase is SyncPhase.PULLING
        return self.donors.pieces.expects(source, ticket) if is_wanted else None

    def arrives(self, source: bytes, ticket: int) -> None:
        """Note that the piece of this ticket has begun to arrive: its donor does not hang."""
        self.donors.pieces.arrives(source, ticket)

    # ------------------------------------------------------------ the task

    def _set_goal(self, goal: Goal, own: ev.OwnState) -> None:
        self.goal = goal
        self.donors.set_goal(goal)
        if not self.assembly.aim(goal):
            self._say(f"round {goal.round} is of another history than what is here: beginning anew")
            self.donors.forget_exclusions()
        back = _is_at(own, goal) and self._finishing is None
        if back and self.phase is not SyncPhase.IDLE:
            self._stop()  # the group is back where we are
        if self.phase is SyncPhase.IDLE:
            self._aimed_s = self._now_s
            self._begin(goal, own)

    def _begin(self, goal: Goal, own: ev.OwnState) -> None:
        self._own = own
        self._mismatches = 0
        if _is_at(own, goal):
            self._out.append(ev.Synced(own.round, own.chain, own.digest))
            return
        self._enter(SyncPhase.LOOKING)
        self.donors.begin(self._now_s)
        self.assembly.begin(goal, own, self._now_s)
        self._unagreed_s = {}
        # Archives do it every round; and that a member has missed rounds is said elsewhere.
        self._say_s = self._now_s + USUAL_S if own.round else self._now_s

    def _enter(self, phase: SyncPhase) -> None:
        if phase not in TRANSITIONS[self.phase]:
            raise LocalProtocolError(f"a sync does not go from {self.phase.value} to {phase.value}")
        self.phase = phase

    def _stop(self) -> None:
        """Stop what is under way. What is here stays."""
        self._enter(SyncPhase.IDLE)
        self._say_s = float("inf")
        self.assembly.release()
        self.donors.release()

    def _fail(self, why: str) -> None:
        self._stop()
        self.donors.forget_exclusions()  # the next task judges anew
        self._out.append(ev.SyncFailed(why))

    def _advance(self) -> None:
        """Do whatever can be done now."""
        if self.phase is SyncPhase.IDLE or self.goal is None:
            return
        if self._finishing is not None:
            return  # the store is being hashed, perhaps for a task that was cancelled meanwhile
        if self._now_s >= self._say_s:
            self._say_begun(self.goal)
        if self.donors.recount(self._now_s):
            self.assembly.on_agreed()
        if self.phase is SyncPhase.LOOKING:
            self._find_blob()
        if self.phase is SyncPhase.READING:
            self._ask_blob()
        if self.phase is SyncPhase.PULLING:
            self.assembly.review(self.goal, self._now_s)
        self._request_pieces()
        if self.phase in (SyncPhase.LOOKING, SyncPhase.READING, SyncPhase.PULLING):
            self._ask_donors(self.goal)
            self._check_limits(self.goal)

    def _request_pieces(self) -> None:
        table, goal = self.assembly.table, self.goal
        if self.phase is not SyncPhase.PULLING or table is None or goal is None:
            return
        if not table.store.is_open:
            self._fail("something else has changed the state meanwhile")
        elif self.assembly.request_pieces(goal, self._now_s):
            digest = self.donors.attestation.agreed[goal.round]
            self._enter(SyncPhase.FINISHING)
            self._finishing = (goal, digest)
            self._out.append(ev.InstallState(table.store, goal.round, digest))

    def _ask_donors(self, goal: Goal) -> None:
        table, agreed = self.assembly.table, self.donors.attestation.agreed
        rounds = {goal.round} | (table.origins() if table is not None else frozenset())
        needed = rounds - agreed.keys()
        self._unagreed_s = {n: self._unagreed_s.get(n, self._now_s) for n in needed}
        behind = self.donors.newest() < goal.round
        soon = self.phase is not SyncPhase.PULLING or behind or bool(needed)
        self.donors.ask(min(rounds), self._now_s, soon=soon)

    def _check_limits(self, goal: Goal) -> None:
        late = [n for n, since_s in self._unagreed_s.items() if self._now_s > since_s + AGREE_S]
        if late:
            said = self.donors.attestation.describe(late[0])
            self._fail(f"no agreement on the state of round {late[0]} for {AGREE_S:.0f} s: {said}")
        elif self._now_s > self.assembly.progress_s + PROGRESS_S:
            table = self.assembly.table
            ahead = table.ahead_of(goal.round) if table is not None else 0
            why = f"chunks of round {ahead} are here" if ahead else self.donors.describe()
            self._fail(f"nothing came for {PROGRESS_S:.0f} s towards round {goal.round}: {why}")

    def _on_linked(self, peers: frozenset[bytes]) -> None:
        """Stop waiting for what was asked over a link that has ended."""
        for peer in self.donors.linked - peers:
            self.assembly.lost(peer)
            if peer == self._blob_asked[0]:
                self._blob_asked = (b"", float("-inf"))
        if self.donors.set_linked(peers):
            self.assembly.look_again()

    def _on_message(self, source: bytes, message: object) -> bool:
        """Take a message of a donor; return whether there may be more to do than before."""
        if not self.donors.knows(source) or self.phase is SyncPhase.IDLE:
            return False
        match message:
            case msg.StateIs():
                return self._on_state_is(source, message)
            case msg.BlobIs():
                self._on_blob(source, message.blob)
            case msg.HeadsAre():
                self.assembly.take_heads(source, message, self._now_s)
            case msg.NoPiece():
                self.donors.pieces.refuse(source, message.ticket, self._now_s)
                self._on_refused(source, message)
        return True

    def _on_refused(self, source: bytes, message: msg.NoPiece) -> None:
        """Say, once of each donor, that it cannot connect to this peer."""
        if message.unreachable and source not in self._unreached_by:
            self._unreached_by.add(source)
            todo = "open that port, or start again with --advertise HOST:PORT"
            self._say(f"{short(source)} cannot send the state here: {message.why}; {todo}")

    def _on_state_is(self, source: bytes, message: msg.StateIs) -> bool:
        before = self.donors.reported(source)
        self.donors.note_state(source, message)
        has = self.donors.reported(source)
        if _reach(before) != _reach(has):
            self.assembly.look_again()
        return has != before

    def _on_arrived(self, event: ev.PieceArrived) -> None:
        if self.phase is SyncPhase.PULLING and self.goal is not None:
            self.assembly.take_piece(event, self.goal, self._now_s)

    def _say_begun(self, goal: Goal) -> None:
        self._say_s = float("inf")
        own = f" (this peer has round {self._own.round})" if self._own.round else ""
        self._say(f"downloading the state of round {goal.round}{own}")

    def _say(self, text: str) -> None:
        self._out.append(ev.LogLine(text))

    # ------------------------------------------------------------ the specification

    def _find_blob(self) -> None:
        table = self.assembly.table
        for _, has in self.donors.usable():
            if self.donors.attestation.agreed.get(has.round) != digest_of(has):
                continue
            self._blob_digest = has.blob_digest
            if table is not None and table.blob_digest == has.blob_digest:
                self._enter(SyncPhase.PULLING)  # go on with what is here
            elif self._own.blob_digest == has.blob_digest:
                self._prepare(b"")
            else:
                self._enter(SyncPhase.READING)
            return

    def _ask_blob(self) -> None:
        asked, since_s = self._blob_asked
        if self._now_s < since_s + ANSWER_S and self.donors.knows(asked):
            return
        able = [p for p, has in self.donors.usable() if has.blob_digest == self._blob_digest]
        if able:
            peer = able[(able.index(asked) + 1) % len(able)] if asked in able else able[0]
            self._blob_asked = (peer, self._now_s)
            self.donors.send(peer, msg.AskBlob())

    def _on_blob(self, source: bytes, blob: bytes) -> None:
        if self.phase is not SyncPhase.READING or source != self._blob_asked[0]:
            return
        self._blob_asked = (b"", float("-inf"))
        if hashlib.sha256(blob).digest() == self._blob_digest:
            self._prepare(blob)
        else:
            self.donors.exclude(source, "it sent another specification than the run's")

    def _prepare(self, blob: bytes) -> None:
        self._enter(SyncPhase.PREPARING)
        self.assembly.table = None
        self._out.append(ev.PrepareStore(blob))

    def _on_store_ready(self, event: ev.StoreReady) -> None:
        if self.phase is SyncPhase.PREPARING:
            self._enter(SyncPhase.PULLING)
            self.assembly.prepared(event.store, self._blob_digest, self._now_s)
            self.assembly.take_cached(event.cached)

    # ------------------------------------------------------------ the end

    def _on_in_place(self) -> None:
        """Report that the state is in place.

        If the goal has moved on meanwhile, so do we, from there.
        """
        if self._finishing is None or self.goal is None:
            return
        (goal, digest), self._finishing = self._finishing, None
        self.assembly.table = None
        self._unreached_by.clear()
        goes_on = self.phase is not SyncPhase.IDLE and self.goal != goal
        self._enter(SyncPhase.IDLE)
        self._out.append(ev.Synced(goal.round, goal.chain, digest))
        if goes_on:
            self._begin(self.goal, ev.OwnState(goal.round, goal.chain, digest, self._blob_digest))

    def _on_rejected(self, event: ev.StateRejected) -> None:
        self._finishing = None
        if self.phase is not SyncPhase.FINISHING:
            return
        self._mismatches += 1
        if not event.is_mismatch or self._mismatches >= MISMATCHES_MAX:
            self._fail(event.why)
            return
        self._say(f"{event.why}; every chunk has to be confirmed by a donor")
        self.assembly.distrust_all()
        self._enter(SyncPhase.PULLING)


def _reach(has: msg.StateIs | None) -> tuple[int, int] | None:
    """Return the rounds that a donor can bring others to."""
    return (has.log_first, has.round) if has is not None else None


def _is_at(own: ev.OwnState, goal: Goal) -> bool:
    """Return whether there is nothing to do: the own state is that of the goal."""
    here = (own.round, own.chain) == (goal.round, goal.chain)
    return here and bool(own.digest) and not goal.suspect
