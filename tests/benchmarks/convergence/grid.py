"""Which inner rate, outer rate and outer momentum a method wants, with AdamW and with Muon inside.

    make bench-convergence-grid [ARGS="--size 0.1M --methods diloco"]

Three sizes, each of which builds on the one before: at 0.1M every setting of the grid with one
seed; at 0.8M the best two of each method with three; at 3M the best one with one. All rows clip
gradients at 1 and begin after a warm start of a quarter. What it will cost is printed before it
starts, and more than ``--hours`` of CPU are refused. What is finished is kept, and the same command
goes on.

The inner rate is found along one axis at a time. (A full grid of nine settings by three rates, run
for DiLoCo with AdamW, had the same best rate in eight of the nine.) At the first size the setting
in the middle of the grid is tried at all inner rates, the others at the best of these, and the best
two settings at all rates again. At a later size data-parallel is tried at all rates, and a method
at the one that is to data-parallel's as its own was at the size before. Data-parallel is tuned on
the same inner rates, and so are its batches of H steps.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf, log
from pathlib import Path
from typing import NamedTuple

from torch import nn
from torch.optim import Optimizer

from atoll.optim import NoLoCo
from atoll.optim.swarm import SwarmSession
from benchmarks.convergence.figures import mean_of, paired_percent
from benchmarks.convergence.methods import Case, Entry, Make, diloco, streaming
from benchmarks.convergence.plan import worker_steps
from benchmarks.convergence.results import Result, Results
from benchmarks.convergence.row import WARM, Line, Row
from benchmarks.convergence.runner import add_options, one_row, run_pending
from benchmarks.convergence.sizes import SIZES
from benchmarks.convergence.table import markdown, sources
from benchmarks.convergence.training import Run

ROOT = Path(__file__).parents[3]
KEPT = ROOT / "docs" / "convergence" / "grid"
CACHE = ROOT / ".cache" / "convergence"
STEPS, WORKERS, H = 1200, 4, 30
ADAMW, MUON = "adamw", "muon"
MUON_RATES = 2  # times AdamW's: its best rate is two to four times as large at these sizes
CEILING, LARGE_BATCH = "data-parallel", "large-batch"
HOURS = 12.0
LOOKED_AT = 2  # settings of a family that are tried at all inner rates, besides the middle


class Stage(NamedTuple):
    """Say which settings a size has, by those that were best at the size before it."""

    before: str
    best: int  # of each method and inner optimizer; 0: all
    seeds: int
    methods: tuple[str, ...]
    step_s: float  # CPU of a worker's step, until it has been measured here


ALL = (CEILING, LARGE_BATCH, "diloco", "streaming", "noloco")
STAGES = {
    "0.1M": Stage("", 0, 1, ALL, 0.009),
    "0.1M-manual": Stage("0.1M", 2, 1, ALL, 0.009),
    "0.8M-clip": Stage("0.1M", 2, 3, ALL, 0.035),
    "0.8M-manual": Stage("0.8M-clip", 1, 1, ALL, 0.035),
    "3M": Stage("0.8M-clip", 1, 1, (CEILING, "diloco", "streaming"), 0.12),
}


class Setting(NamedTuple):
    """Name what is tried: ``diloco-muon@0.7,0.6`` has an outer rate of 0.7, a momentum of 0.6."""

    method: str
    inner: str
    outer_lr: float = 0.0  # 0: there is no outer step
    momentum: float = 0.0

    @property
    def name(self) -> str:
        outer = f"@{self.outer_lr:g},{self.momentum:g}" if self.outer_lr else ""
        return f"{self.method}-{self.inner}{outer}"

    @property
    def family(self) -> tuple[str, str]:
        return self.method, self.inner

    @property
    def middle(self) -> Setting:
        """Return the setting in the middle of the grid of its family: the one, if there is one."""
        rates, momenta = GRIDS[self.method]
        if not rates:
            return Setting(self.method, self.inner)
        lr, momentum = rates[len(rates) // 2], momenta[len(momenta) // 2]
        return Setting(self.method, self.inner, lr, momentum)

    @classmethod
    def of(cls, name: str) -> Setting:
        """Return the inverse of ``name``; raise ValueError."""
        found = re.fullmatch(r"(?P<method>.+)-(?P<inner>adamw|muon)(@(?P<lr>.+),(?P<mu>.+))?", name)
        if found is None or found["method"] not in GRIDS:
            raise ValueError(f"not the name of a setting: {name[:80]!r}")
        return cls(
            found["method"], found["inner"], float(found["lr"] or 0), float(found["mu"] or 0)
        )

    def rates(self, size: str) -> tuple[float, ...]:
        """Return the inner rates that are tried; a batch of many steps bears larger ones."""
        times = MUON_RATES if self.inner == MUON else 1
        grid = SIZES[size].rates
        if self.method == LARGE_BATCH:
            grid = (*grid[1:], 2 * grid[-1])
        return tuple(times * rate for rate in grid)


def noloco(*, outer_lr: float, outer_momentum: float) -> Make:
    def make(model: nn.Module, inner: Optimizer, session: SwarmSession, case: Case) -> NoLoCo:
        options = {"outer_lr": outer_lr, "outer_momentum": outer_momentum}
        return NoLoCo(model, inner, case.sync_every, session, **options)

    return make


def diloco_int4(*, outer_lr: float, outer_momentum: float) -> Make:
    return diloco("int4", outer_lr=outer_lr, outer_momentum=outer_momentum)


def streaming_int4(*, outer_lr: float, outer_momentum: float) -> Make:
    return streaming(codec="int4", local=0.0, outer_lr=outer_lr, outer_momentum=outer_momentum)


MAKERS = {"diloco": diloco_int4, "streaming": streaming_int4, "noloco": noloco}
# Outer rates and momenta. Published: 0.7 and 0.9; with Muon 0.7 and 0.6 (arXiv 2505.23725).
GRIDS: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    CEILING: ((), ()),
    LARGE_BATCH: ((), ()),
    "diloco": ((0.4, 0.7, 1.0), (0.6, 0.8, 0.9)),
    "streaming": ((0.4, 0.7, 1.0), (0.6, 0.8, 0.9)),
    "noloco": ((0.7, 1.0, 1.4), (0.3, 0.5, 0.7)),
}
LABELS = {
    CEILING: "data-parallel",
    LARGE_BATCH: f"data-parallel, batches of {H} steps",
    "diloco": "DiLoCo int4",
    "streaming": "StreamingDiLoCo int4, delay 1, local 0",
    "noloco": "NoLoCo bfloat16",
}
INNERS = {ADAMW: "AdamW", MUON: "Muon"}


class SettingRun(Run):
    """Train a row whose method is a :class:`Setting`."""

    def entry_of(self, method: str) -> Entry:
        setting = Setting.of(method)
        make = MAKERS.get(setting.method)
        return Entry(
            name=method,
            label=method,
            make=make and make(outer_lr=setting.outer_lr, outer_momentum=setting.momentum),
            muon=setting.inner == MUON,
            accumulates=setting.method == LARGE_BATCH,
        )


@dataclass(frozen=True)
class Grid:
    """Say which rows a size has, from what has been measured so far."""

    size: str
    results: Results
    methods: Sequence[str] = ALL

    @property
    def stage(self) -> Stage:
        return STAGES[self.size]

    def line(self, setting: Setting) -> Line:
        h = 1 if setting.method == CEILING else H
        return Line(self.size, WARM, STEPS, WORKERS, setting.name, h)

    def families(self) -> Iterator[tuple[str, str]]:
        for method in self.stage.methods:
            for inner in INNERS:
                if method in self.methods:
                    yield method, inner

    def settings(self, method: str, inner: str) -> list[Setting]:
        """Return those of this size: all of the grid, or the best of the size before it."""
        if self.stage.before:
            before = Grid(self.stage.before, self.results, self.methods)
            return [setting for setting, _, _ in before.ranking(method, inner)][: self.stage.best]
        rates, momenta = GRIDS[method]
        found = [Setting(method, inner, rate, momentum) for rate in rates for momentum in momenta]
        return found or [Setting(method, inner)]

    def tuning(self, setting: Setting) -> list[Row]:
        """Return the rows of seed 0 as far as they are known: others may have to be run first."""
        rates = self._carried_rates(setting) if self.stage.before else self._first_rates(setting)
        return self._rows(setting, rates)

    def _rows(self, setting: Setting, rates: Sequence[float]) -> list[Row]:
        return [Row(self.line(setting), rate, 0) for rate in rates]

    def _first_rates(self, setting: Setting) -> tuple[float, ...]:
        """Return all inner rates in the middle of the grid, else the best of these.

        The two settings that are best at that rate are tried at all.
        """
        every, middle = setting.rates(self.size), setting.middle
        if setting == middle:
            return every
        found = [self.results.get(row) for row in self._rows(middle, every)]
        if None in found:
            return ()
        ended = [result for result in found if result and not result.failed]
        if not ended:
            return every  # the middle is a bad place to look from
        rate = min(ended, key=lambda result: result.loss).row.lr
        settings = self.settings(*setting.family)
        losses = [(self._loss_at(each, rate), each) for each in settings]
        if any(loss is None for loss, _ in losses):
            return (rate,)
        two = [each for loss, each in sorted(losses, key=lambda pair: pair[0] or 0.0)][:LOOKED_AT]
        return every if setting in two else (rate,)

    def _loss_at(self, setting: Setting, rate: float) -> float | None:
        [row] = self._rows(setting, [rate])
        result = self.results.get(row)
        return result and (inf if result.failed else result.loss)

    def _carried_rates(self, setting: Setting) -> tuple[float, ...]:
        """Return all inner rates for data-parallel, and one for a method.

        It is to data-parallel's as it was at the size before.
        """
        every, ceiling = setting.rates(self.size), Setting(CEILING, setting.inner)
        if setting == ceiling:
            return every
        before = Grid(self.stage.before, self.results, self.methods)
        now, was, mine = self.best(ceiling), before.best(ceiling), before.best(setting)
        if now is None or was is None or mine is None:
            return ()
        wanted = now.row.lr * mine.row.lr / was.row.lr
        return (min(every, key=lambda rate: abs(log(rate / wanted))),)

    def best(self, setting: Setting) -> Result | None:
        """Return the best of seed 0; None until its rates have been tried, or if all diverged."""
        tuning = self.tuning(setting)
        if not tuning or any(self.results.get(row) is None for row in tuning):
            return None
        found = [self.results.get(row) for row in self._rows(setting, setting.rates(self.size))]
        ended = [result for result in found if result is not None and not result.failed]
        return min(ended, key=lambda result: result.loss, default=None)

    def ranking(self, method: str, inner: str) -> list[tuple[Setting, float, Result]]:
        """Return settings, their losses and what was best of seed 0, the best first.

        The loss is the mean of all seeds, where all of them have been run.
        """
        found = [(each, self.best(each)) for each in self.settings(method, inner)]
        known = [(each, self._loss(each, best), best) for each, best in found if best is not None]
        return sorted(known, key=lambda each: each[1])

    def _loss(self, setting: Setting, best: Result) -> float:
        seeds = self.of_seeds(setting)
        whole = len(seeds) == self.stage.seeds
        return mean_of([each.loss for each in seeds]).mean if whole else best.loss

    def of_seeds(self, setting: Setting) -> list[Result]:
        """Return what its seeds gave at the rate that was best with seed 0."""
        best = self.best(setting)
        rows = [Row(best.row.line, best.row.lr, n) for n in range(self.stage.seeds)] if best else []
        return [result for row in rows if (result := self.results.get(row)) is not None]

    def rows(self) -> list[Row]:
        """Return all that are known so far, done or not, data-parallel first."""
        settings = [each for family in self.families() for each in self.settings(*family)]
        found = [row for setting in settings for row in self.rows_of(setting)]
        return sorted(found, key=lambda row: row.seed)

    def rows_of(self, setting: Setting) -> list[Row]:
        """Return the rows of a setting that are known so far, done or not."""
        tuning, best = self.tuning(setting), self.best(setting)
        if best is None:
            return tuning
        more = range(1, self.stage.seeds)
        return [*tuning, *(Row(best.row.line, best.row.lr, seed) for seed in more)]

    def pending(self) -> list[Row]:
        return [row for row in self.rows() if self.results.get(row) is None]

    def hours(self) -> float:
        """Return the CPU hours of what is left at most, what is not known yet included."""
        steps = sum(worker_steps(row.line) for row in self.pending())
        for family in self.families():
            if settings := self.settings(*family):
                steps += worker_steps(self.line(settings[0])) * self._unknown(settings)
        return steps * self.step_s() / 3600

    def _unknown(self, settings: Sequence[Setting]) -> int:
        """Return how many rows of a family will be known at most when others have been run."""
        begun = [self.tuning(each) for each in settings]
        left = [rows for rows in begun if not rows or None in map(self.results.get, rows)]
        more = sum(self.stage.seeds - 1 + (not rows) for rows in left)
        looked_at = LOOKED_AT * (len(settings[0].rates(self.size)) - 1)
        return more + (looked_at if left and not self.stage.before and len(settings) > 1 else 0)

    def step_s(self) -> float:
        done = [each for each in self.results.all() if each.row.line.size == self.size]
        steps = sum(worker_steps(each.row.line) for each in done)
        return sum(each.cpu_s for each in done) / steps if steps else self.stage.step_s


HEAD = """# Inner rates, outer rates and momenta

