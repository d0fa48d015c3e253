"""Spend a day's budget of bytes: probes give way first, then state for others, and rounds last.

Until most of it is spent nothing is slower. What is left then is spread over what is left of the
day, so that rounds go on, slowly, until midnight, and the budget holds. No clock.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final

# Probes give way long before anything else: rounds measure the links as well.
PROBES_SHARE: Final = 0.8
# Whoever lacks the state can fetch it from others, or tomorrow.
STATE_SHARE: Final = 0.9
# The last twentieth is for slow rounds and for heartbeats, which go on whatever the hour is.
SPREAD_SHARE: Final = 0.95
# Of so much, a twentieth spread over a whole day is more than the least rate that streams live on
# (RATE_BYTES_PER_S_MIN), so the budget holds.
GB_MIN: Final = 10.0
GB_MAX: Final = 1e6  # a terabit per second, all day
BYTES_PER_GB: Final = 1_000_000_000


class Step(enum.IntEnum):
    """Say what a budget still allows; each step also forbids what those before it do."""

    OPEN = 0
    NO_PROBES = 1
    NO_STATE = 2  # for others
    SPREAD = 3  # all that is left goes evenly over the rest of the day


_FROM = ((Step.SPREAD, SPREAD_SHARE), (Step.NO_STATE, STATE_SHARE), (Step.NO_PROBES, PROBES_SHARE))


@dataclass(frozen=True, slots=True)
class DayBudget:
    """Hold how many bytes may be moved in a day."""

    bytes: int

    def step(self, spent: int) -> Step:
        """Return what is allowed when so much is spent."""
        return next((step for step, share in _FROM if spent >= share * self.bytes), Step.OPEN)

    def bytes_per_s(self, spent: int, left_s: float) -> float:
        """Return how fast the rest may be spent, ``left_s`` seconds before midnight.

        Infinite until the last step. Less than nothing is never left.
        """
        if self.step(spent) is not Step.SPREAD:
            return float("inf")
        return max(0, self.bytes - spent) / max(1.0, left_s)
