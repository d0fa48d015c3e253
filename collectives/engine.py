"""The engine: runs a schedule over streams, with one thread per destination.

A reduction has no queues. The sender thread of a destination asks the schedule for the next frame
and encodes the chunk only then, into one reused buffer; the back-pressure of its stream paces it.
The thread that receives a stream reserves a buffer, fills it, and adds what it brought to the sum,
if it is that source's turn; otherwise the thread whose turn comes later adds it. The own part of a
sum is added when its turn comes, by whichever thread is at it; where nobody else adds anything, by
a thread for these chunks.

Threads and locks: one condition guards the schedule and all shared state. It is held for look-ups
and for the copy of one finished chunk into the result, never while a codec, a stream or a callback
runs. A wait ends by the next final chunk, the next complete sum or ``abort``. The schedule says why
no set of waits can close a circle.

Results are encoded, received and sent where they lie, and sums of an exact codec grow there. A
thread may still be at it after ``abort``, in a chunk that is not final, or reading a final one: as
long as ``uses_result`` says so, nobody else may write there, nor read what is not final.

Memory of a reduction, in encoded chunks of c bytes and float32 chunks of at most 1 MiB::

    c per destination (sending)
    lead * c per source and root, twice that at worst (received and not yet added)
    lead * c in a pairwise exchange (own parts, sent and not yet added)
    lead * 1 MiB per root that it adds for, twice that at worst (sums)
    ENCODERS_MAX * 1 MiB (own contributions being encoded)
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Mapping

from atoll.collectives.chunks import EncodedLayout, encoded_layout
from atoll.collectives.codecs import F32, U8, Codec
from atoll.collectives.errors import CodecError, LocalProtocolError
from atoll.collectives.pairs import PairSchedule
from atoll.collectives.plan import ReducePlan
from atoll.collectives.refusals import check_length, held_too_long
from atoll.collectives.result import RoundResult
from atoll.collectives.schedule import Admission, Idle, Kind, Schedule, Send
from atoll.collectives.senders import Outlet, Senders, reason_of
from atoll.collectives.sums import Sums
from atoll.collectives.trees import TreeSchedule

__all__ = ["UNHASHED", "Reduction"]

UNHASHED = b"-"  # stands for the digest of a chunk that is final and was not hashed


class Reduction:
    """One attempt at one reduction, as participant ``me`` sees it.

    ``source(chunk, out)`` fills ``out``, float32[grid.size(chunk)], with the own contribution. It
    is called once per chunk, from several threads at a time.
    ``part_codec`` is that of parts and partial sums; by default they are encoded like the result.
    ``own(chunk)``, if given, shows the own part, float32[grid.size(chunk)], where it lies: nobody
    changes it before the reduction has ended and its threads have been joined.
    ``result`` is completed in place: the encoded mean, the same bytes for all participants. After
    ``abort`` has returned no further chunk becomes final, and final chunks stay valid.
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
    ) -> None:
        self._kept = kept or {}
        plan.check_use(me, result.grid.count, self._kept)
        self._plan, self._me = plan, me
        self._source, self._own, self._hashed = source, own, hashed
        self._result = result
        codec, self._grid = part_codec or result.codec, result.grid
        self._layout = encoded_layout(self._grid, codec)  # of parts
        self._formats: dict[int, tuple[Codec, EncodedLayout]] = {
            Kind.CONTRIB: (codec, self._layout),
            Kind.RESULT: (result.codec, result.layout),
        }
        self._on_done, self._on_failed = on_done, on_failed
        part_bytes, sum_bytes = self._layout.chunk_bytes, 4 * self._grid.size(0)
        make = PairSchedule if plan.is_pairwise else TreeSchedule
        self._schedule: Schedule = make(plan, me, part_bytes, sum_bytes)
        self.lacking = result.keep(self._kept)  # kept chunks that are not here
        for chunk in self._kept.keys() - self.lacking:
            self._schedule.final(chunk)

        self._changed = threading.Condition()  # guards the schedule and everything below
        self._aborted = self._started = False
        self._failed: set[int] = set()
        self._paced = 0  # senders that wait for a contribution to somebody else
        self._reading: set[int] = set()  # destinations that a result is being sent to
        self._writing: set[int] = set()  # chunks of the result that are being filled
        self._progress_bytes = 0
        self._arriving: dict[tuple[int, int, int], U8] = {}  # (src, kind, chunk)
        self._waiting: dict[tuple[int, int], U8] = {}  # (src, chunk): received, not yet added
        self._own_sent: list[int] = []  # chunks whose own part has just been sent
        self._sums = Sums(result, codec, plan.factors(), self._schedule.is_root)
        self._senders = Senders(
            buffers=self._sums.encoded,
            next_send=self._next_send,
            load=self._load,
            ended=self._send_ended,
        )

    # ---- the life of a reduction

    def start(self, outlets: Mapping[int, Outlet]) -> None:
        """Start a sender thread per outlet, and what there is to do alone.

        May be called again, with further outlets; a destination gets one outlet only. Those that
        this participant sends nothing to are not needed: see ``destinations``.
        """
        with self._changed:
            if self._aborted:
                return
            taken = outlets.keys() & (self._senders.destinations | {self._me})
            if taken:
                raise LocalProtocolError(f"a second outlet, or one to oneself: {sorted(taken)}")
            first, self._started = not self._started, True
            if first and self._schedule.local_chunks():
                self._senders.run(self._me, self._add_alone, self._thread_name(self._me))
            for dest in outlets:
                self._senders.spawn(dest, outlets[dest].send, self._thread_name(dest))
        if first and len(self._kept) == self._grid.count and not self.lacking:
            self._on_done(list(self._result.digests))  # else the last final chunk does it

    def abort(self) -> None:
        """End the reduction: idempotent, never blocks on a stream.

        Wakes everyone who waits. A thread inside ``Outlet.send`` ends after that send, so the
        caller closes the streams too.
        """
        with self._changed:
            self._aborted = True
            self._changed.notify_all()

    def join(self, timeout_s: float) -> bool:
        """Wait for the threads; True when all have ended, so ``source`` is not called any more."""
        return self._senders.join(timeout_s)

    @property
    def uses_result(self) -> bool:
        """Whether a thread is sending from ``result`` or filling a chunk of it that is not final;
        once false after ``abort``, never again."""
        with self._changed:
            return bool(self._reading or self._writing)

    @property
    def destinations(self) -> frozenset[int]:
        """The participants that this one sends to."""
        return self._schedule.destinations

    # ---- what the status page and the failure detector ask

    @property
    def progress_bytes(self) -> int:
        """Payload bytes received and sent so far, counted by whole frames; only ever grows. With
        those of chunks to which nobody else adds: who is alone moves no others for a while."""
        with self._changed:
            return self._progress_bytes

    @property
    def buffer_bytes(self) -> int:
        """Memory that the reduction has taken for chunks."""
        return self._sums.allocated_bytes

    def missing(self) -> frozenset[int]:
        """The participants that this one waits for now; see the schedule."""
        with self._changed:
            return self._schedule.missing()

    # ---- receiving: called by the thread that reads the stream from ``src``

    def reserve(
        self, src: int, kind: int, chunk: int, length: int, timeout_s: float
    ) -> memoryview | None:
        """A buffer of ``length`` bytes for the payload of a frame, to fill before ``received``.

        Blocks while the frame is ahead of the window. None: read the payload and drop it, as the
        attempt is aborted or the bytes are here. RemoteProtocolError: the schedule does not allow
        it. RoundTimeoutError: the window did not move for ``timeout_s``; it may be reserved again.
        """
        begun_s = time.monotonic()
        with self._changed:
            while not self._aborted:
                admission = self._schedule.admit(src, kind, chunk)
                check_length(self._plan, src, chunk, length, *self._formats[kind])
                if admission is Admission.DROP:
                    return None
                if admission is Admission.ACCEPT:
                    if kind == Kind.RESULT:
                        self._writing.add(chunk)
                        buffer = self._result.view(chunk)
                    else:
                        buffer = self._sums.encoded.take()
                    self._arriving[src, kind, chunk] = buffer
                    return buffer[:length].data
                waited_s = time.monotonic() - begun_s
                if waited_s >= timeout_s:
                    late = self._schedule.missing()
                    raise held_too_long(self._plan, src, chunk, waited_s, late)
                self._changed.wait(timeout_s - waited_s)
        return None

    def received(self, src: int, kind: int, chunk: int) -> None:
        """The reserved buffer is full: check it, and add or store what can be added or stored.

        Takes as long as the arithmetic takes (about 1 ms per chunk), so not for the event loop.
        """
        with self._changed:
            buffer = self._arriving.pop((src, kind, chunk), None)
            if buffer is None:
                raise LocalProtocolError(f"frame {src}/{kind}/{chunk} was not reserved")
            if kind == Kind.RESULT:
                self._writing.discard(chunk)
            if self._aborted:
                return
            self._progress_bytes += self._formats[kind][1].size(chunk)
            if kind == Kind.CONTRIB:
                self._waiting[src, chunk] = buffer
                self._schedule.arrived(src, chunk)
        if kind == Kind.CONTRIB:
            self._fold(chunk)
        else:
            self._check_result(src, chunk)

    def put_kept(self, chunk: int, data: U8) -> bool:
        """Take the bytes of a kept chunk from a holder. False: they are not what was kept."""
        if not self._result.fits(chunk, data, self._kept[chunk]):
            return False
        self._finish(chunk, data)
        return True

    def _check_result(self, src: int, chunk: int) -> None:
        """After the commit nobody may fail to decode it."""
        try:
            self._result.codec.check(self._result.view(chunk), self._grid.size(chunk))
        except CodecError as error:
            self._fail(src, f"its result of chunk {chunk}: {error.what}")
        else:
            self._finish(chunk)

    # ---- reducing

    def _fold(self, chunk: int) -> None:
        """Add to the sum of a chunk what is here and has its turn; the root finishes it."""
        complete = False
        while not complete:
            with self._changed:
                src = None if self._aborted else self._schedule.next_fold(chunk)
                if src is None:
                    return
                buffer = self._waiting.pop((src, chunk), None)
                if self._sums.in_place(chunk):
                    self._writing.add(chunk)
            wrong = ""
            try:
                self._add(chunk, src, buffer)
            except Exception as error:  # of codec or source: what it was must not end a reader
                wrong = f"its contribution to chunk {chunk}: {reason_of(error)}"
            with self._changed:
                self._writing.discard(chunk)
                complete = not wrong and self._schedule.folded(chunk)
                if complete:
                    self._changed.notify_all()
            if wrong:
                self._fail(src, wrong)
                return
        if self._schedule.is_root(chunk):
            self._complete(chunk)

    def _complete(self, chunk: int) -> None:
        """Its sum is the whole: to the result with it."""
        with self._changed:
            if self._aborted:
                return
            self._writing.add(chunk)
        try:
            self._sums.encode(chunk, self._result.view(chunk))
        except CodecError as error:
            self._fail(self._me, f"the mean of chunk {chunk}: {error.what}")
        else:
            self._finish(chunk)
        finally:
            with self._changed:
                self._writing.discard(chunk)

    def _add(self, chunk: int, src: int, buffer: U8 | None) -> None:
        """Among own parts alone the own one takes the same way through the codec as theirs."""
        if buffer is not None:
            whole = self._schedule.is_own_part(src, chunk)
            self._sums.add(chunk, src if whole else None, buffer)
        else:
            coded = self._schedule.is_star(chunk)
            self._sums.add_own(chunk, src, self._source, self._own, coded=coded)

    def _add_alone(self) -> None:
        for chunk in self._schedule.local_chunks():
            with self._changed:
                self._progress_bytes += self._layout.size(chunk)
            self._fold(chunk)  # nothing, once it is aborted

    def _finish(self, chunk: int, kept: U8 | None = None) -> None:
        """A chunk lies in the result, or is ``kept`` elsewhere, and is right."""
        data = self._result.view(chunk) if kept is None else kept
        digest = hashlib.sha256(data.data).digest() if self._hashed else UNHASHED
        with self._changed:
            if self._aborted or self._result.digests[chunk]:  # a kept one may come from two holders
                return
            if kept is not None:  # under the lock: nothing else says that somebody writes
                self._result.view(chunk)[:] = kept
            self._result.digests[chunk] = digest
            self._schedule.final(chunk)
            digests = list(self._result.digests) if self._schedule.done else []
            self._changed.notify_all()
        if digests:
            self._on_done(digests)

    # ---- sending

    def _thread_name(self, dest: int) -> str:
        return f"reduce-{self._plan.name(self._me)}-to-{self._plan.name(dest)}"

    def _next_send(self, dest: int) -> Send | None:
        with self._changed:
            while not self._aborted:
                send = self._schedule.next_send(dest)
                if isinstance(send, Send):
                    if send.kind is Kind.RESULT:
                        self._reading.add(dest)
                    elif self._paced:
                        self._changed.notify_all()
                    return send
                if send is Idle.DONE:
                    return None
                paced = send is Idle.PACED
                self._paced += paced
                self._changed.wait()
                self._paced -= paced
        return None

    def _load(self, send: Send, buffer: U8) -> U8:
        if send.kind is Kind.RESULT:
            return self._result.view(send.chunk)
        if self._sums.has(send.chunk) and not send.added_here:
            payload = buffer[: self._layout.size(send.chunk)]
            self._sums.encode(send.chunk, payload)
            return payload
        payload = self._sums.encode_own(send.chunk, self._source, self._own, buffer)
        if send.added_here:
            copy = self._sums.copied(payload, buffer)
            with self._changed:
                if copy is not None:
                    self._waiting[self._me, send.chunk] = copy
                self._schedule.arrived(self._me, send.chunk)
                self._own_sent.append(send.chunk)
        return payload

    def _send_ended(self, dest: int, nbytes: int, why: str, *, ours: bool) -> None:
        with self._changed:
            self._reading.discard(dest)
            if why and not self._aborted:
                self._schedule.broken(dest)
                self._changed.notify_all()
            self._progress_bytes += nbytes
            own, self._own_sent = self._own_sent, []
        for chunk in own:  # now, because it would have kept the send waiting
            self._fold(chunk)
        if why:
            self._fail(self._me if ours else dest, why)

    # ---- failing

    def _fail(self, participant: int, why: str) -> None:
        with self._changed:
            if self._aborted or participant in self._failed:
                return
            self._failed.add(participant)
        self._on_failed(participant, why)
