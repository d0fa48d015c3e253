"""Serve state, log entries and results to peers that lack them: the donor's side.

Pieces are copied and sent one at a time per peer, in worker threads, while rounds go on: memory is
one chunk with its proof (2 MiB and 646 bytes at most) for each of SERVES_MAX peers, 8.4 MB in all,
and Merkle trees of entries; entries are sent from where they lie. While a reduction of this peer's
own sends bytes, pieces take a small share of what it sends.
"""

from __future__ import annotations

import asyncio
import hashlib
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Coroutine
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atoll.collectives import EncodedLayout
from atoll.collectives.digests import strong_digest
from atoll.collectives.errors import AtollError, ConnectError, StateError
from atoll.collectives.merkle import MerkleTree
from atoll.collectives.threads import workers
from atoll.peer.membership.view import short
from atoll.peer.net.connections import ConnectionManager
from atoll.peer.net.dial import UNREACHED
from atoll.peer.net.wire import encode
from atoll.peer.rounds.entries import INIT, EntryHead
from atoll.peer.rounds.log import RoundLog
from atoll.peer.rounds.salvage import parse_chunks
from atoll.peer.rounds.state import CHUNK_COPY_BYTES_MAX, ReplicatedState
from atoll.peer.state_sync import messages as msg
from atoll.peer.state_sync.verification import RUN_MAX, entry_leaf, part_head
from atoll.peer.streams.frames import DataHeader
from atoll.peer.streams.manager import FrameOutlet, Streams, reason_of
from atoll.peer.streams.stream import DataStream
from atoll.peer.streams.transfers import TransferKind

SERVES_MAX = 4  # peers at a time: more would only share the same uplink
# Members that wait for the result of a round at a time: those that do not contribute all ask the
# first peer that has it. In larger views some ask another one, and so does who has waited too long:
# less than it waits for an answer (``ResultFetcher``).
RESULTS_MAX = 64
RESULT_WAIT_S = 2.0
# Entries whose Merkle trees are remembered (hashing one takes 0.1 s per 100 MB): as many as a piece
# may need, but no more leaves than so many, of 64 bytes with what is above them: 8 MB.
TREES_MAX = RUN_MAX
TREE_LEAVES_MAX = 131_072
TREES_MIN = 8  # a run of int8 entries needs no more, and each answer would hash them all again
WHY_CHARACTERS_MAX = 300  # of a refusal's reason
EARLY_MAX = 64  # peers of whom is remembered what has been logged
U8 = NDArray[np.uint8]
Results = Callable[[int, int], tuple[U8, EncodedLayout, int] | None]
BUSY_SHARE = 0.05  # of what the own reduction sends: rounds get no longer than by this ...
# ... unless pieces were wanted all through so many reductions: who wants them does not keep up with
# the rounds, and with this share never would. It doubles with each reduction from there on, to as
# much as the reduction sends. Rounds are longer for a while, and have one trainer more then.
PATIENT_REDUCTIONS = 2
# Or so many in a reduction, if that is more: where rounds are small and the way is long, a peer
# could not keep up with them otherwise. 50 ms at 10 Mbit/s.
BUSY_BYTES = 64 << 10
PACE_TIMEOUT_S = 60.0  # a piece that may not be sent for so long is refused: others may have time
PACE_STEP_S = 0.02  # how often bytes are counted while waiting
# Reductions that send nothing for so long leave the link to pieces: they may be of a peer that
# is alone, or wait for the vote of the very peer that the pieces are for. Twice the time after
# which what a slow link has taken of a frame is counted (peer/streams/stream.py).
IDLE_S = 0.5


