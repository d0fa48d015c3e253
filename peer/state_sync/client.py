"""Bring this peer the state of a goal, or the result of an attempt: sockets, threads and memory.

``SyncClient`` carries out what machine.py decides. Pieces are hashed and stored in the reader
threads of the donors' streams, under one lock with the decisions. Memory beside the state: a frame
(2 MiB) for each donor that is sending, at most DONORS_MAX, 34 MB in all.

``ResultFetcher`` copies the result of an attempt from a peer that holds it (REPAIR).
"""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections.abc import Coroutine
from typing import Any, Protocol

from atoll.collectives import RoundResult
from atoll.collectives.errors import (
    AtollError,
    ConnectError,
    RemoteProtocolError,
    RoundTimeoutError,
    StateError,
)
from atoll.collectives.units import duration
from atoll.peer.membership.events import Goal
from atoll.peer.membership.kept_chunks import KEPT_MAX
from atoll.peer.membership.messages import Begin
from atoll.peer.membership.view import Member, short
from atoll.peer.net.connections import ConnectionManager
from atoll.peer.rounds.entries import EntryHead
from atoll.peer.rounds.log import RoundLog
from atoll.peer.rounds.salvage import pack_chunks
from atoll.peer.rounds.state import CHUNK_COPY_BYTES_MAX, ReplicatedState, StateLoad
from atoll.peer.state_sync import events as ev
from atoll.peer.state_sync.chunk_cache import ChunkCache
from atoll.peer.state_sync.machine import SyncMachine, SyncPhase
from atoll.peer.state_sync.messages import FetchResult, ResultHead
from atoll.peer.state_sync.sources import DONORS_MAX
from atoll.peer.state_sync.verification import PART_HEAD_BYTES_MAX, RUN_MAX, open_parts
from atoll.peer.streams.frames import DataHeader
from atoll.peer.streams.transfers import EncodedTransfer, TransferKind, Transfers, receive

MAY_FINISH_TIMEOUT_S = 600.0  # a disk of 100 MB/s writes 60 GB meanwhile; then it hangs
FRAME_BYTES_MAX = CHUNK_COPY_BYTES_MAX + RUN_MAX * PART_HEAD_BYTES_MAX
HEAD_TIMEOUT_S = 5.0  # a holder that does not answer is replaced


class StateOwner(Protocol):
    """Own the replicated state of a daemon."""

    @property
    def state(self) -> ReplicatedState | None: ...

    def adopt(self, state: ReplicatedState, round_number: int, chain: bytes, /) -> None:
        """Take over a state that is in place, with the log begun anew."""

    def sync_failed(self, why: str, /) -> None:
        """Hear that nothing is under way any more."""

    def log(self, line: str, /) -> None:
        """Write a line about the state."""