Generated by `make bench-convergence-grid` from `results.jsonl`; do not edit it here.

{workers} workers, {steps:,} steps of which the first quarter is data-parallel, H={h}, gradients
clipped at 1. Every figure is the held-out loss at the best inner rate of its grid, and by how much
it is above data-parallel with the same inner optimizer, tuned in the same way; `*`: that rate is at
the edge of its grid. Where a line has several seeds, they are paired, and ± is the standard error.
"""


def document(results: Results) -> str:
    parts = [HEAD.format(workers=WORKERS, steps=STEPS, h=H)]
    for size in STAGES:
        grid = Grid(size, results)
        families = [family for family in grid.families() if grid.ranking(*family)]
        if not families:
            continue
        shape = SIZES[size]
        parts.append(f"## {size}: width {shape.width}, depth {shape.depth}, the {shape.text}\n")
        parts += sources(each for each in results.all() if each.row.line.size == size)
        parts.append(markdown(best_table(grid, families)))
        if not grid.stage.before:
            parts += [part for family in families for part in outer_table(grid, *family)]
    return "\n".join(parts)


def best_table(grid: Grid, families: Sequence[tuple[str, str]]) -> list[tuple[str, ...]]:
    """Return the settings of a size, of a whole grid the best two."""
    table = [("method", "inner", "outer rate, momentum", "inner rate", "loss", "above", "seeds")]
    for method, inner in families:
        ceiling = grid.of_seeds(Setting(CEILING, inner))
        for setting, _, best in grid.ranking(method, inner)[:2]:
            mine = grid.of_seeds(setting)
            above = paired_percent(mine, ceiling)
            outer = f"{setting.outer_lr:g}, {setting.momentum:g}" if setting.outer_lr else ""
            table.append(
                (
                    LABELS[method],
                    INNERS[inner],
                    outer,
                    edged(grid, setting, best),
                    mean_of([each.loss for each in mine]).ranged(3),
                    f"{above.shown(1, '+')} %" if above and method != CEILING else "",
                    str(len(mine)),
                )
            )
    return table


def outer_table(grid: Grid, method: str, inner: str) -> list[str]:
    """Return a table of outer rates by momenta, if the method has an outer step."""
    rates, momenta = GRIDS[method]
    if not rates:
        return []
    ceiling = grid.best(Setting(CEILING, inner))
    table = [("momentum", *(f"outer rate {rate:g}" for rate in rates))]
    for momentum in momenta:
        cells = []
        for rate in rates:
            setting = Setting(method, inner, rate, momentum)
            best = grid.best(setting)
            above = paired_percent([best], [ceiling]) if best and ceiling else None
            percent = f" ({above.shown(1, '+')} %)" if above else ""
            cells.append(
                f"{best.loss:.3f}{percent} at {edged(grid, setting, best)}" if best else ""
            )
        table.append((f"{momentum:g}", *cells))
    return [f"### {LABELS[method]}, {INNERS[inner]}\n", markdown(table)]


def edged(grid: Grid, setting: Setting, best: Result) -> str:
    tried = setting.rates(grid.size)
    return f"{best.row.lr:g}" + ("*" if best.row.lr in (tried[0], tried[-1]) else "")


def main() -> int:
    chosen = parsed()
    if chosen.one:
        row = Row.of(chosen.one)
        text = SIZES[row.line.size].text
        return one_row(lambda *given: SettingRun(row, *given).result(), chosen.cache, text)
    results = Results(chosen.out / "results.jsonl")
    grid = Grid(chosen.size, results, chosen.methods)
    before = grid.stage.before
    if before and (left := len(Grid(before, results, chosen.methods).pending())):
        print(
            f"{chosen.size} is of the best of {before}, of which {left} rows are left: run it first"
        )
        return 2
    hours, rows = grid.hours(), grid.pending()
    print(
        f"{chosen.size}: {len(rows)} rows now, {hours:.1f} hours of CPU in all, at "
        f"{1e3 * grid.step_s():.0f} ms for a worker's step",
        flush=True,
    )
    if chosen.list:
        print("\n".join(row.name for row in rows))
        return 0
    if hours > chosen.hours:
        print(f"that is more than {chosen.hours:g}: say --hours, or fewer --methods")
        return 2
    return run_pending("benchmarks.convergence.grid", chosen, results, grid.pending, document)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="make bench-convergence-grid", description=(__doc__ or "").splitlines()[0]
    )
    a = parser.add_argument
    a("--size", default="0.1M", choices=STAGES, help="of the model (default: %(default)s)")
    a("--methods", nargs="+", default=ALL, choices=ALL, metavar="METHOD", help=", ".join(ALL[1:]))
    a("--hours", type=float, default=HOURS, help="of CPU at most (default: %(default)s)")
    add_options(parser, KEPT, CACHE)
    chosen = parser.parse_args()
    chosen.methods = [each for each in ALL if each in (CEILING, *chosen.methods)]
    return chosen


if __name__ == "__main__":
    sys.exit(main())
