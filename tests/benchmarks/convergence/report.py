"""Writes what has been measured so far: the document with its tables, and a plot for each start."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from benchmarks.convergence.figures import Summary, summaries
from benchmarks.convergence.methods import CEILING, FLOOR, METHODS
from benchmarks.convergence.plan import Plan
from benchmarks.convergence.plot import Level, Mark, plot
from benchmarks.convergence.results import Results
from benchmarks.convergence.table import (
    choices,
    document,
    groups,
    heading_of,
    losses,
    plot_name,
)

__all__ = ["BEGIN", "END", "front", "replace_file", "write_choices", "write_losses", "write_report"]

AXES = (
    "bytes sent per peer in the method's own steps (encoded payload, logarithmic)",
    "held-out loss, nats per byte",
)
# Around the table in docs/choosing.md; empty lines, or the table would be part of a comment.
BEGIN = (
    "<!-- `make bench-convergence` writes this table from docs/convergence/results.jsonl -->\n\n"
)
END = "\n<!-- as far as here -->\n"
HIGHEST = 1.25  # of the ceiling's loss; what is worse lies on the upper edge: bars end at 20 %


def write_choices(path: Path, plan: Plan, results: Results) -> None:
    """Write the table between the marks in docs/choosing.md."""
    before, begin, rest = path.read_text("utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"{path} has no marks around its table")  # what is below would be lost
    replace_file(path, f"{before}{BEGIN}{choices(plan, results)}{END}{after}")


def write_losses(path: Path, plan: Plan, results: Results) -> None:
    """Write the same figures for `atoll plan`, which ships without docs/."""
    replace_file(path, losses(plan, results))


def write_report(folder: Path, plan: Plan, results: Results) -> None:
    """``README.md`` and the plots; each file is replaced as a whole."""
    folder.mkdir(parents=True, exist_ok=True)
    replace_file(folder / "README.md", document(plan, results))
    for start, steps, lines in groups(summaries(plan, results)):
        replace_file(
            folder / plot_name(start, steps), picture(plan, heading_of(start, steps), lines)
        )


def picture(plan: Plan, title: str, lines: Sequence[Summary]) -> str:
    """One mark for each line that sends anything and has not diverged."""
    losses = {each.line.method: each.loss.mean for each in lines if each.loss is not None}
    levels = [
        Level(losses[name], f"{METHODS[name].label} {losses[name]:.3f}")
        for name in (FLOOR, CEILING)
        if name in losses
    ]
    marks = [
        Mark(
            each.sent_bytes,
            each.loss.mean,
            METHODS[each.line.method].label,
            shape=shape_of(plan, each.line.sync_every),
            colour=list(METHODS).index(each.line.method),
        )
        for each in lines
        if each.loss is not None and each.sent_bytes > 0
    ]
    y_most = HIGHEST * losses[CEILING] if CEILING in losses else float("inf")
    shapes = [f"H = {h}" for h in plan.sync_every[:2]] + ["at every step"]
    return plot(title, AXES, marks, levels, shapes, y_most, front(marks))


def front(marks: Sequence[Mark]) -> list[Mark]:
    """Return those that none beats in both bytes and loss (Pareto), the fewest bytes first."""
    found: list[Mark] = []
    for mark in sorted(marks, key=lambda one: (one.x, one.y)):
        if not found or mark.y < found[-1].y:
            found.append(mark)
    return found


def shape_of(plan: Plan, sync_every: int) -> int:
    return plan.sync_every.index(sync_every) if sync_every in plan.sync_every[:2] else 2


def replace_file(path: Path, text: str) -> None:
    """As a whole: nobody finds half of it."""
    part = path.with_suffix(".part")
    part.write_text(text, "utf-8")
    os.replace(part, path)
