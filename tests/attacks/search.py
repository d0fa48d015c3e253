"""Adaptive attacks: how far to go in a direction is tried on the very rule that is in use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from atoll.collectives.robust.coordinate import Rows
from attacks.base import Attack, Seen
from attacks.hidden import ALittleIsEnough, InnerProduct

__all__ = ["Search", "best_alie", "best_ipm", "line_maximum"]

EVALUATIONS, FIRST_STEP, RATIO = 20, 10.0, 0.8  # byzfl's


@dataclass(frozen=True)
class Search(Attack):
    """Of the attacks that ``of`` gives for numbers from 0 on, the one that moves the aggregate
    farthest from the honest mean."""

    of: Callable[[float], Attack]

    def send(self, seen: Seen) -> Rows:
        honest = seen.mean

        def moved(x: float) -> float:
            return float(np.linalg.norm(seen.aggregated(self.of(x).send(seen)) - honest))

        return self.of(line_maximum(moved)).send(seen)


def best_alie() -> Search:
    """Opt-ALIE: ``h + x s`` (Shejwalkar and Houmansadr 2021, as in byzfl, which has this sign)."""
    return Search(lambda x: ALittleIsEnough(-x))


def best_ipm() -> Search:
    """Opt-IPM: ``-x h``."""
    return Search(InnerProduct)


def line_maximum(height: Callable[[float], float]) -> float:
    """Where ``height`` was greatest, of the numbers from 0 on that a search tries: steps that
    double while it rises, then to and fro around the best with steps that shrink."""
    best, most = 0.0, height(0.0)
    step, tried, rising = FIRST_STEP, 0.0, True
    for _ in range(EVALUATIONS - 1):
        if rising or tried < best:
            tried += step
        else:
            back = step
            while back > tried:
                back /= 2  # what is tried is never negative
            tried -= back
        now = height(tried)
        if now > most:
            best, most = tried, now
        else:
            rising = False
        step *= 2 if rising else RATIO
    return best
