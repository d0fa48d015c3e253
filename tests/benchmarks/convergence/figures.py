"""What the rows of a line come to: means over seeds, differences of paired seeds, byte factors."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.convergence.methods import CEILING
from benchmarks.convergence.plan import LONGER, Plan
from benchmarks.convergence.results import Result, Results
from benchmarks.convergence.row import SCRATCH, Line
from benchmarks.convergence.training import ring_bytes

__all__ = [
    "Figure",
    "Summary",
    "fall_of_ceiling",
    "mean_of",
    "of_line",
    "paired_percent",
    "summaries",
]


@dataclass(frozen=True)
class Figure:
    """A mean over ``count`` seeds and its standard error, which one seed does not have."""

    mean: float
    error: float | None
    count: int
    least: float
    most: float

    def shown(self, digits: int, sign: str = "") -> str:
        text = f"{self.mean:{sign}.{digits}f}"
        return text if self.error is None else f"{text} ± {self.error:.{digits}f}"

    def ranged(self, digits: int) -> str:
        """Return the mean, and between what the seeds are."""
        text = f"{self.mean:.{digits}f}"
        if self.count == 1:
            return text
        return f"{text} ({self.least:.{digits}f} to {self.most:.{digits}f})"


@dataclass(frozen=True)
class Summary:
    """Hold what a line comes to: ``factor`` times fewer bytes than a float32 ring would have sent.

    ``whole_bytes`` and ``whole_factor`` are those of the whole run, with its warm start, in which
    gradients travel in float32 at every step.
    """

    line: Line
    rate: float
    results: tuple[Result, ...]  # of the seeds that have been run
    loss: Figure | None  # None: one of them diverged
    above: Figure | None  # percent above data-parallel, over the seeds that both have
    sent_bytes: float  # by each peer, in the method's own steps
    factor: float | None  # None: nothing is sent
    tokens: float | None  # the part with which data-parallel would come to the same loss

    @property
    def whole_bytes(self) -> float:
        line, elements = self.line, self.results[0].elements
        return ring_bytes(elements, line.workers, line.first_step) + self.sent_bytes

    @property
    def whole_factor(self) -> float | None:
        ring = ring_bytes(self.results[0].elements, self.line.workers, self.line.steps)
        return ring / self.whole_bytes if self.whole_bytes else None


def mean_of(values: Sequence[float]) -> Figure:
    several = len(values) > 1
    error = statistics.stdev(values) / len(values) ** 0.5 if several else None
    return Figure(statistics.fmean(values), error, len(values), min(values), max(values))


def paired_percent(mine: Sequence[Result], others: Sequence[Result]) -> Figure | None:
    """By how many percent the loss of ``mine`` is above that of ``others``, over equal seeds."""
    by_seed = {result.row.seed: result for result in others}
    pairs = [(result, by_seed[result.row.seed]) for result in mine if result.row.seed in by_seed]
    if not pairs or any(result.failed for pair in pairs for result in pair):
        return None
    return mean_of([100 * (one.loss / other.loss - 1) for one, other in pairs])


def of_line(plan: Plan, results: Results, line: Line) -> list[Result]:
    """Of the seeds that have been run at the best learning rate."""
    found = [results.get(row) for row in plan.rows(line, results)]
    return [result for result in found if result is not None]


def summaries(plan: Plan, results: Results) -> list[Summary]:
    """Of the lines that have at least one row, in the plan's order."""
    return [
        summary for line in plan.lines() if (summary := summary_of(plan, results, line)) is not None
    ]


def summary_of(plan: Plan, results: Results, line: Line) -> Summary | None:
    found = of_line(plan, results, line)
    if not found:
        return None
    longer = line.steps != plan.steps
    ceiling = of_line(plan, results, plan.line(line.start, CEILING, longer=longer))
    diverged = any(result.failed for result in found)
    sent = found[0].sent_bytes
    ring = ring_bytes(found[0].elements, line.workers, line.steps - line.first_step)
    above = paired_percent(found, ceiling)
    exponent = fall_of_ceiling(plan, results)
    return Summary(
        line=line,
        rate=found[0].row.lr,
        results=tuple(found),
        loss=None if diverged else mean_of([result.loss for result in found]),
        above=above,
        sent_bytes=sent,
        factor=ring / sent if sent else None,
        tokens=(1 + above.mean / 100) ** (-1 / exponent) if above and exponent else None,
    )


def fall_of_ceiling(plan: Plan, results: Results) -> float:
    """Return the exponent with which data-parallel's loss falls as its tokens grow, or 0.

    It is between the two horizons from scratch, over equal seeds; 0 where one is missing.
    """
    short, long = (
        of_line(plan, results, plan.line(SCRATCH, CEILING, longer=longer))
        for longer in (False, True)
    )
    figure = paired_percent(short, long)
    if figure is None or figure.mean <= 0:
        return 0.0
    return math.log(1 + figure.mean / 100) / math.log(LONGER)
