"""Describe the plan of one reduction: who takes part, with which weight, and who owns which chunk.

Every participant computes the same plan from the same opening of the round, so it is a value
without behaviour: the schedules read it, and the engine runs them.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

from atoll.collectives.chunks import ChunkGrid
from atoll.collectives.codecs import factors_of
from atoll.collectives.errors import ConfigError, LocalProtocolError
from atoll.collectives.robust import RobustRule
from atoll.collectives.schedule.routes import Routes, star

NOBODY: Final = -1  # owns the chunks that are kept from an earlier attempt
EVERYONE: Final = -2  # owns the chunks of a pairwise exchange: each adds them up for itself
# What becomes of the parts: their weighted mean, their sum, or the largest or smallest of each
# element. Weights count for the mean only.
FOLDS: Final = ("mean", "sum", "max", "min")
# Streams from one peer to another. More share a lossy path no better, and each has a thread and a
# buffer.
STREAMS_MAX: Final = 16


@dataclass(frozen=True, slots=True)
class ReducePlan:
    """Hold the participants in ascending order of peer id, their weights, and each chunk's owner.

    A participant is named by its index in ``participants``. One with weight 0 adds nothing to the
    mean, but it may own chunks and it receives the result. A chunk that NOBODY owns is not reduced.
    With a ``rule`` that bears nobody (f=0) it is the mean, as without. In a pairwise exchange
    EVERYONE owns all others; it has no shape, and two participants at most. Raises ConfigError for
    what is no such plan.
    """

    participants: tuple[bytes, ...]
    weights: tuple[float, ...]
    owners: tuple[int, ...]
    shape: Routes | None = None  # None: the butterfly
    fold: str = "mean"
    rule: RobustRule | None = None  # instead of the mean; those of positive weight count alike
    key: int = 0  # of what is drawn at random: the same for all, and another in each round

    def __post_init__(self) -> None:
        count = len(self.participants)
        if list(self.participants) != sorted(set(self.participants)) or not count:
            raise ConfigError("the participants of a reduction are not in order, or not unique")
        if len(self.weights) != count:
            raise ConfigError(f"{count} participants, but {len(self.weights)} weights")
        if not all(math.isfinite(weight) and weight >= 0 for weight in self.weights):
            raise ConfigError(f"a weight is negative or not finite: {self.weights}")
        if not 0 < sum(self.weights) < math.inf:
            raise ConfigError(f"the sum of the weights is not positive and finite: {self.weights}")
        if self.fold not in FOLDS:
            raise ConfigError(f"a reduction is one of {', '.join(FOLDS)}, not {self.fold[:32]!r}")
        owners = set(self.owners) - {NOBODY}
        if EVERYONE in owners and (len(owners) > 1 or count > 2):
            raise ConfigError("a pairwise exchange is of 2 peers at most, and nobody owns chunks")
        if not all(0 <= owner < count for owner in owners - {EVERYONE}):
            raise ConfigError(f"an owner of a chunk is not one of the {count} participants")
        if self.rule is not None:
            self._check_rule(self.rule)
        if len(self.routes.up) != count:
            raise ConfigError(f"routes of {len(self.routes.up)} for {count} participants")

    def _check_rule(self, rule: RobustRule) -> None:
        if self.shape is not None or self.is_pairwise or self.fold != "mean":
            raise ConfigError("a robust rule needs a butterfly, and takes the place of the mean")
        rule.check(sum(weight > 0 for weight in self.weights))

    @property
    def routes(self) -> Routes:
        return self.shape or star(len(self.participants))

    @property
    def is_pairwise(self) -> bool:
        """Return whether there are chunks that EVERYONE owns."""
        return EVERYONE in self.owners

    def factors(self) -> tuple[float, ...]:
        """Return what each participant's part is multiplied with; outside a mean it is 1."""
        if self.fold != "mean":
            return (1.0,) * len(self.weights)
        return factors_of(self.weights)

    def check_use(self, me: int, chunks: int, kept: Collection[int]) -> None:
        """Raise LocalProtocolError unless this plan is for ``me`` and for these chunks.

        ``me`` is in it, and it reduces just those of ``chunks`` chunks that are not ``kept``.
        """
        if len(self.owners) != chunks or not 0 <= me < len(self.participants):
            raise LocalProtocolError(
                f"participant {me} of {len(self.participants)} with {chunks} chunks does"
                f" not fit a plan of {len(self.owners)} chunks"
            )
        if {chunk for chunk, owner in enumerate(self.owners) if owner == NOBODY} != set(kept):
            raise LocalProtocolError("the plan reduces chunks that are kept, or not all others")

    def name(self, participant: int) -> str:
        """Return how a message calls a participant: the short id that every command shows."""
        return hashlib.sha256(self.participants[participant]).hexdigest()[:8]


def butterfly_plan(
    participants: Sequence[bytes],
    weights: Sequence[float],
    grid: ChunkGrid,
    kept: Collection[int] = (),
) -> ReducePlan:
    """Return a plan of contiguous shards by peer id, whose sizes differ by one chunk at most.

    ``weights[i]`` belongs to ``participants[i]``, which may come in any order. The ``kept`` chunks
    have no owner; only the others are shared out.
    """
    return shared_plan(participants, weights, grid, kept, (1,) * len(participants))


def shared_plan(
    participants: Sequence[bytes],
    weights: Sequence[float],
    grid: ChunkGrid,
    kept: Collection[int],
    shares: Sequence[int],
    shape: Routes | None = None,
) -> ReducePlan:
    """Return a plan of contiguous shards by peer id, in the ratio of ``shares``.

    There is one share for each participant in ascending order of peer id; of a vector of
    ``sum(shares)`` chunks each owns just as many. The rest is as of ``butterfly_plan``. Raises
    ConfigError if the shares do not fit, or are all zero.
    """
    total, owned = sum(shares), 0
    if len(shares) != len(participants) or total < 1 or min(shares) < 0:
        raise ConfigError(f"shares {tuple(shares)} of {len(participants)} participants")
    owners = [NOBODY] * grid.count
    unfinished = [chunk for chunk in range(grid.count) if chunk not in kept]
    first = 0
    for index, share in enumerate(shares):
        owned += share
        last = -(-owned * len(unfinished) // total)
        for chunk in unfinished[first:last]:
            owners[chunk] = index
        first = last
    return _plan(participants, weights, owners, shape)


def pairwise_plan(
    participants: Sequence[bytes],
    weights: Sequence[float],
    grid: ChunkGrid,
    kept: Collection[int] = (),
) -> ReducePlan:
    """Return a plan by which two participants exchange all chunks but the ``kept`` ones.

    One may be alone. See ``pair.py``.
    """
    owners = [NOBODY if chunk in kept else EVERYONE for chunk in range(grid.count)]
    return _plan(participants, weights, owners)


def _plan(
    participants: Sequence[bytes],
    weights: Sequence[float],
    owners: Sequence[int],
    shape: Routes | None = None,
) -> ReducePlan:
    if len(participants) != len(weights):
        raise ConfigError(f"{len(participants)} participants, but {len(weights)} weights")
    ordered = sorted(zip(participants, weights, strict=True))
    return ReducePlan(
        participants=tuple(peer for peer, _ in ordered),
        weights=tuple(float(weight) for _, weight in ordered),
        owners=tuple(owners),
        shape=shape,
    )
