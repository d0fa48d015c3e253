"""Find where an incoming frame of a transfer belongs, and hold results in progress.

A transfer's first frame may overtake the head that announces it: it pauses its stream for a bounded
time. Frames of transfers that nobody asked for, or that were given up, are drained and dropped.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable
from enum import IntEnum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from atoll.collectives import RoundResult
from atoll.collectives.errors import CodecError, RemoteProtocolError
from atoll.peer.membership.messages import Begin
from atoll.peer.streams.frames import DataHeader

U8 = NDArray[np.uint8]
TransferKey = tuple[bytes, int, int, int]  # source, kind, round, attempt
HEAD_TIMEOUT_S = 30.0  # memory for a large state is taken between the head and the first chunk


class TransferKind(IntEnum):
    """Number the frame kinds beside those of attempts and of probes.

    Those are 1, 2, 6 and 9 (see peer/streams/router.py), and 7.
    """

    RESULT_COPY = 3
    STATE = 4
    ENTRY = 5
    VECTOR = 8  # of what trainers hand to each other


OF_PIECES = (TransferKind.STATE, TransferKind.ENTRY)


class Transfer(Protocol):
    """Receive all chunks of something, from one donor."""

    source: bytes
    kind: int
    round: int
    attempt: int

    def reserve(self, header: DataHeader) -> memoryview | None: ...

    def received(self, header: DataHeader) -> None: ...

    def broken(self, why: str) -> None: ...


class PieceSink(Protocol):
    """Take pieces of the state and of entries (client.py)."""

    def reserve(self, source: bytes, header: DataHeader) -> memoryview | None: ...

    def received(self, source: bytes, header: DataHeader) -> None: ...

    def broken(self, source: bytes, why: str) -> None: ...


class Copies:
    """Find the transfer of a frame.

    Called by reader threads and steered from the event loop.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._asked: set[TransferKey] = set()  # whose head is still to come
        self._transfers: dict[TransferKey, Transfer] = {}
        self.pieces: PieceSink | None = None

    def ask(self, key: TransferKey) -> None:
        """Let frames of this transfer, which may overtake its head, wait for it."""
        with self._changed:
            self._asked.add(key)

    def expect(self, transfer: Transfer) -> None:
        """Let the frames of a transfer in: its head is here."""
        with self._changed:
            key = _key(transfer)
            self._transfers[key] = transfer
            self._asked.discard(key)
            self._changed.notify_all()

    def end(self, key: TransferKey) -> None:
        """End a transfer: whatever still comes is to be dropped."""
        with self._changed:
            self._transfers.pop(key, None)
            self._asked.discard(key)
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

    def broken(self, source: bytes, why: str) -> None:
        with self._changed:
            ended = [t for key, t in self._transfers.items() if key[0] == source]
        for transfer in ended:
            transfer.broken(why)
        if self.pieces is not None:
            self.pieces.broken(source, why)

    def _transfer_of(self, source: bytes, header: DataHeader) -> Transfer | None:
        deadline_s = time.monotonic() + HEAD_TIMEOUT_S
        key = (source, header.kind, header.round, header.attempt)
        with self._changed:
            while key in self._asked:
                left_s = deadline_s - time.monotonic()
                if left_s <= 0 or not self._changed.wait(left_s):
                    return None
            return self._transfers.get(key)


def _key(transfer: Transfer) -> TransferKey:
    return (transfer.source, transfer.kind, transfer.round, transfer.attempt)


class EncodedCopy:
    """Copy an encoded vector into ``result`` as its frames arrive.

    ``on_done`` hears the marks of its chunks, one for each that is here, once all are.

    What is in ``result`` already stays: it is of the same vector, so the source's is the same.
    Frames land in a buffer of their own and move on under a lock, so that after ``close`` no reader
    thread writes where somebody else writes. What does not decode is refused.
    """

    def __init__(
        self,
        key: TransferKey,
        result: RoundResult,
        on_done: Callable[[list[bytes]], None],
        on_broken: Callable[[str], None],
    ) -> None:
        self.source, self.kind, self.round, self.attempt = key
        self.received_bytes = 0
        self.broken = on_broken
        self._result = result
        self._marks = list(result.digests)
        self._on_done = on_done
        self._arriving = threading.local()  # each stream of the source has a thread of its own
        self._lock = threading.Lock()
        self._closed = False

    def reserve(self, header: DataHeader) -> memoryview | None:
        if not 0 <= header.chunk < len(self._marks):
            raise RemoteProtocolError(f"chunk {header.chunk} of {len(self._marks)}")
        size = self._result.layout.size(header.chunk)
        if header.length != size:
            raise RemoteProtocolError(f"{header.length} bytes for a chunk of {size}")
        self.received_bytes += size
        if self._marks[header.chunk]:
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
            if self._closed or self._marks[chunk]:
                return
            stored = result.view(chunk)
            stored[:] = data
            self._marks[chunk] = self._mark(stored)
            done = all(self._marks)
        if done:
            self._on_done(self._marks)

    def _mark(self, stored: U8) -> bytes:
        return b"here"

    def close(self) -> None:
        with self._lock:
            self._closed = True


class ResultCopy(EncodedCopy):
    """Copy R of an attempt from a holder, instead of reducing it.

    ``on_done`` hears the digests of its chunks. What does not decode would end every peer, once
    committed.
    """

    def __init__(
        self,
        source: bytes,
        begin: Begin,
        result: RoundResult,
        on_done: Callable[[list[bytes]], None],
        on_broken: Callable[[str], None],
    ) -> None:
        key = (source, int(TransferKind.RESULT_COPY), begin.round, begin.attempt)
        super().__init__(key, result, on_done, on_broken)

    def _mark(self, stored: U8) -> bytes:
        return hashlib.sha256(stored.data).digest()
