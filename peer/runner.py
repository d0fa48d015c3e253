"""Carries out what the membership machine decides about rounds: reduce, fetch, apply, load.

Effects are done one after the other, in the order in which they were decided, by one task; only
Abort takes hold at once. Arithmetic runs in worker threads, so that the event loop never stops for
longer than it takes to start one.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atoll.collectives import (
    ChunkGrid,
    Codec,
    EncodedLayout,
    Reduction,
    butterfly_plan,
    encoded_layout,
    get_codec,
    grid_for,
)
from atoll.collectives.errors import AtollError
from atoll.optim.spec import parse_blob
from atoll.peer import events as ev
from atoll.peer.dataframes import DataHeader
from atoll.peer.links import LinkHost
from atoll.peer.messages import INIT, Begin
from atoll.peer.router import Router
from atoll.peer.state import ReplicatedState
from atoll.peer.streams import FrameOutlet, Streams
from atoll.peer.transfers import Donor, Learner

__all__ = ["RoundRunner"]

DIGESTS_KEPT = 64  # for people and tests that compare peers

U8 = NDArray[np.uint8]
F32 = NDArray[np.float32]


@dataclass(slots=True)
class Job:
    """One attempt on this peer, whether it takes part or copies the result."""

    begin: Begin
    codec: Codec
    grid: ChunkGrid
    layout: EncodedLayout
    result: U8
    root: bytes = b""  # not empty: `result` is complete
    reduction: Reduction | None = None


class RoundRunner:
    """Owns the replicated state and the reduction at hand. Lives in the event loop."""

    def __init__(
        self,
        *,
        me: bytes,
        host: LinkHost,
        feed: Callable[[ev.Event], None],
        tell_trainer: Callable[[ev.TellTrainer], None],
        log: Callable[[str], None],
    ) -> None:
        self._me = me
        self._feed = feed
        self._tell_trainer = tell_trainer
        self._log = log
        self._loop = asyncio.get_running_loop()
        self.router = Router(lambda p, why: self._threadsafe(self._stream_broken, p, why))
        self.streams = Streams(host, self.router)
        self.donor = Donor(host, self.streams, self._complete_result, log)
        self.learner = Learner(host, self.router)
        self.state: ReplicatedState | None = None
        # The region whose submission the membership machine has accepted last. It is not cleared:
        # whether an attempt may read it is the machine's decision.
        self.inputs: F32 | None = None
        self.last_round_s = 0.0  # from the first BEGIN to the end of the outer step
        self.last_commit_unix_s = 0.0
        self.digests: dict[int, str] = {}  # round -> state digest, of the last rounds
        self._queue: asyncio.Queue[ev.Effect] = asyncio.Queue()
        self._wanted: Begin | None = None  # what Abort and Reduce say now, ahead of the queue
        self._begun_s: tuple[int, float] = (0, 0.0)
        self._job: Job | None = None
        self._fetching: asyncio.Task[bytes] | None = None
        self._fetch_from: tuple[Begin, bytes] | None = None
        self._loading: asyncio.Task[ReplicatedState] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._handlers: dict[type, Callable[[Any], Awaitable[None]]] = {
            ev.Reduce: self._reduce,
            ev.Fetch: self._fetch,
            ev.Apply: self._apply,
            ev.LoadState: self._load_state,
            ev.TellTrainer: self._tell,
        }

    # ------------------------------------------------------------ the queue

    def carry_out(self, effect: ev.Effect) -> None:
        if isinstance(effect, ev.Abort):
            self._abort()
            return
        if isinstance(effect, ev.Fetch) and self._is_fetching(effect):
            return  # the order was repeated while the transfer runs
        if isinstance(effect, ev.Reduce | ev.Fetch):
            self._wanted = effect.begin
        if isinstance(effect, ev.Fetch) and self._fetching is not None:
            self._fetching.cancel()  # another holder is to be asked
        if isinstance(effect, ev.LoadState) and self._loading is not None:
            self._loading.cancel()
        self._queue.put_nowait(effect)

    async def run(self) -> None:
        while True:
            effect = await self._queue.get()
            await self._handlers[type(effect)](effect)

    def close(self) -> None:
        self._abort()
        self.donor.close()
        self.streams.close()
        for task in self._tasks:
            task.cancel()

    def _is_fetching(self, effect: ev.Fetch) -> bool:
        return self._fetching is not None and self._fetch_from == (effect.begin, effect.holder)

    def _threadsafe(self, act: Callable[..., None], *arguments: object) -> None:
        self._loop.call_soon_threadsafe(act, *arguments)

    # ------------------------------------------------------------ an attempt

    def _abort(self) -> None:
        self._wanted = None
        self._end_reduction()
        if self._fetching is not None:
            self._fetching.cancel()

    def _end_reduction(self) -> None:
        """Frames of the attempt no longer count. Its threads end by themselves: what they still
        send carries the old attempt's number and is dropped on arrival."""
        self.router.end_attempt()
        if self._job is not None and self._job.reduction is not None:
            self._job.reduction.abort()

    async def _reduce(self, effect: ev.Reduce) -> None:
        begin = effect.begin
        if begin is not self._wanted:
            return  # aborted while it waited in the queue
        self._end_reduction()
        self._drop_excluded(begin)
        try:
            job = await self._prepare_aside(begin)
            if begin is self._wanted:
                self._start(job)
        except (AtollError, MemoryError) as error:  # an opening that makes no sense, or no memory
            self._failed(begin, (), _reason(error))

    def _start(self, job: Job) -> None:
        begin = job.begin
        source = self._source(job)
        if source is None:
            self._failed(begin, (), "this peer's submission is gone")
            return
        plan = butterfly_plan(begin.participants, begin.weights, job.grid)
        reduction = job.reduction = Reduction(
            plan=plan,
            me=plan.participants.index(self._me),
            codec=job.codec,
            grid=job.grid,
            source=source,
            result=job.result,
            on_done=lambda digest: self._threadsafe(self._reduced, job, digest),
            on_failed=lambda index, why: self._threadsafe(
                self._failed, begin, _others(plan.participants[index], self._me), why
            ),
        )
        self.router.expect_attempt(begin, reduction)
        reduction.start({})
        for index, peer in enumerate(plan.participants):
            if peer != self._me:
                self._spawn(self._attach_outlet(begin, reduction, index, peer))

    async def _attach_outlet(
        self, begin: Begin, reduction: Reduction, index: int, peer: bytes
    ) -> None:
        header = DataHeader(
            0, 0, 0, 0, begin.lineage[:8], begin.view, begin.round, begin.attempt, 0
        )
        try:
            stream = await self.streams.to(peer)
        except AtollError as error:
            self._failed(begin, (peer,), error.what)
            return
        reduction.start({index: FrameOutlet(stream, header)})

    async def _prepare_aside(self, begin: Begin) -> Job:
        """A specification may take longer to read than the event loop may stop."""
        if begin.kind == INIT:
            return await asyncio.to_thread(self._prepare, begin)
        return self._prepare(begin)

    def _prepare(self, begin: Begin) -> Job:
        """Codec, layout and memory of an attempt's result; the memory is used again."""
        if begin.kind == INIT:
            _, manifest = parse_blob(begin.blob)
            codec, grid = get_codec("float32"), grid_for(manifest.elements)
        else:
            assert self.state is not None
            codec, grid = self.state.codec, self.state.grid
        layout = encoded_layout(grid, codec)
        before = self._job
        if before is not None and before.result.nbytes == layout.total_bytes:
            result = before.result
        else:
            result = np.empty(layout.total_bytes, np.uint8)
        if self._begun_s[0] != begin.round:
            self._begun_s = (begin.round, time.monotonic())
        self._job = Job(begin, codec, grid, layout, result)
        return self._job

    def _source(self, job: Job) -> Callable[[int, F32], None] | None:
        inputs, state = self.inputs, self.state
        if inputs is None or inputs.size != job.grid.total:
            return None
        if job.begin.kind != INIT:
            return state.delta_of(inputs) if state is not None else None

        def parameters(chunk: int, out: F32) -> None:
            lo, hi = job.grid.bounds(chunk)
            np.copyto(out, inputs[lo:hi])

        return parameters

    def _drop_excluded(self, begin: Begin) -> None:
        """A retry goes on without some peers: wake the senders that are stuck on them."""
        before = self._job.begin if self._job else None
        if before is not None and before.round == begin.round:
            for peer in set(before.participants) - set(begin.participants):
                self.streams.close_to(peer)

    def _reduced(self, job: Job, digest: bytes) -> None:
        begin = job.begin
        if job is not self._job or job.root:
            return
        if begin.kind == INIT:
            digest = hashlib.sha256(hashlib.sha256(begin.blob).digest() + digest).digest()
        job.root = digest
        self._feed(ev.Reduced(begin.round, begin.attempt, digest))

    def _failed(self, begin: Begin, peers: tuple[bytes, ...], why: str) -> None:
        if begin is self._wanted:
            self._feed(ev.ReduceFailed(begin.round, begin.attempt, peers, why))

    def _stream_broken(self, peer: bytes, why: str) -> None:
        job = self._job
        if job is None or job.reduction is None or peer not in job.begin.participants:
            return
        if job.begin.participants.index(peer) in job.reduction.missing():
            self._failed(job.begin, (peer,), why)

    def _complete_result(self, number: int, attempt: int) -> tuple[U8, EncodedLayout, int] | None:
        job = self._job
        if job is None or not job.root or (job.begin.round, job.begin.attempt) != (number, attempt):
            return None
        return job.result, job.layout, job.grid.count

    async def _fetch(self, effect: ev.Fetch) -> None:
        begin, job = effect.begin, self._job
        if begin is not self._wanted or (job is not None and job.begin is begin and job.root):
            return
        self._fetch_from = (begin, effect.holder)
        self._end_reduction()
        fetching: asyncio.Task[bytes] | None = None
        try:
            job = await self._prepare_aside(begin)
            fetching = self._fetching = self._loop.create_task(
                self.learner.fetch(begin, effect.holder, job.layout, job.result, job.grid.count)
            )
            root = await fetching
        except (AtollError, MemoryError) as error:
            self._log(f"fetching the result of round {begin.round} failed: {_reason(error)}")
            return  # the coordinator repeats the order, with another holder
        except asyncio.CancelledError:
            if fetching is None or not fetching.cancelled():
                raise
            return  # aborted
        finally:
            self._fetching = None
        self._reduced(job, root)

    # ------------------------------------------------------------ commits and loads

    async def _apply(self, effect: ev.Apply) -> None:
        begin, job = effect.begin, self._job
        self._end_reduction()
        assert job is not None
        assert job.begin is begin
        await asyncio.to_thread(self._apply_result, begin, job.result)
        state = self.state
        assert state is not None
        self.donor.state = state
        self.last_round_s = time.monotonic() - self._begun_s[1]
        self.last_commit_unix_s = time.time()
        self._remember(state)
        self._feed(ev.Applied(begin.round, state.digest))

    def _apply_result(self, begin: Begin, result: U8) -> None:
        if begin.kind == INIT:
            state = ReplicatedState(begin.blob)
            state.initialise(result)
            self.state = state
        else:
            assert self.state is not None
            self.state.apply(begin.round, result)

    async def _load_state(self, effect: ev.LoadState) -> None:
        learn = effect.learn
        self._end_reduction()
        try:
            loading = self._loading = self._loop.create_task(self.learner.load(learn, self.state))
            state = await loading
        except (AtollError, MemoryError) as error:
            self._feed(ev.StateFailed(_reason(error)))
            return
        except asyncio.CancelledError:
            if not loading.cancelled():
                raise
            return  # a newer order to load waits in the queue
        finally:
            self._loading = None
        self.state = self.donor.state = state
        self._remember(state)
        self._feed(ev.StateLoaded(learn.round, learn.chain, state.digest))

    def _remember(self, state: ReplicatedState) -> None:
        self.digests[state.round] = state.digest.hex()
        while len(self.digests) > DIGESTS_KEPT:
            del self.digests[next(iter(self.digests))]

    async def _tell(self, effect: ev.TellTrainer) -> None:
        self._tell_trainer(effect)

    def _spawn(self, work: Any) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _reason(error: AtollError | MemoryError) -> str:
    return error.what if isinstance(error, AtollError) else "no memory for the state"


def _others(peer: bytes, me: bytes) -> tuple[bytes, ...]:
    """How ReduceFailed names the culprit: nobody else, when it is ourselves."""
    return () if peer == me else (peer,)
