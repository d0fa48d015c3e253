"""Results of the convergence benchmark as they would be, without training."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from benchmarks.convergence.plan import Plan
from benchmarks.convergence.results import Point, Result, Results
from benchmarks.convergence.row import Row
from benchmarks.convergence.training import ring_bytes

__all__ = ["ELEMENTS", "filled", "result_of"]

ELEMENTS = 1000  # parameters of the model that nobody trains


def result_of(row: Row, loss: float = 2.0, factor: float = 100.0, failed: str = "") -> Result:
    """``factor``: times fewer bytes than a ring would send."""
    line = row.line
    sent = ring_bytes(ELEMENTS, line.workers, line.steps - line.first_step) / factor
    points = (Point(line.first_step, 5.5, 0.0), Point(line.steps, loss, sent))
    return Result(row, points[:1] if failed else points, ELEMENTS, 1.0, 1.0, "a machine", failed)


def filled(path: Path, plan: Plan, make: Callable[[Row], Result]) -> Results:
    """As after a whole run: ``make`` gives the result of each row."""
    results = Results(path)
    while pending := plan.pending(results):
        results.add(make(pending[0]))
    return results
