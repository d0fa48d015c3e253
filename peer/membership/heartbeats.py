"""Send heartbeats: what a peer says of itself four times a second, and at once when it has news.

They come from the daemon, never from the trainer: a training step that holds the GIL must not look
like a death. Most lost messages of the round protocol heal within one heartbeat, because a
heartbeat repeats what READY, OFFER and LEAVE have said. The others heal by a limit of whoever waits
for them: without MISS an attempt stalls, NOTICE is repeated, finals come within ``kept_s`` or not.

A heartbeat that says what the last one on this link has said is only named: SAME_BEAT with its
mark. Most are such where trainers compute. It is sent whole again after ``NAMED_MAX`` of these, and
to whoever has a new link, so that one that was lost is missed for two seconds at most. Who hears of
a beat that it does not know has a sign of life, and nothing else.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

from atoll.collectives.units import duration
from atoll.peer.membership.callers import Callers
from atoll.peer.membership.consensus import Acceptor
from atoll.peer.membership.coordinator import Coordinator
from atoll.peer.membership.election import Election
from atoll.peer.membership.events import Note, Send
from atoll.peer.membership.failure_detector import LAGS_IN_LIMIT, LIMIT_MAX_S
from atoll.peer.membership.joining import Joining
from atoll.peer.membership.member import MemberState
from atoll.peer.membership.messages import (
    MARK_BYTES,
    AskTrainers,
    CoordinatorBeat,
    Heartbeat,
    Leave,
    ObjectIs,
    Offer,
    Remembered,
    SameBeat,
)
from atoll.peer.membership.operations import ObjectSender
from atoll.peer.membership.phase import Phase
from atoll.peer.membership.signing import Signatures
from atoll.peer.membership.situation import Situation
from atoll.peer.membership.view import View, plain
from atoll.peer.net.wire import encode

NAMED_MAX = 5  # times in a row: every sixth is whole, in 1.5 s

Beat = Heartbeat | CoordinatorBeat


class Heartbeats:
    """Decide when the next heartbeat goes and what is in it; keep what the coordinator's say."""

    def __init__(
        self,
        here: Situation,
        own: MemberState,
        joining: Joining,
        callers: Callers,
        signatures: Signatures,
    ) -> None:
        self._here = here
        self._signatures = signatures
        self._own = own
        self._joining = joining
        self._callers = callers
        self.next_s = 0.0
        self.progress_bytes = 0
        self.waiting: tuple[tuple[bytes, ...], float] = ((), 0.0)  # for whom, seconds so far
        self.halted = ""  # why the coordinator begins no round any more ...
        self.held = ""  # ... or not yet
        self.left_out = ""  # who takes no part in them, and why
        self._asked_trainers = (0, 0.0)  # what rounds are to need, until when that is repeated
        self._objects = ObjectSender()
        self._late = False  # by so much that the others wait longer
        self._cached: tuple[tuple[object, ...], Heartbeat] | None = None  # the last, and its fields
        self._told = ToldBeats()

    def soon(self) -> None:
        """Let the next heartbeat go at once: somebody waits for what has just changed."""
        self.next_s = self._here.now_s

    def forget(self, peer: bytes) -> None:
        """Tell this peer a whole heartbeat next: it has another link, or none."""
        self._told.forget(peer)

    def heard(self, beat: CoordinatorBeat) -> None:
        """Keep what the coordinator says of the next commit, for people who ask."""
        self.waiting = (beat.waiting, beat.waiting_s)
        self.halted, self.held = plain(beat.halted), plain(beat.held)
        self.left_out = plain(beat.left_out)

    def forget_reasons(self) -> None:
        """Forget why no round begins, or without whom: the view in which it was so is over."""
        self.halted = self.held = self.left_out = ""

    # ------------------------------------------------------------ sending

    def step(self, lead: Coordinator | None, election: Election | None) -> None:
        """Send what is due: as the coordinator to all, as a member or joiner to the coordinator."""
        here = self._here
        if self._asked_trainers[1]:
            self._forget_fulfilled()
        if here.now_s < self.next_s:
            return
        self.next_s = here.now_s + here.timing.heartbeat_s
        self._note_lag(here.lag_s())
        if here.view is None:
            announcer = self._joining.announcer
            if here.phase is Phase.LEARNER and announcer in here.linked:
                here.emit(Send(announcer, self._told.next(announcer, self.heartbeat())))
        elif lead is not None:
            beat = lead.beat(here.now_s, here.lag_s())
            if news := here.positions.news():
                beat = replace(beat, remembered=news)
            self.heard(beat)
            for peer in here.view.peers:
                if peer != here.me.peer:
                    here.emit(Send(peer, self._told.next(peer, beat)))
            lead.admission.announce(here.now_s)
        elif here.view.number > 0:
            self._to_coordinator(here.view, election)

    def _note_lag(self, lag_s: float) -> None:
        """Note once, each time, that this machine is so busy that others are to wait longer."""
        limit_s = min(LAGS_IN_LIMIT * lag_s, LIMIT_MAX_S)
        late = limit_s > self._here.timing.failure_s
        if late and not self._late:
            text = f"this machine is busy: the daemon was {duration(lag_s)} late several times"
            self._here.emit(Note("late", f"{text}, and the others wait {duration(limit_s)} for it"))
        self._late = late

    def _to_coordinator(self, view: View, election: Election | None) -> None:
        here, own = self._here, self._own
        electing = election.waiting_for() if election is not None else None
        self.waiting = electing or self.waiting  # the lost coordinator's last word counts no more
        tag = (view.lineage, view.number)
        acceptor = election.acceptor if election is not None else None
        beat = self.heartbeat(acceptor)
        for peer in view.peers if here.resigned else (view.coordinator,):
            here.emit(Send(peer, self._told.next(peer, beat)))
        if own.offer and own.round == 0:
            here.emit(Send(view.coordinator, Offer(*tag, own.offer)))
        given = own.given
        path = (*tag, view.coordinator in here.linked)
        if self._objects.is_due(given, path, here.now_s):
            here.emit(Send(view.coordinator, ObjectIs(*tag, given)))
        if here.leave_by_s is not None:
            here.emit(Send(view.coordinator, Leave(*tag, here.me.inc, here.life)))
        if (asked := self.asked_trainers()) is not None:
            here.emit(Send(view.coordinator, AskTrainers(*tag, asked)))

    def heartbeat(self, acceptor: Acceptor | None = None) -> Heartbeat:
        """Return what this peer says of itself now; ``acceptor``: its vote, inside a view."""
        view, own = self._here.view, self._own
        tag = (view.lineage, view.number) if view is not None else self._joining.tag
        arrived, weights, operation = own.waiting()
        attached = own.attached
        if self._here.phase is Phase.CANDIDATE:  # nobody is to wait for who may hear no BEGIN
            attached, arrived, weights, operation = False, (), (), None
        said = (  # in the order of Heartbeat's fields
            *tag,
            self._here.me.inc,
            own.round,
            own.chain,
            own.digest,
            own.digest_round,
            attached,
            arrived,
            weights,
            acceptor is not None and acceptor.frozen,
            acceptor.promised.number if acceptor else 0,
            own.is_behind,
            self.progress_bytes,
            own.runs(),
            own.epoch,
            own.fragments,
            own.rounds_in_flight,
            operation,
            self._objects.digest(own.given),
            own.terms,
            own.since,
            self._here.outbound,
            self._here.unlinked(),
            self._callers.lasting(),
            self._here.life,
            self._here.outbox.began,
            self._here.outbox.durable,
            own.pending,
            self._here.resigned,
            self._here.lag_s(),
            own.keeps_rounds,
            self._position_sig(),
            own.loading,
            *self._here.through_relays(),
        )
        cached = self._cached
        if cached is None or said != cached[0]:  # a coordinator looks at its own at every step
            cached = self._cached = (said, Heartbeat(*said))
        return cached[1]

    def _position_sig(self) -> bytes:
        """Return our signature of what others are to remember of our ledger, if there is one."""
        here, position = self._here, self._here.outbox.durable
        if position == 0:
            return b""
        told = Remembered(here.me.peer, here.me.inc, here.life, position)
        return self._signatures.signed_position(told).sig

    # ------------------------------------------------------------ what somebody here asks for

    def ask_trainers(self, min_trainers: int) -> None:
        """Repeat for a while that rounds are to need so many trainers."""
        self._asked_trainers = (min_trainers, self._here.now_s + self._here.timing.ask_s)
        self.soon()

    def asked_trainers(self) -> int | None:
        """Return the number of trainers that is asked for here and not in the view's rules yet."""
        count, until_s = self._asked_trainers
        return count if self._here.view is not None and self._here.now_s < until_s else None

    def _forget_fulfilled(self) -> None:
        """Forget a number of trainers that was asked for, once the view's rules have it.

        It is asked for once: who asks for another number after that is not to be asked back.
        """
        view = self._here.view
        if view is not None and view.rules.min_trainers == self._asked_trainers[0]:
            self._asked_trainers = (0, 0.0)