class SyncClient:
    """Bring this peer to the state of a goal. Lives in the event loop, one for each daemon."""

    def __init__(
        self,
        host: ConnectionManager,
        transfers: Transfers,
        rounds: RoundLog,
        cache: ChunkCache,
        owner: StateOwner,
    ) -> None:
        self._host = host
        self._rounds, self._cache = rounds, cache
        self._owner = owner
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()  # of everything below
        self._machine = SyncMachine()
        self._landing: dict[tuple[bytes, int], bytearray] = {}  # frames that are being received
        self._spare: list[bytearray] = []
        self._ready: ReplicatedState | None = None  # in place, not yet handed over
        self._closed = False
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._unreachable: dict[bytes, str] = {}  # why, as it was last logged
        self.may_finish = asyncio.Event()  # cleared while the state must stay as it is
        self.may_finish.set()
        self._held_since_s: float | None = None  # since when that is waited for
        transfers.pieces = self

    # ------------------------------------------------------------ steering

    @property
    def is_working(self) -> bool:
        return self._machine.phase is not SyncPhase.IDLE

    def describe(self) -> str:
        """Describe for people what is on its way, since when, and who or what that waits for.

        Return "" if nothing is.
        """
        now_s = self._loop.time()
        with self._lock:
            text = self._machine.describe(now_s)
        if not text or self._held_since_s is None:
            return text
        held_s = now_s - self._held_since_s
        return f"{text}; it has waited for this peer's checkpoint for {duration(held_s)}"

    def aim(self, goal: Goal) -> None:
        """Reach this goal; a newer one takes the place of an older one."""
        self._feed(ev.LinkedPeers(frozenset(self._host.link_peers())))
        self._feed(ev.SetGoal(goal, self._own()))

    def lost(self, peer: bytes) -> None:
        """Handle the end of the control link to a donor.

        Answers to what was asked may be lost with it, also when it is back before anybody has
        looked.
        """
        self._feed(ev.LinkedPeers(frozenset(self._host.link_peers()) - {peer}))

    def cancel(self) -> None:
        """Stop. What has been received stays for a later goal, unless a round is applied first."""
        self._feed(ev.Cancel())

    def close(self) -> None:
        self.cancel()
        with self._lock:
            self._closed = True  # reader threads may outlive the loop
            self._cache.close()
        if self._timer is not None:
            self._timer.cancel()
        for task in self._tasks:
            task.cancel()

    def on_message(self, source: bytes, message: object) -> None:
        """Handle one of ``messages.ANSWERED_BY_DONORS``."""
        self._feed(ev.DonorMessage(source, message))

    def _own(self) -> ev.OwnState:
        state = self._owner.state
        if state is None or not state.digest:
            return ev.OwnState()
        chain, blob_digest = self._rounds.chain_after(state.round), _sha256(state.blob)
        return ev.OwnState(state.round, chain, state.digest, blob_digest)

    def _feed(self, event: ev.Event) -> None:
        """Give an event to the machine, and have its effects carried out. From any thread."""
        with self._lock:
            if self._closed:
                return
            try:
                effects = self._machine.handle(event, self._loop.time())
            except AtollError as error:  # the store is not ours any more, or there is no memory
                effects = self._machine.handle(ev.StoreFailed(error.what), self._loop.time())
            # In order, whichever thread they come from.
            self._loop.call_soon_threadsafe(self._carry_out, effects)

    # ------------------------------------------------------------ frames, in reader threads

    def reserve(self, source: bytes, header: DataHeader) -> memoryview | None:
        ticket = header.attempt
        with self._lock:
            piece = self._machine.expects(source, ticket)
            if piece is None or (source, ticket) in self._landing:
                return None
            wanted = TransferKind.ENTRY if piece.entry else TransferKind.STATE
            right = (header.kind, header.chunk) == (wanted, piece.chunk)
            if right and header.length <= FRAME_BYTES_MAX:
                # A stream that broke in the middle of a frame keeps its buffer: at most that many.
                buffer = self._spare.pop() if self._spare else bytearray(FRAME_BYTES_MAX)
                self._landing[source, ticket] = buffer
                self._machine.arrives(source, ticket)
                return memoryview(buffer)[: header.length]
        self._feed(ev.PieceArrived(source, ticket, header.round, ()))
        return None

    def received(self, source: bytes, header: DataHeader) -> None:
        with self._lock:
            buffer = self._landing.pop((source, header.attempt), None)
        if buffer is None:
            return
        try:
            parts = open_parts(memoryview(buffer)[: header.length])
        except RemoteProtocolError:
            parts = ()
        self._feed(ev.PieceArrived(source, header.attempt, header.round, parts))
        with self._lock:
            if len(self._spare) < DONORS_MAX:
                self._spare.append(buffer)

    def broken_off(self, source: bytes, header: DataHeader) -> None:
        with self._lock:
            self._landing.pop((source, header.attempt), None)

    def broken(self, source: bytes, why: str) -> None:
        with self._lock:
            for key in [key for key in self._landing if key[0] == source]:
                del self._landing[key]
        self._feed(ev.StreamBroken(source))

    # ------------------------------------------------------------ effects, in the event loop

    def _carry_out(self, effects: list[ev.Effect]) -> None:
        for effect in effects:
            match effect:
                case ev.SendToDonor():
                    self._host.send(effect.peer, effect.message)
                case ev.DialDonor():
                    self._spawn(self._dial(effect.member))
                case ev.PrepareStore():
                    self._spawn(self._prepare(effect.blob))
                case ev.InstallState():
                    assert isinstance(effect.store, _StateStore)
                    self._spawn(self._finish(effect.store, effect.round, effect.digest))
                case ev.Synced():
                    self._done(effect)
                case ev.SyncFailed():
                    self._owner.sync_failed(effect.why)
                case ev.LogLine():
                    self._owner.log(effect.text)
        self._arm()

    def _arm(self) -> None:
        if self._timer is None and (deadline_s := self._machine.next_deadline_s()) is not None:
            self._timer = self._loop.call_at(deadline_s, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._feed(ev.LinkedPeers(frozenset(self._host.link_peers())))

    async def _dial(self, member: Member) -> None:
        if member.peer in self._host.outbound:
            self._note_unreachable(member, "it can only dial out, and has no link to this peer")
            return
        try:
            await self._host.dial(member.address, expect_peer=member.peer)
        except AtollError as error:  # tried again while it is wanted
            self._note_unreachable(member, error.what)
        else:
            self._unreachable.pop(member.peer, None)

    def _note_unreachable(self, member: Member, why: str) -> None:
        if self._unreachable.get(member.peer) != why and self.is_working:  # else it needs nobody
            self._unreachable[member.peer] = why
            self._owner.log(f"cannot get the state from {short(member.peer)}: {why}")

    async def _prepare(self, blob: bytes) -> None:
        state = self._owner.state
        try:
            if blob:
                state = await asyncio.to_thread(ReplicatedState, blob)
            assert state is not None
            store = _StateStore(state, self._cache)
            cached = await asyncio.to_thread(store.take_cached, _sha256(blob)) if blob else ()
        except (AtollError, MemoryError, OSError) as error:
            self._feed(ev.StoreFailed(_reason(error)))
            return
        self._feed(ev.StoreReady(store, cached))

    async def _finish(self, store: _StateStore, number: int, digest: bytes) -> None:
        self._held_since_s = None if self.may_finish.is_set() else self._loop.time()
        try:
            async with asyncio.timeout(MAY_FINISH_TIMEOUT_S):
                await self.may_finish.wait()
        except TimeoutError:
            why = f"a checkpoint has been copying the state for {MAY_FINISH_TIMEOUT_S:.0f} s"
            self._feed(ev.StateRejected(why, is_mismatch=False))
            return
        finally:
            self._held_since_s = None
        try:
            await asyncio.to_thread(store.finish, number, digest)
        except StateError as error:
            self._feed(ev.StateRejected(error.what, is_mismatch=store.is_open))
            return
        self._ready = store.state
        self._feed(ev.StateInPlace())

    def _done(self, done: ev.Synced) -> None:
        state, self._ready = self._ready or self._owner.state, None
        assert state is not None
        known = self._rounds.chain_after(done.round), self._rounds.digest_after(done.round)
        if known != (done.chain, done.digest):
            self._rounds.restart(done.round, done.digest, done.chain)
        self._cache.clear()
        self._owner.adopt(state, done.round, done.chain)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class _StateStore:
    """Put a state together on a StateLoad: ``ev.SyncStore``.

    Chunks that are kept are copied when that is needed; what is put is cached as well, while the
    cache is open.
    """

    def __init__(self, state: ReplicatedState, cache: ChunkCache) -> None:
        self.state, self._cache = state, cache
        self._load = StateLoad(state)
        self._kept: dict[int, int] = {}  # chunk of the current state -> the round that it is of
        self._leaves: dict[int, bytes] = {}  # of chunks that were put, where they are known

    @property
    def is_open(self) -> bool:
        return self._load.is_open

    @property
    def chunks(self) -> int:
        return self.state.grid.count

    def state_bytes(self, chunk: int) -> int:
        return self.state.chunk_bytes(chunk)

    def entry_bytes(self, head: EntryHead, chunk: int) -> int:
        return self.state.codec_of(head).encoded_bytes(self.state.grid.size(chunk))

    def place(self, head: EntryHead, chunk: int) -> tuple[int, int] | None:
        chunks = self.state.chunks_in(head)
        return (chunk - chunks.start, len(chunks)) if chunk in chunks else None

    def leaf(self, chunk: int) -> bytes:
        return self._load.leaf(chunk)

    def hint(self, chunk: int) -> bytes:
        if self._load.has(chunk):
            return self._leaves.get(chunk, b"")
        return self.state.leaves[chunk] if self.state.leaves else b""

    def keep(self, chunk: int, number: int) -> None:
        if self._load.has(chunk):
            self._load.confirm(chunk, number)
        else:
            self._kept[chunk] = number

    def put(
        self, chunk: int, number: int, data: memoryview, data_digest: bytes, digest: bytes
    ) -> None:
        self._take(chunk, number, data, data_digest)
        self._cache.add(chunk, number, digest, data_digest, data)

    def take_cached(self, blob_digest: bytes) -> tuple[tuple[int, int, bytes], ...]:
        """Open the cache; return (chunk, round, digest of that round's state) of what it has."""
        sizes = [self.state_bytes(chunk) for chunk in range(self.chunks)]
        self._cache.begin(blob_digest, sum(sizes))
        taken: dict[int, tuple[int, int, bytes]] = {}
        for chunk, number, digest, data_digest, data in self._cache.chunks(sizes):
            self._take(chunk, number, memoryview(data), data_digest)
            taken[chunk] = (chunk, number, digest)
        return tuple(taken.values())

    def _take(self, chunk: int, number: int, data: memoryview, data_digest: bytes) -> None:
        self._kept.pop(chunk, None)
        self._load.put(chunk, number, data)
        self._leaves[chunk] = data_digest  # of parameters and momentum, in this order, as a leaf is

    def replay(self, chunk: int, head: EntryHead, data: memoryview) -> None:
        self._copy(chunk)
        self._leaves.pop(chunk, None)
        self._load.replay(head, data, chunk)

    def finish(self, number: int, digest: bytes) -> None:
        for chunk in list(self._kept):
            self._copy(chunk)
        try:
            self._load.finish(number, digest)
        except StateError:  # donors will be asked which chunks are right
            if self.is_open:
                self._leaves = {chunk: self._load.leaf(chunk) for chunk in range(self.chunks)}
            raise

    def _copy(self, chunk: int) -> None:
        number = self._kept.pop(chunk, None)
        if number is not None:
            self._load.keep(chunk, number)


def _sha256(blob: bytes) -> bytes:
    return hashlib.sha256(blob).digest()


def _reason(error: AtollError | MemoryError | OSError) -> str:
    return error.what if isinstance(error, AtollError) else f"no memory for the state: {error}"


# ---------------------------------------------------------------- the result of an attempt


class ResultFetcher:
    """Copy R of an attempt from one holder at a time, instead of reducing it again."""

    def __init__(self, host: ConnectionManager, transfers: Transfers) -> None:
        self._host = host
        self._transfers = transfers
        self._heads: dict[tuple[bytes, int, int], asyncio.Future[ResultHead]] = {}

    def on_head(self, source: bytes, head: ResultHead) -> None:
        waiting = self._heads.get((source, head.round, head.attempt))
        if waiting is not None and not waiting.done():
            waiting.set_result(head)

    async def fetch(
        self,
        begin: Begin,
        holder: bytes,
        result: RoundResult,
    ) -> list[bytes]:
        """Copy what ``result`` lacks of R of an attempt; return the digests of all chunks.

        ConnectError without a link to the holder, StateError if it does not hold the result or the
        transfer breaks, RoundTimeoutError if it does not answer or sends nothing.
        """
        lacking = [chunk for chunk, digest in enumerate(result.digests) if not digest]
        some = len(lacking) < min(len(result.digests), KEPT_MAX + 1)
        chunks = pack_chunks(lacking) if some else b""  # a list of all says no more
        question = FetchResult(begin.lineage, begin.view, begin.round, begin.attempt, chunks)
        key = (holder, int(TransferKind.RESULT_COPY), begin.round, begin.attempt)
        with self._transfers.asking(key):
            head = await self._ask(holder, question)
            if not head.found:
                raise StateError(f"{short(holder)} does not hold the result of round {begin.round}")
            return await receive(self._transfers, EncodedTransfer(key, result))

    async def _ask(self, peer: bytes, question: FetchResult) -> ResultHead:
        waiting: asyncio.Future[ResultHead] = asyncio.get_running_loop().create_future()
        key = (peer, question.round, question.attempt)
        self._heads[key] = waiting
        try:
            if not self._host.send(peer, question):
                raise ConnectError(f"no control link to {short(peer)}")
            async with asyncio.timeout(HEAD_TIMEOUT_S):
                return await waiting
        except TimeoutError:
            raise RoundTimeoutError(
                f"{short(peer)} has not answered for {HEAD_TIMEOUT_S:.0f} s"
            ) from None
        finally:
            del self._heads[key]
