"""The sending half of the engine: one thread per stream, from its first frame to its last."""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np

from atoll.collectives.arrivals import PIECE_BYTES
from atoll.collectives.buffers import BufferPool
from atoll.collectives.codecs import U8
from atoll.collectives.errors import AtollError
from atoll.collectives.schedule import Send

__all__ = ["Lanes", "Outlet", "SendFrame", "Senders", "Sending", "reason_of"]

# A frame that takes so many times what is usual, and so long, is sent on another stream as well:
# TCP waits for 0.2 s at least before it sends again what got lost last.
LATE_FACTOR: Final = 4
LATE_S_MIN: Final = 0.25
USUAL_OF: Final = 8  # frames that the usual time is an average of
SendFrame = Callable[[int, int, memoryview, int], None]  # kind, chunk, payload, offset


class Outlet(Protocol):
    """The sending end of a stream to one participant."""

    def send(self, kind: int, chunk: int, payload: memoryview, offset: int = 0) -> None:
        """Send one frame; blocks. ``offset``: of the payload in its chunk, if that is not whole.
        ConnectError if the stream is broken or closed."""


@dataclass(slots=True, eq=False)
class Loaded:
    """A chunk whose pieces several streams send."""

    buffer: U8
    left: int  # pieces, and copies of pieces, that have not ended


@dataclass(slots=True, eq=False)
class Sending:
    """A frame that a stream has taken. ``payload``: None before it is loaded."""

    send: Send
    payload: U8 | None = None
    offset: int = 0  # bytes, of the payload in its chunk
    loaded: Loaded | None = None
    since_s: float = 0.0
    copied: bool = False  # another stream sends it too


class Lanes:
    """The streams to each destination, and what they are at. Calls never overlap.

    Where there are several, the one that takes a chunk loads it, and all send its pieces.
    """

    def __init__(self, buffers: BufferPool[np.uint8]) -> None:
        self._buffers = buffers
        self._open: Counter[int] = Counter()
        self._under_way: defaultdict[int, list[Sending]] = defaultdict(list)
        self._ready: defaultdict[int, deque[Sending]] = defaultdict(deque)
        self._usual_s = 0.0  # what a frame takes, lately

    def opened(self, dest: int) -> None:
        self._open[dest] += 1

    def several(self, dest: int) -> bool:
        return self._open[dest] > 1

    def takes(self, dest: int, sending: Sending, now_s: float) -> None:
        """One of its streams has taken this."""
        sending.since_s = now_s
        self._under_way[dest].append(sending)

    def is_loading(self, dest: int) -> bool:
        """Whether there will be pieces soon: one chunk at a time, which bounds the memory."""
        loading = any(sending.payload is None for sending in self._under_way[dest])
        return loading and self.several(dest)

    def loaded(self, dest: int, sending: Sending, payload: U8, buffer: U8) -> bool:
        """The chunk can be sent. True: in pieces, so ``buffer`` belongs to these."""
        sending.payload = payload
        if not self.several(dest) or payload.nbytes <= PIECE_BYTES:
            return False
        offsets = range(0, payload.nbytes, PIECE_BYTES)
        sending.loaded = Loaded(buffer, len(offsets))
        sending.payload = payload[:PIECE_BYTES]
        for at in offsets[1:]:
            piece = payload[at : at + PIECE_BYTES]
            self._ready[dest].append(Sending(sending.send, piece, at, sending.loaded))
        return True

    def is_sending(self, dest: int) -> bool:
        """Whether a frame is under way that no other stream has brought."""
        return any(not sending.copied for sending in self._under_way[dest])

    def ended(self, dest: int, sending: Sending, now_s: float) -> None:
        """It is sent."""
        self._under_way[dest].remove(sending)
        self._release(sending)
        took_s = now_s - sending.since_s
        self._usual_s += (took_s - self._usual_s) / USUAL_OF if self._usual_s else took_s

    def broke(self, dest: int, sending: Sending) -> bool:
        """Its stream broke. True: another one will send the same bytes, which nobody may change."""
        self._under_way[dest].remove(sending)
        self._open[dest] -= 1
        if self._open[dest] and not sending.copied:
            self._ready[dest].appendleft(self._copy(sending))
        self._release(sending)
        return self._open[dest] > 0

    def ready(self, dest: int) -> Sending | None:
        """A piece that no stream has taken, or what one that broke has not sent."""
        return self._ready[dest].popleft() if self._ready[dest] else None

    def late(self, dest: int, now_s: float) -> Sending | None:
        """A copy of what stands still on one stream, for another one that has nothing to send."""
        limit_s = max(LATE_S_MIN, LATE_FACTOR * self._usual_s)
        for sending in self._under_way[dest]:
            is_late = now_s - sending.since_s > limit_s
            if is_late and not sending.copied and sending.payload is not None:
                sending.copied = True
                return self._copy(sending)
        return None

    def _copy(self, sending: Sending) -> Sending:
        if sending.loaded is not None:
            sending.loaded.left += 1
        return Sending(sending.send, sending.payload, sending.offset, sending.loaded)

    def _release(self, sending: Sending) -> None:
        if sending.loaded is not None:
            sending.loaded.left -= 1
            if not sending.loaded.left:
                self._buffers.give(sending.loaded.buffer)