# ---------------------------------------------------------------- what need not be said again


@dataclass(slots=True)
class _ToldBeat:
    beat: Beat
    named: int = 0  # so many times since it was sent whole


class ToldBeats:
    """Remember the last whole heartbeat that each peer was told, and name it where it still holds.

    Keep one for each peer that has heard any: members and, for a joiner, its announcer.
    """

    def __init__(self) -> None:
        self._told: dict[bytes, _ToldBeat] = {}
        self._last: Beat | None = None
        self._name: tuple[Beat, SameBeat] | None = None

    def next(self, peer: bytes, beat: Beat) -> Beat | SameBeat:
        """Return what to send: the heartbeat, or its name."""
        if self._last is None or self._last != beat:  # one comparison, for all who are told
            self._last = beat
        beat, told = self._last, self._told.get(peer)
        if told is None or told.beat is not beat or told.named >= NAMED_MAX:
            self._told[peer] = _ToldBeat(beat)
            return beat
        told.named += 1
        if self._name is None or self._name[0] is not beat:
            self._name = (beat, SameBeat(mark_of(beat)))
        return self._name[1]

    def forget(self, peer: bytes) -> None:
        self._told.pop(peer, None)


class HeardBeats:
    """Keep the last whole heartbeat of each linked peer, for when it is named."""

    def __init__(self) -> None:
        self._heard: dict[bytes, tuple[Beat, bytes | None]] = {}  # with its mark, once needed

    def note(self, peer: bytes, beat: Beat) -> None:
        self._heard[peer] = (beat, None)

    def named(self, peer: bytes, same: SameBeat) -> Beat | None:
        """Return the heartbeat that a peer means; None if we have not heard it."""
        beat, mark = self._heard.get(peer, (None, None))
        if beat is None:
            return None
        if mark is None:
            mark = mark_of(beat)
            self._heard[peer] = (beat, mark)
        return beat if mark == same.mark else None

    def forget(self, peer: bytes) -> None:
        self._heard.pop(peer, None)


def mark_of(beat: Beat) -> bytes:
    """Return the name of a heartbeat: a short BLAKE2 of its bytes on the wire."""
    return hashlib.blake2b(encode(beat), digest_size=MARK_BYTES).digest()
