"""Where an incoming data frame belongs: the attempt at hand, a transfer, or nowhere.

Frames of older attempts are drained and dropped. A frame of an attempt that this peer has not
begun yet (its BEGIN is still on the control link) pauses its stream for a bounded time, as does a
transfer's first frame that overtakes the head that announces it.
"""

from __future__ import annotations

import hashlib
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from atoll.collectives import EncodedLayout, Kind, Reduction
from atoll.collectives.errors import RemoteProtocolError
from atoll.peer.dataframes import DataHeader
from atoll.peer.messages import Begin
from atoll.peer.state import LEAF_BYTES, ReplicatedState
from atoll.peer.views import short

__all__ = ["ResultCopy", "Router", "StateCopy", "TransferKind"]

TransferKey = tuple[bytes, int, int, int]  # source, kind, round, attempt
AHEAD_TIMEOUT_S = 1.5  # the stall time: by then BEGIN has come, or never will
HEAD_TIMEOUT_S = 30.0  # memory for a large state is taken between the head and the first chunk
WINDOW_TIMEOUT_S = 60.0  # a frame ahead of the window; the coordinator ends a stall far sooner


class TransferKind(IntEnum):
    """Frame kinds beside those of the collectives (Kind.CONTRIB = 1, Kind.RESULT = 2)."""

    RESULT_COPY = 3
    STATE = 4


class Transfer(Protocol):
    """All chunks of something, from one donor."""

    source: bytes
    kind: int
    round: int
    attempt: int

    def reserve(self, header: DataHeader) -> memoryview | None: ...

    def received(self, header: DataHeader) -> None: ...

    def broken(self, why: str) -> None: ...


@dataclass(frozen=True, slots=True)
class _Current:
    begin: Begin
    reduction: Reduction
    index: dict[bytes, int]


class Router:
    """Called by reader threads (FrameSink) and steered from the event loop."""

    def __init__(self, on_broken: Callable[[bytes, str], None]) -> None:
        self._on_broken = on_broken
        self._changed = threading.Condition()
        self._current: _Current | None = None
        self._newest = (0, 0)  # (view, attempt): whatever is older is dropped
        self._asked: TransferKey | None = None  # for whose head this peer waits
        self._transfer: Transfer | None = None

    # ------------------------------------------------------------ steering

    def expect_attempt(self, begin: Begin, reduction: Reduction) -> None:
        index = {peer: i for i, peer in enumerate(begin.participants)}
        with self._changed:
            self._current = _Current(begin, reduction, index)
            self._newest = (begin.view, begin.attempt)
            self._changed.notify_all()

    def end_attempt(self) -> None:
        with self._changed:
            self._current = None
            self._changed.notify_all()

    def ask_transfer(self, key: TransferKey) -> None:
        """Frames of this transfer may overtake its head: they wait for it."""
        with self._changed:
            self._asked = key

    def expect_transfer(self, transfer: Transfer | None) -> None:
        """The head is here; or, with None, whatever still comes is to be dropped."""
        with self._changed:
            self._transfer, self._asked = transfer, None
            self._changed.notify_all()

    # ------------------------------------------------------------ FrameSink

    def reserve(self, source: bytes, header: DataHeader) -> memoryview | None:
        if header.kind in (Kind.CONTRIB, Kind.RESULT):
            current = self._attempt_of(header)
            if current is None:
                return None
            return current.reduction.reserve(
                _index(current, source), header.kind, header.chunk, header.length, WINDOW_TIMEOUT_S
            )
        transfer = self._transfer_of(source, header)
        return transfer.reserve(header) if transfer is not None else None

    def received(self, source: bytes, header: DataHeader) -> None:
        if header.kind in (Kind.CONTRIB, Kind.RESULT):
            current = self._attempt_of(header)
            if current is not None:
                current.reduction.received(_index(current, source), header.kind, header.chunk)
            return
        transfer = self._transfer_of(source, header)
        if transfer is not None:
            transfer.received(header)

    def broken(self, source: bytes, why: str) -> None:
        transfer = self._transfer
        if transfer is not None and transfer.source == source:
            transfer.broken(why)
        self._on_broken(source, why)

    def _attempt_of(self, header: DataHeader) -> _Current | None:
        deadline_s = time.monotonic() + AHEAD_TIMEOUT_S
        wanted = (header.view, header.attempt)
        with self._changed:
            while wanted > self._newest:
                left_s = deadline_s - time.monotonic()
                if left_s <= 0 or not self._changed.wait(left_s):
                    return None
            current = self._current
        if current is None or wanted != (current.begin.view, current.begin.attempt):
            return None
        same = header.lineage8 == current.begin.lineage[:8] and header.round == current.begin.round
        return current if same else None

    def _transfer_of(self, source: bytes, header: DataHeader) -> Transfer | None:
        deadline_s = time.monotonic() + HEAD_TIMEOUT_S
        wanted = (source, header.kind, header.round, header.attempt)
        with self._changed:
            while self._asked == wanted:
                left_s = deadline_s - time.monotonic()
                if left_s <= 0 or not self._changed.wait(left_s):
                    return None
            transfer = self._transfer
        if transfer is None:
            return None
        key = (transfer.source, transfer.kind, transfer.round, transfer.attempt)
        return transfer if key == wanted else None


