"""Which rows the benchmark has, and in which order: first what has a bar.

A learning rate is tuned once for each method, with seed 0 at the smaller H after the warm start, on
the grid of the model, and then stands for its other lines. Methods that differ in nothing but the
codec share it, so that their seeds are pairs. Lines with a bar, and those they are held against,
have three seeds, the others one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.convergence.methods import CEILING, FLOOR, METHODS, Entry, LossBar
from benchmarks.convergence.results import Results
from benchmarks.convergence.row import SCRATCH, WARM, Line, Row
from benchmarks.convergence.sizes import SIZES

__all__ = ["LONGER", "Plan", "quick_plan", "worker_steps"]

LONGER = 2  # times as many steps of the rows from scratch that have a bar
QUICK_STEPS, QUICK_SYNC_EVERY = 60, 10


@dataclass(frozen=True, kw_only=True)
class Plan:
    """``sync_every``: the sizes of H, of which the first is that of the bars."""

    size: str = "0.8M"
    steps: int = 1200
    workers: int = 4
    sync_every: tuple[int, ...] = (30, 100)
    seeds: int = 3
    all_seeds: bool = False  # for lines without a bar as well
    starts: tuple[str, ...] = (WARM, SCRATCH)  # the first is that of the tuning
    tunes: bool = True  # or else the middle of each grid is taken

    # ------------------------------------------------------------ lines

    def line(self, start: str, method: str, sync_every: int = 0, longer: bool = False) -> Line:
        """With the first size of H, if none is given."""
        entry = METHODS[method]
        rounds = entry.accumulates or (entry.make is not None and not entry.every_step)
        steps = self.steps * (LONGER if longer else 1)
        h = (sync_every or self.sync_every[0]) if rounds else 1
        return Line(self.size, start, steps, self.workers, method, h)

    def lines(self) -> list[Line]:
        """All, without repetition, in the order in which they should be run."""
        found = [self.line(self.starts[0], CEILING), *self.barred()]
        for start in self.starts:
            for h in self.sync_every:
                first = (start, h) == (self.starts[0], self.sync_every[0])
                entries = [e for e in METHODS.values() if not (e.bars_only and self.barred())]
                names = [entry.name for entry in entries if first or not entry.one_line]
                found += [self.line(start, name, h) for name in names]
        return list(dict.fromkeys(found))

    def bar_lines(self, entry: Entry, bar: LossBar) -> tuple[Line, Line]:
        """What is held against what."""
        start = SCRATCH if bar.from_scratch else WARM
        mine = self.line(start, entry.name, longer=bar.from_scratch)
        return mine, self.line(start, bar.against, longer=bar.from_scratch)

    def barred(self) -> list[Line]:
        """The lines of all bars on losses, the compared ones beside each other."""
        if len(self.starts) < 2:
            return []
        bars = [(entry, bar) for entry in METHODS.values() for bar in entry.bars]
        pairs = [self.bar_lines(entry, bar) for entry, bar in bars if isinstance(bar, LossBar)]
        return [line for pair in pairs for line in pair]

    # ------------------------------------------------------------ learning rates

    def rates(self, method: str) -> tuple[float, ...]:
        entry = METHODS[method]
        if entry.tuned_as:
            return self.rates(entry.tuned_as)
        grid = entry.rates or SIZES[self.size].rates
        return grid if self.tunes else (grid[len(grid) // 2],)

    def tuning(self, method: str) -> list[Row]:
        """The rows that decide on a method's learning rate."""
        tuned = METHODS[method].tuned_as or method
        line = self.line(self.starts[0], tuned)
        return [Row(line, rate, seed=0) for rate in self.rates(method)]

    def best_rate(self, method: str, results: Results) -> float | None:
        """None until all of the grid has been tried, or where all of it diverged."""
        rows = self.tuning(method)
        if len(rows) == 1:
            return rows[0].lr
        found = [results.get(row) for row in rows]
        ended = [result for result in found if result is not None]
        if len(ended) < len(rows) or all(result.failed for result in ended):
            return None
        return min(ended, key=lambda result: result.loss).row.lr

    # ------------------------------------------------------------ rows

    def rows(self, line: Line, results: Results) -> list[Row]:
        """Those of the best learning rate, as far as it is known."""
        rate = self.best_rate(line.method, results)
        if rate is None:
            return []
        return [Row(line, rate, seed) for seed in range(self.seeds_of(line))]

    def seeds_of(self, line: Line) -> int:
        return self.seeds if self.all_seeds or line in self.barred() else 1

    def pending(self, results: Results, pattern: str = "") -> list[Row]:
        """What can be run now, the most important first; lines in whose name ``pattern`` is found,
        and what decides on their learning rates."""
        return list(dict.fromkeys(self._pending(results, pattern)))

    def _pending(self, results: Results, pattern: str) -> Iterator[Row]:
        for line in self.lines():
            if re.search(pattern, line.name):
                wanted = self.rows(line, results) or self.tuning(line.method)
                yield from (row for row in wanted if results.get(row) is None)

    def later(self, results: Results, pattern: str = "") -> list[Line]:
        """A line for each row that waits until its learning rate is known."""
        found = []
        for line in self.lines():
            tuning = self.tuning(line.method)
            waits = len(tuning) > 1 and any(results.get(row) is None for row in tuning)
            if waits and re.search(pattern, line.name):
                found += [line] * (self.seeds_of(line) - (tuning[0].line == line))
        return found


def quick_plan() -> Plan:
    """Every method for a few steps from scratch, without tuning."""
    return Plan(
        size="quick",
        steps=QUICK_STEPS,
        sync_every=(QUICK_SYNC_EVERY,),
        seeds=1,
        starts=(SCRATCH,),
        tunes=False,
    )


def worker_steps(line: Line) -> int:
    """Forward and backward passes of a worker's batch that a row costs, without a warm start."""
    workers = 1 if line.method == FLOOR else line.workers
    return workers * (line.steps - line.first_step)
