"""The engine: runs a schedule over streams, with one thread per destination.

A reduction has no queues. The sender thread of a destination asks the schedule for the next frame
and encodes the chunk only then, into one reused buffer; the back-pressure of its stream paces it.
The thread that receives a stream reserves a buffer, fills it, and adds what it brought to the sum,
if it is that source's turn; otherwise the thread whose turn comes later adds it. Own contributions
take the same way, from a thread of their own.

Threads and locks: one condition guards the schedule and all shared state. It is held for look-ups
and for the copy of one finished chunk into the result, never while a codec, a stream or a callback
runs. A wait ends by the next final own chunk or by ``abort``. The schedule says why no set of waits
can close a circle.

Results are sent from where they lie. A sender may still read there after ``abort``: as long as
``reads_result`` says so, nobody else may write there (the frame would pass for a valid one).

Memory of a reduction, in encoded chunks of c bytes and float32 chunks of at most 1 MiB::

    c per destination (sending)
    (window + 1) * c per source (received and not yet added; one result that arrives)
    window * (c + 1 MiB) (sums, and their encoded form)
    ENCODERS_MAX * 1 MiB (own contributions being encoded)
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Mapping
from typing import Final

import numpy as np

from atoll.collectives.buffers import BufferPool
from atoll.collectives.butterfly import Butterfly, window_chunks
from atoll.collectives.codecs import F32, U8
from atoll.collectives.errors import (
    CodecError,
    LocalProtocolError,
    RemoteProtocolError,
    RoundTimeoutError,
)
from atoll.collectives.plan import NOBODY, ReducePlan
from atoll.collectives.result import RoundResult
from atoll.collectives.schedule import Admission, Idle, Kind, Schedule, Send
from atoll.collectives.senders import Outlet, Senders, SendFrame

__all__ = ["Reduction"]

# Chunks that are filled and encoded at the same time. Each takes a float32 chunk, and this many
# cores encode more than 100 Gbit/s of float32, so more would take memory and bring nothing.
ENCODERS_MAX: Final = 4


class Reduction:
    """One attempt at one reduction, as participant ``me`` sees it.

    ``source(chunk, out)`` fills ``out``, float32[grid.size(chunk)], with the own contribution. It
    is called once per chunk, from several threads at a time.
    ``result`` is completed in place: the encoded mean, the same bytes for all participants. Nothing
    writes to it after ``abort`` has returned, and its final chunks stay valid.
    ``kept`` are chunks that an earlier attempt has finished, with their digests: the plan gives
    them no owner. Those that ``result`` holds are final at once; ``lacking`` are to be put.
    ``on_done(digests)`` is called once, when the result is complete here, with the SHA-256 of each
    chunk. Others may still need this participant's sends: call ``abort`` only after the round is
    decided.
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
    ) -> None:
        self._kept = kept or {}
        unowned = {chunk for chunk, owner in enumerate(plan.owners) if owner == NOBODY}
        if len(plan.owners) != result.grid.count or not 0 <= me < len(plan.participants):
            raise LocalProtocolError(
                f"participant {me} of {len(plan.participants)} with {result.grid.count} chunks does"
                f" not fit a plan of {len(plan.owners)} chunks"
            )
        if unowned != self._kept.keys():
            raise LocalProtocolError("the plan reduces chunks that are kept, or not all others")
        self._plan = plan
        self._factors = plan.factors()
        self._me = me
        self._source = source
        self._result = result
        self._codec, self._grid, self._layout = result.codec, result.grid, result.layout
        self._on_done = on_done
        self._on_failed = on_failed
        window = window_chunks(len(plan.participants), self._layout.chunk_bytes)
        self._schedule: Schedule = Butterfly(plan, me, window)
        self.lacking = result.keep(self._kept)  # kept chunks that are not here
        for chunk in self._kept.keys() - self.lacking:
            self._schedule.final(chunk)

        self._changed = threading.Condition()  # guards the schedule and everything below
        self._aborted = False
        self._failed: set[int] = set()
        self._reading: set[int] = set()  # destinations that a result is being sent to
        self._progress_bytes = 0
        self._arriving: dict[tuple[int, int, int], U8] = {}  # (src, kind, chunk)
        self._waiting: dict[tuple[int, int], U8] = {}  # (src, chunk): received, not yet added
        self._sums: dict[int, F32] = {}  # only the one thread that folds a chunk touches its sum
        self._encoders = threading.BoundedSemaphore(ENCODERS_MAX)
        self._encoded = BufferPool(self._layout.chunk_bytes, np.uint8)
        self._floats = BufferPool(self._grid.size(0), np.float32)
        self._senders = Senders(
            buffers=self._encoded,
            next_send=self._next_send,
            load=self._load,
            ended=self._send_ended,
        )

    # ---- the life of a reduction

    def start(self, outlets: Mapping[int, Outlet]) -> None:
        """Start the own thread and a sender thread per outlet.

        May be called again, with further outlets; a destination gets one outlet only.
        """
        with self._changed:
            if self._aborted:
                return
            taken = outlets.keys() & (self._senders.destinations | {self._me})
            if taken:
                raise LocalProtocolError(f"a second outlet, or one to oneself: {sorted(taken)}")
            first = self._me not in self._senders.destinations
            if first:
                self._spawn(self._me, self._send_to_self)
            for dest, outlet in outlets.items():
                self._spawn(dest, outlet.send)
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
    def reads_result(self) -> bool:
        """Whether a thread is sending from ``result``; once false after ``abort``, never again."""
        with self._changed:
            return bool(self._reading)

    # ---- what the status page and the failure detector ask

    @property
    def progress_bytes(self) -> int:
        """Payload bytes received and sent so far, counted by whole frames; only ever grows."""
        with self._changed:
            return self._progress_bytes

    @property
    def buffer_bytes(self) -> int:
        """Memory that the reduction has taken for chunks."""
        return self._encoded.allocated_bytes + self._floats.allocated_bytes

    def missing(self) -> frozenset[int]:
        """The participants that this one waits for now; see the schedule."""
        with self._changed:
            return self._schedule.missing()

    # ---- receiving: called by the thread that reads the stream from ``src``

    def reserve(
        self, src: int, kind: int, chunk: int, length: int, timeout_s: float
    ) -> memoryview | None:
        """A buffer of ``length`` bytes for the payload of a frame, to fill before ``received``.

        Blocks while the frame is ahead of the window. None: read the payload and drop it, because
        the attempt is aborted or the bytes are here already. RemoteProtocolError: the schedule does
        not allow this frame. RoundTimeoutError: the window did not move for ``timeout_s``; the same
        frame may be reserved again.
        """
        if src == self._me:
            raise RemoteProtocolError("a data frame that claims to come from this peer itself")
        return self._reserve(src, kind, chunk, length, timeout_s)

    def received(self, src: int, kind: int, chunk: int) -> None:
        """The reserved buffer is full: check it, and add or store what can be added or stored.

        Takes as long as the arithmetic takes (about 1 ms per chunk), so not for the event loop.
        """
        with self._changed:
            buffer = self._arriving.pop((src, kind, chunk), None)
            if buffer is None:
                raise LocalProtocolError(f"frame {src}/{kind}/{chunk} was not reserved")
            if self._aborted:
                return
            if src != self._me:
                self._progress_bytes += self._layout.size(chunk)
            if kind == Kind.CONTRIB:
                self._waiting[src, chunk] = buffer
                self._schedule.arrived(src, chunk)
        if kind == Kind.CONTRIB:
            self._fold(chunk)
        else:
            self._store_result(src, chunk, buffer)

    def put_kept(self, chunk: int, data: U8) -> bool:
        """Take the bytes of a kept chunk from a holder. False: they are not what was kept."""
        digest = hashlib.sha256(data.data).digest()
        if len(data) != self._layout.size(chunk) or digest != self._kept[chunk]:
            return False
        try:
            self._codec.check(data, self._grid.size(chunk))  # who kept it may not have done so
        except CodecError:
            return False
        self._finish(chunk, data, digest)
        return True

    def _reserve(
        self, src: int, kind: int, chunk: int, length: int, timeout_s: float | None
    ) -> memoryview | None:
        begun_s = time.monotonic()
        with self._changed:
            while not self._aborted:
                admission = self._schedule.admit(src, kind, chunk)
                expected = self._layout.size(chunk)
                if length != expected:
                    raise RemoteProtocolError(
                        f"peer {self._plan.name(src)} sent {length} bytes for chunk {chunk}, which "
                        f"takes {expected} in {self._codec.name}",
                        fix="run the same version of atoll on all peers",
                    )
                if admission is Admission.DROP:
                    return None
                if admission is Admission.ACCEPT:
                    buffer = self._encoded.take()
                    self._arriving[src, kind, chunk] = buffer
                    return buffer[:length].data
                waited_s = time.monotonic() - begun_s
                if timeout_s is not None and waited_s >= timeout_s:
                    raise self._stalled(src, chunk, waited_s)
                self._changed.wait(None if timeout_s is None else timeout_s - waited_s)
        return None

    # ---- reducing

    def _fold(self, chunk: int) -> None:
        """Add to the sum of an own chunk what is here and has its turn."""
        size, encoded_bytes = self._grid.size(chunk), self._layout.size(chunk)
        complete = False
        while not complete:
            with self._changed:
                src = None if self._aborted else self._schedule.next_fold(chunk)
                if src is None:
                    return
                buffer = self._waiting.pop((src, chunk))
            if chunk not in self._sums:
                self._sums[chunk] = self._floats.take()
                self._sums[chunk].fill(0)
            total = self._sums[chunk][:size]
            try:
                self._codec.decode_add(buffer[:encoded_bytes], self._factors[src], total)
            except CodecError as error:
                self._fail(src, f"its contribution to chunk {chunk}: {error.what}")
                return
            self._encoded.give(buffer)
            with self._changed:
                complete = self._schedule.folded(chunk)
        self._finish_own(chunk)

    def _finish_own(self, chunk: int) -> None:
        """Encode the complete sum of an own chunk, once."""
        total = self._sums.pop(chunk)
        encoded = self._encoded.take()
        try:
            data = encoded[: self._layout.size(chunk)]
            self._codec.encode(total[: self._grid.size(chunk)], data)
        except CodecError as error:
            # Only values next to the largest float32 can do this, since each part was finite.
            self._fail(self._me, f"the mean of chunk {chunk}: {error.what}")
            return
        self._floats.give(total)
        self._finish(chunk, data, hashlib.sha256(data.data).digest())
        self._encoded.give(encoded)

    def _store_result(self, src: int, chunk: int, buffer: U8) -> None:
        data = buffer[: self._layout.size(chunk)]
        try:
            # Checked here, because after the commit nobody may fail to decode it.
            self._codec.check(data, self._grid.size(chunk))
        except CodecError as error:
            self._fail(src, f"its result of chunk {chunk}: {error.what}")
            return
        self._finish(chunk, data, hashlib.sha256(data.data).digest())
        self._encoded.give(buffer)

    def _finish(self, chunk: int, data: U8, digest: bytes) -> None:
        with self._changed:
            # Under the lock, so that after abort() the result belongs to its owner again.
            if self._aborted or self._result.digests[chunk]:  # a kept one may come from two holders
                return
            self._result.store(chunk, data, digest)
            self._schedule.final(chunk)
            digests = list(self._result.digests) if self._schedule.done else []
            self._changed.notify_all()
        if digests:
            self._on_done(digests)

    # ---- sending

    def _spawn(self, dest: int, send: SendFrame) -> None:
        name = f"reduce-{self._plan.name(self._me)}-to-{self._plan.name(dest)}"
        self._senders.spawn(dest, send, name)

    def _next_send(self, dest: int) -> Send | None:
        with self._changed:
            while not self._aborted:
                send = self._schedule.next_send(dest)
                if isinstance(send, Send):
                    if send.kind is Kind.RESULT:
                        self._reading.add(dest)
                    return send
                if send is Idle.DONE:
                    return None
                self._changed.wait()
        return None

    def _load(self, send: Send, buffer: U8) -> U8:
        if send.kind is Kind.RESULT:
            return self._result.view(send.chunk)
        payload = buffer[: self._layout.size(send.chunk)]
        self._encode(send.chunk, payload)
        return payload

    def _send_ended(self, dest: int, nbytes: int, why: str, *, ours: bool) -> None:
        with self._changed:
            self._reading.discard(dest)
            if dest != self._me and not why:
                self._progress_bytes += nbytes
        if why:
            self._fail(self._me if ours else dest, why)

    def _send_to_self(self, kind: int, chunk: int, payload: memoryview) -> None:
        buffer = self._reserve(self._me, kind, chunk, len(payload), timeout_s=None)
        if buffer is not None:
            buffer[:] = payload
            self.received(self._me, kind, chunk)

    def _encode(self, chunk: int, out: U8) -> None:
        with self._encoders:
            values = self._floats.take()
            try:
                contribution = values[: self._grid.size(chunk)]
                self._source(chunk, contribution)
                self._codec.encode(contribution, out)
            finally:
                self._floats.give(values)

    # ---- failing

    def _fail(self, participant: int, why: str) -> None:
        with self._changed:
            if self._aborted or participant in self._failed:
                return
            self._failed.add(participant)
        self._on_failed(participant, why)

    def _stalled(self, src: int, chunk: int, waited_s: float) -> RoundTimeoutError:
        late = ", ".join(self._plan.name(p) for p in sorted(self._schedule.missing()))
        return RoundTimeoutError(
            f"peer {self._plan.name(src)} has waited {waited_s:.1f} s to send chunk {chunk}, "
            f"because this peer still waits for {late or 'itself'}",
            fix="see `atoll status` for the links to those peers",
            phase="reduce",
            elapsed_s=waited_s,
        )
