"""Grant bytes at a rate, the most urgent first: one bucket of tokens. No clock, no thread.

Bulk asks before it moves (``ask``, then ``take`` until it is granted something) and gives back what
it did not use. What cannot wait, as heartbeats cannot, is charged afterwards (``charge``): the
level falls below zero, and bulk waits until that is made good. So control is never late, and in any
time t no more is moved than the rate times t and one bucket, as long as control alone keeps to it.
"""

from __future__ import annotations

import math
from typing import Final

# A bucket holds what the rate gives in this time: of ten seconds it adds a hundredth to the rate.
BURST_S: Final = 0.1
# What is granted at once: so small that others get their turn, and so large that a stream at a
# gigabit comes fifty times a second and no more.
PIECE_S: Final = 0.02
# At slow rates one full packet: less would cost more headers than it brings turns.
PIECE_BYTES_MIN: Final = 1448
# A stream that has waited so long for a piece gets one before the more urgent. The other side takes
# a stream for broken on which nothing moves for 10 s, and then its rounds have none either.
STARVED_S: Final = 2.0
# Bulk makes good for control as much as the rate gives in this time, and no more, for the same
# reason: where control alone is above the rate, bulk still has a trickle.
DEBT_S_MAX: Final = 4.0
# No rate is less: at this one two dozen streams all have a piece within 10 s.
RATE_BYTES_PER_S_MIN: Final = 4e3


class TokenBucket:
    """Hold the tokens of one direction. Times are of any clock that never goes back."""

    def __init__(self, bytes_per_s: float, now_s: float) -> None:
        """Make a full bucket. ``bytes_per_s``: the rate; infinite grants everything at once."""
        self._waiting: dict[int, tuple[int, float]] = {}  # ticket -> (urgency, since)
        self._tickets = 0
        self._filled_s = now_s
        self.bytes_per_s = max(bytes_per_s, RATE_BYTES_PER_S_MIN)
        self._level = self.burst_bytes

    @property
    def burst_bytes(self) -> float:
        """Return what the bucket holds when it is full."""
        return max(float(PIECE_BYTES_MIN), self.bytes_per_s * BURST_S)

    def set_rate(self, bytes_per_s: float, now_s: float) -> None:
        """Go on with another rate; what is owed at the old one stays owed."""
        self._fill(now_s)
        was_unlimited = math.isinf(self.bytes_per_s)
        self.bytes_per_s = max(bytes_per_s, RATE_BYTES_PER_S_MIN)
        self._level = self.burst_bytes if was_unlimited else min(self._level, self.burst_bytes)

    def charge(self, count: float, now_s: float) -> None:
        """Count bytes that were moved without asking; less than none where too much was charged."""
        self._fill(now_s)
        debt_bytes = self.bytes_per_s * DEBT_S_MAX
        self._level = min(max(self._level - count, -debt_bytes), self.burst_bytes)

    def owed_s(self, now_s: float) -> float:
        """Return how long it takes to make good for what was charged."""
        self._fill(now_s)
        return max(0.0, -self._level) / self.bytes_per_s

    def ask(self, urgency: int, now_s: float) -> int:
        """Return a ticket with which to ``take`` a piece; the smaller ``urgency`` goes first."""
        self._tickets += 1
        self._waiting[self._tickets] = (urgency, now_s)
        return self._tickets

    def drop(self, ticket: int) -> None:
        """Give a turn up."""
        self._waiting.pop(ticket, None)

    def take(self, ticket: int, wanted: int, now_s: float) -> int:
        """Return how many of the bytes that are wanted may move now; 0: none yet.

        With the grant, the ticket is used up. What does not move is to be charged back.
        """
        self._fill(now_s)
        granted = self._piece(wanted)
        if self._next(now_s) != ticket or self._level < granted:
            return 0
        del self._waiting[ticket]
        self._level -= granted
        return granted

    def wait_s(self, ticket: int, wanted: int, now_s: float) -> float:
        """Return in how many seconds ``take`` may succeed; infinite while others come first."""
        self._fill(now_s)
        if self._next(now_s) != ticket:
            return math.inf
        return max(0.0, self._piece(wanted) - self._level) / self.bytes_per_s

    def _piece(self, wanted: int) -> int:
        if math.isinf(self.bytes_per_s):
            return wanted
        return min(wanted, max(PIECE_BYTES_MIN, int(self.bytes_per_s * PIECE_S)))

    def _next(self, now_s: float) -> int:
        """Return whose turn it is: who has waited too long, else the first of the most urgent."""
        starved = (t for t, (_, since_s) in self._waiting.items() if now_s - since_s >= STARVED_S)
        first = next(starved, 0)
        return first or min(self._waiting, key=lambda ticket: (self._waiting[ticket][0], ticket))

    def _fill(self, now_s: float) -> None:
        if math.isinf(self.bytes_per_s):
            self._level = math.inf
        else:
            new = (now_s - self._filled_s) * self.bytes_per_s
            self._level = min(self._level + max(0.0, new), self.burst_bytes)
        self._filled_s = max(self._filled_s, now_s)
