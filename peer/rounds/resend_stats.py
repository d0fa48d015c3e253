"""Count what a round costs twice: payload of chunks that the next attempt reduces again.

A chunk that the next attempt keeps was not sent in vain. What it sends of the others is more than
the same round would have taken without the death, and so are kept chunks that are handed out.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Container

from atoll.collectives.engine.send import Outlet, Receipt


class SentPayload:
    """Count what one attempt of this peer has sent, by chunk, without headers.

    Called from any thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bytes: Counter[int] = Counter()

    def add(self, chunk: int, nbytes: int) -> None:
        with self._lock:
            self._bytes[chunk] += nbytes

    @property
    def total_bytes(self) -> int:
        with self._lock:
            return self._bytes.total()

    def carry(self, before: SentPayload, kept: Container[int]) -> int:
        """Go on from a broken attempt; return the bytes that it has sent in vain.

        What it sent of ``kept`` chunks counts as sent by this one, which may break as well; the
        rest was in vain.
        """
        with before._lock:
            sent = Counter(before._bytes)
        for chunk, nbytes in sent.items():
            if chunk in kept:
                self.add(chunk, nbytes)
        return sum(nbytes for chunk, nbytes in sent.items() if chunk not in kept)


class CountingOutlet:
    """Count frames when they are begun, and send them through another outlet.

    A stream that breaks has sent some part of its last one, and nobody knows which.
    """

    def __init__(self, outlet: Outlet, sent: SentPayload) -> None:
        self._outlet, self._sent = outlet, sent

    def send(self, kind: int, chunk: int, payload: memoryview, offset: int = 0) -> Receipt | None:
        self._sent.add(chunk, payload.nbytes)
        return self._outlet.send(kind, chunk, payload, offset)
