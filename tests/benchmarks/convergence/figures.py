"""What the rows of a line come to: means over seeds, differences of paired seeds, byte factors."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.convergence.methods import CEILING
from benchmarks.convergence.plan import Plan
from benchmarks.convergence.results import Result, Results
from benchmarks.convergence.row import Line
from benchmarks.convergence.training import ring_bytes

__all__ = ["Figure", "Summary", "mean_of", "of_line", "paired_percent", "summaries"]


@dataclass(frozen=True)
class Figure:
    """A mean over ``count`` seeds and its standard error, which one seed does not have."""

    mean: float
    error: float | None
    count: int

    def shown(self, digits: int, sign: str = "") -> str:
        text = f"{self.mean:{sign}.{digits}f}"
        return text if self.error is None else f"{text} ± {self.error:.{digits}f}"


@dataclass(frozen=True)
class Summary:
    """Of one line: ``factor`` times fewer bytes than a float32 ring would have sent."""

    line: Line
    rate: float
    results: tuple[Result, ...]  # of the seeds that have been run
    loss: Figure | None  # None: one of them diverged
    above: Figure | None  # percent above data-parallel, over the seeds that both have
    sent_bytes: float  # by each peer, in the method's own steps
    factor: float | None  # None: nothing is sent


def mean_of(values: Sequence[float]) -> Figure:
    several = len(values) > 1
    error = statistics.stdev(values) / len(values) ** 0.5 if several else None
    return Figure(statistics.fmean(values), error, len(values))


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
    return Summary(
        line=line,
        rate=found[0].row.lr,
        results=tuple(found),
        loss=None if diverged else mean_of([result.loss for result in found]),
        above=paired_percent(found, ceiling),
        sent_bytes=sent,
        factor=ring / sent if sent else None,
    )
