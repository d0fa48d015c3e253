"""Attacks that lie among what honest peers send, or cannot be told from it in one round."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from atoll.collectives.robust.coordinate import Rows
from attacks.base import Attack, Seen, unit

__all__ = ["ALittleIsEnough", "Drift", "InnerProduct", "LabelFlip", "Mimic", "Stale", "z_max"]


def z_max(peers: int, f: int) -> float:
    """How many standard deviations off the honest mean f of ``peers`` can go, so that a majority
    with some honest peers is on their side (Baruch et al. 2019, algorithm 3)."""
    supporters = peers // 2 + 1 - f
    return NormalDist().inv_cdf((peers - f - supporters) / (peers - f))


@dataclass(frozen=True)
class ALittleIsEnough(Attack):
    """``h - z s``: every coordinate is a little too small (Baruch et al. 2019). Without ``z`` it is
    that of the paper."""

    z: float | None = None

    def send(self, seen: Seen) -> Rows:
        z = z_max(seen.peers, len(seen.own)) if self.z is None else self.z
        return seen.together(seen.mean - z * seen.deviation)


@dataclass(frozen=True)
class InnerProduct(Attack):
    """``-eps h`` (inner-product manipulation, Xie et al. 2019): small, it hides near zero; above
    (n - f) / f it turns the mean of all around."""

    eps: float

    def send(self, seen: Seen) -> Rows:
        return seen.together(-self.eps * seen.mean)


class Mimic(Attack):
    """All repeat one honest peer, which then counts too much (Karimireddy et al. 2022, section 4):
    the one that goes farthest in the direction in which honest peers differ most.

    That direction is found by Oja's rule over the rounds that were watched, with unit vectors, so
    that the scale of the pseudo-gradients does not matter. Whom they repeat is then settled.
    """

    def __init__(self) -> None:
        self._rounds = 0
        self._direction: Rows | None = None
        self._sums: Rows | None = None  # of each honest peer's vectors
        self.chosen: int | None = None

    def watch(self, seen: Seen) -> None:
        if self._direction is None or self._sums is None:
            self._direction = unit(seen.random.standard_normal(seen.honest.shape[1]))
            self._sums = np.zeros(seen.honest.shape)
        self._rounds += 1
        self._sums += seen.honest
        apart = seen.honest - seen.mean
        turned = unit((apart @ self._direction) @ apart)
        old = (self._rounds - 1) / self._rounds
        self._direction = unit(old * self._direction + (1 - old) * turned)

    def send(self, seen: Seen) -> Rows:
        if self.chosen is None:
            if not self._rounds:
                self.watch(seen)
            assert self._sums is not None
            self.chosen = int(np.argmax(np.abs(self._sums @ self._direction)))
        return seen.together(seen.honest[self.chosen])


class LabelFlip(Attack):
    """Honest work on labels that are wrong."""

    flips_labels = True

    def send(self, seen: Seen) -> Rows:
        return seen.own.copy()


class Stale(Attack):
    """Their own of ``rounds`` rounds ago, or the oldest that there is."""

    def __init__(self, rounds: int) -> None:
        self._kept: deque[Rows] = deque(maxlen=rounds + 1)

    def watch(self, seen: Seen) -> None:
        self._kept.append(seen.own.copy())

    def send(self, seen: Seen) -> Rows:
        self.watch(seen)
        return self._kept[0].copy()


class Drift(Attack):
    """Their own and a bias, in every round the same direction: against that in which the run went
    when they first saw it. It is ``size`` times the honest peers' usual distance from their mean,
    so no single round shows it; over many it adds up."""

    def __init__(self, size: float) -> None:
        self.size = size
        self._direction: Rows | None = None

    def watch(self, seen: Seen) -> None:
        if self._direction is None:
            self._direction = -unit(seen.mean)

    def send(self, seen: Seen) -> Rows:
        self.watch(seen)
        usual = float(np.linalg.norm(seen.deviation))
        return seen.own + seen.together(self.size * usual * self._direction)
