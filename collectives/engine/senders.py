"""Run the sending half of the engine: one thread per stream, from its first frame to its last."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np

from atoll.collectives.codecs import U8
from atoll.collectives.engine.buffers import BufferPool
from atoll.collectives.engine.stripes import Receipt, Sending, Stripe
from atoll.collectives.errors import AtollError
from atoll.collectives.schedule.schedule import OutgoingFrame
from atoll.collectives.threads import worker

# kind, chunk, payload, offset
SendFrame = Callable[[int, int, memoryview, int], Receipt | None]


class Outlet(Protocol):
    """Describe the sending end of a stream to one participant."""

    def send(self, kind: int, chunk: int, payload: memoryview, offset: int = 0) -> Receipt | None:
        """Send one frame; this blocks.

        ``offset``: where the payload begins in its chunk, if that is not whole. What is returned
        tells whether the other side has got it; None if that cannot be known. Raises ConnectError
        if the stream is broken or closed.
        """


class SendCalls(NamedTuple):
    """Hold what the thread of a stream calls to ask, and to tell."""

    next_send: Callable[[Stripe], Sending | None]
    """(lane) Blocks until there is a frame to send; None ends the thread."""
    load: Callable[[OutgoingFrame, U8], U8]
    """(send, buffer) The payload, in ``buffer`` or elsewhere."""
    loaded: Callable[[Stripe, Sending, U8, U8], bool]
    """(lane, sending, payload, buffer) True: other streams need that buffer now, or later."""
    ended: Callable[[Stripe, Sending, str, Receipt | None], None]
    """(lane, sending, why, receipt) After each frame. With a reason it was the last one on its
    stream; without a payload the destination is not to blame."""


class Senders:
    """Run the threads that send.

    Only those that run hold on to whom they call: a reduction that is over would otherwise keep its
    buffers until the next collection of cycles.
    """

    def __init__(self, buffers: BufferPool[np.uint8]) -> None:
        self._buffers = buffers
        self._threads: list[threading.Thread] = []

    def spawn(self, lane: Stripe, send: SendFrame, name: str, calls: SendCalls) -> None:
        """Start the thread of a stream."""
        self.run(lambda: self._send_all(lane, send, calls), name)

    def run(self, work: Callable[[], None], name: str) -> None:
        """Run any other work in a thread that ``join`` waits for."""
        thread = worker(work, name)
        self._threads.append(thread)
        thread.start()

    def join(self, timeout_s: float) -> bool:
        """Wait for the threads, and return whether all have ended.

        A thread may ask about the others.
        """
        deadline_s = time.monotonic() + timeout_s
        threads = [t for t in self._threads if t is not threading.current_thread()]
        for thread in threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        return not any(thread.is_alive() for thread in threads)

    def _send_all(self, lane: Stripe, send_frame: SendFrame, calls: SendCalls) -> None:
        buffer = self._buffers.take()
        while (sending := calls.next_send(lane)) is not None:
            send = sending.send
            try:
                if sending.payload is None:
                    payload = calls.load(send, buffer)
                    if calls.loaded(lane, sending, payload, buffer):
                        buffer = self._buffers.take()
                assert sending.payload is not None
                data = sending.payload.data
                receipt = send_frame(send.kind, send.chunk, data, sending.offset)
            except Exception as error:  # whatever it was: a thread that dies in silence is a hang
                why = f"sending chunk {send.chunk}: {reason_of(error)}"
                calls.ended(lane, sending, why, None)
                return  # the buffer may be what another stream sends now
            calls.ended(lane, sending, "", receipt)
            if sending.copied and sending.loaded is None:
                buffer = self._buffers.take()  # another stream may still send from this one
        self._buffers.give(buffer)


def reason_of(error: Exception) -> str:
    return error.what if isinstance(error, AtollError) else f"{type(error).__name__}: {error}"
