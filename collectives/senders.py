"""The sending half of the engine: one thread per destination, from its first frame to its last."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Protocol

import numpy as np

from atoll.collectives.buffers import BufferPool
from atoll.collectives.codecs import U8
from atoll.collectives.errors import AtollError
from atoll.collectives.schedule import Send

__all__ = ["Outlet", "SendFrame", "Senders", "reason_of"]

SendFrame = Callable[[int, int, memoryview], None]  # kind, chunk, payload


class Outlet(Protocol):
    """The sending end of a stream to one participant."""

    def send(self, kind: int, chunk: int, payload: memoryview) -> None:
        """Send one frame; blocks. ConnectError if the stream is broken or closed."""


class SendEnded(Protocol):
    def __call__(self, dest: int, nbytes: int, why: str, *, ours: bool) -> None: ...


class Senders:
    """``next_send(dest)`` blocks until there is a frame to send; None ends the thread.
    ``load(send, buffer)`` gives its payload, in ``buffer`` or from elsewhere.
    ``ended(dest, nbytes, why, ours=...)`` is called after each frame. With a reason it was the last
    one; ``ours``: there was no payload, so the destination is not to blame.
    """

    def __init__(
        self,
        *,
        buffers: BufferPool[np.uint8],
        next_send: Callable[[int], Send | None],
        load: Callable[[Send, U8], U8],
        ended: SendEnded,
    ) -> None:
        self._buffers = buffers
        self._next_send, self._load = next_send, load
        self._ended = ended
        self._threads: dict[int, threading.Thread] = {}

    @property
    def destinations(self) -> frozenset[int]:
        return frozenset(self._threads)

    def spawn(self, dest: int, send: SendFrame, name: str) -> None:
        """Start the thread of this destination; the caller sees to it that there is only one."""
        self.run(dest, lambda: self._send_all(dest, send), name)

    def run(self, dest: int, work: Callable[[], None], name: str) -> None:
        """Any other work in a thread that ``join`` waits for."""
        thread = self._threads[dest] = threading.Thread(target=work, name=name, daemon=True)
        thread.start()

    def join(self, timeout_s: float) -> bool:
        """Wait for the threads; whether all have ended. A thread may ask about the others."""
        deadline_s = time.monotonic() + timeout_s
        threads = [t for t in self._threads.values() if t is not threading.current_thread()]
        for thread in threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        return not any(thread.is_alive() for thread in threads)

    def _send_all(self, dest: int, send_frame: SendFrame) -> None:
        buffer = self._buffers.take()
        while (send := self._next_send(dest)) is not None:
            ours = True
            try:
                payload = self._load(send, buffer)
                ours = False
                send_frame(send.kind, send.chunk, payload.data)
            except Exception as error:  # whatever it was: a thread that dies in silence is a hang
                self._ended(dest, 0, f"sending chunk {send.chunk}: {reason_of(error)}", ours=ours)
                break
            self._ended(dest, payload.nbytes, "", ours=False)
        self._buffers.give(buffer)


def reason_of(error: Exception) -> str:
    return error.what if isinstance(error, AtollError) else f"{type(error).__name__}: {error}"
