"""Send the frames of a reduction: one thread per stream, and what each of several streams sends.

Several streams to one destination share its chunks. A frame that ``Outlet.send`` has taken may
still be in this machine's memory, and is lost when its stream is reset or ends in a black hole; the
other side says nothing, as other streams live. So where there are several, a frame is kept until
the other side has acknowledged it, and until then another stream may have to send it again. Who
receives drops what comes twice.

Memory: the encoded chunk of each part that is kept. That is what is unsent or on its way on all
streams to a destination, and a schedule bounds the parts that are open. Results, and parts that are
sent from where they lie, are read there again and take nothing.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Final, NamedTuple, Protocol

import numpy as np

from atoll.collectives.codecs import U8
from atoll.collectives.engine.accumulate import Accumulator
from atoll.collectives.engine.buffers import BufferPool
from atoll.collectives.engine.control import Control, reason_of
from atoll.collectives.engine.parts import Parts
from atoll.collectives.engine.receive import PIECE_BYTES
from atoll.collectives.engine.result import RoundResult
from atoll.collectives.schedule.plan import ReducePlan
from atoll.collectives.schedule.schedule import FrameKind, Idle, OutgoingFrame, Schedule
from atoll.collectives.threads import worker

Receipt = Callable[[], bool]  # whether the other side has the frame now; must not wait

# A frame that takes so many times what is usual, and so long, is sent on another stream as well:
# TCP waits for 0.2 s at least before it sends again what got lost last.
LATE_FACTOR: Final = 4
LATE_S_MIN: Final = 0.25
# How long an acknowledgement takes, before one was seen: as on the longest ways, with queues, and
# so that a copy comes before a stall is declared (Timing.stall_s).
DELIVERY_S: Final = 0.75
USUAL_OF: Final = 8  # frames that the usual time is an average of
POLL_S: Final = LATE_S_MIN / 2  # how often a stream that has nothing to send looks at the others


class Outlet(Protocol):
    """Describe the sending end of a stream to one participant."""

    def send(self, kind: int, chunk: int, payload: memoryview, offset: int = 0) -> Receipt | None:
        """Send one frame; this blocks.

        ``offset``: where the payload begins in its chunk, if that is not whole. What is returned
        tells whether the other side has got it; None if that cannot be known. Raises ConnectError
        if the stream is broken or closed.
        """


class Senders:
    """Run a thread per stream, from its first frame to its last.

    A thread asks the schedule for the next frame to its destination, and encodes the chunk only
    then, into one reused buffer; the back-pressure of its stream paces it.
    """

    def __init__(
        self,
        plan: ReducePlan,
        me: int,
        schedule: Schedule,
        parts: Parts,
        accumulator: Accumulator,
        result: RoundResult,
        control: Control,
    ) -> None:
        self._plan, self._me, self._schedule, self._parts = plan, me, schedule, parts
        self._accumulator, self._result = accumulator, result
        self._control, self._changed = control, control.changed
        self._buffers = parts.encoded
        self._stripes = Stripes(schedule, parts.encoded)
        self._threads: list[threading.Thread] = []
        self._paced: set[int] = set()  # destinations that wait for a contribution to another
        self._own_sent: list[int] = []  # chunks whose own part has just been sent
        self.reading = 0  # results that are being sent

    def open(self, outlets: Mapping[int, Outlet], to_come: Mapping[int, int]) -> None:
        """Start a thread per outlet. The caller holds the lock.

        ``to_come``: how many streams are about to be opened to each destination.
        """
        self._stripes.expect(to_come)
        for dest, outlet in outlets.items():
            stripe, turn = self._stripes.opened(dest), self._control.turn(dest)
            self.run(partial(self._send_all, stripe, turn, outlet), f"to-{self._plan.name(dest)}")

    def run(self, work: Callable[[], None], name: str) -> None:
        """Run some work in a thread that ``join`` waits for."""
        thread = worker(work, f"reduce-{self._plan.name(self._me)}-{name}")
        self._threads.append(thread)
        thread.start()

    def join(self, timeout_s: float) -> bool:
        """Wait for the threads, and return whether all have ended.

        A thread may ask about the others.
        """
        deadline_s = time.monotonic() + timeout_s
        threads = [t for t in self._threads if t is not threading.current_thread()]
        for thread in threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        return not any(thread.is_alive() for thread in threads)

    def _send_all(self, stripe: Stripe, turn: threading.Condition, outlet: Outlet) -> None:
        buffer = self._buffers.take()
        while (sending := self._next(stripe, turn)) is not None:
            send = sending.send
            try:
                if sending.payload is None:
                    payload = self._load(send, buffer)
                    if self._loaded(stripe, sending, payload, buffer):
                        buffer = self._buffers.take()
                assert sending.payload is not None
                data = sending.payload.data
                receipt = outlet.send(send.kind, send.chunk, data, sending.offset)
            except Exception as error:  # whatever it was: a thread that dies in silence is a hang
                why = f"sending chunk {send.chunk}: {reason_of(error)}"
                self._ended(stripe, sending, why, None)
                return  # the buffer may be what another stream sends now
            self._ended(stripe, sending, "", receipt)
            if sending.copied and sending.loaded is None:
                buffer = self._buffers.take()  # another stream may still send from this one
        self._buffers.give(buffer)

    def _next(self, stripe: Stripe, turn: threading.Condition) -> Sending | None:
        """Block until there is a frame to send; return None when there will be none."""
        dest, control = stripe.dest, self._control
        with turn:
            while not control.aborted:
                found = self._stripes.take(stripe, time.monotonic())
                if isinstance(found, Sending):
                    self.reading += found.send.kind is FrameKind.RESULT
                    for other in self._paced if found.send.kind is FrameKind.CONTRIB else ():
                        control.turn(other).notify()
                    return found
                if found is Idle.DONE and self._stripes.is_over(dest, time.monotonic()):
                    return None
                if found is Idle.PACED:
                    self._paced.add(dest)
                turn.wait(POLL_S if self._stripes.several(dest) else None)
                self._paced.discard(dest)
        return None

    def _load(self, send: OutgoingFrame, buffer: U8) -> U8:
        """Return the payload, in ``buffer`` or elsewhere."""
        if send.kind is FrameKind.RESULT:
            return self._result.view(send.chunk)
        if send.kind is FrameKind.GRAM:
            told = self._parts.to_tell()
            assert told is not None  # the schedule hands it out only then
            return told
        payload = self._parts.part(send.chunk, self._me, buffer, own=send.added_here)
        if send.added_here:
            copy = self._parts.copied(payload, buffer)
            with self._changed:
                if copy is not None:
                    self._accumulator.waiting[self._me, send.chunk] = copy
                self._schedule.arrived(self._me, send.chunk)
                self._own_sent.append(send.chunk)
        return payload

    def _loaded(self, stripe: Stripe, sending: Sending, payload: U8, buffer: U8) -> bool:
        """Share a payload among several streams; return whether they keep the buffer for now."""
        with self._changed:
            if self._stripes.several(stripe.dest):
                self._control.turn(stripe.dest).notify_all()
            return self._stripes.loaded(stripe.dest, sending, payload, buffer)

    def _ended(self, stripe: Stripe, sending: Sending, why: str, receipt: Receipt | None) -> None:
        """Note that a frame is sent or, with a reason, that it was the last one on its stream.

        Without a payload the destination is not to blame for that.
        """
        payload, broke, dest, now_s = sending.payload, bool(why), stripe.dest, time.monotonic()
        with self._changed:
            self.reading -= sending.send.kind is FrameKind.RESULT
            if payload is not None and not why:
                self._stripes.note_sent(stripe, sending, now_s, receipt)
            elif payload is not None and self._stripes.broke(stripe, sending):
                why = ""  # another stream sends it
            elif not self._control.aborted:
                self._schedule.broken(dest)
                self._control.wake()
            if broke or self._stripes.is_over(dest, now_s):  # to be sent again, or the end
                self._control.turn(dest).notify_all()
            own, self._own_sent = self._own_sent, []
        for chunk in own:  # now, because it would have kept the send waiting
            self._accumulator.fold(chunk)
        if why:
            self._control.fail(self._me if payload is None else dest, why)


# ---------------------------------------------------------------- several streams


class Stripes:
    """Keep the streams to each destination, and what they are at. Calls never overlap.

    Where there are several, the one that takes a chunk loads it, and all send its pieces: whichever
    has room takes the next one. What one of them breaks off, loses or does not get rid of, another
    sends again.
    """

    def __init__(self, schedule: Schedule, buffers: BufferPool[np.uint8]) -> None:
        self._schedule, self._buffers = schedule, buffers
        self._open: defaultdict[int, list[Stripe]] = defaultdict(list)
        self._numbers = itertools.count()
        self._to_come: defaultdict[int, int] = defaultdict(int)
        self._ready: defaultdict[int, deque[Sending]] = defaultdict(deque)
        self._unsure: defaultdict[int, set[int]] = defaultdict(set)  # results: chunks
        self._usual_s = 0.0  # what a frame takes to be sent, lately
        self._delivery_s: dict[int, float] = {}  # from then to its acknowledgement, at least

    def expect(self, counts: Mapping[int, int]) -> None:
        """Note that so many streams are about to be opened to each destination.

        So the first shares its frames from the start.
        """
        self._to_come.update(counts)

    def opened(self, dest: int) -> Stripe:
        stripe = Stripe(dest, next(self._numbers))
        self._open[dest].append(stripe)
        self._to_come[dest] = max(0, self._to_come[dest] - 1)
        return stripe

    def several(self, dest: int) -> bool:
        return len(self._open[dest]) + self._to_come[dest] > 1

    def take(self, stripe: Stripe, now_s: float) -> Sending | Idle:
        """Return what this stream sends next, or why there is nothing now.

        It is a piece that no stream has taken, or what one that broke has not delivered; a chunk;
        or what stands still on another.
        """
        dest = stripe.dest
        found: Sending | Idle
        if self._ready[dest]:
            found = self._ready[dest].popleft()
        else:
            # One chunk at a time is loaded, which bounds the memory: there will be pieces soon.
            send = Idle.WAIT if self._is_loading(dest) else self._next(dest)
            found = (
                Sending(send)
                if isinstance(send, OutgoingFrame)
                else self._late(stripe, now_s) or send
            )
        if isinstance(found, Sending):
            stripe.now, stripe.since_s, found.since_s = found, now_s, now_s
            found.copied |= bool(found.carriers)
            found.carriers.add(stripe.number)
            found.in_hand += 1
        return found

    def _next(self, dest: int) -> OutgoingFrame | Idle:
        return self._schedule.next_send(dest, self._unsure[dest])

    def _is_loading(self, dest: int) -> bool:
        loading = any(stripe.now and stripe.now.payload is None for stripe in self._open[dest])
        return loading and self.several(dest)

    def loaded(self, dest: int, sending: Sending, payload: U8, buffer: U8) -> bool:
        """Note that a chunk is loaded, and return whether ``buffer`` is kept.

        The chunk can be sent now. The buffer is kept until it is delivered.
        """
        sending.payload = payload
        if not self.several(dest):
            return False
        lent = np.may_share_memory(payload, buffer)
        offsets = range(0, payload.nbytes, PIECE_BYTES)
        sending.loaded = StripedChunk(buffer if lent else None, len(offsets), len(offsets))
        if sending.send.kind is FrameKind.RESULT:
            self._unsure[dest].add(sending.send.chunk)
        sending.payload = payload[:PIECE_BYTES]
        for at in offsets[1:]:
            piece = payload[at : at + PIECE_BYTES]
            self._ready[dest].append(Sending(sending.send, piece, at, sending.loaded))
        return lent

    def is_over(self, dest: int, now_s: float) -> bool:
        """Return whether all that was taken is delivered, as far as one can know."""
        stripes = self._open[dest]
        if self._ready[dest] or any(stripe.now and not stripe.now.copied for stripe in stripes):
            return False  # mostly: without a question to every stream
        for stripe in stripes:
            self._note_delivered(stripe, now_s)
        under_way = [stripe.now for stripe in stripes if stripe.now]
        under_way += [entry.sending for stripe in stripes for entry in stripe.sent]
        return all(sending.delivered for sending in under_way)

    def note_sent(
        self, stripe: Stripe, sending: Sending, now_s: float, receipt: Receipt | None
    ) -> None:
        """Note that a frame is sent. Without a receipt nobody will know more."""
        stripe.now = None
        self._put_down(sending)
        took_s = now_s - stripe.since_s
        self._usual_s += (took_s - self._usual_s) / USUAL_OF if self._usual_s else took_s
        if receipt is None or sending.loaded is None or not self.several(stripe.dest):
            self._forget(stripe, sending)
            return
        stripe.sent.append(Sent(sending, receipt, now_s))
        self._note_delivered(stripe, now_s)

    def broke(self, stripe: Stripe, sending: Sending) -> bool:
        """Note that a stream broke with this frame, and return whether there are others.

        They will send what it has not delivered, which nobody may change.
        """
        dest = stripe.dest
        others = self._open[dest]
        others.remove(stripe)
        stripe.now = None
        self._put_down(sending)
        lost = [*(entry.sending for entry in stripe.sent), sending]
        stripe.sent.clear()
        for one in lost:
            one.carriers.discard(stripe.number)
        lost = [one for one in lost if not one.delivered and not one.carriers]
        if others:
            self._ready[dest].extendleft(reversed(lost))
        if not self.several(dest):  # nobody is left who could help the last one
            for last in others:
                while last.sent:
                    self._forget(last, last.sent.popleft().sending)
        return bool(others)

    def _late(self, stripe: Stripe, now_s: float) -> Sending | None:
        """Return what another stream has had for too long, if this one gets rid of its own frames.

        Else None.
        """
        if len(self._open[stripe.dest]) == 1:
            return None
        limit_s = max(LATE_S_MIN, LATE_FACTOR * self._usual_s)
        delivery_limit_s = limit_s + self._delivery_s.get(stripe.dest, DELIVERY_S)
        if self._stands_still(stripe, now_s, delivery_limit_s):
            return None
        for other in self._open[stripe.dest]:
            held = [other.now] if other.now and now_s - other.now.since_s > limit_s else []
            if self._stands_still(other, now_s, delivery_limit_s):
                late = (entry.sending for entry in other.sent)
                held += [one for one in late if now_s - one.since_s > delivery_limit_s]
            for one in held:
                is_mine = stripe.number in one.carriers
                if one.payload is not None and not one.delivered and not is_mine:
                    return one
        return None

    def _stands_still(self, stripe: Stripe, now_s: float, limit_s: float) -> bool:
        if not stripe.sent or now_s - stripe.sent[0].at_s <= limit_s:
            return False
        self._note_delivered(stripe, now_s)
        return bool(stripe.sent) and now_s - stripe.moved_s > limit_s

    def _note_delivered(self, stripe: Stripe, now_s: float) -> None:
        while stripe.sent:
            sending, receipt, at_s = stripe.sent[0]
            if not sending.delivered:
                if not receipt():
                    return
                stripe.moved_s = now_s
                usual_s = self._delivery_s.get(stripe.dest, now_s - at_s)
                self._delivery_s[stripe.dest] = min(usual_s, now_s - at_s)
            stripe.sent.popleft()
            self._forget(stripe, sending)

    def _forget(self, stripe: Stripe, sending: Sending) -> None:
        """Note that a frame is delivered, as far as one can know."""
        sending.carriers.discard(stripe.number)
        if not sending.delivered:
            sending.delivered = True
            if sending.loaded is not None:
                sending.loaded.undelivered -= 1
                if not sending.loaded.undelivered:
                    self._unsure[stripe.dest].discard(sending.send.chunk)
            self._release(sending)

    def _put_down(self, sending: Sending) -> None:
        sending.in_hand -= 1
        self._release(sending)

    def _release(self, sending: Sending) -> None:
        """Give the buffer of a chunk back when all its pieces are delivered and read.

        Called when a piece is delivered, and when a stream has read it: the last of these counts.
        """
        loaded = sending.loaded
        if loaded is not None and sending.delivered and not sending.in_hand:
            loaded.left -= 1
            if not loaded.left and loaded.buffer is not None:
                self._buffers.give(loaded.buffer)


@dataclass(slots=True, eq=False)
class StripedChunk:
    """Describe a chunk whose pieces several streams send.

    ``buffer``: where it lies, if that is lent.
    """

    buffer: U8 | None
    left: int  # pieces that somebody reads, or may have to read again
    undelivered: int  # pieces


@dataclass(slots=True, eq=False)
class Sending:
    """Describe a frame that streams have taken. ``payload``: None before it is loaded."""

    send: OutgoingFrame
    payload: U8 | None = None
    offset: int = 0  # bytes, of the payload in its chunk
    loaded: StripedChunk | None = (
        None  # None: one stream alone was there, and its buffer is used again
    )
    since_s: float = 0.0  # when a stream last took it
    # Numbers of the streams that have it in hand, or sent and not forgotten; not the streams, whose
    # cycle would keep buffers beyond the reduction.
    carriers: set[int] = field(default_factory=set)
    in_hand: int = 0  # streams that are reading it
    copied: bool = False  # more than one stream took it
    delivered: bool = False


class Sent(NamedTuple):
    sending: Sending
    receipt: Receipt
    at_s: float


@dataclass(slots=True, eq=False)
class Stripe:
    """Describe one of the streams to ``dest``."""

    dest: int
    number: int
    now: Sending | None = None  # in hand
    since_s: float = 0.0
    sent: deque[Sent] = field(default_factory=deque)  # in this order, and not known to be delivered
    moved_s: float = 0.0  # when one of them was last seen to be
