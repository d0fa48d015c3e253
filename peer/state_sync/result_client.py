"""Fetch the result of an attempt from a peer that holds it (REPAIR)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from atoll.collectives import RoundResult
from atoll.collectives.errors import ConnectError, RoundTimeoutError, StateError
from atoll.peer.membership.kept_chunks import KEPT_MAX
from atoll.peer.membership.messages import Begin
from atoll.peer.membership.view import short
from atoll.peer.net.connections import ConnectionManager
from atoll.peer.rounds.salvage import pack_chunks
from atoll.peer.state_sync.incoming import (
    Copies,
    EncodedCopy,
    ResultCopy,
    TransferKey,
    TransferKind,
)
from atoll.peer.state_sync.messages import FetchResult, ResultHead

HEAD_TIMEOUT_S = 5.0  # a holder that does not answer is replaced
STALL_TIMEOUT_S = 20.0  # ... and so is one that sends no chunk (2 MiB, at 1 Mbit/s 17 s)


class Fetcher:
    """Copy R of an attempt from one holder at a time, instead of reducing it again."""

    def __init__(self, host: ConnectionManager, copies: Copies) -> None:
        self._host = host
        self._copies = copies
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
        digests: list[bytes] = []
        done, succeed, fail = completion()

        def on_done(found: list[bytes]) -> None:
            digests.extend(found)
            succeed()

        key = (holder, int(TransferKind.RESULT_COPY), begin.round, begin.attempt)
        with asking(self._copies, key):
            head = await self._ask(holder, question)
            if not head.found:
                raise StateError(f"{short(holder)} does not hold the result of round {begin.round}")
            copy = ResultCopy(holder, begin, result, on_done, fail)
            await receive(self._copies, copy, done)
        return digests

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


@contextmanager
def asking(copies: Copies, key: TransferKey) -> Iterator[None]:
    """Take frames of this transfer from now until the end of the block."""
    copies.ask(key)
    try:
        yield
    finally:
        copies.end(key)


async def receive(copies: Copies, copy: EncodedCopy, done: asyncio.Future[str]) -> None:
    """Wait until all chunks are here.

    RoundTimeoutError after a time without a byte, StateError if the transfer breaks.
    """
    copies.expect(copy)
    before = -1
    try:
        while not done.done():
            if before == copy.received_bytes:
                raise RoundTimeoutError(
                    f"{short(copy.source)} sent no chunk for {STALL_TIMEOUT_S:.0f} s"
                )
            before = copy.received_bytes
            await asyncio.wait([done], timeout=STALL_TIMEOUT_S)
    finally:
        copy.close()  # whatever comes now must not be written any more
    if done.result():
        raise StateError(f"transfer from {short(copy.source)} broke: {done.result()}")


def completion() -> tuple[asyncio.Future[str], Callable[[], None], Callable[[str], None]]:
    """Return a future and two callbacks that complete it from any thread.

    The first one completes it with "", the second one with why it failed.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[str] = loop.create_future()

    def complete(why: str) -> None:
        if not future.done():
            future.set_result(why)

    def fail(why: str) -> None:
        loop.call_soon_threadsafe(complete, why)

    return future, lambda: fail(""), fail
