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
from typing import Final, NamedTuple, Protocol

import numpy as np

from atoll.collectives.codecs import U8
from atoll.collectives.engine.buffers import BufferPool
from atoll.collectives.engine.receive import PIECE_BYTES
from atoll.collectives.errors import AtollError
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


# kind, chunk, payload, offset
SendFrame = Callable[[int, int, memoryview, int], Receipt | None]


class Outlet(Protocol):
    """Describe the sending end of a stream to one participant."""

    def send(self, kind: int, chunk: int, payload: memoryview, offset: int = 0) -> Receipt | None:
        """Send one frame; this blocks.

        ``offset``: where the payload begins in its chunk, if that is not whole. What is returned
        tells whether the other side has got it; None if that cannot be known. Raises ConnectError
        if the stream is broken or closed.
        """


class SendCalls(NamedTuple):
    """Hold what the thread of a stream calls to ask, and to tell."""

    next_send: Callable[[Stripe], Sending | None]
    """(lane) Blocks until there is a frame to send; None ends the thread."""
    load: Callable[[OutgoingFrame, U8], U8]
    """(send, buffer) The payload, in ``buffer`` or elsewhere."""
    loaded: Callable[[Stripe, Sending, U8, U8], bool]
    """(lane, sending, payload, buffer) True: other streams need that buffer now, or later."""
    ended: Callable[[Stripe, Sending, str, Receipt | None], None]
    """(lane, sending, why, receipt) After each frame. With a reason it was the last one on its
    stream; without a payload the destination is not to blame."""


class Senders:
    """Run the threads that send.

    Only those that run hold on to whom they call: a reduction that is over would otherwise keep its
    buffers until the next collection of cycles.
    """

    def __init__(self, buffers: BufferPool[np.uint8]) -> None:
        self._buffers = buffers
        self._threads: list[threading.Thread] = []

    def spawn(self, lane: Stripe, send: SendFrame, name: str, calls: SendCalls) -> None:
        """Start the thread of a stream."""
        self.run(lambda: self._send_all(lane, send, calls), name)

    def run(self, work: Callable[[], None], name: str) -> None:
        """Run any other work in a thread that ``join`` waits for."""
        thread = worker(work, name)
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

    def _send_all(self, lane: Stripe, send_frame: SendFrame, calls: SendCalls) -> None:
        buffer = self._buffers.take()
        while (sending := calls.next_send(lane)) is not None:
            send = sending.send
            try:
                if sending.payload is None:
                    payload = calls.load(send, buffer)
                    if calls.loaded(lane, sending, payload, buffer):
                        buffer = self._buffers.take()
                assert sending.payload is not None
                data = sending.payload.data
                receipt = send_frame(send.kind, send.chunk, data, sending.offset)
            except Exception as error:  # whatever it was: a thread that dies in silence is a hang
                why = f"sending chunk {send.chunk}: {reason_of(error)}"
                calls.ended(lane, sending, why, None)
                return  # the buffer may be what another stream sends now
            calls.ended(lane, sending, "", receipt)
            if sending.copied and sending.loaded is None:
                buffer = self._buffers.take()  # another stream may still send from this one
        self._buffers.give(buffer)


