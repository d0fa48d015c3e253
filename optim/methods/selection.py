"""Select by truncation: who takes over whose weights, and what then becomes of its numbers.

Every member computes the same from what all of them have said, so nobody has to tell.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from atoll.collectives.counter_rng import derive_key

ONE_OF = 5  # members at either end: the paper's 20 %
FACTORS = (0.8, 1.2)

Bounds = tuple[float, float]


@dataclass(frozen=True, slots=True)
class PopulationMember:
    """Describe a member for the selection.

    ``score``: lower is better, NaN worse than anything. ``is_fresh``: it has just begun, and wants
    to begin with what a good member has.
    """

    name: str
    score: float
    is_fresh: bool = False


def exploited(members: Sequence[PopulationMember], seed: int, turn: int) -> dict[str, str]:
    """Return who copies whom: name -> name of a better member.

    Each of the worst fifth copies one of the best fifth, chosen at random. A fifth is one member at
    least, where there are two or more. A member copies only one that is strictly better, so equals
    leave each other alone; they rank in the order given. A fresh member copies in any case, as long
    as somebody is not fresh, and is not copied.
    """
    ranked = sorted((m for m in members if not m.is_fresh), key=_rank)
    count = max(1, len(ranked) // ONE_OF)
    best = [m for m in ranked[:count] if not math.isnan(m.score)]
    worst = ranked[-count:] if len(ranked) > 1 else []
    chosen = {}
    for member in [*worst, *(m for m in members if m.is_fresh)]:
        better = [m for m in best if member.is_fresh or _rank(m) < _rank(member)]
        if better:
            word = derive_key(b"exploit", seed, turn, member.name.encode())
            chosen[member.name] = better[word % len(better)].name
    return chosen


def explored(value: float, bounds: Bounds, seed: int, turn: int, *what: str) -> float:
    """Return 0.8 or 1.2 times the value, at random, within the bounds.

    ``what`` names member and number. A value of zero stays what it is.
    """
    word = derive_key(b"explore", seed, turn, *(name.encode() for name in what))
    low, high = bounds
    return min(max(value * FACTORS[word & 1], low), high)


def _rank(member: PopulationMember) -> tuple[bool, float]:
    is_nan = math.isnan(member.score)
    return is_nan, 0.0 if is_nan else member.score