class SendEnded(Protocol):
    def __call__(self, dest: int, sending: Sending, why: str) -> None: ...


class Senders:
    """``next_send(dest)`` blocks until there is a frame to send; None ends the thread.
    ``load(send, buffer)`` gives its payload, in ``buffer`` or from elsewhere; ``loaded(dest,
    sending, payload, buffer)`` says whether other streams need that buffer now.
    ``ended(dest, sending, why)`` is called after each frame. With a reason it was the last one on
    its stream; without a payload the destination is not to blame.
    """

    def __init__(
        self,
        *,
        buffers: BufferPool[np.uint8],
        next_send: Callable[[int], Sending | None],
        load: Callable[[Send, U8], U8],
        loaded: Callable[[int, Sending, U8, U8], bool],
        ended: SendEnded,
    ) -> None:
        self._buffers = buffers
        self._next_send, self._load = next_send, load
        self._loaded, self._ended = loaded, ended
        self._threads: list[threading.Thread] = []

    def spawn(self, dest: int, send: SendFrame, name: str) -> None:
        """Start the thread of a stream to this destination."""
        self.run(lambda: self._send_all(dest, send), name)

    def run(self, work: Callable[[], None], name: str) -> None:
        """Any other work in a thread that ``join`` waits for."""
        thread = threading.Thread(target=work, name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def join(self, timeout_s: float) -> bool:
        """Wait for the threads; whether all have ended. A thread may ask about the others."""
        deadline_s = time.monotonic() + timeout_s
        threads = [t for t in self._threads if t is not threading.current_thread()]
        for thread in threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        return not any(thread.is_alive() for thread in threads)

    def _send_all(self, dest: int, send_frame: SendFrame) -> None:
        buffer = self._buffers.take()
        while (sending := self._next_send(dest)) is not None:
            send = sending.send
            try:
                if sending.payload is None:
                    payload = self._load(send, buffer)
                    if self._loaded(dest, sending, payload, buffer):
                        buffer = self._buffers.take()
                assert sending.payload is not None
                send_frame(send.kind, send.chunk, sending.payload.data, sending.offset)
            except Exception as error:  # whatever it was: a thread that dies in silence is a hang
                self._ended(dest, sending, f"sending chunk {send.chunk}: {reason_of(error)}")
                return  # the buffer may be what another stream sends now
            self._ended(dest, sending, "")
            if sending.copied and sending.loaded is None:
                buffer = self._buffers.take()  # another stream may still send from this one
        self._buffers.give(buffer)


def reason_of(error: Exception) -> str:
    return error.what if isinstance(error, AtollError) else f"{type(error).__name__}: {error}"
