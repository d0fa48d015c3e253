"""Take in transfers: what one peer sends whole, as frames of its data streams.

A transfer's first frame may overtake the head that announces it: it pauses its stream for a bounded
time. Frames of transfers that nobody asked for, or that were given up, are drained and dropped.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, InvalidStateError
from enum import IntEnum
from typing import Protocol

import numpy as np

from atoll.collectives import RoundResult
from atoll.collectives.errors import (
    CodecError,
    RemoteProtocolError,
    RoundTimeoutError,
    StateError,
)
from atoll.peer.membership.view import short
from atoll.peer.streams.frames import DataHeader

TransferKey = tuple[bytes, int, int, int]  # source, kind, round, attempt
HEAD_WAIT_S = 30.0  # memory for a large state is taken between the head and the first chunk
STALL_TIMEOUT_S = 20.0  # who sends no chunk for so long is given up (2 MiB, at 1 Mbit/s 17 s)


class TransferKind(IntEnum):
    """Number the frame kinds beside those of attempts and of probes.

    Those are 1, 2, 6 and 9 (see peer/streams/router.py), and 7.
    """

    RESULT_COPY = 3
    STATE = 4
    ENTRY = 5
    VECTOR = 8  # of what trainers hand to each other


OF_PIECES = (TransferKind.STATE, TransferKind.ENTRY)


class PieceSink(Protocol):
    """Take pieces of the state and of entries (peer/state_sync/client.py)."""

    def reserve(self, source: bytes, header: DataHeader) -> memoryview | None: ...

    def received(self, source: bytes, header: DataHeader) -> None: ...

    def broken_off(self, source: bytes, header: DataHeader) -> None: ...

    def broken(self, source: bytes, why: str) -> None: ...


class Transfers:
    """Find the transfer of a frame, and take what it brings.

    Called by reader threads and steered from the event loop.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._asked: set[TransferKey] = set()  # whose head is still to come
        self._transfers: dict[TransferKey, EncodedTransfer] = {}
        self.pieces: PieceSink | None = None

    @contextlib.contextmanager
    def asking(self, key: TransferKey) -> Iterator[None]:
        """Take frames of this transfer, which may overtake its head, until the end of the block."""
        with self._changed:
            self._asked.add(key)
        try:
            yield
        finally:
            with self._changed:
                self._transfers.pop(key, None)
                self._asked.discard(key)
                self._changed.notify_all()

    def expect(self, transfer: EncodedTransfer) -> None:
        """Let the frames of a transfer in: its head is here."""
        with self._changed:
            self._transfers[transfer.key] = transfer
            self._asked.discard(transfer.key)
            self._changed.notify_all()

    def reserve(self, source: bytes, header: DataHeader) -> memoryview | None:
        if header.kind in OF_PIECES:
            return self.pieces.reserve(source, header) if self.pieces is not None else None
        transfer = self._transfer_of(source, header)
        return transfer.reserve(header) if transfer is not None else None

    def received(self, source: bytes, header: DataHeader) -> None:
        if header.kind in OF_PIECES:
            if self.pieces is not None:
                self.pieces.received(source, header)
            return
        transfer = self._transfer_of(source, header)
        if transfer is not None:
            transfer.received(header)

    def broken_off(self, source: bytes, header: DataHeader) -> None:
        """Hear that a stream has ended within this frame: its source refuses what it was of."""
        if self.pieces is not None and header.kind in OF_PIECES:
            self.pieces.broken_off(source, header)

    def broken(self, source: bytes, why: str) -> None:
        with self._changed:
            ended = [t for key, t in self._transfers.items() if key[0] == source]
        for transfer in ended:
            transfer.broken(why)
        if self.pieces is not None:
            self.pieces.broken(source, why)

    def _transfer_of(self, source: bytes, header: DataHeader) -> EncodedTransfer | None:
        deadline_s = time.monotonic() + HEAD_WAIT_S
        key = (source, header.kind, header.round, header.attempt)
        with self._changed:
            while key in self._asked:
                left_s = deadline_s - time.monotonic()
                if left_s <= 0 or not self._changed.wait(left_s):
                    return None
            return self._transfers.get(key)


class EncodedTransfer:
    """Take in an encoded vector, into ``result``, as its frames arrive.

    What is in ``result`` already stays: it is of the same vector, so the source's is the same.
    Frames land in a buffer of their own and move on under a lock, so that after ``close`` no reader
    thread writes where somebody else writes. What does not decode is refused: it would end every
    peer, once committed. The marks of chunks are their digests.
    """

    def __init__(self, key: TransferKey, result: RoundResult) -> None:
        self.key = key
        self.received_bytes = 0  # of chunks that were not here yet: others are no progress
        self.marks = list(result.digests)  # of each chunk that is here
        self.ended: Future[str] = Future()  # "" once all chunks are here, or why they never will be
        self._result = result
        self._arriving = threading.local()  # each stream of the source has a thread of its own
        self._lock = threading.Lock()
        self._closed = False

    def reserve(self, header: DataHeader) -> memoryview | None:
        if not 0 <= header.chunk < len(self.marks):
            raise RemoteProtocolError(f"chunk {header.chunk} of {len(self.marks)}")
        size = self._result.layout.size(header.chunk)
        if header.length != size:
            raise RemoteProtocolError(f"{header.length} bytes for a chunk of {size}")
        if self.marks[header.chunk]:
            return None
        self._arriving.data = np.empty(size, np.uint8)
        return memoryview(self._arriving.data)

    def received(self, header: DataHeader) -> None:
        result, chunk, data = self._result, header.chunk, self._arriving.data
        try:
            result.codec.check(data, result.grid.size(chunk))
        except CodecError as error:
            raise RemoteProtocolError(f"chunk {chunk} does not decode: {error.what}") from error
        with self._lock:
            if self._closed or self.marks[chunk]:
                return
            stored = result.view(chunk)
            stored[:] = data
            self.marks[chunk] = result.digest(stored)
            self.received_bytes += stored.nbytes
            is_done = all(self.marks)
        if is_done:
            self.broken("")

    def broken(self, why: str) -> None:
        """End the transfer, from any thread: "" if all is here, else why it never will be."""
        with contextlib.suppress(InvalidStateError):  # it has ended
            self.ended.set_result(why)

    def close(self) -> None:
        with self._lock:
            self._closed = True


async def receive(transfers: Transfers, transfer: EncodedTransfer) -> list[bytes]:
    """Wait until all chunks are here, and return their marks.

    RoundTimeoutError after a time without a byte, StateError if the transfer breaks.
    """
    transfers.expect(transfer)
    ended = asyncio.wrap_future(transfer.ended)
    before = -1
    try:
        while not ended.done():
            if before == transfer.received_bytes:
                raise RoundTimeoutError(
                    f"{short(transfer.key[0])} sent no chunk for {STALL_TIMEOUT_S:.0f} s"
                )
            before = transfer.received_bytes
            await asyncio.wait([ended], timeout=STALL_TIMEOUT_S)
    finally:
        transfer.close()  # whatever comes now must not be written any more
    if ended.result():
        raise StateError(f"transfer from {short(transfer.key[0])} broke: {ended.result()}")
    return transfer.marks
