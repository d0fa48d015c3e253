"""Bring a peer to the group's state from many donors while the run goes on. Sans-I/O.

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

from atoll.collectives.units import duration, listed
from atoll.peer.membership.events import Goal
from atoll.peer.membership.view import short
from atoll.peer.state_sync import events as ln
from atoll.peer.state_sync import messages as ft
from atoll.peer.state_sync.assembly import Gathering
from atoll.peer.state_sync.sources import Piece, Supply, digest_of

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


class SyncMachine:
    """Decide what to do next to reach the state of a goal.

    ``handle`` returns effects; call it again at ``next_deadline_s`` with a Tick.
    """

    def __init__(self) -> None:
        self.phase = SyncPhase.IDLE
        self.goal: Goal | None = None
        self._out: list[ln.Effect] = []
        self.supply = Supply(self._out)
        self.gathering = Gathering(self.supply, self._out)
        self._own = ln.Own()
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

    def handle(self, event: ln.Event, now_s: float) -> list[ln.Effect]:
        self._now_s = now_s
        is_news = True
        match event:
            case ln.Aim():
                self._on_aim(event.goal, event.own)
            case ln.Cancel():
                self._stop()
            case ln.Linked():
                self._on_linked(event.peers)
            case ln.Heard():
                is_news = self._on_heard(event.source, event.message)
            case ln.PieceArrived():
                self._on_arrived(event)
            case ln.Interrupted():
                self.supply.pull.interrupt(event.source)
            case ln.Prepared():
                self._on_prepared(event)
            case ln.Unprepared():
                self._fail(event.why)
            case ln.Finished():
                self._on_finished()
            case ln.Unfinished():
                self._on_unfinished(event)
        if isinstance(
            event, ln.PieceArrived
        ):  # a thousand a second: nothing that grows with the state
            self._pull()
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
        """Describe for people which state is being loaded, since when, and who has it.

        Return "" if none is.
        """
        if self.phase is SyncPhase.IDLE or self.goal is None:
            return ""
        if self.phase is SyncPhase.FINISHING:
            who = "all of it is here"
        else:
            who = self.supply.describe()
        if self._unreached_by:
            names = listed([short(peer) for peer in sorted(self._unreached_by)])
            who += f"; nothing comes from {names}, which cannot connect to this peer"
        so_far = duration(now_s - self._aimed_s)
        return f"the state of round {self.goal.round} ({so_far} so far), {who}"

    def expects(self, source: bytes, ticket: int) -> Piece | None:
        """Return the piece that this ticket is for, if it is still wanted."""
        return self.supply.pull.expects(source, ticket) if self.phase is SyncPhase.PULLING else None

    # ------------------------------------------------------------ the task

    def _on_aim(self, goal: Goal, own: ln.Own) -> None:
        self.goal = goal
        self.supply.set_goal(goal)
        if not self.gathering.aim(goal):
            self._say(f"round {goal.round} is of another history than what is here: beginning anew")
            self.supply.discount_pause()
        back = _is_at(own, goal) and self._finishing is None
        if back and self.phase is not SyncPhase.IDLE:
            self._stop()  # the group is back where we are
        if self.phase is SyncPhase.IDLE:
            self._aimed_s = self._now_s
            self._begin(goal, own)

    def _begin(self, goal: Goal, own: ln.Own) -> None:
        self._own = own
        self._mismatches = 0
        if _is_at(own, goal):
            self._out.append(ln.Done(own.round, own.chain, own.digest))
            return
        self.phase = SyncPhase.LOOKING
        self.supply.begin(self._now_s)
        self.gathering.begin(goal, own, self._now_s)
        self._unagreed_s = {}
        # Archives do it every round; and that a member has missed rounds is said elsewhere.
        self._say_s = self._now_s + USUAL_S if own.round else self._now_s

    def _stop(self) -> None:
        """Stop what is under way. What is here stays."""
        self.phase = SyncPhase.IDLE
        self._say_s = float("inf")
        self.gathering.release()
        self.supply.release()

    def _fail(self, why: str) -> None:
        self._stop()
        self.supply.discount_pause()  # the next task judges anew
        self._out.append(ln.SyncFailed(why))

    def _advance(self) -> None:
        """Do whatever can be done now."""
        if self.phase is SyncPhase.IDLE or self.goal is None:
            return
        if self._finishing is not None:
            return  # the store is being hashed, perhaps for a task that was cancelled meanwhile
        if self._now_s >= self._say_s:
            self._say_loading(self.goal)
        if self.supply.settle(self._now_s):
            self.gathering.agreed()
        if self.phase is SyncPhase.LOOKING:
            self._find_blob()
        if self.phase is SyncPhase.READING:
            self._ask_blob()
        if self.phase is SyncPhase.PULLING:
            self.gathering.review(self.goal, self._now_s)
        self._pull()
        if self.phase in (SyncPhase.LOOKING, SyncPhase.READING, SyncPhase.PULLING):
            self._ask_donors(self.goal)
            self._check_limits(self.goal)

    def _pull(self) -> None:
        assembly, goal = self.gathering.assembly, self.goal
        if self.phase is not SyncPhase.PULLING or assembly is None or goal is None:
            return
        if not assembly.store.is_open:
            self._fail("something else has changed the state meanwhile")
        elif self.gathering.pull(goal, self._now_s):
            digest = self.supply.attestation.agreed[goal.round]
            self.phase = SyncPhase.FINISHING
            self._finishing = (goal, digest)
            self._out.append(ln.Finish(assembly.store, goal.round, digest))

    def _ask_donors(self, goal: Goal) -> None:
        assembly, agreed = self.gathering.assembly, self.supply.attestation.agreed
        rounds = {goal.round} | (assembly.origins() if assembly is not None else frozenset())
        needed = rounds - agreed.keys()
        self._unagreed_s = {n: self._unagreed_s.get(n, self._now_s) for n in needed}
        behind = self.supply.newest() < goal.round
        soon = self.phase is not SyncPhase.PULLING or behind or bool(needed)
        self.supply.ask(min(rounds), self._now_s, soon=soon)

    def _check_limits(self, goal: Goal) -> None:
        late = [n for n, since_s in self._unagreed_s.items() if self._now_s > since_s + AGREE_S]
        if late:
            said = self.supply.attestation.describe(late[0])
            self._fail(f"no agreement on the state of round {late[0]} for {AGREE_S:.0f} s: {said}")
        elif self._now_s > self.gathering.progress_s + PROGRESS_S:
            assembly = self.gathering.assembly
            ahead = assembly.ahead_of(goal.round) if assembly is not None else 0
            why = f"chunks of round {ahead} are here" if ahead else self.supply.describe()
            self._fail(f"nothing came for {PROGRESS_S:.0f} s towards round {goal.round}: {why}")

    def _on_linked(self, peers: frozenset[bytes]) -> None:
        """Stop waiting for what was asked over a link that has ended."""
        for peer in self.supply.linked - peers:
            self.gathering.lost(peer)
            if peer == self._blob_asked[0]:
                self._blob_asked = (b"", float("-inf"))
        if self.supply.set_linked(peers):
            self.gathering.learned()

    def _on_heard(self, source: bytes, message: object) -> bool:
        """Take a message of a donor; return whether there may be more to do than before."""
        if not self.supply.knows(source) or self.phase is SyncPhase.IDLE:
            return False
        match message:
            case ft.StateIs():
                return self._on_state_is(source, message)
            case ft.BlobIs():
                self._on_blob(source, message.blob)
            case ft.HeadsAre():
                self.gathering.take_heads(source, message, self._now_s)
            case ft.NoPiece():
                self.supply.pull.refuse(source, message.ticket, self._now_s)
                self._on_refused(source, message)
        return True

    def _on_refused(self, source: bytes, message: ft.NoPiece) -> None:
        """Say, once of each donor, that it cannot connect to this peer."""
        if message.unreachable and source not in self._unreached_by:
            self._unreached_by.add(source)
            todo = "open that port, or start again with --advertise HOST:PORT"
            self._say(f"{short(source)} cannot send the state here: {message.why}; {todo}")

    def _on_state_is(self, source: bytes, message: ft.StateIs) -> bool:
        before = self.supply.said(source)
        self.supply.hear(source, message)
        has = self.supply.said(source)
        if _reach(before) != _reach(has):
            self.gathering.learned()
        return has != before

    def _on_arrived(self, event: ln.PieceArrived) -> None:
        if self.phase is SyncPhase.PULLING and self.goal is not None:
            self.gathering.take_piece(event, self.goal, self._now_s)

    def _say_loading(self, goal: Goal) -> None:
        self._say_s = float("inf")
        own = f" (this peer has round {self._own.round})" if self._own.round else ""
        self._say(f"downloading the state of round {goal.round}{own}")

    def _say(self, text: str) -> None:
        self._out.append(ln.Say(text))

    # ------------------------------------------------------------ the specification

    def _find_blob(self) -> None:
        assembly = self.gathering.assembly
        for _, has in self.supply.usable():
            if self.supply.attestation.agreed.get(has.round) != digest_of(has):
                continue
            self._blob_digest = has.blob_digest
            if assembly is not None and assembly.blob_digest == has.blob_digest:
                self.phase = SyncPhase.PULLING  # go on with what is here
            elif self._own.blob_digest == has.blob_digest:
                self._prepare(b"")
            else:
                self.phase = SyncPhase.READING
            return

    def _ask_blob(self) -> None:
        asked, since_s = self._blob_asked
        if self._now_s < since_s + ANSWER_S and self.supply.knows(asked):
            return
        able = [p for p, has in self.supply.usable() if has.blob_digest == self._blob_digest]
        if able:
            peer = able[(able.index(asked) + 1) % len(able)] if asked in able else able[0]
            self._blob_asked = (peer, self._now_s)
            self.supply.tell(peer, ft.AskBlob())

    def _on_blob(self, source: bytes, blob: bytes) -> None:
        if self.phase is not SyncPhase.READING or source != self._blob_asked[0]:
            return
        self._blob_asked = (b"", float("-inf"))
        if hashlib.sha256(blob).digest() == self._blob_digest:
            self._prepare(blob)
        else:
            self.supply.exclude(source, "it sent another specification than the run's")

    def _prepare(self, blob: bytes) -> None:
        self.phase = SyncPhase.PREPARING
        self.gathering.assembly = None
        self._out.append(ln.PrepareStore(blob))

    def _on_prepared(self, event: ln.Prepared) -> None:
        if self.phase is SyncPhase.PREPARING:
            self.phase = SyncPhase.PULLING
            self.gathering.prepared(event.store, self._blob_digest, self._now_s)
            self.gathering.take_shelved(event.shelved)

    # ------------------------------------------------------------ the end

    def _on_finished(self) -> None:
        """Report that the state is in place.

        If the goal has moved on meanwhile, so do we, from there.
        """
        if self._finishing is None or self.goal is None:
            return
        (goal, digest), self._finishing = self._finishing, None
        self.gathering.assembly = None
        self._unreached_by.clear()
        goes_on = self.phase is not SyncPhase.IDLE and self.goal != goal
        self.phase = SyncPhase.IDLE
        self._out.append(ln.Done(goal.round, goal.chain, digest))
        if goes_on:
            self._begin(self.goal, ln.Own(goal.round, goal.chain, digest, self._blob_digest))

    def _on_unfinished(self, event: ln.Unfinished) -> None:
        self._finishing = None
        if self.phase is not SyncPhase.FINISHING:
            return
        self._mismatches += 1
        if not event.is_mismatch or self._mismatches >= MISMATCHES_MAX:
            self._fail(event.why)
            return
        self._say(f"{event.why}; every chunk has to be confirmed by a donor")
        self.gathering.distrust_all()
        self.phase = SyncPhase.PULLING


def _reach(has: ft.StateIs | None) -> tuple[int, int] | None:
    """Return the rounds that a donor can bring others to."""
    return (has.log_first, has.round) if has is not None else None


def _is_at(own: ln.Own, goal: Goal) -> bool:
    """Return whether there is nothing to do: the own state is that of the goal."""
    here = (own.round, own.chain) == (goal.round, goal.chain)
    return here and bool(own.digest) and not goal.suspect
