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
from typing import Final, Protocol

import numpy as np

from atoll.collectives.buffers import BufferPool
from atoll.collectives.butterfly import Butterfly, window_chunks
from atoll.collectives.chunks import ChunkGrid, encoded_layout
from atoll.collectives.codecs import F32, U8, Codec
from atoll.collectives.errors import (
    AtollError,
    CodecError,
    LocalProtocolError,
    RemoteProtocolError,
    RoundTimeoutError,
)
from atoll.collectives.plan import ReducePlan
from atoll.collectives.schedule import Admission, Idle, Kind, Schedule, Send

__all__ = ["Outlet", "Reduction"]

# Chunks that are filled and encoded at the same time. Each takes a float32 chunk, and this many
# cores encode more than 100 Gbit/s of float32, so more would take memory and bring nothing.
ENCODERS_MAX: Final = 4

_SendFrame = Callable[[int, int, memoryview], None]  # kind, chunk, payload


class Outlet(Protocol):
    """The sending end of a stream to one participant."""

    def send(self, kind: int, chunk: int, payload: memoryview) -> None:
        """Send one frame; blocks. ConnectError if the stream is broken or closed."""


class Reduction:
    """One attempt at one reduction, as participant ``me`` sees it.

    ``source(chunk, out)`` fills ``out``, float32[grid.size(chunk)], with the own contribution. It
    is called once per chunk, from several threads at a time.
    ``result`` is uint8[layout.total_bytes]: the encoded mean, written in place, the same bytes for
    all participants. Nothing writes to it after ``abort`` has returned.
    ``on_done(digest)`` is called once, when the result is complete here, with the SHA-256 of the
    SHA-256 digests of its chunks. Others may still need this participant's sends: call ``abort``
    only after the round is decided.
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
        codec: Codec,
        grid: ChunkGrid,
        source: Callable[[int, F32], None],
        result: U8,
        on_done: Callable[[bytes], None],
        on_failed: Callable[[int, str], None],
    ) -> None:
        self._layout = encoded_layout(grid, codec)
        if len(plan.owners) != grid.count or not 0 <= me < len(plan.participants):
            raise LocalProtocolError(
                f"participant {me} of {len(plan.participants)} with {grid.count} chunks does not "
                f"fit a plan of {len(plan.owners)} chunks"
            )
        if result.dtype != np.uint8 or result.shape != (self._layout.total_bytes,):
            raise LocalProtocolError(
                f"the result takes {self._layout.total_bytes} bytes, not {result.nbytes}"
            )
        self._plan = plan
        self._factors = plan.factors()
        self._me = me
        self._codec = codec
        self._grid = grid
        self._source = source
        self._result = result
        self._on_done = on_done
        self._on_failed = on_failed
        window = window_chunks(len(plan.participants), self._layout.chunk_bytes)
        self._schedule: Schedule = Butterfly(plan, me, window)

        self._changed = threading.Condition()  # guards the schedule and everything below
        self._aborted = False
        self._failed: set[int] = set()
        self._progress_bytes = 0
        self._digests = [b"" for _ in range(grid.count)]
        self._arriving: dict[tuple[int, int, int], U8] = {}  # (src, kind, chunk)
        self._waiting: dict[tuple[int, int], U8] = {}  # (src, chunk): received, not yet added
        self._sums: dict[int, F32] = {}  # only the one thread that folds a chunk touches its sum
        self._threads: dict[int, threading.Thread] = {}
        self._encoders = threading.BoundedSemaphore(ENCODERS_MAX)
        self._encoded = BufferPool(self._layout.chunk_bytes, np.uint8)
        self._floats = BufferPool(grid.size(0), np.float32)

    # ---- the life of a reduction

    def start(self, outlets: Mapping[int, Outlet]) -> None:
        """Start the own thread and a sender thread per outlet.

        May be called again, with further outlets; a destination gets one outlet only.
        """
        with self._changed:
            if self._aborted:
                return
            taken = outlets.keys() & (self._threads.keys() | {self._me})
            if taken:
                raise LocalProtocolError(f"a second outlet, or one to oneself: {sorted(taken)}")
            if self._me not in self._threads:
                self._spawn(self._me, self._send_to_self)
            for dest, outlet in outlets.items():
                self._spawn(dest, outlet.send)

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
        deadline_s = time.monotonic() + timeout_s
        with self._changed:
            threads = [t for t in self._threads.values() if t is not threading.current_thread()]
        for thread in threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        return not any(thread.is_alive() for thread in threads)

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

    @property
    def chunk_digests(self) -> list[bytes]:
        """SHA-256 of the encoded bytes of each chunk; empty for chunks that are not final."""
        with self._changed:
            return list(self._digests)

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
        self._finish(chunk, data)
        self._encoded.give(encoded)

    def _store_result(self, src: int, chunk: int, buffer: U8) -> None:
        data = buffer[: self._layout.size(chunk)]
        try:
            # Checked here, because after the commit nobody may fail to decode it.
            self._codec.check(data, self._grid.size(chunk))
        except CodecError as error:
            self._fail(src, f"its result of chunk {chunk}: {error.what}")
            return
        self._finish(chunk, data)
        self._encoded.give(buffer)

    def _finish(self, chunk: int, data: U8) -> None:
        digest = hashlib.sha256(data.data).digest()
        lo, hi = self._layout.slice(chunk)
        with self._changed:
            # Under the lock, so that after abort() the result belongs to its owner again.
            if self._aborted:
                return
            self._result[lo:hi] = data
            self._digests[chunk] = digest
            self._schedule.final(chunk)
            done = self._schedule.done
            self._changed.notify_all()
        if done:
            self._on_done(hashlib.sha256(b"".join(self._digests)).digest())

    # ---- sending

    def _spawn(self, dest: int, send: _SendFrame) -> None:
        name = f"reduce-{self._plan.name(self._me)}-to-{self._plan.name(dest)}"
        thread = threading.Thread(target=self._run, args=(dest, send), name=name, daemon=True)
        thread.start()
        self._threads[dest] = thread

    def _run(self, dest: int, send_frame: _SendFrame) -> None:
        encoded = self._encoded.take()
        while (send := self._next_send(dest)) is not None:
            lo, hi = self._layout.slice(send.chunk)
            blame = self._me
            try:
                if send.kind is Kind.RESULT:
                    payload = self._result[lo:hi]
                else:
                    payload = encoded[: hi - lo]
                    self._encode(send.chunk, payload)
                blame = dest
                send_frame(send.kind, send.chunk, payload.data)
            except Exception as error:  # whatever it was: a thread that dies in silence is a hang
                self._fail(blame, f"sending chunk {send.chunk}: {_reason(error)}")
                break
            if dest != self._me:
                with self._changed:
                    self._progress_bytes += hi - lo
        self._encoded.give(encoded)

    def _next_send(self, dest: int) -> Send | None:
        with self._changed:
            while not self._aborted:
                send = self._schedule.next_send(dest)
                if isinstance(send, Send):
                    return send
                if send is Idle.DONE:
                    return None
                self._changed.wait()
        return None

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


def _reason(error: Exception) -> str:
    return error.what if isinstance(error, AtollError) else f"{type(error).__name__}: {error}"
