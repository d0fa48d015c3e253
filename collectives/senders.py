"""The sending half of the engine: one thread per stream, from its first frame to its last."""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np

from atoll.collectives.buffers import BufferPool
from atoll.collectives.codecs import U8
from atoll.collectives.errors import AtollError
from atoll.collectives.schedule import Send

__all__ = ["Lanes", "Outlet", "SendFrame", "Senders", "Sending", "reason_of"]

SendFrame = Callable[[int, int, memoryview], None]  # kind, chunk, payload


class Outlet(Protocol):
    """The sending end of a stream to one participant."""

    def send(self, kind: int, chunk: int, payload: memoryview) -> None:
        """Send one frame; blocks. ConnectError if the stream is broken or closed."""


class SendEnded(Protocol):
    def __call__(self, dest: int, send: Send, payload: U8 | None, why: str) -> None: ...


class Sending(NamedTuple):
    send: Send
    payload: U8 | None = None  # of what another stream has broken off


class Lanes:
    """The streams to each destination, and what they are at. Calls never overlap."""

    def __init__(self) -> None:
        self._open: Counter[int] = Counter()
        self._sending: Counter[int] = Counter()
        self._again: defaultdict[int, deque[Sending]] = defaultdict(deque)

    def opened(self, dest: int) -> None:
        self._open[dest] += 1

    def several(self, dest: int) -> bool:
        return self._open[dest] > 1

    def sends(self, dest: int) -> None:
        """One of its streams has taken a frame."""
        self._sending[dest] += 1

    def is_sending(self, dest: int) -> bool:
        return self._sending[dest] > 0

    def ended(self, dest: int) -> None:
        """It is sent."""
        self._sending[dest] -= 1

    def broke(self, dest: int, send: Send, payload: U8) -> bool:
        """Its stream broke. True: another one will send the same bytes, which nobody may change."""
        self._sending[dest] -= 1
        self._open[dest] -= 1
        if self._open[dest]:
            self._again[dest].append(Sending(send, payload))
        return self._open[dest] > 0

    def broken_off(self, dest: int) -> Sending | None:
        """What a stream that broke has not sent."""
        return self._again[dest].popleft() if self._again[dest] else None


class Senders:
    """``next_send(dest)`` blocks until there is a frame to send; None ends the thread.
    ``load(send, buffer)`` gives its payload, in ``buffer`` or from elsewhere.
    ``ended(dest, send, payload, why)`` is called after each frame. With a reason it was the last
    one on its stream; without a payload the destination is not to blame.
    """

    def __init__(
        self,
        *,
        buffers: BufferPool[np.uint8],
        next_send: Callable[[int], Sending | None],
        load: Callable[[Send, U8], U8],
        ended: SendEnded,
    ) -> None:
        self._buffers = buffers
        self._next_send, self._load = next_send, load
        self._ended = ended
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
            send, payload = sending
            try:
                if payload is None:
                    payload = self._load(send, buffer)
                send_frame(send.kind, send.chunk, payload.data)
            except Exception as error:  # whatever it was: a thread that dies in silence is a hang
                why = f"sending chunk {send.chunk}: {reason_of(error)}"
                self._ended(dest, send, payload, why)
                return  # the buffer may be what another stream sends now
            self._ended(dest, send, payload, "")
        self._buffers.give(buffer)


def reason_of(error: Exception) -> str:
    return error.what if isinstance(error, AtollError) else f"{type(error).__name__}: {error}"
