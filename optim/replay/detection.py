"""Compute how soon a trainer that cheats in some segments of its work is found. Pure.

In each round ``validators`` of ``peers`` are drawn, with as many targets, all of them different
(BTARD, arXiv 2106.11257), and each validator opens ``audits`` different segments of its target. A
cheat is found when its validator is honest and one of these segments has it::

    found in an audit = 1 - C(S - c, a) / C(S, a)        c / S if one segment is opened
    found in a round  = validators / peers * (peers - faulty) / (peers - 1) * found in an audit

Rounds are drawn independently, so 1 / p rounds pass on average until it is found, and after r of
them it was found with probability 1 - (1 - p)^r.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from atoll.collectives.errors import ConfigError


@dataclass(frozen=True)
class Detection:
    """Hold the probabilities that a cheat is found.

    ``in_audit``: by an honest validator that was drawn for it.
    """

    in_audit: float
    in_round: float

    @property
    def expected_rounds(self) -> float:
        """Return the mean number of rounds until it is found, that round included.

        Infinite if it never is.
        """
        return 1 / self.in_round if self.in_round else math.inf

    def within(self, rounds: int) -> float:
        return 1 - (1 - self.in_round) ** rounds


def detection(
    segments: int, cheated: int, audits: int, validators: int, peers: int, faulty: int
) -> Detection:
    """Return how likely one of ``faulty`` peers is found that cheats in every round.

    It cheats in ``cheated`` of its ``segments``. ConfigError for numbers that cannot be.
    """
    if not (0 <= cheated <= segments and 0 < audits <= segments):
        raise ConfigError(f"{cheated} and {audits} of {segments} segments")
    if not (0 < 2 * validators <= peers and 0 < faulty <= peers):
        raise ConfigError(f"{validators} validators, {faulty} faulty, of {peers} peers")
    missed = math.comb(segments - cheated, audits) / math.comb(segments, audits)
    drawn = validators / peers * (peers - faulty) / (peers - 1)
    return Detection(1 - missed, drawn * (1 - missed))
