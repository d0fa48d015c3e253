"""Handing state and results to peers that lack them: the donor's side, and the learner's.

The learner asks over the control link; the donor answers with a head there and pushes the chunks
over its data stream. Every chunk of state is checked against a leaf, the leaves against the digest
that the coordinator attested, so a wrong donor can only waste time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from atoll.collectives import EncodedLayout
from atoll.collectives.errors import AtollError, ConnectError, RoundTimeoutError, StateError
from atoll.peer.dataframes import DataHeader
from atoll.peer.links import LinkHost
from atoll.peer.messages import (
    Begin,
    FetchResult,
    FetchState,
    Learn,
    ResultHead,
    StateHead,
)
from atoll.peer.router import ResultCopy, Router, StateCopy, TransferKind
from atoll.peer.state import LEAF_BYTES, ReplicatedState, state_digest
from atoll.peer.streams import FrameOutlet, Streams
from atoll.peer.views import short

__all__ = ["SERVES_MAX", "Donor", "Learner", "Results"]

SERVES_MAX = 4  # transfers served at a time: more would only share the same uplink
HEAD_TIMEOUT_S = 5.0  # a donor that does not answer is replaced
STALL_TIMEOUT_S = 20.0  # ... and so is one that sends no chunk (2 MiB, at 1 Mbit/s 17 s)
Results = Callable[[int, int], tuple[NDArray[np.uint8], EncodedLayout, int] | None]


class Donor:
    """Serves FETCH-STATE and FETCH-RESULT."""

    def __init__(
        self, host: LinkHost, streams: Streams, results: Results, log: Callable[[str], None]
    ) -> None:
        self._host = host
        self._log = log
        self._streams = streams
        self._results = results  # (round, attempt) -> a complete R, its layout, its chunks
        self._serving: set[asyncio.Task[None]] = set()
        self.state: ReplicatedState | None = None

    def on_fetch_state(self, source: bytes, message: FetchState) -> None:
        state = self.state
        busy = len(self._serving) >= SERVES_MAX  # the learner asks again, perhaps somebody else
        if state is None or state.round != message.round or busy:
            self._host.send(source, StateHead(message.round, found=False))
            return
        self._host.send(source, StateHead(message.round, True, state.blob, state.leaves))
        header = DataHeader(int(TransferKind.STATE), 0, 0, 0, b"\0" * 8, 0, message.round, 0, 0)

        def push(outlet: FrameOutlet) -> None:
            for chunk in range(state.grid.count):
                if state.round != message.round:
                    return  # the run went on; the learner is told to begin again
                outlet.send_parts(int(TransferKind.STATE), chunk, *state.chunk_views(chunk))

        self._serve(source, header, push)

    def on_fetch_result(self, source: bytes, message: FetchResult) -> None:
        found = self._results(message.round, message.attempt)
        busy = len(self._serving) >= SERVES_MAX
        if found is None or busy:
            self._host.send(source, ResultHead(message.round, message.attempt, found=False))
            return
        self._host.send(source, ResultHead(message.round, message.attempt, found=True))
        result, layout, chunks = found
        kind = int(TransferKind.RESULT_COPY)
        header = DataHeader(kind, 0, 0, 0, b"\0" * 8, 0, message.round, message.attempt, 0)

        def push(outlet: FrameOutlet) -> None:
            for chunk in range(chunks):
                lo, hi = layout.slice(chunk)
                outlet.send(kind, chunk, result[lo:hi].data)

        self._serve(source, header, push)

    def _serve(
        self, source: bytes, header: DataHeader, push: Callable[[FrameOutlet], None]
    ) -> None:
        async def serve() -> None:
            try:
                outlet = FrameOutlet(await self._streams.to(source), header)
                await asyncio.to_thread(push, outlet)
            except AtollError as error:  # the learner misses the bytes and asks another donor
                self._log(f"serving {short(source)} ended early: {error.what}")

        task = asyncio.get_running_loop().create_task(serve())
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)

    def close(self) -> None:
        for task in self._serving:
            task.cancel()


class Learner:
    """Fetches a whole state or the result of an attempt from one donor at a time."""

    def __init__(self, host: LinkHost, router: Router) -> None:
        self._host = host
        self._router = router
        self._heads: dict[tuple[bytes, type], asyncio.Future[object]] = {}

    def on_head(self, source: bytes, head: StateHead | ResultHead) -> None:
        waiting = self._heads.get((source, type(head)))
        if waiting is not None and not waiting.done():
            waiting.set_result(head)

    async def load(self, learn: Learn, known: ReplicatedState | None) -> ReplicatedState:
        """The state that LEARN names. StateError, RoundTimeoutError or ConnectError."""
        donor = learn.donor.peer
        if donor not in self._host.link_peers():
            await self._host.dial(learn.donor.address, expect_peer=donor)
        with self._asking(donor, TransferKind.STATE, learn.round, 0):
            return await self._load(learn, known)

    async def _load(self, learn: Learn, known: ReplicatedState | None) -> ReplicatedState:
        donor = learn.donor.peer
        head = await self._ask(donor, FetchState(learn.round), StateHead)
        assert isinstance(head, StateHead)
        if not head.found or head.round != learn.round:
            raise StateError(f"donor {short(donor)} has no state of round {learn.round} at hand")
        if state_digest(head.blob, head.leaves) != learn.digest:
            raise StateError(f"donor {short(donor)} names other leaves than the coordinator")
        state = known if known is not None and known.blob == head.blob else None
        if state is None:
            state = await asyncio.to_thread(ReplicatedState, head.blob)
        if len(head.leaves) != LEAF_BYTES * state.grid.count:
            raise StateError(f"donor {short(donor)} names {len(head.leaves) // LEAF_BYTES} leaves")
        state.begin_load()
        done, succeed, fail = _completion()
        copy = StateCopy(donor, learn.round, state, head.leaves, succeed, fail)
        await self._receive(copy, done)
        state.finish_load(learn.round, head.leaves)
        return state

    async def fetch(
        self,
        begin: Begin,
        holder: bytes,
        layout: EncodedLayout,
        result: NDArray[np.uint8],
        chunks: int,
    ) -> bytes:
        """Copy R of an attempt into ``result``; the digest of its chunks' digests."""
        question = FetchResult(begin.lineage, begin.view, begin.round, begin.attempt)
        root = b""
        done, succeed, fail = _completion()

        def on_done(digest: bytes) -> None:
            nonlocal root
            root = digest
            succeed()

        with self._asking(holder, TransferKind.RESULT_COPY, begin.round, begin.attempt):
            head = await self._ask(holder, question, ResultHead)
            assert isinstance(head, ResultHead)
            if not head.found or (head.round, head.attempt) != (begin.round, begin.attempt):
                raise StateError(f"{short(holder)} does not hold the result of round {begin.round}")
            copy = ResultCopy(holder, begin, layout, result, chunks, on_done, fail)
            await self._receive(copy, done)
        return root

    @contextmanager
    def _asking(
        self, source: bytes, kind: TransferKind, number: int, attempt: int
    ) -> Iterator[None]:
        """Frames of this transfer are wanted from now until the end of the block."""
        self._router.ask_transfer((source, int(kind), number, attempt))
        try:
            yield
        finally:
            self._router.expect_transfer(None)

    async def _ask(self, peer: bytes, question: object, answer: type) -> object:
        waiting: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        self._heads[peer, answer] = waiting
        if not self._host.send(peer, question):
            raise ConnectError(f"no control link to donor {short(peer)}")
        try:
            async with asyncio.timeout(HEAD_TIMEOUT_S):
                return await waiting
        except TimeoutError:
            raise RoundTimeoutError(
                f"donor {short(peer)} has not answered for {HEAD_TIMEOUT_S:.0f} s"
            ) from None
        finally:
            del self._heads[peer, answer]

    async def _receive(self, copy: ResultCopy | StateCopy, done: asyncio.Future[str]) -> None:
        """Wait until all chunks are here; RoundTimeoutError after a time without a byte."""
        self._router.expect_transfer(copy)
        before = -1
        try:
            while not done.done():
                if before == copy.received_bytes:
                    raise RoundTimeoutError(
                        f"donor {short(copy.source)} sent no chunk for {STALL_TIMEOUT_S:.0f} s"
                    )
                before = copy.received_bytes
                await asyncio.wait([done], timeout=STALL_TIMEOUT_S)
        finally:
            copy.close()  # whatever comes now must not be written any more
        if done.result():
            raise StateError(f"transfer from {short(copy.source)} broke: {done.result()}")


def _completion() -> tuple[asyncio.Future[str], Callable[[], None], Callable[[str], None]]:
    """A future of "" or why it failed, and two callbacks that complete it from any thread."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[str] = loop.create_future()

    def complete(why: str) -> None:
        if not future.done():
            future.set_result(why)

    def fail(why: str) -> None:
        loop.call_soon_threadsafe(complete, why)

    return future, lambda: fail(""), fail
