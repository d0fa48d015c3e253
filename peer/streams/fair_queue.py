"""Decide whose frame goes next on a stream that several rounds and a donor share.

A lock of frames: it goes to the most urgent one that waits, and among equals to the one that has
waited longest. Rounds commit in order, so the oldest is the most urgent; what no round waits for
comes last, but it does come: whoever has been passed over so often goes next.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

LAST = 1 << 64  # behind the frames of every round
# A learner still gets this part of a stream that rounds fill without a pause.
PASSED_MAX = 16


class FairQueue:
    """Give turns to the threads that send on one stream."""

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.Lock())
        self._held = False
        self._waiting: list[tuple[int, int]] = []  # (urgency, ticket): small numbers first
        self._ticket = 0
        self._passed = 0  # turns since the one that has waited longest was passed over first

    @contextlib.contextmanager
    def turn(self, urgency: int) -> Iterator[None]:
        """Wait for a turn and hold it; the smaller the ``urgency``, the sooner."""
        with self._changed:
            if self._held or self._waiting:
                self._wait(urgency)
            self._held = True
        try:
            yield
        finally:
            with self._changed:
                self._held = False
                if self._waiting:
                    self._changed.notify_all()

    @property
    def holds_up_a_round(self) -> bool:
        """Return whether a frame of a round waits for the one at hand."""
        with self._changed:
            return any(urgency < LAST for urgency, _ in self._waiting)

    def _wait(self, urgency: int) -> None:
        self._ticket += 1
        mine = urgency, self._ticket
        self._waiting.append(mine)
        while self._held or self._next() != mine:
            self._changed.wait()
        oldest = min(self._waiting, key=lambda entry: entry[1])
        self._passed = 0 if oldest == mine else self._passed + 1
        self._waiting.remove(mine)

    def _next(self) -> tuple[int, int]:
        if self._passed >= PASSED_MAX:
            return min(self._waiting, key=lambda entry: entry[1])
        return min(self._waiting)
