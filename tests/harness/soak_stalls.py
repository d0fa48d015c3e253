"""Tell which stalls of a soak the faults under way explain, and which are misses.

A stall is the time since the last commit. It counts while a majority of the view is *fit*: its
processes run and have answered since they were started, and one of them has paths to the others;
who leads that majority is the protocol's business. So the clock of a stall begins at the last
commit, or at the last moment without such a majority if that is later.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

__all__ = ["DEAD_S", "LIMIT_S", "STARVED_LIMIT_S", "Stall", "Stalls", "has_majority"]

LIMIT_S = 10.0
STARVED_LIMIT_S = 25.0  # where the CPUs were starved at any time of the stall, or just before it
STARVED_AFTER_S = 10.0
NOTED_S = 3.0  # a shorter one is no line of the event log
DEAD_S = 180.0  # the run does not come back: the soak ends


def has_majority(
    members: Collection[str], fit: Collection[str], cut: Collection[frozenset[str]]
) -> bool:
    """Return whether some fit member has paths to so many that they are a majority with it.

    They need not have paths to each other: behind a bridge partition they have none.
    """
    here = {*members} & {*fit}
    return any(
        2 * sum(other == hub or frozenset((hub, other)) not in cut for other in here) > len(members)
        for hub in here
    )


@dataclass
class Stall:
    """Keep one stall: from when on nothing excused it, and what was under way meanwhile."""

    began_s: float
    length_s: float = 0.0
    limit_s: float = LIMIT_S
    faults: list[str] = field(default_factory=list)  # kinds, in the order in which they came

    @property
    def is_miss(self) -> bool:
        return self.length_s > self.limit_s


class Stalls:
    """Follow the stalls of a run; all times are of one clock."""

    def __init__(self, now_s: float) -> None:
        self.at_hand = Stall(now_s)
        self.noted: list[Stall] = []  # longer than NOTED_S
        self.longest_s: dict[str, float] = {}  # by kind of fault under way
        self.longest = self.at_hand
        self.excused_s = 0.0  # how long no majority was fit, in all
        self._looked_s = now_s
        self._starved_s = float("-inf")

    @property
    def misses(self) -> list[Stall]:
        return [stall for stall in (*self.noted, self.at_hand) if stall.is_miss]

    def look(
        self,
        now_s: float,
        commits_s: Sequence[float],
        faults: Sequence[str],
        *,
        is_fit: bool,
        is_starved: bool,
    ) -> list[Stall]:
        """Note how it stands; return the stalls that have ended, if they were long.

        ``commits_s``: when rounds were committed since the last look. ``faults``: the kinds under
        way. ``is_fit``: whether a majority is (:func:`has_majority`).
        """
        ended = []
        before, self._looked_s = self._looked_s, now_s
        self._starved_s = now_s if is_starved else self._starved_s
        for committed_s in commits_s:
            if committed_s > self.at_hand.began_s:
                self._last_until(committed_s, faults)
                ended.append(self._over(committed_s))
        if is_fit:
            self._last_until(now_s, faults)
        else:
            self.excused_s += now_s - before
            ended.append(self._over(now_s))
        long = [stall for stall in ended if stall.length_s > NOTED_S]
        self.noted += long
        return long

    def _last_until(self, until_s: float, faults: Iterable[str]) -> None:
        stall = self.at_hand
        stall.length_s = max(stall.length_s, until_s - stall.began_s)
        if stall.began_s - self._starved_s < STARVED_AFTER_S:
            stall.limit_s = STARVED_LIMIT_S
        stall.faults += [kind for kind in faults if kind not in stall.faults]
        for kind in stall.faults:
            self.longest_s[kind] = max(self.longest_s.get(kind, 0.0), stall.length_s)
        if stall.length_s > self.longest.length_s:
            self.longest = stall

    def _over(self, at_s: float) -> Stall:
        over, self.at_hand = self.at_hand, Stall(at_s)
        return over


def names_of(faults: Sequence[str]) -> str:
    return ", ".join(faults) or "no fault"
