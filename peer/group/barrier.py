"""The barrier: who takes part in the next round, and how long those who are late are waited for.

Theory. A round opens when all attached trainers have arrived, or when the stragglers' time since
the first arrival is up: max(30 s, half the median inner phase). A straggler that was not there when
its time was up is not waited for again until it has arrived once more: a hung trainer costs the
others one wait and not one in every round.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

from atoll.collectives.units import duration, listed
from atoll.peer.group.events import Effect, Note
from atoll.peer.group.follower import Follower
from atoll.peer.group.roster import Roster
from atoll.peer.group.timing import Timing
from atoll.peer.group.views import short
from atoll.peer.rounds.entries import fragment_of

__all__ = ["Barrier"]

_PHASES_KEPT = 9  # inner phases whose median sets the stragglers' time


class Barrier:
    """Part of the coordinator; reads its follower (the own position) and its roster."""

    def __init__(
        self,
        own: Follower,
        roster: Roster,
        timing: Timing,
        emit: Callable[[Effect], None],
        now_s: float,
    ) -> None:
        self._own = own
        self._roster = roster
        self._timing = timing
        self._emit = emit
        self._first_arrival_s: float | None = None
        self._opened_s = now_s
        self._phases_s: list[float] = []
        self._stragglers: set[bytes] = set()
        self.left_out: set[bytes] = set()  # who was waited for and is not in the round that opened

    def open(self, now_s: float) -> None:
        """A round has ended: the time until the next one begins."""
        self._opened_s = now_s
        self._first_arrival_s = None

    def waited_s(self, now_s: float) -> float:
        return now_s - self._opened_s

    def participants(
        self,
        number: int,
        present: set[bytes],
        now_s: float,
        may_begin: Callable[[int, set[bytes], int], bool] = lambda number, arrived, fragment: True,
    ) -> tuple[bytes, ...]:
        """Who takes part in round ``number``; nobody yet if it has to wait. ``may_begin``: whether
        it can be of those who have arrived, when no others are waited for (counting.py)."""
        if self._roster.unheard(present):
            return ()  # in a new view: who has arrived is in their first heartbeats
        arrived = self._arrived(number, present)
        self._stragglers &= present - arrived
        if not arrived:
            return ()
        if self._first_arrival_s is None:
            self._first_arrival_s = now_s
        late = self._roster.attached(present) - arrived - self._stragglers
        if late and now_s - self._first_arrival_s < self.straggle_s:
            return ()
        if not may_begin(number, arrived, fragment_of(number, self._own.fragments)):
            return ()
        if late:
            self._stragglers |= late
            names = listed([short(peer) for peer in sorted(late)])
            text = f"round {number} begins without {names}: the others have waited"
            self._emit(Note("stragglers", f"{text} {duration(self.straggle_s)}"))
        self.left_out = late
        self._phases_s = [*self._phases_s, now_s - self._opened_s][-_PHASES_KEPT:]
        self._first_arrival_s = None
        return tuple(arrived)

    def late(self, present: set[bytes]) -> set[bytes]:
        """Whom the next round waits for, for people who ask."""
        return self._roster.attached(present) - self._arrived(self._own.round + 1, present)

    def _arrived(self, number: int, present: set[bytes]) -> set[bytes]:
        own = self._own
        fragment = fragment_of(number, own.fragments)
        return self._roster.arrived(present, fragment, own.round, own.chain)

    @property
    def straggle_s(self) -> float:
        phase_s = median(self._phases_s) if self._phases_s else 0.0
        return max(self._timing.straggle_min_s, phase_s / 2)