class SyncServer:
    """Answer everything in ``messages.ASKED_OF_DONORS``. Lives in the event loop.

    ``is_open`` is false while this peer is no donor: it syncs itself, or its state may be
    wrong. Results of attempts are served regardless.
    """

    def __init__(
        self,
        host: ConnectionManager,
        streams: Streams,
        results: Results,
        rounds: RoundLog,
        log: Callable[[str], None],
    ) -> None:
        self._host = host
        self._streams = streams
        self._results = results  # (round, attempt) -> a complete R, its layout, its chunks
        self._rounds = rounds
        self._log = log
        self.state: ReplicatedState | None = None
        self.is_open = True
        self.refuses: Callable[[], str] = lambda: ""  # why no pieces are sent now; "" if they are
        self.pace = ServingPace(lambda: streams.sent_for_rounds_bytes, time.monotonic)
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._queues: dict[bytes, PieceQueue] = {}  # of peers that are being served
        # Who wants the result of which round, until its turn.
        self._waiting: dict[tuple[bytes, int], msg.FetchResult] = {}
        self._result_turns = asyncio.Semaphore(SERVES_MAX)
        self._early: dict[bytes, str] = {}  # peer -> why serving it ended early, as last logged
        self._threads = workers(2 * SERVES_MAX, "serve")
        self._trees: OrderedDict[bytes, MerkleTree] = OrderedDict()  # by the entry's root
        self._trees_lock = threading.Lock()

    def busy(self, reducing: bool) -> None:
        """Slow pieces down while this peer's own reductions are under way.

        Called when a reduction begins, and when the last of them has ended.
        """
        self.pace.busy(reducing)

    def close(self) -> None:
        self.pace.close()
        for task in self._tasks:
            task.cancel()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def on_message(self, source: bytes, message: object) -> None:
        match message:
            case msg.FetchPiece():
                self._on_fetch(source, message)
            case msg.DropPieces():
                if source in self._queues:
                    self._queues[source].drop(message.tickets)
            case msg.FetchResult():
                self._on_fetch_result(source, message)
            case msg.AskState():
                self._host.send(source, self._state_from(message.first))
            case msg.AskHeads():
                self._host.send(source, self._heads(message.first, message.last))
            case msg.AskBlob() if self.state is not None:
                self._host.send(source, msg.BlobIs(self.state.blob))

    # ------------------------------------------------------------ small answers

    def _state_from(self, first: int) -> msg.StateIs:
        state = self.state if self.is_open else None
        if state is None or (found := state.place) is None:
            return msg.StateIs(-1)
        number, root = found
        first = min(max(first, number + 1 - msg.DIGESTS_MAX), number)
        digests = [self._rounds.digest_after(n) or bytes(32) for n in range(first, number + 1)]
        blob_digest = hashlib.sha256(state.blob).digest()
        return msg.StateIs(number, root, blob_digest, self._log_first(), first, b"".join(digests))

    def _log_first(self) -> int:
        """Return the first entry that can be proven and replayed: the chain before it is known."""
        first = max(self._rounds.first, 2)  # INIT is the state itself
        return first if self._rounds.chain_after(first - 1) else first + 1

    def _heads(self, first: int, last: int) -> msg.HeadsAre:
        heads: list[EntryHead] = []
        size = 0
        before = self._rounds.chain_after(first - 1) if self.is_open else b""
        while before and first + len(heads) <= last and len(heads) < msg.HEADS_MAX:
            head = self._rounds.head(first + len(heads))
            if head is None:
                break
            size += len(encode(head))
            if heads and size > msg.HEADS_BYTES_MAX:
                break
            heads.append(head)
        return msg.HeadsAre(first, before, tuple(heads))

    # ------------------------------------------------------------ pieces

    def _on_fetch(self, source: bytes, message: msg.FetchPiece) -> None:
        if self.state is None or not self.is_open:
            self._refuse(source, message.ticket, "no state to give")
            return
        if why := self.refuses():
            self._refuse(source, message.ticket, why)
            return
        queue = self._queues.get(source)
        if queue is None and len(self._queues) < SERVES_MAX:
            queue = self._queues[source] = PieceQueue()
            self._spawn(self._serve(source, queue))
        if queue is None:
            self._refuse(source, message.ticket, f"{SERVES_MAX} learners are being served")
        elif not queue.add(message):
            self._refuse(source, message.ticket, f"{msg.ASKED_MAX} pieces have been asked for")

    def _refuse(self, source: bytes, ticket: int, why: str, unreachable: bool = False) -> None:
        self._host.send(source, msg.NoPiece(ticket, why[:WHY_CHARACTERS_MAX], unreachable))

    async def _serve(self, source: bytes, queue: PieceQueue) -> None:
        """Send pieces to a peer until nothing is asked for.

        What cannot be sent is refused, so that others are asked.
        """
        try:
            stream = await self._streams.to(source)
            await self._loop.run_in_executor(self._threads, self._send_all, source, queue, stream)
        except (AtollError, MemoryError) as error:
            self._cannot_send(source, "the state", error)
            for message in queue.rest():
                unreachable = isinstance(error, ConnectError) and error.stage in UNREACHED
                self._refuse(source, message.ticket, self._why(source, error), unreachable)
        finally:
            del self._queues[source]
        for message in queue.rest():  # came while the thread ended
            self._on_fetch(source, message)

    def _send_all(self, source: bytes, queue: PieceQueue, stream: DataStream) -> None:
        """Send the pieces that wait in the queue, in a worker thread."""
        buffer = memoryview(bytearray(CHUNK_COPY_BYTES_MAX))
        while (message := queue.next()) is not None:
            try:
                kind, number, parts = self._piece(message, buffer)
                self.pace.wait(sum(len(part) for part in parts))
            except (StateError, MemoryError) as error:
                why = reason_of(error)
                self._loop.call_soon_threadsafe(self._refuse, source, message.ticket, why)
                continue
            ticket, chunk = message.ticket, message.chunk
            header = DataHeader(int(kind), 0, 0, 0, bytes(8), 0, number, ticket, chunk)
            try:
                FrameOutlet(stream, header, aside=True).send_parts(int(kind), chunk, *parts)
            except AtollError as error:  # other streams to that peer may live on: it waits for this
                why = self._why(source, error)
                self._loop.call_soon_threadsafe(self._refuse, source, ticket, why)
                raise

    def _piece(
        self, message: msg.FetchPiece, buffer: memoryview
    ) -> tuple[TransferKind, int, tuple[memoryview, ...]]:
        """Return kind, round and bytes of what is asked for; StateError if it is not here."""
        state = self.state
        if state is None or not self.is_open or message.chunk >= state.grid.count:
            raise StateError("no such chunk of the state here")
        if message.entry:
            return TransferKind.ENTRY, message.entry, self._run(state, message)
        copy = state.read_chunk(message.chunk, buffer)
        same = message.have == copy.leaf
        nbytes = 0 if same else copy.nbytes
        head = memoryview(part_head(copy.proof, nbytes, same=same))
        return TransferKind.STATE, copy.round, (head, buffer[:nbytes])

    def _run(self, state: ReplicatedState, message: msg.FetchPiece) -> tuple[memoryview, ...]:
        """Return the chunk's parts of consecutive entries, as many as are here and fit in a frame.

        Each as its head and its data. StateError if there is none.
        """
        parts: list[memoryview] = []
        size = 0
        for number in range(message.entry, max(message.entry, message.last) + 1):
            head = self._rounds.head(number)
            if head is None or head.kind == INIT:
                break
            chunks = state.chunks_in(head)
            if message.chunk not in chunks:
                continue
            layout, index = state.layout(head), message.chunk - chunks.start
            lo, hi = layout.slice(index)
            size += hi - lo  # the chunk itself would be smaller than more of them
            if (parts and size > state.chunk_bytes(message.chunk)) or len(parts) == 2 * RUN_MAX:
                break
            tree, data = self._tree(head, layout, len(chunks)), self._rounds.part(number, lo, hi)
            if tree is None or data is None:
                break
            parts += [memoryview(part_head(tree.proof(index), hi - lo, same=False)), data]
        if not parts:
            raise StateError(f"no part of chunk {message.chunk} of entry {message.entry} here")
        return tuple(parts)

    def _tree(self, head: EntryHead, layout: EncodedLayout, count: int) -> MerkleTree | None:
        """Return the tree over the chunks of an entry; None if its bytes are not here."""
        with self._trees_lock:  # whoever else needs it waits for it
            tree = self._trees.get(head.root)
            if tree is None:
                tree = self._hashed(head, layout, count)
                if tree is None:
                    return None
                self._trees[head.root] = tree
                most = max(TREES_MIN, min(TREES_MAX, TREE_LEAVES_MAX // count))
                while len(self._trees) > most:
                    self._trees.popitem(last=False)
            self._trees.move_to_end(head.root)
            return tree

    def _hashed(self, head: EntryHead, layout: EncodedLayout, count: int) -> MerkleTree | None:
        leaves = []
        for index in range(count):
            data = self._rounds.part(head.round, *layout.slice(index))
            if data is None:
                return None
            leaves.append(entry_leaf(head, index, strong_digest(data)))
        tree = MerkleTree(leaves)
        if tree.root != head.root:  # the disk has changed it: nobody is to take us for a liar
            self._rounds.lost(head.round)
            text = f"the file of round {head.round} is damaged: nobody gets that round from here"
            self._loop.call_soon_threadsafe(self._log, text)
            return None
        return tree

    # ------------------------------------------------------------ results of attempts

    def _on_fetch_result(self, source: bytes, message: msg.FetchResult) -> None:
        key = (source, message.round)  # several rounds may be in flight
        before = self._waiting.get(key)
        if before == message:
            return  # the order was repeated
        is_room = before is not None or len(self._waiting) < RESULTS_MAX
        found = self._results(message.round, message.attempt) if is_room else None
        if found is None:
            self._say_result(source, message, found=False)
            return
        parse_chunks(message.chunks, found[2])  # RemoteProtocolError, before anybody waits for it
        self._waiting[key] = message  # in the place of an older attempt, which is over
        self._spawn(self._await_turn(source, message))

    async def _await_turn(self, source: bytes, message: msg.FetchResult) -> None:
        key = (source, message.round)
        try:
            async with asyncio.timeout(RESULT_WAIT_S):
                await self._result_turns.acquire()
        except TimeoutError:
            if self._waiting.get(key) is message:
                del self._waiting[key]
                self._say_result(source, message, found=False)
            return
        try:
            if self._waiting.get(key) is message:
                del self._waiting[key]
                await self._serve_result(source, message)
        finally:
            self._result_turns.release()

    async def _serve_result(self, source: bytes, message: msg.FetchResult) -> None:
        number, attempt = message.round, message.attempt
        found = self._results(number, attempt)  # it may be over by now
        is_linked = self._say_result(source, message, found=found is not None)
        if found is None or not is_linked:
            return
        result, layout, count = found
        kind = int(TransferKind.RESULT_COPY)
        header = DataHeader(kind, 0, 0, 0, bytes(8), 0, number, attempt, 0)

        def push(outlet: FrameOutlet) -> None:
            for chunk in parse_chunks(message.chunks, count) or range(count):
                if self._results(number, attempt) is None:
                    return  # committed or given up: nobody wants the rest
                lo, hi = layout.slice(chunk)
                outlet.send(kind, chunk, result[lo:hi].data)

        try:
            outlet = FrameOutlet(await self._streams.to(source), header)
            await self._loop.run_in_executor(self._threads, push, outlet)
        except (AtollError, MemoryError) as error:  # it is missed, and another holder is asked
            self._cannot_send(source, f"the result of round {number}", error)

    def _say_result(self, source: bytes, message: msg.FetchResult, *, found: bool) -> bool:
        return self._host.send(source, msg.ResultHead(message.round, message.attempt, found))

    def _cannot_send(self, source: bytes, what: str, error: AtollError | MemoryError) -> None:
        """Log that something cannot be sent, once for a peer and a reason.

        It asks again, and so will this happen again.
        """
        why = self._why(source, error)
        if self._early.get(source) != why:
            self._early[source] = why
            if len(self._early) > EARLY_MAX:
                del self._early[next(iter(self._early))]
            self._log(f"cannot send {what} to {short(source)}: {why}")

    def _why(self, source: bytes, error: AtollError | MemoryError) -> str:
        if isinstance(error, ConnectError) and error.stage in UNREACHED:
            return f"nobody can connect to {self._streams.address(source)} (behind a router?)"
        return reason_of(error)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


# ---------------------------------------------------------------- shared with threads


class PieceQueue:
    """Keep the requests of one peer, first come, first served."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: OrderedDict[int, msg.FetchPiece] = OrderedDict()  # by ticket

    def add(self, message: msg.FetchPiece) -> bool:
        """Add a request; return False if that peer asks for more than one may."""
        with self._lock:
            if len(self._waiting) >= msg.ASKED_MAX:
                return False
            self._waiting[message.ticket] = message
            return True

    def drop(self, tickets: Collection[int]) -> None:
        with self._lock:
            for ticket in tickets:
                self._waiting.pop(ticket, None)

    def next(self) -> msg.FetchPiece | None:
        with self._lock:
            return self._waiting.popitem(last=False)[1] if self._waiting else None

    def rest(self) -> list[msg.FetchPiece]:
        with self._lock:
            waiting = list(self._waiting.values())
            self._waiting.clear()
            return waiting


class ServingPace:
    """Limit how fast pieces are sent.

    While a reduction is under way, pieces get BUSY_SHARE of the bytes that it sends, or BUSY_BYTES;
    more of them, if they were wanted through PATIENT_REDUCTIONS.
    """

    def __init__(self, sent_bytes: Callable[[], int], clock: Callable[[], float]) -> None:
        self._sent_bytes = sent_bytes  # of all rounds so far, and of nothing else
        self._clock = clock
        self._changed = threading.Condition()
        self._busy = self._closed = False
        self._since_bytes = 0  # sent when the reduction began
        self._pieces_bytes = 0  # since then, by pieces
        self._reduced_bytes = 0  # since then, by the reduction, when they were last counted ...
        self._moved_s = float("-inf")  # ... and when that has last grown, in this one or before
        self._wanted = False  # pieces were, since a reduction began
        self._reductions = 0  # one after the other in which they were

    def busy(self, reducing: bool) -> None:
        with self._changed:
            if reducing and not self._busy:
                self._since_bytes = self._sent_bytes()
                self._reduced_bytes = self._pieces_bytes = 0
                self._reductions = self._reductions + 1 if self._wanted else 0
                self._wanted = False
            self._busy = reducing
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def wait(self, nbytes: int) -> None:
        """Wait until so many bytes may be sent.

        StateError after PACE_TIMEOUT_S, or at the end.
        """
        deadline_s = self._clock() + PACE_TIMEOUT_S
        with self._changed:
            self._wanted = True
            while self._busy and not self._closed and not self._takes(nbytes):
                if self._clock() > deadline_s:
                    raise StateError("this donor needs its link for a round")
                self._changed.wait(PACE_STEP_S)
            if self._closed:
                raise StateError("this donor is closing")

    @property
    def _share(self) -> float:
        """Return which part of what the reduction sends pieces may have."""
        late = max(0, self._reductions - PATIENT_REDUCTIONS)
        return min(1.0, BUSY_SHARE * float(1 << min(late, 16)))

    def _takes(self, nbytes: int) -> bool:
        """Return whether there is room for so many; if so, count them.

        Where nothing else is sent, there is room, and they do not count.
        """
        reduced_bytes = self._sent_bytes() - self._since_bytes
        now_s = self._clock()
        if reduced_bytes > self._reduced_bytes:
            self._reduced_bytes, self._moved_s = reduced_bytes, now_s
        if now_s - self._moved_s >= IDLE_S:
            return True
        if self._pieces_bytes + nbytes > max(BUSY_BYTES, self._share * reduced_bytes):
            return False
        self._pieces_bytes += nbytes
        return True
