"""Run a schedule over streams, with one thread per outgoing stream.

A reduction has no queues. A sender thread asks the schedule for the next frame to its destination
and encodes the chunk only then (``send.py``). The thread that receives a stream reserves a buffer,
fills it, and adds what it brought to the sum, if it is that source's turn; otherwise the thread
whose turn comes later adds it (``accumulate.py``). The own part of a sum is added when its turn
comes, by whichever thread is at it, or by one for chunks to which nobody else adds.

One lock guards the schedule and all shared state (``control.py``). A wait ends by a final chunk, a
complete sum or ``abort``; the schedule says why there is no deadlock.

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

import time
from collections.abc import Callable, Mapping

import numpy as np

from atoll.collectives.chunks import encoded_layout
from atoll.collectives.codecs import U8, Codec
from atoll.collectives.engine.accumulate import Accumulator, PartAuditor
from atoll.collectives.engine.control import Control
from atoll.collectives.engine.parts import Contribution, parts_for
from atoll.collectives.engine.receive import (
    ReceiveBuffers,
    ReceivedChunk,
    held_too_long,
    twice,
    wrong_length,
)
from atoll.collectives.engine.result import RoundResult
from atoll.collectives.engine.send import Outlet, Senders
from atoll.collectives.errors import CodecError, LocalProtocolError
from atoll.collectives.robust.gram import InnerProducts
from atoll.collectives.schedule.pair import PairSchedule
from atoll.collectives.schedule.plan import ReducePlan
from atoll.collectives.schedule.schedule import Frame, FrameAdmission, FrameKind, Schedule
from atoll.collectives.schedule.tree import TreeSchedule


class Reduction:
    """Run one attempt at one reduction, as participant ``me`` sees it.

    ``contribution`` gives its own part of each chunk.
    ``result`` is completed in place: what its codec and ``plan.fold`` say, the same bytes for all.
    After ``abort`` has returned no more chunks become final, and final ones stay valid.
    ``part_codec`` is that of parts and partial sums; by default what the result's codec
    says, which is how the result is encoded too, but for coarse ones.
    ``kept`` are chunks that an earlier attempt has finished, with their digests: the plan gives
    them no owner. Those that ``result`` holds are final at once; ``lacking`` are to be put.
    ``on_done(digests)`` is called once, when the result is complete here, with the digest of each
    chunk. Others may still need this participant's sends: call ``abort`` only after the round is
    decided.
    ``on_failed(participant, why)`` is called at most once per participant, when a stream to it
    broke or it sent bytes that do not decode; with ``me`` when the own contribution cannot be
    encoded. The reduction goes on with the others until ``abort``.
    ``auditor``, if given, is shown every part that others send and every final chunk. What owners
    have told each other is verified afterwards then: no word of a single one breaks the reduction
    off and names somebody else.

    Callbacks come from worker threads and from threads in ``received``, never from ``abort``, and
    one may be under way while ``abort`` returns.
    """

    def __init__(
        self,
        *,
        plan: ReducePlan,
        me: int,
        contribution: Contribution,
        result: RoundResult,
        on_done: Callable[[list[bytes]], None],
        on_failed: Callable[[int, str], None],
        kept: Mapping[int, bytes] | None = None,
        part_codec: Codec | None = None,
        auditor: PartAuditor | None = None,
    ) -> None:
        self._kept = kept or {}
        plan.check_use(me, result.grid.count, self._kept)
        self._plan, self._me, self._result = plan, me, result
        self._contribution = contribution
        self._codec, self._grid = part_codec or result.codec.part_codec, result.grid
        self._layout = encoded_layout(self._grid, self._codec)  # the layout of parts
        part_bytes, sum_bytes = self._layout.chunk_bytes, 4 * self._grid.size(0)
        make = PairSchedule if plan.is_pairwise else TreeSchedule
        self._schedule: Schedule = make(plan, me, part_bytes, sum_bytes)
        self.lacking = result.keep(self._kept)  # kept chunks that are not here
        for chunk in self._kept.keys() - self.lacking:
            self._schedule.final(chunk)

        self._started = False
        control = self._control = Control(on_done, on_failed)
        self._changed = control.changed
        is_root, audited = self._schedule.is_root, auditor is not None
        parts = self._parts = parts_for(
            plan, result, self._codec, is_root, contribution, audited=audited
        )
        self._accumulator = Accumulator(me, self._schedule, parts, result, control, auditor)
        self._arrivals = ReceiveBuffers(result, self._layout, parts.encoded, parts.told_bytes)
        self._senders = Senders(plan, me, self._schedule, parts, self._accumulator, result, control)

    @property
    def inner_products(self) -> InnerProducts:
        """Return the inner products that the result was made with."""
        return self._parts.inner_products

    # ---- the life of a reduction

    def start(
        self, outlets: Mapping[int, Outlet], to_come: Mapping[int, int] | None = None
    ) -> None:
        """Start a sender thread per outlet, and what there is to do alone.

        Outlets lead to any of ``destinations``. May be called again, with more; ``to_come``: how
        many are to come to each of them. Raises LocalProtocolError for an outlet to oneself.
        """
        with self._changed:
            if self._control.aborted:
                return
            if self._me in outlets:
                raise LocalProtocolError("an outlet to oneself")
            first, self._started = not self._started, True
            if first and self._schedule.local_chunks():
                self._senders.run(self._add_alone, "alone")
            self._senders.open(outlets, to_come or {})
        if first and len(self._kept) == self._grid.count and not self.lacking:
            self._control.on_done(list(self._result.digests))  # else the last final chunk does it

    def abort(self) -> None:
        """End the reduction and wake everyone who waits.

        It is idempotent and never blocks on a stream. Who is inside ``Outlet.send`` ends after
        that, so the caller closes the streams too.
        """
        self._control.abort()

    def join(self, timeout_s: float) -> bool:
        """Wait for the threads, and return whether all have ended.

        Then the contribution is not asked any more.
        """
        return self._senders.join(timeout_s)

    @property
    def uses_result(self) -> bool:
        """Return whether a thread reads or fills ``result``.

        Once it is false after ``abort``, it is never true again.
        """
        with self._changed:
            sends_or_sums = bool(self._senders.reading or self._accumulator.writing)
            return sends_or_sums or self._arrivals.writes_result

    @property
    def destinations(self) -> frozenset[int]:
        """Return the participants that this one sends to."""
        return self._schedule.destinations

    # ---- what the status page and the failure detector ask

    @property
    def progress_bytes(self) -> int:
        """Return the payload bytes that have come so far, by whole frames; it only ever grows.

        It has those of chunks to which nobody else adds: to who is alone none come for a while.
        What is sent shows no progress, before it has arrived.
        """
        return self._control.progress_bytes

    @property
    def buffer_bytes(self) -> int:
        return self._parts.allocated_bytes + self._arrivals.allocated_bytes

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
            while not self._control.aborted:
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
            writing = self._accumulator.writing
            wanted &= not self._control.aborted
            wanted &= kind != FrameKind.RESULT or chunk not in writing
            self._control.progress_bytes += self._arrivals.length(frame)
            arrived = self._arrivals.filled(frame, wanted=wanted)
            if arrived is None:
                return
            if kind == FrameKind.CONTRIB:
                self._accumulator.waiting[src, chunk] = arrived.data
                self._schedule.arrived(src, chunk)
            elif arrived.in_place:
                writing.add(chunk)  # until it is known to be right
        if kind == FrameKind.CONTRIB:
            self._accumulator.fold(chunk)
            return
        if kind == FrameKind.GRAM:
            data = arrived.data[: self._parts.told_bytes]
            self._accumulator.told(src, data)
        else:
            self._check_result(src, chunk, arrived)
        self._arrivals.give_back(frame, arrived)

    def broken_off(self, frame: Frame) -> None:
        """Forget a reserved frame of which the rest will not come on this stream."""
        with self._changed:
            self._arrivals.ended(frame)

    def put_kept(self, chunk: int, data: U8) -> bool:
        """Take the bytes of a kept chunk from a holder; return whether they are what was kept."""
        fits = self._result.fits(chunk, data, self._kept[chunk])
        if fits and not self._is_known_to_differ(chunk, data):
            self._accumulator.finish(chunk, data)
            return True
        return False

    def _is_known_to_differ(self, chunk: int, data: U8) -> bool:
        """Return whether a result is not what it must be.

        Who alone gives something knows what comes of it, where its bytes lie and are not rounded.
        """
        plan, own = self._plan, self._contribution.own
        alone = plan.weights[self._me] == sum(plan.weights)
        exact = self._result.codec is self._codec and self._codec.contract.kind == "exact"
        if not alone or own is None or not exact:
            return False
        return not np.array_equal(own(chunk), data.view(np.float32))

    def _check_result(self, src: int, chunk: int, arrived: ReceivedChunk) -> None:
        """Check a result that arrived: after the commit nobody may fail to decode it."""
        data = arrived.data[: self._result.layout.size(chunk)]
        try:
            self._result.codec.check(data, self._grid.size(chunk))
            if self._is_known_to_differ(chunk, data):
                self._control.fail(src, f"its result of chunk {chunk} is not what was given")
                return
            self._accumulator.finish(chunk, None if arrived.in_place else data)
        except CodecError as error:
            self._control.fail(src, f"its result of chunk {chunk}: {error.what}")
        finally:
            with self._changed:
                self._accumulator.writing.discard(chunk)

    def _add_alone(self) -> None:
        for chunk in self._schedule.local_chunks():
            with self._changed:
                self._control.progress_bytes += self._layout.size(chunk)
            self._accumulator.fold(chunk)  # nothing, once it is aborted
