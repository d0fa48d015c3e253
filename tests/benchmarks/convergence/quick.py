"""`--quick`: every method for a few steps, and what is wrong with what came of it."""

from __future__ import annotations

import re

from benchmarks.convergence.methods import METHODS
from benchmarks.convergence.plan import Plan
from benchmarks.convergence.results import Results

__all__ = ["faults"]


def faults(plan: Plan, results: Results, pattern: str = "") -> list[str]:
    """A sentence for each row that is missing, has diverged, or has not beaten the untrained model
    by the margin of its method; of the lines in whose name ``pattern`` is found."""
    found = []
    lines = [line for line in plan.lines() if re.search(pattern, line.name)]
    for row in (row for line in lines for row in plan.rows(line, results)):
        entry, result = METHODS[row.line.method], results.get(row)
        if result is None:
            found.append(f"{entry.label} has no result")
        elif result.failed:
            found.append(f"{entry.label} has diverged: {result.failed}")
        else:
            untrained, trained = result.points[0].loss, result.loss
            if untrained - trained < entry.quick_margin:
                found.append(
                    f"{entry.label} came from {untrained:.3f} to {trained:.3f} nats per byte; "
                    f"{entry.quick_margin:g} less is wanted"
                )
    return found
