"""Hold what a donor's threads share with its event loop: requests that wait, and the pace."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Collection

from atoll.collectives.errors import StateError
from atoll.peer.state_sync.messages import ASKED_MAX, FetchPiece

BUSY_SHARE = 0.05  # of what the own reduction sends: rounds get no longer than by this
# Or so many in a reduction, if that is more: where rounds are small and the way is long, a learner
# could not keep up with them otherwise. 50 ms at 10 Mbit/s.
BUSY_BYTES = 64 << 10
PACE_TIMEOUT_S = 60.0  # a piece that may not be sent for so long is refused: others may have time
PACE_STEP_S = 0.02  # how often bytes are counted while waiting
# Reductions that send nothing for so long leave the link to pieces: they may be of a peer that
# is alone, or wait for the vote of the very peer that the pieces are for. Twice the time after
# which what a slow link has taken of a frame is counted (peer/streams/stream.py).
IDLE_S = 0.5


class Queue:
    """Keep the requests of one learner, first come, first served."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: OrderedDict[int, FetchPiece] = OrderedDict()  # by ticket

    def add(self, message: FetchPiece) -> bool:
        """Add a request; return False if the learner asks for more than one may."""
        with self._lock:
            if len(self._waiting) >= ASKED_MAX:
                return False
            self._waiting[message.ticket] = message
            return True

    def drop(self, tickets: Collection[int]) -> None:
        with self._lock:
            for ticket in tickets:
                self._waiting.pop(ticket, None)

    def next(self) -> FetchPiece | None:
        with self._lock:
            return self._waiting.popitem(last=False)[1] if self._waiting else None

    def rest(self) -> list[FetchPiece]:
        with self._lock:
            waiting = list(self._waiting.values())
            self._waiting.clear()
            return waiting


class ServingPace:
    """Limit how fast pieces are sent.

    While a reduction is under way, pieces get BUSY_SHARE of the bytes that it sends, or BUSY_BYTES.
    """

    def __init__(self, sent_bytes: Callable[[], int], clock: Callable[[], float]) -> None:
        self._sent_bytes = sent_bytes  # of all rounds so far, and of nothing else
        self._clock = clock
        self._changed = threading.Condition()
        self._busy = self._closed = False
        self._since_bytes = 0  # sent when the reduction began
        self._pieces_bytes = 0  # since then, by pieces
        self._reduced_bytes = 0  # since then, by the reduction, when they were last counted ...
        self._moved_s = float("-inf")  # ... and when that has last grown, in this one or before

    def busy(self, reducing: bool) -> None:
        with self._changed:
            if reducing and not self._busy:
                self._since_bytes = self._sent_bytes()
                self._reduced_bytes = self._pieces_bytes = 0
            self._busy = reducing
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def wait(self, nbytes: int) -> None:
        """Wait until so many bytes may be sent.

        StateError after PACE_TIMEOUT_S, or at the end.
        """
        deadline_s = self._clock() + PACE_TIMEOUT_S
        with self._changed:
            while self._busy and not self._closed and not self._takes(nbytes):
                if self._clock() > deadline_s:
                    raise StateError("this donor needs its link for a round")
                self._changed.wait(PACE_STEP_S)
            if self._closed:
                raise StateError("this donor is closing")

    def _takes(self, nbytes: int) -> bool:
        """Return whether there is room for so many; if so, count them.

        Where nothing else is sent, there is room, and they do not count.
        """
        reduced_bytes = self._sent_bytes() - self._since_bytes
        now_s = self._clock()
        if reduced_bytes > self._reduced_bytes:
            self._reduced_bytes, self._moved_s = reduced_bytes, now_s
        if now_s - self._moved_s >= IDLE_S:
            return True
        if self._pieces_bytes + nbytes > max(BUSY_BYTES, BUSY_SHARE * reduced_bytes):
            return False
        self._pieces_bytes += nbytes
        return True