def reason_of(error: Exception) -> str:
    return error.what if isinstance(error, AtollError) else f"{type(error).__name__}: {error}"


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
        lane = Stripe(dest, next(self._numbers))
        self._open[dest].append(lane)
        self._to_come[dest] = max(0, self._to_come[dest] - 1)
        return lane

    def several(self, dest: int) -> bool:
        return len(self._open[dest]) + self._to_come[dest] > 1

    def take(self, lane: Stripe, now_s: float) -> Sending | Idle:
        """Return what this stream sends next, or why there is nothing now.

        It is a piece that no stream has taken, or what one that broke has not delivered; a chunk;
        or what stands still on another.
        """
        dest = lane.dest
        found: Sending | Idle
        if self._ready[dest]:
            found = self._ready[dest].popleft()
        else:
            # One chunk at a time is loaded, which bounds the memory: there will be pieces soon.
            send = Idle.WAIT if self._is_loading(dest) else self._next(dest)
            found = (
                Sending(send)
                if isinstance(send, OutgoingFrame)
                else self._late(lane, now_s) or send
            )
        if isinstance(found, Sending):
            lane.now, lane.since_s, found.since_s = found, now_s, now_s
            found.copied |= bool(found.carriers)
            found.carriers.add(lane.number)
            found.in_hand += 1
        return found

    def _next(self, dest: int) -> OutgoingFrame | Idle:
        return self._schedule.next_send(dest, self._unsure[dest])

    def _is_loading(self, dest: int) -> bool:
        loading = any(lane.now and lane.now.payload is None for lane in self._open[dest])
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
        lanes = self._open[dest]
        if self._ready[dest] or any(lane.now and not lane.now.copied for lane in lanes):
            return False  # mostly: without a question to every stream
        for lane in lanes:
            self._note_delivered(lane, now_s)
        under_way = [lane.now for lane in lanes if lane.now]
        under_way += [entry.sending for lane in lanes for entry in lane.sent]
        return all(sending.delivered for sending in under_way)

    def ended(self, lane: Stripe, sending: Sending, now_s: float, receipt: Receipt | None) -> None:
        """Note that a frame is sent. Without a receipt nobody will know more."""
        lane.now = None
        self._put_down(sending)
        took_s = now_s - lane.since_s
        self._usual_s += (took_s - self._usual_s) / USUAL_OF if self._usual_s else took_s
        if receipt is None or sending.loaded is None or not self.several(lane.dest):
            self._forget(lane, sending)
            return
        lane.sent.append(Sent(sending, receipt, now_s))
        self._note_delivered(lane, now_s)

    def broke(self, lane: Stripe, sending: Sending) -> bool:
        """Note that a stream broke with this frame, and return whether there are others.

        They will send what it has not delivered, which nobody may change.
        """
        dest = lane.dest
        others = self._open[dest]
        others.remove(lane)
        lane.now = None
        self._put_down(sending)
        lost = [*(entry.sending for entry in lane.sent), sending]
        lane.sent.clear()
        for one in lost:
            one.carriers.discard(lane.number)
        lost = [one for one in lost if not one.delivered and not one.carriers]
        if others:
            self._ready[dest].extendleft(reversed(lost))
        if not self.several(dest):  # nobody is left who could help the last one
            for last in others:
                while last.sent:
                    self._forget(last, last.sent.popleft().sending)
        return bool(others)

    def _late(self, lane: Stripe, now_s: float) -> Sending | None:
        """Return what another stream has had for too long, if this one gets rid of its own frames.

        Else None.
        """
        if len(self._open[lane.dest]) == 1:
            return None
        limit_s = max(LATE_S_MIN, LATE_FACTOR * self._usual_s)
        delivery_limit_s = limit_s + self._delivery_s.get(lane.dest, DELIVERY_S)
        if self._stands_still(lane, now_s, delivery_limit_s):
            return None
        for other in self._open[lane.dest]:
            held = [other.now] if other.now and now_s - other.now.since_s > limit_s else []
            if self._stands_still(other, now_s, delivery_limit_s):
                late = (entry.sending for entry in other.sent)
                held += [one for one in late if now_s - one.since_s > delivery_limit_s]
            for one in held:
                is_mine = lane.number in one.carriers
                if one.payload is not None and not one.delivered and not is_mine:
                    return one
        return None

    def _stands_still(self, lane: Stripe, now_s: float, limit_s: float) -> bool:
        if not lane.sent or now_s - lane.sent[0].at_s <= limit_s:
            return False
        self._note_delivered(lane, now_s)
        return bool(lane.sent) and now_s - lane.moved_s > limit_s

    def _note_delivered(self, lane: Stripe, now_s: float) -> None:
        while lane.sent:
            sending, receipt, at_s = lane.sent[0]
            if not sending.delivered:
                if not receipt():
                    return
                lane.moved_s = now_s
                usual_s = self._delivery_s.get(lane.dest, now_s - at_s)
                self._delivery_s[lane.dest] = min(usual_s, now_s - at_s)
            lane.sent.popleft()
            self._forget(lane, sending)

    def _forget(self, lane: Stripe, sending: Sending) -> None:
        """Note that a frame is delivered, as far as one can know."""
        sending.carriers.discard(lane.number)
        if not sending.delivered:
            sending.delivered = True
            if sending.loaded is not None:
                sending.loaded.undelivered -= 1
                if not sending.loaded.undelivered:
                    self._unsure[lane.dest].discard(sending.send.chunk)
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
