"""Whether the bars of the methods are met, by what has been measured so far."""

from __future__ import annotations

from typing import NamedTuple

from benchmarks.convergence.figures import of_line, paired_percent
from benchmarks.convergence.methods import METHODS, BytesBar, Entry, LossBar
from benchmarks.convergence.plan import Plan
from benchmarks.convergence.results import Results
from benchmarks.convergence.row import WARM
from benchmarks.convergence.training import ring_bytes

__all__ = ["MET", "MISSED", "OPEN", "Verdict", "verdicts"]

MET, MISSED, OPEN = "met", "**not met**", "open"


class Verdict(NamedTuple):
    what: str
    bar: str
    measured: str
    said: str


def verdicts(plan: Plan, results: Results) -> list[Verdict]:
    return [
        loss_verdict(plan, results, entry, bar)
        if isinstance(bar, LossBar)
        else bytes_verdict(plan, results, entry, bar)
        for entry in METHODS.values()
        for bar in entry.bars
    ]


def loss_verdict(plan: Plan, results: Results, entry: Entry, bar: LossBar) -> Verdict:
    """Open until both have all seeds; a row that diverged is a bar that is missed."""
    line, other_line = plan.bar_lines(entry, bar)
    mine, others = of_line(plan, results, line), of_line(plan, results, other_line)
    start = f"from scratch, {line.steps} steps" if bar.from_scratch else "after the warm start"
    what = f"{entry.label}, H={line.sync_every}, {start}: loss above {METHODS[bar.against].label}"
    wanted = f"≤ {bar.percent:g} %"
    if bar.errors:
        wanted += f" or {bar.errors:g} standard errors"
    figure = paired_percent(mine, others)
    seeds = plan.seeds_of(line)
    if figure is None:
        diverged = any(result.failed for result in (*mine, *others))
        return Verdict(what, wanted, "diverged" if diverged else "", MISSED if diverged else OPEN)
    measured = f"{figure.shown(2, '+')} %, {figure.count} of {seeds} seeds"
    if figure.count < seeds:
        return Verdict(what, wanted, measured, OPEN)
    most = max(bar.percent, bar.errors * (figure.error or 0.0))
    return Verdict(what, wanted, measured, MET if figure.mean <= most else MISSED)


def bytes_verdict(plan: Plan, results: Results, entry: Entry, bar: BytesBar) -> Verdict:
    line = plan.line(WARM, entry.name)
    what = f"{entry.label}, H={line.sync_every}: fewer bytes than a float32 ring"
    wanted = f"≥ {bar.factor:,g} times"
    done = [result for result in of_line(plan, results, line) if not result.failed]
    if not done:
        return Verdict(what, wanted, "", OPEN)
    ring = ring_bytes(done[0].elements, line.workers, line.steps - line.first_step)
    factor = ring / done[0].sent_bytes
    said = MET if factor >= bar.factor else MISSED
    return Verdict(what, wanted, f"{factor:,.0f} times", said)
