"""Held-out loss against bytes sent, of every method: a table and plots, a row at a time.

    make bench-convergence [ARGS="--rows int4 --minutes 60"]
    make bench-convergence-quick

What is finished is kept in a file (``--out``), so the same command goes on where it was stopped,
killed or ran out of ``--minutes``. With 0.8 million parameters the whole table takes about two
hours on two cores that have nothing else to do; ``--list`` says what is left. With a GPU the same
command runs 30 million (``--size 100M``: 100 million). ``--quick``: every method for a few steps,
in under five minutes; exit code 1 if one diverges or has learnt too little.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.convergence.plan import Plan, quick_plan, worker_steps
from benchmarks.convergence.quick import faults
from benchmarks.convergence.report import write_choices, write_losses, write_report
from benchmarks.convergence.results import Result, Results
from benchmarks.convergence.row import Row
from benchmarks.convergence.runner import Runner, one_row, say_done
from benchmarks.convergence.sizes import SIZES, default_size
from benchmarks.convergence.training import run_row

ROOT = Path(__file__).parents[3]
KEPT = ROOT / "docs" / "convergence"  # the table of the smallest model; others lie below it
CHOOSING = ROOT / "docs" / "choosing.md"
LOSSES = ROOT / "peer" / "plan" / "losses.json"
CACHE = ROOT / ".cache" / "convergence"
USUAL = Plan()


def main() -> int:
    chosen = parsed()
    if chosen.one:
        row = Row.of(chosen.one)
        text = SIZES[row.line.size].text
        return one_row(lambda *given: run_row(row, *given), chosen.cache, text)
    plan = quick_plan() if chosen.quick else plan_of(chosen)
    out = chosen.out or usual_folder(plan, chosen.quick)
    if chosen.quick:
        shutil.rmtree(out, ignore_errors=True)
    results = Results(out / "results.jsonl")
    if chosen.list:
        show_list(plan, results, chosen.rows)
        return 0

    began_s = time.monotonic()

    def report() -> None:
        write_report(out, plan, results)
        if out == KEPT:
            write_choices(CHOOSING, plan, results)
            write_losses(LOSSES, plan, results)

    def done(result: Result) -> None:
        report()
        left = len(plan.pending(results, chosen.rows)) + len(plan.later(results, chosen.rows))
        say_done(result, began_s, left)

    report()
    until_s = began_s + 60 * chosen.minutes
    runner = Runner(results, chosen.cache / "logs", chosen.jobs, command_of(chosen.cache), done)
    broken = runner.run(lambda: plan.pending(results, chosen.rows), until_s)
    print(f"results, tables and plots: {out}")
    wrong = (
        faults(plan, results, chosen.rows)
        if chosen.quick
        else [f"{row.name} failed" for row in broken]
    )
    print("\n".join(wrong), end="\n" if wrong else "")
    return 1 if wrong else 0


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="make bench-convergence", description=(__doc__ or "").splitlines()[0]
    )
    a = parser.add_argument
    a("--quick", action="store_true", help="every method for a few steps, for CI")
    a("--list", action="store_true", help="the rows that are left, without running them")
    a("--rows", default="", metavar="PATTERN", help="lines in whose name this expression is found")
    a("--size", default=default_size(), choices=SIZES, help="of the model (default: %(default)s)")
    a("--steps", type=int, default=USUAL.steps, help="with the warm start (default: %(default)s)")
    a("--sync-every", type=int, nargs="+", default=USUAL.sync_every, metavar="H", help="sizes of H")
    a("--workers", type=int, default=USUAL.workers)
    a("--seeds", type=int, default=USUAL.seeds, help="of lines with a bar (default: %(default)s)")
    a("--all-seeds", action="store_true", help="so many for lines without a bar as well")
    a("--minutes", type=float, default=float("inf"), help="begin no row after this time")
    jobs = 1 if torch.cuda.is_available() else 2
    a("--jobs", type=int, default=jobs, help="rows at a time (default: %(default)s)")
    a("--out", type=Path, help="folder of results.jsonl and of what is made from it")
    a("--cache", type=Path, default=CACHE, help="folder of warm starts and logs")
    a("--one", metavar="ROW", help=argparse.SUPPRESS)  # what the processes of rows are told
    return parser.parse_args()


def plan_of(chosen: argparse.Namespace) -> Plan:
    return Plan(
        size=chosen.size,
        steps=chosen.steps,
        workers=chosen.workers,
        sync_every=tuple(chosen.sync_every),
        seeds=chosen.seeds,
        all_seeds=chosen.all_seeds,
    )


def usual_folder(plan: Plan, quick: bool) -> Path:
    """What is committed is made with the usual numbers alone."""
    if quick:
        return CACHE / "quick"
    usual = (USUAL.steps, USUAL.workers, USUAL.sync_every)
    if (plan.steps, plan.workers, plan.sync_every) != usual:
        return CACHE / "trial"
    return KEPT if plan.size == USUAL.size else KEPT / plan.size


def command_of(cache: Path) -> Callable[[Row], list[str]]:
    options = ["-m", "benchmarks.convergence", "--cache", str(cache), "--one"]
    return lambda row: [sys.executable, *options, row.name]


def show_list(plan: Plan, results: Results, pattern: str) -> None:
    """The rows that are left, and how long they take by those that are there."""
    pending, later = plan.pending(results, pattern), plan.later(results, pattern)
    for row in pending:
        print(row.name)
    for line in later:
        print(f"{line.name}, when its learning rate is known")
    steps = sum(map(worker_steps, [*(row.line for row in pending), *later]))
    print(f"{len(pending) + len(later)} rows, {steps:,} steps of a worker", end="")
    done = [each for each in results.all() if each.row.line.size == plan.size]
    if done:
        step_s = sum(each.wall_s for each in done) / sum(
            worker_steps(each.row.line) for each in done
        )
        print(
            f": {steps * step_s / 3600:.1f} hours of one process, at {1e3 * step_s:.0f} ms", end=""
        )
    print()


if __name__ == "__main__":
    sys.exit(main())
