"""Carry out attempts at rounds: reduce, fetch the result instead, list what is final, abort.

Several rounds of different fragments may be under way. Reductions run in threads of their own, and
fetches in tasks, so that no round waits for another one. Orders come in the order in which they
were decided; only ``abort`` and ``list_final`` take hold at once.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atoll.collectives import Contribution, EncodedLayout, ReducePlan, Reduction, RoundResult
from atoll.collectives.errors import AtollError
from atoll.peer.audit.manager import AuditManager
from atoll.peer.membership import events as ev
from atoll.peer.membership.layout import Layout
from atoll.peer.membership.messages import Begin
from atoll.peer.membership.view import short
from atoll.peer.net.connections import ConnectionManager
from atoll.peer.rounds.attempt_table import AttemptRun, AttemptTable, plan_of
from atoll.peer.rounds.audited import AuditedAttempts
from atoll.peer.rounds.entries import INIT
from atoll.peer.rounds.replica import Replica, contribution
from atoll.peer.rounds.resend_stats import CountingOutlet
from atoll.peer.rounds.salvage import (
    FetchKept,
    KeptCopy,
    KeptPlan,
    KeptServer,
    header_of,
    pack_chunks,
)
from atoll.peer.state_sync.result_client import Fetcher
from atoll.peer.streams.manager import FrameOutlet, Streams, reason_of
from atoll.peer.streams.router import Router

U8 = NDArray[np.uint8]
# Twice this at most without a chunk of 1 MiB: it comes at less than 1 Mbit/s, or not at all.
KEPT_STALL_S = 5.0


class Reducer:
    """Carry out the attempts of this peer. Lives in the event loop."""

    def __init__(
        self,
        *,
        me: bytes,
        host: ConnectionManager,
        replica: Replica,
        router: Router,
        streams: Streams,
        audits: AuditManager,
        busy: Callable[[bool], None],
        feed: Callable[[ev.Event], None],
        log: Callable[[str], None],
    ) -> None:
        self._me = me
        self._host = host
        self._replica = replica
        self._router = router
        self._streams = streams
        self._on_busy = busy  # told when a first reduction begins, and when the last has ended
        self._busy = False
        self._feed = feed
        self._log = log
        self._loop = asyncio.get_running_loop()
        self.fetcher = Fetcher(host, router.copies)
        self.jobs = AttemptTable(replica.log.spare)
        self.kept_server = KeptServer(
            streams,
            self._result_of,
            lambda number, nbytes: self._threadsafe(self.jobs.sent_again, number, nbytes),
            log,
        )
        self.layout: Layout | None = None  # of the last attempt
        self._wanted: dict[int, Begin] = {}  # by round, ahead of the queue
        self._tasks: set[asyncio.Task[None]] = set()
        self._audited = AuditedAttempts(
            me,
            audits,
            is_wanted=self._is_wanted,
            failed=self._failed,
            reduced=self._reduced,
            start=lambda job, plan, how: self._run(job, self._reduction(job, plan, **how)),
            threadsafe=self._threadsafe,
            spawn=self._spawn,
        )

    # ------------------------------------------------------------ at once

    def want(self, begin: Begin) -> None:
        """Note that an order about this attempt is on its way; orders about older ones are void."""
        self._wanted[begin.round] = begin
        self._router.promise_attempt(begin)

    def abort(self, round_number: int, attempt: int) -> None:
        """End an attempt: its frames no longer count, and nothing more becomes final.

        Its threads end by themselves: what they still send carries its number and is dropped on
        arrival.
        """
        wanted = self._wanted.get(round_number)
        if wanted is not None and wanted.attempt == attempt:
            del self._wanted[round_number]
        self._router.end_attempt(round_number, attempt)
        job = self.jobs.at(round_number, attempt)
        if job is not None:
            self._end(job)

    def list_final(self, round_number: int, attempt: int) -> ev.FinalChunks:
        self.abort(round_number, attempt)
        job = self.jobs.at(round_number, attempt)
        digests = job.finals if job is not None else b""
        missing: tuple[bytes, ...] = ()
        if job is not None and job.reduction is not None:
            late = sorted(job.reduction.missing())
            missing = tuple(job.begin.participants[index] for index in late)
        return ev.FinalChunks(round_number, attempt, digests, missing)

    def settle(self, round_number: int) -> None:
        """Drop the rounds up to this one: the state is the one after it, however it came about."""
        self._router.settle(round_number)
        self.jobs.drop(lambda number: number <= round_number)
        self._wanted = {r: begin for r, begin in self._wanted.items() if r > round_number}
        self._note_busy()

    def forget(self) -> None:
        """End all attempts, because the state is not what they have built on.

        Orders in the queue stand.
        """
        for job in self.jobs.all:
            self._end(job)
        self.jobs.drop(lambda number: True)

    def close(self) -> None:
        self.forget()
        self.kept_server.close()
        for task in self._tasks:
            task.cancel()

    def _end(self, job: AttemptRun) -> None:
        self._router.end_attempt(job.begin.round, job.begin.attempt)
        job.end()
        self._note_busy()

    def _note_busy(self) -> None:
        busy = any(job.is_reducing for job in self.jobs.all)
        if busy != self._busy:
            self._busy = busy
            self._on_busy(busy)

    # ------------------------------------------------------------ reducing

    async def reduce(self, begin: Begin) -> None:
        if not self._is_wanted(begin):
            return  # aborted while it waited in the queue
        self._drop_excluded(begin)
        try:
            job = await self._open(begin)
            if self._is_wanted(begin):
                self._start(job)
        except (AtollError, MemoryError) as error:  # an opening that makes no sense, or no memory
            self._failed(begin, (), reason_of(error))

    def _is_wanted(self, begin: Begin) -> bool:
        return self._wanted.get(begin.round) is begin

    async def _open(self, begin: Begin) -> AttemptRun:
        """Open a job once the attempt before at this round has let go of its memory."""
        before = self.jobs.get(begin.round)
        if before is not None:
            self._end(before)
            if before.fetching is not None:
                await asyncio.wait([before.fetching])
        state, view = self._replica.state, self._replica.view
        members = len(view.members) if view is not None else 0
        if begin.kind == INIT or (before is not None and before.is_read):  # may take a while
            job = await asyncio.to_thread(self.jobs.open, begin, state, members)
        else:
            job = self.jobs.open(begin, state, members)
        if before is not None:
            self.jobs.begun_again(before, job)
        return job

    def _start(self, job: AttemptRun) -> None:
        begin = job.begin
        own, source = contribution(self._replica, job)
        if source is None:
            self._failed(begin, (), "this peer's submission is gone")
            return
        self.layout = begin.layout
        if job.terms is not None:
            self._spawn(self._audited.begin(job, job.terms, source, self._replica.steps))
        else:
            kept = {item.chunk: item.digest for item in job.kept}
            plan = plan_of(begin, job.result.grid, kept, job.rule)
            # The root of many chunks takes a while: computed in the thread that brings the last.
            self._run(
                job,
                self._reduction(
                    job,
                    plan,
                    contribution=Contribution(source, own),
                    kept=kept,
                    on_done=lambda digests: self._threadsafe(
                        self._reduced, job, job.root_of(digests)
                    ),
                ),
            )

    def _reduction(self, job: AttemptRun, plan: ReducePlan, **how: Any) -> Reduction:
        begin = job.begin
        job.reduction = Reduction(
            plan=plan,
            me=plan.participants.index(self._me),
            result=job.result,
            on_failed=lambda index, why: self._threadsafe(
                self._failed, begin, _others(plan.participants[index], self._me), why
            ),
            **how,
        )
        return job.reduction

    def _run(self, job: AttemptRun, reduction: Reduction) -> None:
        begin = job.begin
        copying = job.copying = self._kept_copy(job, reduction)
        self._router.expect_attempt(begin, reduction, copying)
        wanted = sorted(reduction.destinations)
        lanes = {index: self._streams.lanes(begin.participants[index]) for index in wanted}
        reduction.start({}, lanes)
        self._note_busy()
        self._streams.begin_round(begin.round)
        for index, count in lanes.items():
            for lane in range(count):
                self._spawn(self._attach_outlet(job, reduction, index, lane))
        if reduction.lacking:
            copying.start()
            job.watching = self._loop.create_task(_watch(copying))

    async def _attach_outlet(
        self, job: AttemptRun, reduction: Reduction, index: int, lane: int
    ) -> None:
        begin = job.begin
        peer = begin.participants[index]
        try:
            stream = await self._streams.to(peer, lane)
        except AtollError as error:
            if not lane:  # the others only make it faster
                self._failed(begin, (peer,), error.what)
            return
        outlet = FrameOutlet(stream, header_of(begin))
        reduction.start({index: CountingOutlet(outlet, job.sent)})

    def _drop_excluded(self, begin: Begin) -> None:
        """Wake the senders that are stuck on peers that a retry goes on without."""
        before = self.jobs.get(begin.round)
        if before is not None:
            for peer in set(before.begin.participants) - set(begin.participants):
                self._streams.close_to(peer)

    def _reduced(self, job: AttemptRun, root: bytes) -> None:
        """Report that an attempt is reduced, unless it was aborted.

        Attempts of the next view count from 1 again, so what is said late of this one would be
        taken for that one's.
        """
        begin = job.begin
        if self.jobs.get(begin.round) is job and not job.root and not job.ended:
            job.root = root
            self._feed(ev.AttemptReduced(begin.round, begin.attempt, root))

    def _failed(self, begin: Begin, peers: tuple[bytes, ...], why: str) -> None:
        if self._is_wanted(begin):
            self._feed(ev.ReduceFailed(begin.round, begin.attempt, peers, why))

    def on_broken(self, peer: bytes, why: str) -> None:
        """Handle the end of a stream from this peer. Called by the thread that read it."""
        self._threadsafe(self._stream_broken, peer, why)

    def _stream_broken(self, peer: bytes, why: str) -> None:
        for job in self.jobs.all:
            if job.reduction is None or peer not in job.begin.participants:
                continue
            if job.begin.participants.index(peer) in job.reduction.missing():
                self._failed(job.begin, (peer,), why)

    # ------------------------------------------------------------ kept chunks

    def _kept_copy(self, job: AttemptRun, reduction: Reduction) -> KeptCopy:
        begin, view = job.begin, self._replica.view
        members = [member.peer for member in view.members] if view is not None else []
        lacking = {
            item.chunk: [members[holder] for holder in item.holders if members[holder] != self._me]
            for item in job.kept
            if item.chunk in reduction.lacking
        }
        return KeptCopy(
            KeptPlan(lacking, begin.participants.index(self._me)),
            job.result.layout,
            put=reduction.put_kept,
            ask=lambda holder, chunks: self._threadsafe(self._ask_kept, job, holder, chunks),
            failed=lambda holder, why: self._threadsafe(
                self._failed, begin, (holder,) if holder else (), why
            ),
        )

    def _ask_kept(self, job: AttemptRun, holder: bytes, chunks: list[int]) -> None:
        begin = job.begin
        packed = pack_chunks(chunks)
        question = FetchKept(begin.lineage, begin.view, begin.round, begin.attempt, packed)
        if self._is_wanted(begin) and not self._host.send(holder, question):
            assert job.copying is not None
            job.copying.gave_up(holder, f"no control link to its holder {short(holder)}")

    def _result_of(self, question: FetchKept) -> RoundResult | None:
        job = self.jobs.get(question.round)
        return job.result if job and job.begin.lineage == question.lineage else None

    # ------------------------------------------------------------ fetching

    async def fetch(self, begin: Begin, holder: bytes) -> None:
        """Start to copy the whole result from a peer that has it, unless that is under way."""
        before = self.jobs.get(begin.round)
        if not self._is_wanted(begin):
            return
        if before is not None and before.begin is begin:
            if before.terms is not None and self._me in begin.participants:
                return  # who takes part in an audit believes nobody, and passes or gives up
            under_way = before.fetching is not None and not before.fetching.done()
            if before.root or (under_way and before.holder == holder):
                return  # the order was repeated
        try:
            job = await self._open(begin)
            if before is None or before.begin is not begin:
                job.result.keep({item.chunk: item.digest for item in job.kept})
        except (AtollError, MemoryError) as error:
            self._log(f"fetching the result of round {begin.round} failed: {reason_of(error)}")
            return
        if self._is_wanted(begin):
            job.holder = holder
            job.fetching = self._loop.create_task(self._fetch(job))

    async def _fetch(self, job: AttemptRun) -> None:
        digests = job.result.digests
        try:
            if not all(digests):  # else the reduction was faster than the order to fetch
                digests = await self.fetcher.fetch(job.begin, job.holder, job.result)
        except AtollError as error:  # the coordinator repeats the order, with another holder
            self._log(f"fetching the result of round {job.begin.round} failed: {error.what}")
            return
        job.result.digests = digests
        self._reduced(job, await asyncio.to_thread(job.root_of, digests))

    def complete_result(self, number: int, attempt: int) -> tuple[U8, EncodedLayout, int] | None:
        """Return the encoded result, its layout and its number of chunks, for a donor.

        None if it is not complete, or if the attempt has ended. Whoever reads it may still do so
        when a retry begins.
        """
        job = self.jobs.at(number, attempt)
        if job is None or not job.root or job.ended:
            return None
        job.lent = True
        return job.result.array, job.result.layout, job.result.grid.count

    # ------------------------------------------------------------ small things

    def _threadsafe(self, act: Callable[..., None], *arguments: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended before this thread
            self._loop.call_soon_threadsafe(act, *arguments)

    def _spawn(self, work: Any) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _watch(copying: KeptCopy) -> None:
    while copying.lacking:
        await asyncio.sleep(KEPT_STALL_S)
        copying.check_stalls(f"its holder has sent nothing for {KEPT_STALL_S:.0f} s")


def _others(peer: bytes, me: bytes) -> tuple[bytes, ...]:
    """Return the culprit as ReduceFailed names it: nobody else, when it is ourselves."""
    return () if peer == me else (peer,)
