"""Run a schedule over streams, with one thread per outgoing stream.

A reduction has no queues. A sender thread asks the schedule for the next frame to its destination
and encodes the chunk only then, into one reused buffer; the back-pressure of its stream paces it.
Several streams to one destination share its chunks, piece by piece (``send.py``). The thread
that receives a stream reserves a buffer, fills it, and adds what it brought to the sum, if it is
that source's turn; otherwise the thread whose turn comes later adds it. The own part of a sum is
added when its turn comes, by whichever thread is at it, or by one for chunks to which nobody else
adds.

Threads and locks: one lock guards the schedule and all shared state. It is held for look-ups and
copies of a finished chunk or piece, never while a codec, a stream or a callback runs. A sender
waits for the turn of its destination; a change wakes one, and that one the others. A wait ends by
a final chunk, a complete sum or ``abort``; the schedule says why there is no deadlock.

Results are encoded, received and sent where they lie, and sums of an exact codec grow there. A
thread may still be at it after ``abort``, in a chunk that is not final, or reading a final one: as
long as ``uses_result`` says so, nobody else may write there, nor read what is not final.

Memory of a reduction, in encoded chunks of c bytes and float32 chunks of at most 1 MiB::

    c per stream (sending; receiving too where a source has several)
    lead * c per source and root, twice that at worst (received and not yet added)
    lead * 1 MiB per root that it adds for, twice that at worst (sums)
    16 KiB per participant, once, where a robust rule aggregates (1 MiB without kernels; columns.py)
    ENCODERS_MAX * 1 MiB (own contributions being encoded)
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping

from atoll.collectives.chunks import encoded_layout
from atoll.collectives.codecs import F32, U8, Codec
from atoll.collectives.engine.accumulate import FoldCalls, Folding
from atoll.collectives.engine.parts import parts_for
from atoll.collectives.engine.receive import (
    ReceiveBuffers,
    ReceivedChunk,
    held_too_long,
    twice,
    wrong_length,
)
from atoll.collectives.engine.result import RoundResult
from atoll.collectives.engine.send import (
    POLL_S,
    Outlet,
    Receipt,
    SendCalls,
    Senders,
    Sending,
    Stripe,
    Stripes,
)
from atoll.collectives.errors import CodecError, LocalProtocolError
from atoll.collectives.robust.gram import InnerProducts
from atoll.collectives.schedule.pair import PairSchedule
from atoll.collectives.schedule.plan import ReducePlan
from atoll.collectives.schedule.schedule import (
    Frame,
    FrameAdmission,
    FrameKind,
    Idle,
    OutgoingFrame,
    Schedule,
)
from atoll.collectives.schedule.tree import TreeSchedule


class Reduction:
    """Run one attempt at one reduction, as participant ``me`` sees it.

    ``source(chunk, out)`` fills ``out``, float32[grid.size(chunk)], with the own contribution. It
    is called once per chunk, from several threads at a time.
    ``coded(chunk)``, if given, shows the own part as it was encoded before; then
    ``keep(participant, chunk, part)`` is shown every part that others send, and may copy it, and
    ``came(chunk, data)`` is called for each chunk of the result that is final, where it lies.
    ``part_codec`` is that of parts and partial sums; by default they are encoded like the result.
    ``own(chunk)``, if given, shows the own part, float32[grid.size(chunk)], where it lies: nobody
    changes it before the reduction has ended and its threads have been joined.
    ``result`` is completed in place: what its codec and ``plan.fold`` say, the same bytes for all.
    After ``abort`` has returned no more chunks become final, and final ones stay valid.
    ``kept`` are chunks that an earlier attempt has finished, with their digests: the plan gives
    them no owner. Those that ``result`` holds are final at once; ``lacking`` are to be put.
    ``on_done(digests)`` is called once, when the result is complete here, with the SHA-256 of each
    chunk (a mark instead, where they are not ``hashed``: that costs more than the sum). Others may
    still need this participant's sends: call ``abort`` only after the round is decided.
    ``on_failed(participant, why)`` is called at most once per participant, when a stream to it
    broke or it sent bytes that do not decode; with ``me`` when the own contribution cannot be
    encoded. The reduction goes on with the others until ``abort``.

    Callbacks come from worker threads and from threads in ``received``, never from ``abort``, and
    one may be under way while ``abort`` returns.
    """

    def __init__(
        self,
        *,
        plan: ReducePlan,
        me: int,
        source: Callable[[int, F32], None],
        result: RoundResult,
        on_done: Callable[[list[bytes]], None],
        on_failed: Callable[[int, str], None],
        kept: Mapping[int, bytes] | None = None,
        own: Callable[[int], F32] | None = None,
        hashed: bool = True,
        part_codec: Codec | None = None,
        coded: Callable[[int], U8] | None = None,
        keep: Callable[[int, int, U8], None] | None = None,
        came: Callable[[int, U8], None] | None = None,
    ) -> None:
        self._kept = kept or {}
        plan.check_use(me, result.grid.count, self._kept)
        self._plan, self._me, self._result = plan, me, result
        self._codec, self._grid = part_codec or result.codec.part_codec, result.grid
        self._layout = encoded_layout(self._grid, self._codec)  # the layout of parts
        self._on_done, self._on_failed, self._on_came = on_done, on_failed, came
        part_bytes, sum_bytes = self._layout.chunk_bytes, 4 * self._grid.size(0)
        make = PairSchedule if plan.is_pairwise else TreeSchedule
        self._schedule: Schedule = make(plan, me, part_bytes, sum_bytes)
        self.lacking = result.keep(self._kept)  # kept chunks that are not here
        for chunk in self._kept.keys() - self.lacking:
            self._schedule.final(chunk)

        lock = threading.RLock()  # guards the schedule and everything below
        self._lock, self._changed = lock, threading.Condition(lock)
        self._turns: dict[int, threading.Condition] = {}  # senders wait, by destination: same lock
        self._aborted = self._started = False
        self._failed: set[int] = set()
        self._paced: set[int] = set()  # destinations that wait for a contribution to another
        self._reading = 0  # results that are being sent
        self._progress_bytes = 0
        self._own_sent: list[int] = []  # chunks whose own part has just been sent
        is_root = self._schedule.is_root
        self._sums = parts_for(plan, result, self._codec, is_root, source, own)
        self._sums.coded, self._sums.keep = coded, keep
        self._folding = Folding(
            me, self._schedule, self._sums, result, self._changed, hashed=hashed
        )
        told_bytes = self._sums.told_bytes
        self._arrivals = ReceiveBuffers(result, self._layout, self._sums.encoded, told_bytes)
        self._lanes = Stripes(self._schedule, self._sums.encoded)
        self._senders = Senders(self._sums.encoded)

    @property
    def inner_products(self) -> InnerProducts:
        """Return the inner products that the result was made with."""
        return self._sums.inner_products

    # ---- the life of a reduction

    def start(self, outlets: Mapping[int, Outlet], lanes: Mapping[int, int] | None = None) -> None:
        """Start a sender thread per outlet, and what there is to do alone.

        Outlets lead to any of ``destinations``. May be called again, with more; ``lanes``: how many
        are to come to each of them. Raises LocalProtocolError for an outlet to oneself.
        """
        name = f"reduce-{self._plan.name(self._me)}"
        with self._changed:
            if self._aborted:
                return
            if self._me in outlets:
                raise LocalProtocolError("an outlet to oneself")
            first, self._started = not self._started, True
            if first and self._schedule.local_chunks():
                self._senders.run(self._add_alone, f"{name}-alone")
            calls = SendCalls(self._next_send, self._load, self._loaded, self._send_ended)
            self._lanes.expect(lanes or {})
            for dest, outlet in outlets.items():
                self._turns.setdefault(dest, threading.Condition(self._lock))
                to = f"{name}-to-{self._plan.name(dest)}"
                self._senders.spawn(self._lanes.opened(dest), outlet.send, to, calls)
        if first and len(self._kept) == self._grid.count and not self.lacking:
            self._on_done(list(self._result.digests))  # else the last final chunk does it

    def abort(self) -> None:
        """End the reduction and wake everyone who waits.

        It is idempotent and never blocks on a stream. Who is inside ``Outlet.send`` ends after
        that, so the caller closes the streams too.
        """
        with self._changed:
            self._aborted = True
            for turn in (self._changed, *self._turns.values()):
                turn.notify_all()

    def join(self, timeout_s: float) -> bool:
        """Wait for the threads, and return whether all have ended.

        Then ``source`` is not called any more.
        """
        return self._senders.join(timeout_s)

    @property
    def uses_result(self) -> bool:
        """Return whether a thread reads or fills ``result``.

        Once it is false after ``abort``, it is never true again.
        """
        with self._changed:
            return bool(self._reading or self._folding.writing) or self._arrivals.writes_result

    @property
    def destinations(self) -> frozenset[int]:
        """Return the participants that this one sends to."""
        return self._schedule.destinations

    # ---- what the status page and the failure detector ask

    @property
    def progress_bytes(self) -> int:
        """Return the payload bytes moved so far, by whole frames; the number only ever grows.

        It has those of chunks to which nobody else adds: who is alone moves no others for a while.
        """
        return self._progress_bytes

    @property
    def buffer_bytes(self) -> int:
        return self._sums.allocated_bytes + self._arrivals.allocated_bytes

    def missing(self) -> frozenset[int]:
        with self._changed:
            return self._schedule.missing()

    # ---- receiving: called by the thread that reads the stream from ``src``

    def reserve(self, frame: Frame, length: int, timeout_s: float) -> memoryview | None:
        """Return a buffer for the payload of a frame, to fill before ``received``.

        It has ``length`` bytes. Blocks while the frame is ahead of the window. Returns None if it
        is to be dropped, as the attempt is aborted or the bytes are here. Raises
        RemoteProtocolError if the schedule does not allow it, and RoundTimeoutError if the window
        did not move for ``timeout_s``; it may be reserved again.
        """
        begun_s = time.monotonic()
        with self._changed:
            while not self._aborted:
                admission = self._schedule.admit(frame.src, frame.kind, frame.chunk)
                if not self._arrivals.fits(frame, length):
                    codec = self._codec if frame.kind == FrameKind.CONTRIB else self._result.codec
                    expected = self._arrivals.size(frame)
                    raise wrong_length(self._plan, frame, length, codec, expected)
                if admission is FrameAdmission.DROP:
                    return None
                if frame in self._arrivals:
                    raise twice(self._plan, frame)
                if admission is FrameAdmission.ACCEPT:
                    return self._arrivals.place(frame, length)[:length].data
                waited_s = time.monotonic() - begun_s
                if waited_s >= timeout_s:
                    late = self._schedule.missing()
                    raise held_too_long(self._plan, frame.src, frame.chunk, waited_s, late)
                self._changed.wait(timeout_s - waited_s)
        return None

    def received(self, frame: Frame) -> None:
        """Take in a frame whose reserved buffer is full: check it, and add or store what can be.

        Takes as long as the arithmetic takes (about 1 ms per chunk), so not for the event loop.
        """
        src, kind, chunk = frame.src, frame.kind, frame.chunk
        with self._changed:
            wanted = self._schedule.admit(src, kind, chunk) is not FrameAdmission.DROP
            writing = self._folding.writing
            wanted &= not self._aborted and (kind != FrameKind.RESULT or chunk not in writing)
            self._progress_bytes += self._arrivals.length(frame)
            arrived = self._arrivals.filled(frame, wanted=wanted)
            if arrived is None:
                return
            if kind == FrameKind.CONTRIB:
                self._folding.waiting[src, chunk] = arrived.data
                self._schedule.arrived(src, chunk)
            elif arrived.in_place:
                writing.add(chunk)  # until it is known to be right
        if kind == FrameKind.CONTRIB:
            self._folding.fold(chunk, self._fold_calls)
            return
        if kind == FrameKind.GRAM:
            data = arrived.data[: self._sums.told_bytes]
            self._folding.told(src, data, self._fold_calls)
        else:
            self._check_result(src, chunk, arrived)
        self._arrivals.give_back(frame, arrived)

    def broken_off(self, frame: Frame) -> None:
        """Forget a reserved frame of which the rest will not come on this stream."""
        with self._changed:
            self._arrivals.ended(frame)

    def put_kept(self, chunk: int, data: U8) -> bool:
        """Take the bytes of a kept chunk from a holder; return whether they are what was kept."""
        if fits := self._result.fits(chunk, data, self._kept[chunk]):
            self._folding.finish(chunk, self._fold_calls, data)
        return fits

    def _check_result(self, src: int, chunk: int, arrived: ReceivedChunk) -> None:
        """Check a result that arrived: after the commit nobody may fail to decode it."""
        data = arrived.data[: self._result.layout.size(chunk)]
        try:
            self._result.codec.check(data, self._grid.size(chunk))
            self._folding.finish(chunk, self._fold_calls, None if arrived.in_place else data)
        except CodecError as error:
            self._fail(src, f"its result of chunk {chunk}: {error.what}")
        finally:
            with self._changed:
                self._folding.writing.discard(chunk)

    @property
    def _fold_calls(self) -> FoldCalls:
        return FoldCalls(
            lambda: self._aborted, self._wake, self._fail, self._on_done, self._on_came
        )

    def _add_alone(self) -> None:
        for chunk in self._schedule.local_chunks():
            with self._changed:
                self._progress_bytes += self._layout.size(chunk)
            self._folding.fold(chunk, self._fold_calls)  # nothing, once it is aborted

    # ---- sending

    def _next_send(self, lane: Stripe) -> Sending | None:
        dest, turn = lane.dest, self._turns[lane.dest]
        with turn:
            while not self._aborted:
                found = self._lanes.take(lane, time.monotonic())
                if isinstance(found, Sending):
                    self._reading += found.send.kind is FrameKind.RESULT
                    for other in self._paced if found.send.kind is FrameKind.CONTRIB else ():
                        self._turns[other].notify()
                    return found
                if found is Idle.DONE and self._lanes.is_over(dest, time.monotonic()):
                    return None
                if found is Idle.PACED:
                    self._paced.add(dest)
                turn.wait(POLL_S if self._lanes.several(dest) else None)
                self._paced.discard(dest)
        return None

    def _load(self, send: OutgoingFrame, buffer: U8) -> U8:
        if send.kind is FrameKind.RESULT:
            return self._result.view(send.chunk)
        if send.kind is FrameKind.GRAM:
            told = self._sums.to_tell()
            assert told is not None  # the schedule hands it out only then
            return told
        payload = self._sums.part(send.chunk, buffer, own=send.added_here)
        if send.added_here:
            copy = self._sums.copied(payload, buffer)
            with self._changed:
                if copy is not None:
                    self._folding.waiting[self._me, send.chunk] = copy
                self._schedule.arrived(self._me, send.chunk)
                self._own_sent.append(send.chunk)
        return payload

    def _loaded(self, lane: Stripe, sending: Sending, payload: U8, buffer: U8) -> bool:
        with self._changed:
            if self._lanes.several(lane.dest):
                self._turns[lane.dest].notify_all()
            return self._lanes.loaded(lane.dest, sending, payload, buffer)

    def _send_ended(
        self, lane: Stripe, sending: Sending, why: str, receipt: Receipt | None
    ) -> None:
        payload, broke, dest, now_s = sending.payload, bool(why), lane.dest, time.monotonic()
        with self._changed:
            self._reading -= sending.send.kind is FrameKind.RESULT
            if payload is not None and not why:
                self._progress_bytes += payload.nbytes
                self._lanes.ended(lane, sending, now_s, receipt)
            elif payload is not None and self._lanes.broke(lane, sending):
                why = ""  # another stream sends it
            elif not self._aborted:
                self._schedule.broken(dest)
                self._wake()
            if broke or self._lanes.is_over(dest, now_s):  # to be sent again, or the end
                self._turns[dest].notify_all()
            own, self._own_sent = self._own_sent, []
        for chunk in own:  # now, because it would have kept the send waiting
            self._folding.fold(chunk, self._fold_calls)
        if why:
            self._fail(self._me if payload is None else dest, why)

    def _wake(self) -> None:  # under the lock: the schedule may allow more
        self._changed.notify_all()
        for turn in self._turns.values():
            turn.notify()

    # ---- failing

    def _fail(self, participant: int, why: str) -> None:
        with self._changed:
            if self._aborted or participant in self._failed:
                return
            self._failed.add(participant)
        self._on_failed(participant, why)
