"""Measure how far local steps that were taken again are from what a trainer claims. Pure.

Tensors are compared in groups: the parameters, the buffers, and each kind of number that the inner
optimizers keep. With a the own end, b the claimed one and s the start, of a tensor or of a group::

    difference = ||a - b|| / (min(||a - s||, ||b - s||) + FLOOR ||s||)

that is, relative to what the steps have moved, here or there: a claim that moves nothing is far
away, and so is one that moves too much. On the machine that took the steps it is zero.

Some tensors have gradients that would be zero if nothing were rounded (biases of keys in attention,
biases before a normalization), and Adam makes whole steps of what rounding leaves of them. So where
something differs by more than is usual, the steps are taken a second time from a start that is
rounded otherwise, and what differs between the own two ends is borne from the other too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from atoll.collectives.errors import ConfigError
from atoll.optim.replay.checkpoint import Array, Plain, Tensors, WorkCheckpoint

# Rounding to float32 alone moves a tensor by as much: steps at a learning rate of 0 are no cheat.
FLOOR = 2.0**-24


@dataclass(frozen=True)
class Tolerance:
    """Say how large a difference is tolerated.

    ``group``: of parameters, buffers and each kind of state as a whole. ``tensor``: of each tensor
    by itself, where what others have moved hides nothing. docs/log.md has what both were chosen
    from.

    ``own``: as many times the difference of two own ends is borne as well, but no more than
    ``group_max`` and ``tensor_max``; 0: the steps are never taken twice. Where two own ends differ
    by more than ``group_max``, nothing can be said of the other.
    """

    group: float = 1e-3
    tensor: float = 3e-3
    own: float = 5.0
    group_max: float = 2e-2
    tensor_max: float = 2.0

    @property
    def doubled(self) -> Tolerance:
        """Return a tolerance that is twice as large in everything.

        What lies between the two may be right on one machine and wrong on another.
        """
        return replace(
            self,
            group=2 * self.group,
            tensor=2 * self.tensor,
            own=2 * self.own,
            group_max=2 * self.group_max,
            tensor_max=2 * self.tensor_max,
        )

    def of_group(self, own: float) -> float:
        return max(self.group, min(self.own * own, self.group_max))

    def of_tensor(self, own: float) -> float:
        return max(self.tensor, min(self.own * own, self.tensor_max))


# Where machines differ and both run the forward pass in bfloat16, five steps at most in a segment:
# sums in another order then give up to 2.5e-2 and 1.7e-1. What changes less is not found.
MIXED_PRECISION = Tolerance(group=5e-2, tensor=5e-1, own=0.0)


@dataclass(frozen=True)
class ReplayVerdict:
    """Hold what a comparison has found.

    ``differences`` of the groups; ``worst`` is the tensor that differs most, and by how much.
    ``why``: what is wrong, for people; empty if nothing is. ``decided``: False if rounding alone
    may have led there, so that it is neither a proof of honest work nor of a cheat.
    """

    why: str
    differences: Mapping[str, float] = field(default_factory=dict)
    worst: str = ""
    worst_difference: float = 0.0
    decided: bool = True

    @property
    def passed(self) -> bool:
        return not self.why

    @property
    def difference(self) -> float:
        """Return the difference of the group that differs most."""
        return max(self.differences.values(), key=_rank, default=0.0)


@dataclass(frozen=True)
class Differences:
    """Hold differences of groups, and of tensors; ``why`` says what cannot be compared."""

    groups: Mapping[str, float] = field(default_factory=dict)
    tensors: Mapping[str, float] = field(default_factory=dict)
    why: str = ""


def differences(start: WorkCheckpoint, mine: WorkCheckpoint, theirs: WorkCheckpoint) -> Differences:
    sums: dict[str, list[float]] = {}
    tensors: dict[str, float] = {}
    for group, name, before, own, claimed in _pairs(start, mine, theirs):
        if own is None or claimed is None or not own.like(claimed):
            return Differences(why=f"{name} is {_shown(claimed)}, and here {_shown(own)}")
        squares = _squares(before, own, claimed)
        tensors[name] = _ratio(*squares)
        total = sums.setdefault(group, [0.0] * len(squares))
        sums[group] = [a + b for a, b in zip(total, squares, strict=True)]
    return Differences({group: _ratio(*total) for group, total in sums.items()}, tensors)


def compare(
    found: Differences, tolerance: Tolerance, own: Differences | None = None, values: str = ""
) -> ReplayVerdict:
    """Judge the differences that were found.

    ``own``: those of two ends of one's own. ``values``: a line about numbers that differ, or empty.
    """
    if found.why:
        return ReplayVerdict(found.why)
    own = own or Differences()
    why = [
        f"{group} differ by {away:.3g}"
        for group, away in found.groups.items()
        if not away <= tolerance.of_group(own.groups.get(group, 0.0))
    ]
    wrong = {
        name: away
        for name, away in found.tensors.items()
        if not away <= tolerance.of_tensor(own.tensors.get(name, 0.0))
    }
    tensors = wrong or found.tensors
    worst = max(tensors, key=lambda name: _rank(tensors[name]), default="")
    away = tensors.get(worst, 0.0)
    if wrong:
        why.append(f"{worst} differs by {away:.3g}")
    # What is no number is no rounding: nobody can submit such parameters.
    unsteady = [g for g, away in own.groups.items() if tolerance.group_max < away < math.inf]
    if why and unsteady:
        why.append(f"but so do {', '.join(unsteady)} of two replays here: segments are too long")
    return ReplayVerdict(
        "; ".join(why) or values, found.groups, worst, away, not (why and unsteady)
    )


def differing_values(mine: WorkCheckpoint, theirs: WorkCheckpoint, tolerance: Tolerance) -> str:
    """Return a line about the first number, or text, that differs; empty if none does."""
    lines = _differing(dict(mine.values), dict(theirs.values), tolerance.group)
    return next(iter(lines), "")


def _pairs(
    start: WorkCheckpoint, mine: WorkCheckpoint, theirs: WorkCheckpoint
) -> Iterator[tuple[str, str, Array | None, Array | None, Array | None]]:
    """Yield group, name, start and both ends of each tensor that either end has."""
    for part in ("parameters", "buffers", "inner"):
        a: Tensors = getattr(mine, part)
        b: Tensors = getattr(theirs, part)
        s: Tensors = getattr(start, part)
        for name in sorted(a.keys() | b.keys()):
            group = part if part != "inner" else f"inner {name.split('.', 2)[-1]}"
            yield group, f"{part} {name}"[:200], s.get(name), a.get(name), b.get(name)


def _squares(start: Array | None, mine: Array, theirs: Array) -> tuple[float, float, float, float]:
    """Return the sums of squares of a - b, a - s, b - s and s.

    s is zero where there was nothing yet.
    """
    a, b = mine.values(), theirs.values()
    s = start.values() if start is not None and start.like(mine) else np.zeros_like(a)
    with np.errstate(over="ignore", invalid="ignore"):
        away, here, there = (float(np.sum(d * d)) for d in (a - b, a - s, b - s))
        return away, here, there, float(np.sum(s * s))


def _ratio(away: float, here: float, there: float, before: float) -> float:
    """Return the difference for these sums; NaN where either has values that are no numbers."""
    if away == 0:
        return 0.0
    if math.isnan(away):
        return math.nan
    length = math.sqrt(min(here, there)) + FLOOR * math.sqrt(before)
    return math.sqrt(away) / length if length else math.inf


def _rank(difference: float) -> float:
    return math.inf if math.isnan(difference) else difference


def _shown(array: Array | None) -> str:
    return "missing" if array is None else f"{array.shape} {array.dtype}"


def _differing(mine: Plain, theirs: Plain, tolerance: float, name: str = "") -> list[str]:
    """Return a line for the first values that differ, or none."""
    if isinstance(mine, dict) and isinstance(theirs, dict) and mine.keys() == theirs.keys():
        lines = (_differing(mine[k], theirs[k], tolerance, f"{name}.{k}") for k in sorted(mine))
        return next((line for line in lines if line), [])
    if isinstance(mine, list) and isinstance(theirs, list) and len(mine) == len(theirs):
        lines = (
            _differing(a, b, tolerance, f"{name}.{n}")
            for n, (a, b) in enumerate(zip(mine, theirs, strict=True))
        )
        return next((line for line in lines if line), [])
    if isinstance(mine, float) and isinstance(theirs, float):
        is_same = math.isclose(mine, theirs, rel_tol=tolerance)
    else:
        is_same = type(mine) is type(theirs) and mine == theirs
    return [] if is_same else [f"{name.strip('.')} is {theirs!r:.80}, and here {mine!r:.80}"]


# ---------------------------------------------------------------- detection
#
# Compute how soon a trainer that cheats in some segments of its work is found. Pure.
#
# In each round ``validators`` of ``peers`` are drawn, with as many targets, all of them different
# (BTARD, arXiv 2106.11257), and each validator opens ``audits`` different segments of its target.
# A cheat is found when its validator is honest and one of these segments has it::
#
#     found in an audit = 1 - C(S - c, a) / C(S, a)        c / S if one segment is opened
#     found in a round  = validators / peers * (peers - faulty) / (peers - 1) * found in an audit
#
# Rounds are drawn independently, so 1 / p rounds pass on average until it is found, and after r of
# them it was found with probability 1 - (1 - p)^r.


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
