"""Decide where an incoming data frame belongs: an attempt at hand, a transfer, or nowhere.

Several rounds may be under way, one attempt at each. Frames of older attempts, views and rounds are
drained and dropped. A frame of an attempt that this peer has not begun yet (its BEGIN is still on
the control link) pauses its stream for a bounded time; once BEGIN is here, until its turn comes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from atoll.collectives import Frame, FrameKind, Reduction
from atoll.collectives.errors import RemoteProtocolError
from atoll.peer.links.messages import PROBE, check_probe
from atoll.peer.membership.messages import Begin
from atoll.peer.membership.view import short
from atoll.peer.streams.frames import KEPT, DataHeader
from atoll.peer.streams.transfers import Transfers

AHEAD_TIMEOUT_S = 1.5  # the stall time: by then BEGIN has come, or never will ...
# ... but where the event loop is late, BEGIN waits for it as well: so many times its lag, at most.
LAGS_AHEAD, AHEAD_TIMEOUT_MAX_S = 2, 8.0
# A frame ahead of the window, or of commits here: the coordinator ends a stall far sooner.
WINDOW_TIMEOUT_S = 60.0
OF_REDUCTIONS = tuple(FrameKind)
OF_ATTEMPTS = (*OF_REDUCTIONS, KEPT)


class KeptFrames(Protocol):
    """Take the frames with the kept chunks of one attempt (rounds/salvage.py)."""

    def reserve(self, source: bytes, chunk: int, length: int, /) -> memoryview | None:
        """Return a buffer for a frame, or None to drop it."""

    def received(self, source: bytes, chunk: int, /) -> None:
        """Take a frame whose reserved buffer is full."""

    def gave_up(self, holder: bytes, why: str, /) -> None:
        """Ask others for what this holder was asked for: nothing more comes from it."""


@dataclass(frozen=True, slots=True)
class _Attempt:
    """Keep where the frames of one attempt go; ``index``: its participants by position."""

    begin: Begin
    reduction: Reduction
    kept: KeptFrames
    index: dict[bytes, int]


class Router:
    """Route incoming frames. Called by reader threads (FrameSink), steered from the event loop."""

    def __init__(self, on_broken: Callable[[bytes, str], None]) -> None:
        self.transfers = Transfers()
        self._on_broken = on_broken
        self._changed = threading.Condition()
        self._attempts: dict[int, _Attempt] = {}  # by round
        self._newest: dict[int, tuple[int, int]] = {}  # round -> (view, attempt)
        self._promised: dict[int, tuple[int, int]] = {}  # the same, of orders that wait in a queue
        self._lineage8 = b""  # of the view at hand ...
        self._left: set[bytes] = set()  # ... and of those before: nothing of them is wanted
        self._view = 0  # the newest of this lineage that an attempt was begun in
        self._lag_s = 0.0  # of the event loop
        self._settled = 0  # rounds up to this one are over
        self._closed = False

    # ------------------------------------------------------------ steering

    def enter(self, lineage: bytes) -> None:
        """Take note that a view of this lineage is at hand.

        The numbers of another one say nothing about its own: whoever gives way may come from a
        higher view to a lower one.
        """
        with self._changed:
            if lineage[:8] == self._lineage8:
                return
            self._left.add(self._lineage8)
            self._left.discard(lineage[:8])
            self._lineage8, self._view = lineage[:8], 0
            self._newest.clear()
            self._promised.clear()
            self._changed.notify_all()

    def note_lag(self, lag_s: float) -> None:
        """Let frames wait longer for the orders about them while the event loop is late."""
        self._lag_s = lag_s

    def promise_attempt(self, begin: Begin) -> None:
        """Let the frames of an attempt wait that is expected, or ended, later.

        They wait for the commits before it. A frame that is dropped cannot be had again, and the
        attempt would stall.
        """
        with self._changed:
            self._promised[begin.round] = (begin.view, begin.attempt)
            self._changed.notify_all()

    def expect_attempt(self, begin: Begin, reduction: Reduction, kept: KeptFrames) -> None:
        """Take the frames of this attempt from now on.

        Those of older ones, or of older views, are not wanted any more.
        """
        index = {peer: i for i, peer in enumerate(begin.exchange)}
        with self._changed:
            self._attempts[begin.round] = _Attempt(begin, reduction, kept, index)
            self._newest[begin.round] = (begin.view, begin.attempt)
            self._view = max(self._view, begin.view)
            self._changed.notify_all()

    def end_attempt(self, begin: Begin) -> None:
        """Drop the frames of this attempt; one of another view may have the same number."""
        number, place = begin.round, (begin.view, begin.attempt)
        with self._changed:
            current, is_here = self._attempts.get(number), begin.lineage[:8] == self._lineage8
            if current is not None and _place(current.begin) == _place(begin):
                del self._attempts[number]
            if is_here and self._promised.get(number) == place:
                del self._promised[number]
                self._changed.notify_all()

    def settle(self, round_number: int) -> None:
        """Drop frames of this round and of earlier ones: the state is the one after it.

        After a rollback this is less than before.
        """
        with self._changed:
            self._settled = round_number
            self._attempts = {r: a for r, a in self._attempts.items() if r > round_number}
            self._newest = {r: n for r, n in self._newest.items() if r > round_number}
            self._promised = {r: n for r, n in self._promised.items() if r > round_number}
            self._changed.notify_all()

    def close(self) -> None:
        """Wake whoever waits: nothing needs to be waited for any more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    # ------------------------------------------------------------ FrameSink

    def reserve(self, source: bytes, header: DataHeader, stripe: int = 0) -> memoryview | None:
        if header.kind == PROBE:
            check_probe(header)
            return None
        if header.kind not in OF_ATTEMPTS:
            return self.transfers.reserve(source, header)
        current = self._attempt_of(header)
        if current is None:
            return None
        if header.kind == KEPT:
            return current.kept.reserve(source, header.chunk, header.length)
        frame = _frame(current, source, header, stripe)
        return current.reduction.reserve(frame, header.length, WINDOW_TIMEOUT_S)

    def received(self, source: bytes, header: DataHeader, stripe: int = 0) -> None:
        if header.kind not in OF_ATTEMPTS:
            self.transfers.received(source, header)
            return
        current = self._attempt_of(header)
        if current is None:
            return
        if header.kind == KEPT:
            current.kept.received(source, header.chunk)
        else:
            current.reduction.received(_frame(current, source, header, stripe))

    def broken_off(self, source: bytes, header: DataHeader, stripe: int = 0) -> None:
        if header.kind not in OF_ATTEMPTS:
            self.transfers.broken_off(source, header)
            return
        with self._changed:
            current = self._attempts.get(header.round)
        if header.kind in OF_REDUCTIONS and current is not None and _is_of(current.begin, header):
            current.reduction.broken_off(_frame(current, source, header, stripe))

    def broken(self, source: bytes, why: str) -> None:
        self.transfers.broken(source, why)
        with self._changed:
            attempts = list(self._attempts.values())
        for attempt in attempts:
            attempt.kept.gave_up(source, why)
        self._on_broken(source, why)

    def _attempt_of(self, header: DataHeader) -> _Attempt | None:
        begun_s = time.monotonic()
        with self._changed:
            while self._is_ahead(header):
                timeout_s = WINDOW_TIMEOUT_S if self._is_promised(header) else self._ahead_s()
                left_s = begun_s + timeout_s - time.monotonic()
                if left_s <= 0:
                    return None
                self._changed.wait(left_s)
            current = self._attempts.get(header.round)
        return current if current is not None and _is_of(current.begin, header) else None

    def _ahead_s(self) -> float:
        return max(AHEAD_TIMEOUT_S, min(LAGS_AHEAD * self._lag_s, AHEAD_TIMEOUT_MAX_S))

    def _is_promised(self, header: DataHeader) -> bool:
        promised = self._promised.get(header.round) == (header.view, header.attempt)
        return promised and header.lineage8 == self._lineage8

    def _is_ahead(self, header: DataHeader) -> bool:
        if self._closed or header.round <= self._settled or header.lineage8 in self._left:
            return False
        if header.lineage8 != self._lineage8:
            return True  # its view is still on its way here
        newest = self._newest.get(header.round, (0, 0))
        return header.view >= self._view and (header.view, header.attempt) > newest


def _is_of(begin: Begin, header: DataHeader) -> bool:
    mine = (begin.lineage[:8], begin.view, begin.attempt)
    return mine == (header.lineage8, header.view, header.attempt)


def _frame(current: _Attempt, source: bytes, header: DataHeader, stripe: int) -> Frame:
    index = current.index.get(source)
    if index is None:
        raise RemoteProtocolError(
            f"{short(source)} sent data for round {current.begin.round} and takes no part in it"
        )
    return Frame(index, header.kind, header.chunk, stripe, header.offset)


def _place(begin: Begin) -> tuple[bytes, int, int]:
    return begin.lineage, begin.view, begin.attempt
