"""Carry out what the membership machine decides about rounds and state.

Effects are done one after the other, in the order in which they were decided, by one task; only
Abort, ListFinal and a newer goal of a catch-up take hold at once. Arithmetic runs in worker
threads, so that the event loop never stops for longer than it takes to start one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atoll.collectives.errors import CodecError, DivergedError
from atoll.collectives.units import size
from atoll.optim.footprint import LOG_BYTES_DEFAULT, log_cap_bytes
from atoll.peer.checkpoint.reader import LoadedCheckpoint
from atoll.peer.daemon.ports import RoundsPort
from atoll.peer.membership import events as ev
from atoll.peer.membership.messages import Finals
from atoll.peer.membership.view import View
from atoll.peer.net.connections import ConnectionManager
from atoll.peer.rounds.attempt_table import AttemptRun
from atoll.peer.rounds.entries import GATHER, INIT, REDUCE
from atoll.peer.rounds.log import RoundLog
from atoll.peer.rounds.operating import commit_operation
from atoll.peer.rounds.reducer import Reducer
from atoll.peer.rounds.replica import Replica
from atoll.peer.rounds.state import ReplicatedState
from atoll.peer.state_sync.chunk_cache import ChunkCache
from atoll.peer.state_sync.client import SyncClient
from atoll.peer.state_sync.server import Donor
from atoll.peer.streams.manager import Streams
from atoll.peer.streams.router import Router
from atoll.peer.verify.manager import AuditManager

DIGESTS_KEPT = 64  # for people and tests that compare peers


class RoundExecutor:
    """Own the replicated state and the log, and carry out effects. Lives in the event loop."""

    def __init__(
        self,
        *,
        me: bytes,
        host: ConnectionManager,
        audits: AuditManager,
        daemon: RoundsPort,
        received: Path,
        log_bytes: int = LOG_BYTES_DEFAULT,
    ) -> None:
        self._me, self._audits, self.validating = me, audits, audits.validating
        self._daemon, self._feed = daemon, daemon.feed
        self._loop = asyncio.get_running_loop()
        self.replica = Replica(RoundLog(log_bytes))
        self.router = Router(lambda peer, why: self.reducer.on_broken(peer, why))
        self.streams = Streams(host, self.router)
        self.reducer = Reducer(
            me=me,
            host=host,
            replica=self.replica,
            router=self.router,
            streams=self.streams,
            audits=audits,
            busy=lambda reducing: self.donor.busy(reducing),
            feed=daemon.feed,
            log=self.log,
        )
        rounds = self.replica.log

        def in_loop(line: str) -> None:
            """Log from any thread: the threads that read from donors fill the cache."""
            self._loop.call_soon_threadsafe(self.log, line)

        self.donor = Donor(host, self.streams, self.reducer.complete_result, rounds, self.log)
        cache = ChunkCache(received, in_loop)
        self.sync = SyncClient(host, self.router.copies, rounds, cache, self)
        self.last_round_s = 0.0  # from the first BEGIN to the end of the outer step
        self.last_commit_unix_s = 0.0
        self.digests: dict[int, str] = {}  # round -> state digest, of the last rounds
        # Work in the order in which it was decided.
        self._queue: asyncio.Queue[Callable[[], Awaitable[None]]] = asyncio.Queue()
        self._goal: ev.Goal | None = None  # of the catch-up that waits in the queue

    # ------------------------------------------------------------ what it holds

    @property
    def state(self) -> ReplicatedState | None:
        return self.replica.state

    @state.setter
    def state(self, state: ReplicatedState | None) -> None:
        self.replica.state = self.donor.state = state

    @property
    def inputs(self) -> NDArray[np.float32] | None:
        return self.replica.inputs

    @inputs.setter
    def inputs(self, inputs: NDArray[np.float32] | None) -> None:
        self.replica.inputs = inputs

    @property
    def progress_bytes(self) -> int:
        """Return a number that grows while this peer gets on, for stall detectors.

        The bytes that it has moved, and local work: who contributes alone may send nothing for
        long.
        """
        moved = self.streams.moved_bytes + self.reducer.jobs.progress_bytes
        return moved + self._audits.progress

    def installed(self, view: View) -> None:
        """Take over a view that was installed.

        BEGIN names the holders of kept chunks by their positions in it.
        """
        before, self.replica.view = self.replica.view, view
        self.router.enter(view.lineage)
        if before is not None and before.lineage not in (view.lineage, *view.ancestors):
            self.digests.clear()  # of a history that was given up
            if self.state is not None:
                self.digests[self.state.round] = self.state.digest.hex()

    def restore(self, loaded: LoadedCheckpoint) -> None:
        """Begin with the state of a checkpoint."""
        self.replica.log.restart(loaded.round, loaded.state.digest, loaded.chain)
        self._moved_to(loaded.state, "a checkpoint was loaded")
        self._feed(ev.Restored(loaded.round, loaded.chain, loaded.state.digest))

    def link_down(self, peer: bytes) -> None:
        self.streams.close_to(peer)
        self.sync.lost(peer)

    def believed(self, message: object) -> object:
        """Return the message as the machine may take it.

        Under a robust rule or an audit nobody's word is enough for a chunk to be kept, because
        nobody else may have it (Jobs.open refuses such a BEGIN): digests of final chunks are left
        out.
        """
        spec = self.state.spec if self.state is not None else None
        if spec is None or not spec.keeps_nothing or not isinstance(message, Finals):
            return message
        return replace(message, digests=b"")

    # ------------------------------------------------------------ the queue

    def handlers(self) -> dict[type, Callable[[Any], None]]:
        """Return what carries out each effect about rounds and state."""
        return {
            ev.Reduce: self._reduce,
            ev.Fetch: self._fetch,
            ev.Abort: lambda e: self.reducer.abort(e.round, e.attempt),
            ev.ListFinal: self._list_final,
            ev.Apply: lambda e: self._in_turn(self._apply, e),
            ev.StartSync: self._start_sync,
            ev.Undo: lambda e: self._in_turn(self._undo, e),
            ev.TellTrainer: lambda e: self._in_turn(self._tell, e),
        }

    def _in_turn(self, work: Callable[..., Awaitable[None]], *arguments: object) -> None:
        self._queue.put_nowait(partial(work, *arguments))

    def _reduce(self, effect: ev.Reduce) -> None:
        self.reducer.want(effect.begin)
        self._in_turn(self.reducer.reduce, effect.begin)

    def _fetch(self, effect: ev.Fetch) -> None:
        self.reducer.want(effect.begin)
        self._in_turn(self.reducer.fetch, effect.begin, effect.holder)

    def _list_final(self, effect: ev.ListFinal) -> None:
        finals = self.reducer.list_final(effect.round, effect.attempt)
        self._loop.call_soon(self._feed, finals)  # the machine is not to be entered twice

    def _start_sync(self, effect: ev.StartSync) -> None:
        if self._goal is None:  # else its turn has not come yet
            self._in_turn(self._aim)
        self._goal = effect.goal

    async def run(self) -> None:
        while True:
            work = await self._queue.get()
            await work()

    def close(self) -> None:
        self.sync.close()
        self.router.close()
        self.reducer.close()
        self.donor.close()
        self.streams.close()

    async def _tell(self, effect: ev.TellTrainer) -> None:
        self._daemon.tell_trainer(effect)

    def log(self, line: str) -> None:
        """Write a line about rounds or about the state."""
        self._daemon.note("transfer", line)

    # ------------------------------------------------------------ commits

    async def _apply(self, effect: ev.Apply) -> None:
        begin = effect.begin
        job = self.reducer.jobs.get(begin.round)
        if begin.kind == GATHER or (begin.kind == REDUCE and self._me not in begin.participants):
            job = None  # BEGIN itself is the result, or it is for others
        else:
            assert job is not None
            assert job.begin is begin
            assert job.root
            job.end()
        try:
            state = await asyncio.to_thread(self._commit, effect, job)
        except CodecError as error:  # every chunk was checked when it came: it has changed since
            raise DivergedError(
                f"the result of round {begin.round} cannot be applied here: {error.what}",
                fix="start this peer again: it fetches the state from the others",
            ) from error
        if job is not None:
            self.last_round_s = time.monotonic() - job.begun_s
            if job.tries > 1:
                self.log(
                    f"round {begin.round} took {job.tries} attempts here:"
                    f" {size(job.again_bytes)} sent again"
                )
        self.last_commit_unix_s = time.time()
        exchange_s = self.last_round_s if job is not None else 0.0
        self._daemon.round_committed(begin, exchange_s, self._me in begin.participants)
        if job is not None and job.audit is not None and job.before is not None:
            audit, before = job.audit.audit, job.before
            self.validating.committed(audit, state.spec, state.manifest, before)
        self._moved_to(state, "" if begin.kind != INIT else "the run begins")
        self._feed(ev.Applied(begin.round, state.digest))

    def _commit(self, effect: ev.Apply, job: AttemptRun | None) -> ReplicatedState:
        """Apply a committed round, and append it to the log. In a worker thread.

        From here on the result belongs to the log.
        """
        begin, chain = effect.begin, effect.chain
        if job is None or begin.operation is not None:
            return commit_operation(self.replica, effect, job)
        array = job.result.array
        state = ReplicatedState(begin.blob) if begin.kind == INIT else self.state
        assert state is not None
        head = job.entry(chain)
        self.replica.residual.commit(job, self._me)
        if job.audit is not None and state.spec.validators:
            job.before = state.theta.copy()
        state.apply(head, array)
        self.replica.log.append(head, array, state.digest)
        if job.is_read:
            self.replica.log.encoded(begin.round)  # so that its memory is not used again
        return state

    async def _undo(self, effect: ev.Undo) -> None:
        state = self.state
        if state is not None and await asyncio.to_thread(state.undo):
            self.reducer.forget()
            self.replica.log.cut_after(state.round)
            self.digests = {k: d for k, d in self.digests.items() if k <= state.round}
            self.sync.cancel()  # of a goal that was undone with it
            self._moved_to(state, "a round was undone")
        if state is not None and state.round == effect.round:
            self._feed(ev.CaughtUp(effect.round, effect.chain, state.digest))
        else:
            self._feed(ev.CatchUpFailed(f"the state after round {effect.round} is not here"))

    async def _aim(self) -> None:
        """Begin a catch-up in its turn: what was committed before is to be applied first."""
        goal, self._goal = self._goal, None
        assert goal is not None
        self.donor.is_open = False  # what others attest must not wait for whoever is behind itself
        self.sync.aim(goal)

    def adopt(self, state: ReplicatedState, round_number: int, chain: bytes) -> None:
        """Take over the state that the catch-up has brought to this round, and the log with it."""
        if self.replica.view is None:
            self.digests.clear()  # a checkpoint's may be of another history than the run's
        self._moved_to(state, "the state of others was loaded")
        self._feed(ev.CaughtUp(round_number, chain, state.digest))

    def sync_failed(self, why: str) -> None:
        """Tell the machine that nothing is being loaded any more."""
        self._feed(ev.CatchUpFailed(why))

    def _moved_to(self, state: ReplicatedState, otherwise: str) -> None:
        """Go on from this state.

        It was reached by a round that was applied here; or ``otherwise``, which then says how.
        """
        if otherwise and (rounds := self.replica.residual.forget()):
            self.log(f"error feedback forgets what {rounds} rounds have left out: {otherwise}")
        self.state = state
        self.donor.is_open = not self.sync.is_working
        self.replica.log.cap_bytes = log_cap_bytes(state.manifest)
        self.reducer.settle(state.round)
        self.digests[state.round] = state.digest.hex()
        while len(self.digests) > DIGESTS_KEPT:
            del self.digests[next(iter(self.digests))]