def _index(current: _Current, source: bytes) -> int:
    index = current.index.get(source)
    if index is None:
        raise RemoteProtocolError(
            f"{short(source)} sent data for round {current.begin.round} and takes no part in it"
        )
    return index


class _Copy(ABC):
    """A transfer in progress. Frames land in a buffer of its own and move on under a lock, so that
    after ``close`` no reader thread writes where the next transfer or attempt writes."""

    def __init__(self, buffer_bytes: int, on_broken: Callable[[str], None]) -> None:
        self.received_bytes = 0
        self.broken = on_broken
        self._buffer = memoryview(bytearray(buffer_bytes))
        self._lock = threading.Lock()
        self._closed = False

    def received(self, header: DataHeader) -> None:
        with self._lock:
            if self._closed:
                return
            done = self._take(header.chunk, self._buffer[: header.length])
            self.received_bytes += header.length
        if done:
            self._finish()

    def close(self) -> None:
        with self._lock:
            self._closed = True

    @abstractmethod
    def _take(self, chunk: int, data: memoryview) -> bool:
        """Store one chunk; true if it was the last. Called with the lock held."""

    @abstractmethod
    def _finish(self) -> None:
        """All chunks are here."""


class ResultCopy(_Copy):
    """R of an attempt, fetched from a holder instead of reduced."""

    kind = int(TransferKind.RESULT_COPY)

    def __init__(
        self,
        source: bytes,
        begin: Begin,
        layout: EncodedLayout,
        result: NDArray[np.uint8],
        chunks: int,
        on_done: Callable[[bytes], None],
        on_broken: Callable[[str], None],
    ) -> None:
        super().__init__(layout.chunk_bytes, on_broken)
        self.source, self.round, self.attempt = source, begin.round, begin.attempt
        self._layout, self._result = layout, result
        self._digests: list[bytes] = [b""] * chunks
        self._left = chunks
        self._on_done = on_done

    def reserve(self, header: DataHeader) -> memoryview | None:
        if not 0 <= header.chunk < len(self._digests):
            raise RemoteProtocolError(f"chunk {header.chunk} of {len(self._digests)}")
        lo, hi = self._layout.slice(header.chunk)
        if header.length != hi - lo:
            raise RemoteProtocolError(f"{header.length} bytes for a chunk of {hi - lo}")
        return None if self._digests[header.chunk] else self._buffer[: header.length]

    def _take(self, chunk: int, data: memoryview) -> bool:
        lo, hi = self._layout.slice(chunk)
        self._result[lo:hi].data[:] = data
        self._digests[chunk] = hashlib.sha256(data).digest()
        self._left -= 1
        return self._left == 0

    def _finish(self) -> None:
        self._on_done(hashlib.sha256(b"".join(self._digests)).digest())


class StateCopy(_Copy):
    """The whole state after a round, chunk by chunk, each checked against its leaf."""

    kind = int(TransferKind.STATE)
    attempt = 0

    def __init__(
        self,
        source: bytes,
        round_number: int,
        state: ReplicatedState,
        leaves: bytes,
        on_done: Callable[[], None],
        on_broken: Callable[[str], None],
    ) -> None:
        super().__init__(8 * state.grid.chunk_elements, on_broken)
        self.source, self.round = source, round_number
        self._state, self._leaves = state, leaves
        self._next = 0  # one donor sends them in order
        self._on_done = on_done

    def reserve(self, header: DataHeader) -> memoryview | None:
        grid = self._state.grid
        if header.chunk != self._next or self._next >= grid.count:
            raise RemoteProtocolError(f"state chunk {header.chunk}, expected {self._next}")
        if header.length != 8 * grid.size(header.chunk):
            raise RemoteProtocolError(f"{header.length} bytes for state chunk {header.chunk}")
        return self._buffer[: header.length]

    def _take(self, chunk: int, data: memoryview) -> bool:
        leaf = self._leaves[chunk * LEAF_BYTES : (chunk + 1) * LEAF_BYTES]
        if not self._state.load_chunk(chunk, data, leaf):
            raise RemoteProtocolError(f"state chunk {chunk} does not have its digest")
        self._next += 1
        return self._next == self._state.grid.count

    def _finish(self) -> None:
        self._on_done()
