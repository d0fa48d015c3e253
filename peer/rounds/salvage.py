"""Fetch the kept chunks that this peer lacks, and hand out those that it holds.

A BEGIN names, for each chunk that it keeps, its digest and who holds it
(peer/membership/kept_chunks.py). A participant asks a holder, which answers with frames on its
data stream, one per chunk, while the reduction of the other chunks goes on. Every chunk is checked
against its digest, so that a wrong holder can only waste time; when one fails, the next is asked.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Protocol

import numpy as np
from numpy.typing import NDArray

from atoll.collectives import EncodedLayout, RoundResult
from atoll.collectives.errors import AtollError, RemoteProtocolError
from atoll.collectives.threads import workers
from atoll.peer.membership.kept_chunks import KEPT_MAX
from atoll.peer.membership.messages import Begin
from atoll.peer.membership.view import Attempts, Lineage, Rounds, Views, short
from atoll.peer.net.wire import Within, message
from atoll.peer.rounds.entries import CHUNKS_MAX
from atoll.peer.streams.frames import KEPT, DataHeader
from atoll.peer.streams.manager import FrameOutlet, Streams, reason_of

SERVES_MAX = 8  # requests answered at a time: more would only share the same uplink
SERVES_OF_ONE_MAX = 8  # requests of one peer that may wait: two for each round under way
U8 = NDArray[np.uint8]


@message(wire="FetchKept")
@dataclass(frozen=True, slots=True)
class FetchKept:
    """Ask a holder, as a participant of an attempt, for these chunks of its result of the round."""

    lineage: Lineage
    view: Views
    round: Rounds
    attempt: Attempts  # the new one, whose BEGIN keeps them
    chunks: Annotated[bytes, Within(4, 4 * KEPT_MAX)]  # numbers within the fragment, u32 each


def pack_chunks(chunks: Iterable[int]) -> bytes:
    return np.array(list(chunks), ">u4").tobytes()


def parse_chunks(packed: bytes, count: int) -> list[int]:
    """Return the chunk numbers of a packed list of u32.

    RemoteProtocolError if it is malformed, or if there is one beyond ``count``.
    """
    if len(packed) % 4:
        raise RemoteProtocolError(f"{len(packed)} bytes are not a list of chunks")
    chunks = [int(chunk) for chunk in np.frombuffer(packed, ">u4")]
    if max(chunks, default=0) >= count:
        raise RemoteProtocolError(f"asked for kept chunk {max(chunks)} of {count}")
    return chunks


class KeptPlan:
    """Decide which chunk to ask of whom. ``lacking`` maps each chunk to its holders.

    ``turn`` differs from peer to peer, so that they do not all ask the same holder first.
    """

    def __init__(self, lacking: Mapping[int, Sequence[bytes]], turn: int) -> None:
        self._untried: dict[int, list[bytes]] = {}
        self.asked: dict[int, bytes] = {}  # chunk -> of whom it is expected
        for position, (chunk, holders) in enumerate(sorted(lacking.items())):
            first = (position + turn) % max(1, len(holders))
            self._untried[chunk] = [*holders[first:], *holders[:first]]

    @property
    def lacking(self) -> list[int]:
        return list(self._untried)

    def wants(self, chunk: int) -> bool:
        return chunk in self._untried

    def arrived(self, chunk: int) -> None:
        self._untried.pop(chunk, None)
        self.asked.pop(chunk, None)

    def ask(self, chunks: Iterable[int]) -> dict[bytes, list[int]]:
        """Return the next holder of each of these chunks, with what to ask it for.

        Under an empty name: those that nobody is left for. What is here by now is not asked for.
        """
        orders: dict[bytes, list[int]] = {}
        for chunk in filter(self.wants, chunks):
            holders = self._untried[chunk]
            holder = holders.pop(0) if holders else b""
            self.asked[chunk] = holder
            orders.setdefault(holder, []).append(chunk)
        return orders

    def expected_of(self, holder: bytes) -> list[int]:
        return sorted(chunk for chunk, asked in self.asked.items() if asked == holder)


class KeptPort(Protocol):
    """Take the kept chunks of one attempt, and ask for them. Called from any thread."""

    def put_kept(self, chunk: int, data: U8, /) -> bool:
        """Store a chunk; return whether it is what was kept."""

    def ask_kept(self, holder: bytes, chunks: list[int], /) -> None:
        """Ask this holder for these chunks."""

    def kept_failed(self, holder: bytes, why: str, /) -> None:
        """Hear that some chunk cannot be had: ``holder`` was the last that it was asked of."""


class KeptCopy:
    """Receive the lacking chunks of one attempt. Called from any thread."""

    def __init__(self, plan: KeptPlan, layout: EncodedLayout, attempt: KeptPort) -> None:
        self._plan = plan
        self._layout = layout
        self._attempt = attempt
        self._lock = threading.Lock()
        self._arriving: dict[tuple[bytes, int], U8] = {}
        self._moved: set[bytes] = set()  # holders asked or heard since the last check

    @property
    def lacking(self) -> list[int]:
        with self._lock:
            return self._plan.lacking

    def start(self) -> None:
        self._ask_for(self.lacking, b"", "BEGIN names nobody else who holds it")

    def reserve(self, source: bytes, chunk: int, length: int) -> memoryview | None:
        """Return a buffer for a frame, or None to drop it."""
        with self._lock:
            if not self._plan.wants(chunk):
                return None
            self._moved.add(source)
            if length == self._layout.size(chunk):
                buffer = self._arriving[source, chunk] = np.empty(length, np.uint8)
                return buffer.data
        self._refused(source, chunk, f"{length} bytes" if length else "it does not have it")
        return None

    def received(self, source: bytes, chunk: int) -> None:
        with self._lock:
            buffer = self._arriving.pop((source, chunk))
            wanted = self._plan.wants(chunk)
        if not wanted:
            return
        if self._attempt.put_kept(chunk, buffer):
            with self._lock:
                self._plan.arrived(chunk)
        else:
            self._refused(source, chunk, "its bytes do not have their digest")

    def gave_up(self, holder: bytes, why: str) -> None:
        """Ask others for what this holder was asked for: nothing more comes from it."""
        with self._lock:
            chunks = self._plan.expected_of(holder)
        self._ask_for(chunks, holder, why)

    def check_stalls(self, why: str) -> None:
        """Give up the holders that were silent since the last call; to be called now and then."""
        with self._lock:
            stalled = set(self._plan.asked.values()) - self._moved - {b""}
            self._moved.clear()
        for holder in stalled:
            self.gave_up(holder, why)

    def _refused(self, source: bytes, chunk: int, why: str) -> None:
        with self._lock:
            expected = self._plan.asked.get(chunk) == source  # else another one is asked by now
        if expected:
            self._ask_for([chunk], source, why)

    def _ask_for(self, chunks: list[int], before: bytes, why: str) -> None:
        with self._lock:
            orders = self._plan.ask(chunks)
            self._moved |= orders.keys()
        if unobtainable := orders.pop(b"", []):
            self._attempt.kept_failed(before, f"kept chunk {unobtainable[0]}: {why}")
        for holder, wanted in orders.items():
            self._attempt.ask_kept(holder, wanted)


class KeptSource(Protocol):
    """Hold the results that kept chunks are handed out of."""

    def result_of(self, question: FetchKept, /) -> RoundResult | None:
        """Return this peer's result of that round, or None."""

    def handed_out(self, round_number: int, nbytes: int, /) -> None:
        """Hear that a chunk of so many bytes was sent. Called from any thread."""

    def log(self, line: str, /) -> None:
        """Write a line about rounds."""


