"""How far local steps that were taken again are from what a trainer claims. Pure.

Tensors are compared in groups: the parameters, the buffers, and each kind of number that the inner
optimizers keep. With a the own end, b the claimed one and s the start, of a tensor or of a group::

    difference = ||a - b|| / (||b - s|| + FLOOR ||s||)

that is, relative to what the steps have moved. On the machine that took them it is zero.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from atoll.optim.replay.checkpoint import Checkpoint, Plain
from atoll.optim.replay.tensors import Array, Tensors

__all__ = ["MIXED_PRECISION", "Tolerance", "Verdict", "compare"]

# Rounding to float32 alone moves a tensor by that much: steps at a learning rate of 0 are no cheat.
FLOOR = 2.0**-24


@dataclass(frozen=True)
class Tolerance:
    """``group``: of parameters, buffers and each kind of state as a whole. ``tensor``: of each
    tensor by itself, where what others have moved hides nothing. docs/log.md has what both were
    chosen from."""

    group: float = 1e-3
    tensor: float = 3e-3


# Where machines differ and both run the forward pass in bfloat16, five steps at most in a segment:
# sums in another order then give up to 1.7e-2 and 5e-2. What changes less is not found.
MIXED_PRECISION = Tolerance(group=5e-2, tensor=2e-1)


@dataclass(frozen=True)
class Verdict:
    """``differences`` of the groups; ``worst`` is the tensor that differs most, and by how much.
    ``why``: what is wrong, for people; empty if nothing is."""

    why: str
    differences: Mapping[str, float] = field(default_factory=dict)
    worst: str = ""
    worst_difference: float = 0.0

    @property
    def passed(self) -> bool:
        return not self.why

    @property
    def difference(self) -> float:
        """Of the group that differs most."""
        return max(self.differences.values(), key=_rank, default=0.0)


def compare(
    start: Checkpoint,
    mine: Checkpoint,
    theirs: Checkpoint,
    tolerance: Tolerance,
    *,
    values: bool = True,
) -> Verdict:
    """``values``: whether numbers are compared as well, not tensors only."""
    sums: dict[str, list[float]] = {}
    of_tensors: dict[str, float] = {}
    for group, name, before, own, claimed in _pairs(start, mine, theirs):
        if own is None or claimed is None or not own.like(claimed):
            return Verdict(f"{name} is {_shown(claimed)}, and here {_shown(own)}")
        squares = _squares(before, own, claimed)
        of_tensors[name] = _ratio(*squares)
        total = sums.setdefault(group, [0.0, 0.0, 0.0])
        sums[group] = [a + b for a, b in zip(total, squares, strict=True)]
    groups = {group: _ratio(*total) for group, total in sums.items()}
    worst = max(of_tensors, key=lambda name: _rank(of_tensors[name]), default="")
    away = of_tensors.get(worst, 0.0)
    why = [f"{g} differ by {d:.3g}" for g, d in groups.items() if not d <= tolerance.group]
    if not away <= tolerance.tensor:
        why.append(f"{worst} differs by {away:.3g}")
    if values and not why:
        why += _differing(dict(mine.values), dict(theirs.values), tolerance.group)
    return Verdict("; ".join(why), groups, worst, away)


def _pairs(
    start: Checkpoint, mine: Checkpoint, theirs: Checkpoint
) -> Iterator[tuple[str, str, Array | None, Array | None, Array | None]]:
    """Group, name, and both ends of each tensor that either has."""
    for part in ("parameters", "buffers", "inner"):
        a: Tensors = getattr(mine, part)
        b: Tensors = getattr(theirs, part)
        s: Tensors = getattr(start, part)
        for name in sorted(a.keys() | b.keys()):
            group = part if part != "inner" else f"inner {name.split('.', 2)[-1]}"
            yield group, f"{part} {name}"[:200], s.get(name), a.get(name), b.get(name)


def _squares(start: Array | None, mine: Array, theirs: Array) -> tuple[float, float, float]:
    """Of a - b, b - s and s; s is zero where there was nothing yet."""
    a, b = mine.values(), theirs.values()
    s = start.values() if start is not None and start.like(mine) else np.zeros_like(a)
    with np.errstate(over="ignore", invalid="ignore"):
        return float(np.sum((a - b) ** 2)), float(np.sum((b - s) ** 2)), float(np.sum(s**2))


def _ratio(away: float, moved: float, before: float) -> float:
    """NaN where either has values that are no numbers."""
    if away == 0:
        return 0.0
    length = math.sqrt(moved) + FLOOR * math.sqrt(before)
    return math.sqrt(away) / length if length else math.inf


def _rank(difference: float) -> float:
    return math.inf if math.isnan(difference) else difference


def _shown(array: Array | None) -> str:
    return "missing" if array is None else f"{array.shape} {array.dtype}"


def _differing(mine: Plain, theirs: Plain, tolerance: float, name: str = "") -> list[str]:
    """A line for the first values that differ."""
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
