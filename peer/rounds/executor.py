"""Carry out what the membership machine decides about rounds and state.

Effects are done one after the other, in the order in which they were decided, by one task; only
Abort, ListFinal and a newer goal of a catch-up take hold at once. Arithmetic runs in worker
threads, so that the event loop never stops for longer than it takes to start one.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from atoll.collectives import EncodedLayout, RoundResult
from atoll.collectives.codecs import U8
from atoll.collectives.errors import AtollError, CodecError, ConfigError, DivergedError
from atoll.collectives.units import duration, size
from atoll.optim.footprint import LOG_BYTES_DEFAULT, log_cap_bytes
from atoll.peer.checkpoint.reader import LoadedCheckpoint
from atoll.peer.daemon.ports import RoundsPort
from atoll.peer.durable.round_files import RoundFiles
from atoll.peer.membership import events as ev
from atoll.peer.membership.durable_records import ReadyRecord
from atoll.peer.membership.layout import Layout
from atoll.peer.membership.messages import Begin
from atoll.peer.membership.view import MEMBERS_MAX, View
from atoll.peer.net.connections import ConnectionManager
from atoll.peer.rounds.attempt_run import AttemptRun, AttemptTable, Replica
from atoll.peer.rounds.durability import Durability
from atoll.peer.rounds.entries import (
    GATHER,
    INIT,
    OPERATIONS,
    REDUCE,
    ROUNDS_IN_FLIGHT_MAX,
    STEP,
    EntryHead,
)
from atoll.peer.rounds.log import RoundLog
from atoll.peer.rounds.outputs import TrainerOutputs
from atoll.peer.rounds.recovery import HeldResult, HomeContents, HomeReader
from atoll.peer.rounds.rewinding import Checkpoints, rewound
from atoll.peer.rounds.salvage import FetchKept, KeptServer
from atoll.peer.rounds.state import ReplicatedState
from atoll.peer.rounds.verifier import AttemptVerifier
from atoll.peer.state_sync.chunk_cache import ChunkCache
from atoll.peer.state_sync.client import ResultFetcher, SyncClient
from atoll.peer.state_sync.server import SyncServer
from atoll.peer.streams.manager import Streams, reason_of
from atoll.peer.streams.router import Router
from atoll.peer.streams.stream import NO_PROGRESS_TIMEOUT_S

QUICK_BYTES_MAX = 1 << 16  # of a result in float32 that the event loop writes: 10 us
# For the first parameters to be on a slow disk, at least; on a busy machine as long as they took.
SAVED_WAIT_S = 10.0
SAVED_POLL_S = 0.01
DIGESTS_KEPT = 64  # for people and tests that compare peers


class RoundExecutor:
    """Own the replicated state and the log, and carry out effects. Lives in the event loop.

    Also what its attempts see of this peer (AttemptPort, KeptSource).
    """

    def __init__(
        self,
        *,
        me: bytes,
        host: ConnectionManager,
        audits: AttemptVerifier,
        daemon: RoundsPort,
        received: Path,
        log_bytes: int = LOG_BYTES_DEFAULT,
        files: RoundFiles | None = None,
        checkpoints: Checkpoints | None = None,
    ) -> None:
        """Begin with no state.

        ``files`` is where R of rounds is kept over restarts, if it is, and ``checkpoints`` where
        this peer writes the states that these build on.
        """
        self.me, self.host, self.audits = me, host, audits
        self._daemon, self._feed = daemon, daemon.feed
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._checkpoints = checkpoints
        rounds = RoundLog(log_bytes, files)
        self.replica = Replica(rounds)
        self.router = Router(self._on_broken)
        self.streams = Streams(host, self.router)
        self.fetcher = ResultFetcher(host, self.router.transfers)
        self.attempts = AttemptTable(self)
        self.kept_server = KeptServer(self.streams, self)
        self.donor = SyncServer(host, self.streams, self.complete_result, rounds, self.log)
        # The threads that read from donors fill the cache, and log too.
        cache = ChunkCache(received, partial(self.threadsafe, self.log))
        self.sync = SyncClient(host, self.router.transfers, rounds, cache, self)
        self.layout: Layout | None = None  # of the last attempt
        self._wanted: dict[int, Begin] = {}  # by round, ahead of the queue
        self._busy = False  # as the donor was told last
        self._local_bytes = 0  # of outer steps, chunk by chunk, and of memory for a first state
        self.last_round_s = 0.0  # from the first BEGIN to the end of the outer step
        self.last_commit_unix_s = 0.0
        self.digests: dict[int, str] = {}  # round -> state digest, of the last rounds
        # Work in the order in which it was decided.
        self._queue: asyncio.Queue[partial[Awaitable[None]]] = asyncio.Queue()
        self._unreported: Callable[[], None] | None = None
        self._goal: ev.Goal | None = None  # of the catch-up that waits in the queue
        self.durability: Durability | None = None  # who keeps results over restarts, if anybody
        self.is_loading = False  # the home is being read
        self._falls_short = False  # it gave less than was promised: what builds on that is void

    # ------------------------------------------------------------ what it holds

    @property
    def state(self) -> ReplicatedState | None:
        return self.replica.state

    @state.setter
    def state(self, state: ReplicatedState | None) -> None:
        self.replica.state = self.donor.state = state

    @property
    def progress_bytes(self) -> int:
        """Return a number that grows while this peer gets on, for stall detectors.

        The bytes that it has moved, and local work: who contributes alone may send nothing for
        long.
        """
        moved = self.streams.moved_bytes + self.attempts.progress_bytes
        return moved + self.audits.progress + self._local_bytes

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

    def load(self, reader: HomeReader) -> None:
        """Read the home of this peer before anything else is carried out.

        Until that is done its state is not here, though the machine knows where it stands.
        """
        self.is_loading = True
        for ready in reader.recovered.ready:
            if ready.begin is not None:
                self._wanted[ready.run.round] = ready.begin
        self._in_turn(self._load, reader)

    async def _load(self, reader: HomeReader) -> None:
        promised = reader.recovered
        contents = await asyncio.to_thread(reader.read)
        for line in contents.lines:
            self._daemon.note("recovered", line)
        found = contents.recovered
        is_whole = (found.state, found.missing) == (promised.state, promised.missing)
        self._falls_short = not is_whole
        if self.durability is not None and found.missing:
            self.durability.damaged(max(found.missing))
        self.is_loading = False
        if contents.state is not None:
            self._recover(contents.state, contents)
        for held in contents.held:
            await self._hold(held)
        if found.state == promised.state:  # orders of before the machine hears of it are void
            self._in_turn(self._trust_orders)
        read = ev.HomeRead(*found.state, contents.digest, is_whole, found.missing)
        self._feed(read)

    async def _trust_orders(self) -> None:
        """Carry out what the machine orders now: it knows which results are not here."""
        self._falls_short = False

    def _recover(self, state: ReplicatedState, contents: HomeContents) -> None:
        """Begin with what this peer's home has kept: the state, its last rounds, what is held."""
        log = self.replica.log
        if contents.checkpoint[0]:
            log.restart(contents.checkpoint[0], contents.checkpoint_digest, contents.checkpoint[1])
        for each in contents.replayed:
            if each.head is None:
                log.restart(each.position[0], each.digest, each.position[1])
            elif each.name is not None:
                log.append_stored(each.head, each.name, each.digest)
            else:  # an operation
                log.append(each.head, np.empty(0, np.uint8), each.digest)
        self._moved_to(state, "this peer has been started again")
        if state.spec.error_feedback:
            self.log("what error feedback held before this start is lost: no file has it")

    async def _hold(self, held: HeldResult) -> None:
        """Hold R of a round that an earlier life was READY for: it may yet be committed."""
        begin = held.ready.begin
        if begin is None or not self.is_wanted(begin):
            return  # given up while it was read
        run = await asyncio.to_thread(self.attempts.open, begin, self.state, MEMBERS_MAX)
        np.copyto(run.result.array, held.array)
        run.result.digests = held.digests
        run.root = held.ready.run.root
        if not self.is_wanted(begin):  # given up while its memory was asked for
            self._end(run)

    @contextlib.contextmanager
    def lend_result(self, ready: ReadyRecord) -> Iterator[U8 | None]:
        """Give R of an attempt that this peer is READY for, or of the round that it has become.

        Its memory stays as it is meanwhile. None if it is here no more.
        """
        number = ready.run.round
        run = self.attempts.at(number, ready.run.attempt)
        logged = self._logged(number, ready.run.root)  # which lends it, if it is there already
        if run is None or run.root != ready.run.root:
            yield logged
            return
        run.saving = True
        try:
            yield run.result.array
        finally:
            run.saving = False

    def _logged(self, number: int, root: bytes) -> U8 | None:
        """Return R of a round that is committed, if this was its root; it may be on the disk only.

        That is where an earlier attempt has had the same result.
        """
        log, state = self.replica.log, self.state
        head = log.head(number)
        if head is None or head.root != root or state is None:
            return None
        encoded = log.encoded(number)
        if encoded is None and head.kind == STEP:
            part = log.part(number, 0, state.layout(head).total_bytes)
            encoded = np.frombuffer(part, np.uint8) if part is not None else None
        return encoded

    def restore(self, loaded: LoadedCheckpoint) -> None:
        """Begin with the state of a checkpoint."""
        self.replica.log.restart(loaded.round, loaded.state.digest, loaded.chain)
        self._moved_to(loaded.state, "a checkpoint was loaded")
        self._feed(ev.Restored(loaded.round, loaded.chain, loaded.state.digest))

    def link_down(self, peer: bytes) -> None:
        self.streams.close_to(peer)
        self.sync.lost(peer)

    # ------------------------------------------------------------ the queue

    def handlers(self) -> dict[type, Callable[[Any], None]]:
        """Return what carries out each effect about rounds and state."""
        return {
            ev.Reduce: self._reduce,
            ev.Fetch: self._fetch,
            ev.Abort: lambda e: self.abort(e.round, e.attempt),
            ev.ListFinal: self._list_final,
            ev.Apply: lambda e: self._in_turn(self._apply, e),
            ev.StartSync: self._start_sync,
            ev.Undo: lambda e: self._in_turn(self._undo, e),
            ev.TakeBack: lambda e: self._in_turn(self._take_back, e),
            # Of the call that waits now: it may be given up before its turn comes.
            ev.TellTrainer: lambda e: self._in_turn(
                self._tell, e, self._daemon.awaited_call(e.fragment)
            ),
        }

    def _in_turn(self, work: Callable[..., Awaitable[None]], *arguments: object) -> None:
        self._queue.put_nowait(partial(work, *arguments))

    def _reduce(self, effect: ev.Reduce) -> None:
        self._want(effect.begin)
        self._in_turn(self._begin_attempt, effect.begin)

    def _fetch(self, effect: ev.Fetch) -> None:
        self._want(effect.begin)
        self._in_turn(self._begin_fetch, effect.begin, effect.holder)

    def _want(self, begin: Begin) -> None:
        """Note that an order about this attempt is on its way; orders about older ones are void."""
        if self.me in begin.helpers:  # it applies no rounds: those before these are over
            self.router.settle(begin.round - ROUNDS_IN_FLIGHT_MAX)
        self._wanted[begin.round] = begin
        self.router.promise_attempt(begin)

    def _list_final(self, effect: ev.ListFinal) -> None:
        run = self.attempts.at(effect.round, effect.attempt)
        self.abort(effect.round, effect.attempt)
        digests, missing = (run.finals, run.missing()) if run is not None else (b"", ())
        finals = ev.FinalChunks(effect.round, effect.attempt, digests, missing)
        self._loop.call_soon(self._feed, finals)  # the machine is not to be entered twice

    def _start_sync(self, effect: ev.StartSync) -> None:
        if self._goal is None:  # else its turn has not come yet
            self._in_turn(self._aim)
        self._goal = effect.goal

    async def run(self) -> None:
        while True:
            work = await self._queue.get()
            if work.func != self._tell:  # all else is to find the machine at the last commit
                self._report()
            await work()

    def close(self) -> None:
        self.sync.close()
        self.router.close()
        self._forget_attempts()
        self.kept_server.close()
        for task in self._tasks:
            task.cancel()
        self.donor.close()
        self.streams.close()

    async def _tell(self, effect: ev.TellTrainer, call: int | None) -> None:
        self._daemon.tell_trainer(effect, call)

    def log(self, line: str) -> None:
        """Write a line about rounds or about the state."""
        self._daemon.note("transfer", line)

    # ------------------------------------------------------------ attempts

    async def _begin_attempt(self, begin: Begin) -> None:
        if not self.is_wanted(begin):
            return  # aborted while it waited in the queue
        self._drop_excluded(begin)
        try:
            run = await self._open(begin)
            if self.is_wanted(begin):
                self.layout = begin.layout
                self._write_early(run)
                run.start()
        except (AtollError, MemoryError) as error:  # an opening that makes no sense, or no memory
            self.failed(begin, (), reason_of(error))

    async def _begin_fetch(self, begin: Begin, holder: bytes) -> None:
        """Start to copy the whole result from a peer that has it, unless that is under way."""
        before = self.attempts.get(begin.round)
        same = before if before is not None and before.begin is begin else None
        if not self.is_wanted(begin) or (same is not None and not same.needs(holder)):
            return
        try:
            run = await self._open(begin)
            if same is None:
                run.result.keep({item.chunk: item.digest for item in run.kept})
        except (AtollError, MemoryError) as error:
            self.log(f"fetching the result of round {begin.round} failed: {reason_of(error)}")
            return
        if self.is_wanted(begin):
            self._write_early(run)
            run.fetch(holder)

    def _write_early(self, run: AttemptRun) -> None:
        """Have the result written while it comes; of an operation none is kept."""
        is_kept = run.begin.operation is None and self.me not in run.begin.helpers
        if self.durability is not None and is_kept:
            self.spawn(self.durability.write_early(run))

    def ended(self, run: AttemptRun) -> None:
        if self.durability is not None:
            self.durability.ended(run)

    async def _open(self, begin: Begin) -> AttemptRun:
        """Open an attempt once the one before at this round has let go of its memory."""
        before = self.attempts.get(begin.round)
        if before is not None:
            self._end(before)
            if before.fetching is not None:
                await asyncio.wait([before.fetching])
        state, view = self.replica.state, self.replica.view
        members = len(view.members) if view is not None else 0
        if begin.kind == INIT or (before is not None and before.is_read):  # may take a while
            run = await asyncio.to_thread(self.attempts.open, begin, state, members)
        else:
            run = self.attempts.open(begin, state, members)
        if before is not None:
            self.attempts.begun_again(before, run)
        return run

    def _drop_excluded(self, begin: Begin) -> None:
        """Wake the senders that are stuck on peers that a retry goes on without."""
        before = self.attempts.get(begin.round)
        if before is not None:
            for peer in set(before.begin.exchange) - set(begin.exchange):
                self.streams.close_to(peer)

    def abort(self, round_number: int, attempt: int) -> None:
        """End an attempt: its frames no longer count, and nothing more becomes final."""
        wanted = self._wanted.get(round_number)
        if wanted is not None and wanted.attempt == attempt:
            del self._wanted[round_number]
            self.router.end_attempt(wanted)
        run = self.attempts.at(round_number, attempt)
        if run is not None:
            self._end(run)
            if self.me in run.begin.helpers:  # nobody here needs what has come of it
                self.attempts.drop(lambda number: number == round_number)

    def _end(self, run: AttemptRun) -> None:
        self.router.end_attempt(run.begin)
        run.end()
        self.note_busy()

    def _settle(self, round_number: int) -> None:
        """Drop the rounds up to this one: the state is the one after it, however it came about."""
        self.router.settle(round_number)
        self.attempts.drop(lambda number: number <= round_number)
        self._wanted = {r: begin for r, begin in self._wanted.items() if r > round_number}
        self.note_busy()

    def _forget_attempts(self) -> None:
        """End all attempts, because the state is not what they have built on.

        Orders in the queue stand.
        """
        for run in self.attempts.all:
            self._end(run)
        self.attempts.drop(lambda number: True)

    def complete_result(self, number: int, attempt: int) -> tuple[U8, EncodedLayout, int] | None:
        """Return the encoded result, its layout and its number of chunks, for a donor.

        None if it is not complete, or if the attempt has ended. Whoever reads it may still do so
        when a retry begins.
        """
        run = self.attempts.at(number, attempt)
        if run is None or not run.root or run.ended:
            return None
        run.lend()
        return run.result.array, run.result.layout, run.result.grid.count

    # ------------------------------------------------------------ what attempts ask (AttemptPort)

    def note_progress(self, nbytes: int) -> None:
        """Count a chunk of an outer step, or memory for the first parameters: attempts wait.

        A count that is lost between two threads does no harm: any change shows progress.
        """
        self._local_bytes += nbytes

    def is_wanted(self, begin: Begin) -> bool:
        return self._wanted.get(begin.round) is begin

    def failed(self, begin: Begin, peers: tuple[bytes, ...], why: str) -> None:
        if self.is_wanted(begin):
            self._feed(ev.ReduceFailed(begin.round, begin.attempt, peers, why))

    def reduced(self, begin: Begin, root: bytes) -> None:
        self._feed(ev.AttemptReduced(begin.round, begin.attempt, root))

    def note_busy(self) -> None:
        busy = any(run.is_reducing for run in self.attempts.all)
        if busy != self._busy:
            self._busy = busy
            self.donor.busy(busy)

    def result_of(self, question: FetchKept) -> RoundResult | None:
        run = self.attempts.get(question.round)
        return run.result if run and run.begin.lineage == question.lineage else None

    def handed_out(self, round_number: int, nbytes: int) -> None:
        self.threadsafe(self.attempts.sent_again, round_number, nbytes)

    def _on_broken(self, peer: bytes, why: str) -> None:
        """Handle the end of a stream from this peer. Called by the thread that read it."""
        self.threadsafe(self._stream_broken, peer, why)

    def _stream_broken(self, peer: bytes, why: str) -> None:
        for run in self.attempts.all:
            run.stream_broken(peer, why)

    def threadsafe(self, act: Callable[..., None], *arguments: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended before this thread
            self._loop.call_soon_threadsafe(act, *arguments)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # ------------------------------------------------------------ commits

    async def _apply(self, effect: ev.Apply) -> None:
        if self._falls_short:
            return  # the machine has heard that the state before it is not here
        begin = effect.begin
        run = self.attempts.get(begin.round)
        is_for_others = self.me not in begin.participants or run is None  # ... or an earlier life
        if begin.kind == GATHER or (begin.kind == REDUCE and is_for_others):
            run = None  # BEGIN itself is the result, or it is for others
        else:
            assert run is not None
            assert run.begin is begin
            assert run.root
            run.end()
        try:
            if begin.operation is not None and self._is_quick(run):
                state = self._commit(effect, run)  # a thread would begin later than it ends
            else:
                state = await asyncio.to_thread(self._commit, effect, run)
        except CodecError as error:  # every chunk was checked when it came: it has changed since
            raise DivergedError(
                f"the result of round {begin.round} cannot be applied here: {error.what}",
                fix="start this peer again: it fetches the state from the others",
            ) from error
        if run is not None:
            self.last_round_s = time.monotonic() - run.begun_s
            if run.tries > 1:
                self.log(
                    f"round {begin.round} took {run.tries} attempts here:"
                    f" {size(run.again_bytes)} sent again"
                )
        self.last_commit_unix_s = time.time()
        if run is not None and run.audit is not None and run.before is not None:
            self.audits.committed(run.audit, state.spec, state.manifest, run.before)
        self._moved_to(state, "" if begin.kind != INIT else "the run begins")
        applied = ev.Applied(begin.round, state.digest)
        self._unreported = partial(self._report_commit, applied, begin, run)
        if begin.kind == INIT:
            self._report()  # the run's settings come of it
        else:  # the trainer, whose turn in the queue is next, does not wait for that
            self._loop.call_soon(self._report)

    def _report(self) -> None:
        """Tell the daemon of a commit, if that was put off."""
        if self._unreported is not None:
            report, self._unreported = self._unreported, None
            report()

    def _report_commit(self, applied: ev.Applied, begin: Begin, run: AttemptRun | None) -> None:
        exchange_s = self.last_round_s if run is not None else 0.0
        self._daemon.round_committed(begin, exchange_s, run.tries if run is not None else 1)
        self._feed(applied)

    def _is_quick(self, run: AttemptRun | None) -> bool:
        """Return whether the commit of an operation waits for nobody, and copies little."""
        state = self.state
        if state is None or state.is_written or self.sync.is_working:
            return False
        if run is None:
            return True
        if run.in_outputs and run.is_read:
            return False
        lies_there = self.replica.outputs.is_at(run.result.array)
        return lies_there or 4 * run.result.grid.total <= QUICK_BYTES_MAX

    def _commit(self, effect: ev.Apply, run: AttemptRun | None) -> ReplicatedState:
        """Apply a committed round, and append it to the log. In a worker thread.

        From here on the result belongs to the log.
        """
        begin, chain = effect.begin, effect.chain
        if run is None or begin.operation is not None:
            return commit_operation(self.replica, effect, run)
        state = self._initial(run) if begin.kind == INIT else self.state
        assert state is not None
        head = run.entry(chain)
        run.keep_residual()
        if run.audit is not None and state.spec.validators:
            run.before = state.theta.copy()
        state.apply(head, run.result.array, self.note_progress)
        array = None if state is run.initial else run.result.array  # which would change with it
        self.replica.log.append(head, array, state.digest, lent=run.is_read)
        return state

    def _initial(self, run: AttemptRun) -> ReplicatedState:
        """Return the state that begins with the result of INIT.

        It is the one in whose memory that lies already, once the result is on the disk, unless
        others read it there. Another one would cost its memory, and the time to clear and fill it,
        in which the next round begins without this peer.
        """
        since_s = time.monotonic()
        limit_s = max(SAVED_WAIT_S, since_s - run.begun_s)
        while run.initial is not None and not run.lent:
            if not self._is_in_use(run):
                return run.initial
            if time.monotonic() - since_s > limit_s:
                waited = duration(limit_s)
                text = f"the first parameters are not on the disk after {waited}: they are copied"
                self.threadsafe(self.log, text)
                break
            time.sleep(SAVED_POLL_S)
        run.initial = None
        return ReplicatedState(run.begin.blob, self.note_progress)

    def _is_in_use(self, run: AttemptRun) -> bool:
        """Return whether the result of INIT has yet to be written to the disk, or is being read."""
        keeps = self.durability is not None and self.durability.keeps_rounds
        is_saved = not keeps or self.replica.log.is_stored(run.begin.round, run.root)
        return run.is_read or not is_saved

    async def _undo(self, effect: ev.Undo) -> None:
        """Go back to the state after an earlier round, if it can be had here."""
        log, before = self.replica.log, None
        self.sync.cancel()  # of a goal that is undone with it
        if self.state is not None and log.chain_after(effect.round) == effect.chain:
            before = await asyncio.to_thread(self._state_before, effect.round)
        if before is None:
            self._feed(ev.CatchUpFailed(f"the state after round {effect.round} is not here"))
            return
        self._forget_attempts()
        log.cut_after(effect.round)
        self.digests = {k: d for k, d in self.digests.items() if k <= effect.round}
        self._moved_to(before, "a round was undone")
        self._feed(ev.CaughtUp(effect.round, effect.chain, before.digest))

    def _state_before(self, round_number: int) -> ReplicatedState | None:
        """Return the state after an earlier round; None if it cannot be had here.

        In a worker thread.
        """
        state, log = self.state, self.replica.log
        assert state is not None
        heads = [log.head(number) for number in range(round_number + 1, state.round + 1)]
        if all(head is not None and head.kind in OPERATIONS for head in heads):
            state.rename(round_number)
            return state
        if self._checkpoints is None:
            return None
        try:
            return rewound(log, self._checkpoints, round_number)
        except (AtollError, MemoryError, OSError) as error:
            why = reason_of(error) if isinstance(error, AtollError) else str(error)
            self.threadsafe(self.log, f"the state of round {round_number} is not read again: {why}")
            return None

    async def _take_back(self, effect: ev.TakeBack) -> None:
        state = self.state
        if self._falls_short or state is None:
            return
        await asyncio.to_thread(state.rename, effect.round)
        self._forget_attempts()
        self.replica.log.cut_after(effect.round)
        self.digests = {k: d for k, d in self.digests.items() if k <= effect.round}
        self._moved_to(state, "")
        self._feed(ev.Applied(effect.round, state.digest))

    async def _aim(self) -> None:
        """Begin a catch-up in its turn: what was committed before is to be applied first."""
        goal, self._goal = self._goal, None
        assert goal is not None
        self.donor.is_open = False  # what others attest must not wait for whoever is behind itself
        self.sync.aim(goal)

    def adopt(self, state: ReplicatedState, round_number: int, chain: bytes) -> None:
        """Take over the state that the catch-up has brought to this round, and the log with it."""
        self._falls_short = False
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
        self._settle(state.round)
        self.digests[state.round] = state.digest.hex()
        while len(self.digests) > DIGESTS_KEPT:
            del self.digests[next(iter(self.digests))]


def commit_operation(replica: Replica, effect: ev.Apply, run: AttemptRun | None) -> ReplicatedState:
    """Hand the result of a REDUCE to our trainer, and move the state on by a round.

    The round changes nothing in the state. ``run``: None if this peer takes no part in a REDUCE. In
    a worker thread.

    The log keeps the entry without its bytes: laggards need its place in the history only.
    CodecError if the result does not decode.
    """
    state, begin = replica.state, effect.begin
    assert state is not None
    if run is not None:
        if run.in_outputs and not run.settled():
            try:
                replica.outputs.move()
            except ConfigError:  # no memory: a thread that hangs in a stream ends with that
                if not run.settled(NO_PROGRESS_TIMEOUT_S):
                    raise
        _write_outputs(replica.outputs, run.result)
        if not (run.is_read or run.in_outputs):
            replica.log.give_back(run.result.array)
    head = EntryHead(begin.round, begin.kind, 0, begin.origins, b"", effect.root, effect.chain)
    nothing = np.empty(0, np.uint8)
    state.apply(head, nothing)
    replica.log.append(head, nothing, state.digest)
    return state


def _write_outputs(outputs: TrainerOutputs, result: RoundResult) -> None:
    """Write a result where the trainer expects it, unless it lies there. CodecError."""
    out = outputs.floats
    if out is None or out.size != result.grid.total or outputs.is_at(result.array):
        return
    for chunk in range(result.grid.count):
        lo, hi = result.grid.bounds(chunk)
        result.codec.decode(result.view(chunk), out[lo:hi])
