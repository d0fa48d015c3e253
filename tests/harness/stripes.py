"""Several streams to one destination between reductions of one process, whole or breaking."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from atoll.collectives.engine.send import Receipt
from atoll.collectives.errors import ConnectError
from atoll.collectives.schedule.schedule import Frame

__all__ = ["WAIT_S", "Stream", "start_stripes", "until"]

WAIT_S = 30.0  # how long a test waits for what must happen; never reached when all is well


def until(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(1e-3)


class Stream:
    """One of several streams from ``src`` to ``dest``; ``breaks``: with this frame, half of which
    has arrived, and ``lost``: what of it the other side notices."""

    def __init__(
        self, group: Any, src: int, dest: int, number: int, breaks_at: int = 0, slow_s: float = 0.0
    ) -> None:
        self.group, self.src, self.dest, self.number = group, src, dest, number
        self.breaks_at, self.slow_s = breaks_at, slow_s
        self.sent = self.sent_bytes = 0
        self.notices = True

    def send(self, kind: int, chunk: int, payload: memoryview, offset: int = 0) -> Receipt | None:
        reduction = self.group.reductions[self.dest]
        frame = Frame(self.src, kind, chunk, self.number, offset)
        buffer = reduction.reserve(frame, len(payload), WAIT_S)
        self.sent += 1
        self.sent_bytes += len(payload)
        time.sleep(self.slow_s)
        half = len(payload) // 2 if self.sent == self.breaks_at else len(payload)
        if buffer is not None:
            buffer[:half] = payload[:half]
        if half != len(payload):
            if self.notices:
                reduction.broken_off(frame)
            raise ConnectError("the cable was pulled")
        if buffer is not None:
            reduction.received(frame)
        return lambda: True


def start_stripes(
    group: Any, count: int, make: Callable[[int, int, int], Stream] | None = None
) -> list[Stream]:
    """Start all reductions, with so many streams to each destination; ``make(src, dest, number)``,
    if given, makes each."""
    make = make or (lambda src, dest, number: Stream(group, src, dest, number))
    stripes = []
    for reduction in group.reductions:
        reduction.start({}, dict.fromkeys(reduction.destinations, count))
    for number in range(1, count + 1):
        for src, reduction in enumerate(group.reductions):
            found = {dest: make(src, dest, number) for dest in reduction.destinations}
            stripes += found.values()
            reduction.start(found)
    return stripes