class KeptServer:
    """Answer FETCH-KEPT with the chunks that this peer holds.

    Sends in threads of its own: a slow receiver must not take those that commits need.
    """

    def __init__(self, streams: Streams, results: KeptSource) -> None:
        self._streams, self._results = streams, results
        self._threads = workers(SERVES_MAX, "kept-to")
        self._serving: dict[asyncio.Task[None], bytes] = {}

    def on_fetch_kept(self, source: bytes, question: FetchKept) -> None:
        if sum(peer == source for peer in self._serving.values()) < SERVES_OF_ONE_MAX:
            task = asyncio.get_running_loop().create_task(self._serve(source, question))
            self._serving[task] = source
            task.add_done_callback(lambda done: self._serving.pop(done))

    async def _serve(self, source: bytes, question: FetchKept) -> None:
        result = self._results.result_of(question)
        try:
            chunks = parse_chunks(question.chunks, result.grid.count if result else CHUNKS_MAX)
            outlet = FrameOutlet(await self._streams.to(source), header_of(question))
            loop = asyncio.get_running_loop()
            sent = partial(self._results.handed_out, question.round)
            await loop.run_in_executor(self._threads, _send_kept, result, chunks, outlet, sent)
        except (AtollError, MemoryError) as error:  # the other asks somebody else
            self._results.log(f"kept chunks for {short(source)} end early: {reason_of(error)}")

    def close(self) -> None:
        for task in list(self._serving):
            task.cancel()
        self._threads.shutdown(wait=False, cancel_futures=True)


def _send_kept(
    result: RoundResult | None,
    chunks: list[int],
    outlet: FrameOutlet,
    sent: Callable[[int], None],
) -> None:
    """Send each chunk that is final, and an empty frame in the place of each other one.

    An attempt that begins meanwhile may write to the memory that is copied here: the receiver's
    check finds such bytes.
    """
    for chunk in chunks:
        final = result is not None and result.digests[chunk]
        data = (result.view(chunk).copy().data,) if result and final else ()
        outlet.send_parts(KEPT, chunk, *data)
        sent(sum(part.nbytes for part in data))


def header_of(about: Begin | FetchKept) -> DataHeader:
    """Return the header of an attempt's frames; kind, chunk and length are filled in for each."""
    return DataHeader(0, 0, 0, 0, about.lineage[:8], about.view, about.round, about.attempt, 0)
