"""What attackers see of a round, and what an attack is."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field

import numpy as np

from atoll.collectives.robust import RobustRule
from atoll.collectives.robust.coordinate import Rows, mean
from atoll.collectives.robust.gram import Matrix, add_gram

__all__ = ["Attack", "Seen", "unit"]


@dataclass(frozen=True)
class Seen:
    """Of a round: ``honest``, float[n - f, d], are the pseudo-gradients of the honest peers in
    their order, ``own``, float[f, d], those that the attackers would send if they were honest.

    ``rule`` with its ``key`` is what aggregates them, None the plain mean. ``places``: those of the
    attackers among all n peers, the last ones if nothing is said.
    """

    honest: Rows
    own: Rows
    rule: RobustRule | None = None
    random: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))
    key: int = 0
    places: tuple[int, ...] = ()

    @property
    def peers(self) -> int:
        return len(self.honest) + len(self.own)

    @property
    def mean(self) -> Rows:
        """Of the honest ones, float[d]: h in the formulas."""
        centre: Rows = self.honest.mean(axis=0)
        return centre

    @property
    def deviation(self) -> Rows:
        """Their standard deviation in each coordinate, float[d]: s in the formulas."""
        found: Rows = self.honest.std(axis=0, ddof=1)
        return found

    def together(self, vector: Rows) -> Rows:
        """What is sent when all attackers send the same: float[f, d]."""
        return np.repeat(vector[None].astype(self.own.dtype), len(self.own), axis=0)

    def aggregated(self, sent: Rows) -> Rows:
        """float[d]: what comes of the round if the attackers send this."""
        mine = list(self.places) or list(range(len(self.honest), self.peers))
        rows: Rows = np.empty((self.peers, self.own.shape[1]), self.own.dtype)
        rows[mine] = sent
        rows[[place for place in range(self.peers) if place not in mine]] = self.honest
        if self.rule is None:
            return mean(rows)
        gram: Matrix = np.zeros((self.peers, self.peers))
        if self.rule.needs_gram:
            add_gram(rows, gram)
        return self.rule.aggregate(rows, self.rule.matrix(gram, self.peers, self.key))


class Attack:
    """One for each run: some remember earlier rounds.

    ``flips_labels``: its attackers train on wrong labels (labels.py), and then send what comes of
    it.
    """

    flips_labels = False

    def watch(self, seen: Seen) -> None:
        """A round in which the attackers are still honest. Most learn nothing from it."""

    @abstractmethod
    def send(self, seen: Seen) -> Rows:
        """What the attackers send in this round: float[f, d], memory of its own."""


def unit(vector: Rows) -> Rows:
    """Of length one; zero stays zero."""
    length = float(np.linalg.norm(vector))
    scaled: Rows = vector / length if length > 0 else vector.copy()
    return scaled
