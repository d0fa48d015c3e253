"""Decide who takes part in the next round, and how long those who are late are waited for.

Theory. A round opens when all attached trainers have arrived, or when the stragglers' time since
the first arrival is up: three usual inner phases, but not less than 3 s nor more than 30 s; and
half a usual phase where that is more, since trainers whose phases take minutes vary by more than
30 s. A straggler that was not there when its time was up is not waited for again until it has
arrived once more: a hung trainer costs the others one wait and not one in every round.

A usual phase is the median of the last ones, from view to view as long as one peer coordinates.
Only whole phases count: not one in which the view began, nor one after a round that was given up.
If a straggler arrives after all, it was no hang but a slow trainer or a pause, and the time that it
took counts instead of all phases before: a trainer that is slower than the others by far is waited
for from then on, and a pause is forgotten after two rounds. The time is 30 s while no phase is
known, and for a session's own collectives: who misses one of those gets an error.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from statistics import median

from atoll.collectives.units import duration, listed
from atoll.peer.membership.events import Effect, Note
from atoll.peer.membership.member import MemberState
from atoll.peer.membership.roster import Roster
from atoll.peer.membership.timing import Timing
from atoll.peer.membership.view import short
from atoll.peer.rounds.entries import fragment_of

_PHASES_KEPT = 9  # inner phases whose median sets the stragglers' time


class Barrier:
    """Decide when the next round opens, and with whom.

    It is a part of the coordinator, and reads its follower (the own position) and its roster.
    """

    def __init__(
        self,
        own: MemberState,
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
        self._is_whole = False  # the inner phase at hand
        self._phases_s: list[float] = []
        self._stragglers: dict[bytes, float] = {}  # and when the phase began that they were late in
        self.left_out: set[bytes] = set()  # who was waited for and is not in the round that opened

    def open(self, now_s: float, *, committed: bool) -> None:
        """Start the wait for the next round, as one has ended."""
        self._opened_s = now_s
        self._is_whole = committed
        self._first_arrival_s = None

    def hold(self) -> None:
        """Discard the inner phase at hand, because too few trainers are attached.

        How long those take that come is no inner phase.
        """
        self._is_whole = False
        self._first_arrival_s = None

    def take_over(self, before: Barrier, staying: Collection[bytes]) -> None:
        """Go on with what this coordinator knew in the view before."""
        self._phases_s = before._phases_s
        self._stragglers = {p: s for p, s in before._stragglers.items() if p in staying}

    def waited_s(self, now_s: float) -> float:
        return now_s - self._opened_s

    def participants(
        self,
        number: int,
        present: set[bytes],
        now_s: float,
        may_begin: Callable[[int, set[bytes], int], bool] = lambda number, arrived, fragment: True,
    ) -> tuple[bytes, ...]:
        """Return who takes part in round ``number``; nobody yet if it has to wait.

        ``may_begin`` says whether it can be of those who have arrived, when no others are waited
        for (eligibility.py).
        """
        if self._roster.unheard(present):
            return ()  # in a new view: who has arrived is in their first heartbeats
        arrived = self._arrived(number, present)
        self._note_returns(arrived, now_s)
        self._stragglers = {p: s for p, s in self._stragglers.items() if p in present - arrived}
        if not arrived:
            return ()
        if self._first_arrival_s is None:
            self._first_arrival_s = now_s
        late = self._roster.attached(present) - arrived - self._stragglers.keys()
        straggle_s = self._straggle_s(arrived)
        if late and now_s - self._first_arrival_s < straggle_s:
            return ()
        if not may_begin(number, arrived, fragment_of(number, self._own.fragments)):
            return ()
        if late:
            self._stragglers |= dict.fromkeys(late, self._opened_s)
            names = listed([short(peer) for peer in sorted(late)])
            text = f"round {number} begins without {names}: the others have waited"
            self._emit(Note("stragglers", f"{text} {duration(straggle_s)}"))
        self.left_out = late
        if self._is_whole:
            self._phases_s = [*self._phases_s, now_s - self._opened_s][-_PHASES_KEPT:]
        self._first_arrival_s = None
        return tuple(arrived)

    def late(self, present: set[bytes]) -> set[bytes]:
        """Return the peers that the next round waits for, for people who ask."""
        return self._roster.attached(present) - self._arrived(self._own.round + 1, present)

    def _arrived(self, number: int, present: set[bytes]) -> set[bytes]:
        own = self._own
        fragment = fragment_of(number, own.fragments)
        return self._roster.arrived(present, fragment, own.round, own.chain)

    def _note_returns(self, arrived: Collection[bytes], now_s: float) -> None:
        """Count what stragglers have taken that have come after all, 30 s of it at most."""
        took_s = max((now_s - s for p, s in self._stragglers.items() if p in arrived), default=0.0)
        took_s = min(took_s, self._timing.straggle_max_s)
        if took_s and self._phases_s and took_s > median(self._phases_s):
            self._phases_s = [took_s]

    def _straggle_s(self, arrived: Collection[bytes]) -> float:
        """Return how long the first of a round waits for the others, in seconds."""
        most_s = self._timing.straggle_max_s
        if not self._phases_s or any(self._roster.calls(peer) for peer in arrived):
            return most_s
        phase_s = median(self._phases_s)
        return max(self._timing.straggle_min_s, min(3 * phase_s, most_s), phase_s / 2)
