"""Attacks that are far from anything honest: whoever looks at one vector sees them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from atoll.collectives.robust.coordinate import Rows
from attacks.base import Attack, Seen, unit

__all__ = ["Direction", "FreeRider", "Gaussian", "NotFinite", "Scaling", "SignFlip", "Spike"]


@dataclass(frozen=True)
class SignFlip(Attack):
    """``times`` the honest mean, backwards."""

    times: float = 1.0

    def send(self, seen: Seen) -> Rows:
        return seen.together(-self.times * seen.mean)


@dataclass(frozen=True)
class Scaling(Attack):
    """Each its own, but ``times`` as long."""

    times: float

    def send(self, seen: Seen) -> Rows:
        return self.times * seen.own


class FreeRider(Attack):
    """Zeros: no work, and a share in what the others have done."""

    def send(self, seen: Seen) -> Rows:
        return np.zeros_like(seen.own)


@dataclass(frozen=True)
class Gaussian(Attack):
    """Noise, drawn anew by each attacker in each round: ``times`` the root mean square of honest
    coordinates, whatever their scale is."""

    times: float

    def send(self, seen: Seen) -> Rows:
        sigma = self.times * float(np.sqrt(np.mean(np.square(seen.honest, dtype=np.float64))))
        return (sigma * seen.random.standard_normal(seen.own.shape)).astype(seen.own.dtype)


class Direction(Attack):
    """All send one random vector, in every round the same direction, ``times`` as long as the
    honest ones are in the mean."""

    def __init__(self, times: float = 1000.0) -> None:
        self.times = times
        self._direction: Rows | None = None

    def send(self, seen: Seen) -> Rows:
        if self._direction is None:
            self._direction = unit(seen.random.standard_normal(seen.own.shape[1]))
        length = self.times * float(np.linalg.norm(seen.honest, axis=1).mean())
        return seen.together(length * self._direction)


@dataclass(frozen=True)
class NotFinite(Attack):
    """Their own, with one coordinate that is no number: the smallest lie that makes a mean one."""

    value: float

    def send(self, seen: Seen) -> Rows:
        sent: Rows = seen.own.copy()
        sent[:, sent.shape[1] // 2] = self.value
        return sent


@dataclass(frozen=True)
class Spike(Attack):
    """Their own, and backwards, ``times`` as long as an honest one, in one place only: in the
    largest coordinate of the honest mean, or (``whole_shard``) in the n-th part of the vector that
    one of n owners reduces. A rule that looked at each shard by itself would know no better than
    that all of the attackers are wrong there."""

    times: float = 1000.0
    whole_shard: bool = False

    def send(self, seen: Seen) -> Rows:
        sent, mean = seen.own.copy(), seen.mean
        length = self.times * float(np.linalg.norm(mean))
        at = int(np.argmax(np.abs(mean)))
        lo, hi = at, at + 1
        if self.whole_shard:
            size = -(-mean.size // seen.peers)
            lo = at // size * size
            hi = lo + size
        sent[:, lo:hi] = -length * unit(mean[lo:hi])
        return sent
