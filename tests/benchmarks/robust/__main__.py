"""What each attack costs a run with each rule of aggregation: a table, a row at a time.

    make bench-robust [ARGS="--rules mean nnm+trimmed --attacks alie opt-ipm"]
    make bench-robust ARGS=--quick

What is finished is kept in a file (``--out``), so the same command goes on where it was stopped,
killed or ran out of ``--minutes``. The whole of it takes less than an hour of CPU; ``--list`` says
what is left. ``--quick``: two rules and six attacks for a few rounds, under two minutes of one
core; exit code 1 if the best rule is ruined, or if the attacks do not hurt the mean.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path

from attacks.catalogue import ATTACKS

from benchmarks.convergence.report import replace_file
from benchmarks.convergence.results import Result, Results
from benchmarks.convergence.row import Row
from benchmarks.convergence.runner import Runner, one_row, say_done
from benchmarks.convergence.sizes import SIZES
from benchmarks.robust.figures import faults, verdicts
from benchmarks.robust.plan import RULES, Plan, quick_plan
from benchmarks.robust.table import document
from benchmarks.robust.training import AttackedRun

ROOT = Path(__file__).parents[3]
KEPT = ROOT / "docs" / "robust"
CACHE = ROOT / ".cache" / "robust"
USUAL = Plan()


def main() -> int:
    chosen = parsed()
    if chosen.one:
        row = Row.of(chosen.one)
        return one_row(lambda *given: AttackedRun(row, *given).result(), chosen.cache)
    plan = quick_plan() if chosen.quick else plan_of(chosen)
    # The document has all that was ever measured with these numbers.
    shown = plan if chosen.quick else replace(plan, rules=RULES, attacks=tuple(ATTACKS))
    out = chosen.out or usual_folder(shown, chosen.quick)
    if chosen.quick:
        shutil.rmtree(out, ignore_errors=True)
    results = Results(out / "results.jsonl")
    if chosen.list:
        show_list(plan, results)
        return 0

    began_s = time.monotonic()

    def done(result: Result) -> None:
        replace_file(out / "README.md", document(shown, results))
        say_done(result, began_s, len(plan.pending(results)))

    out.mkdir(parents=True, exist_ok=True)
    replace_file(out / "README.md", document(shown, results))
    until_s = began_s + 60 * chosen.minutes

    def command(row: Row) -> list[str]:
        options = ["-m", "benchmarks.robust", "--cache", str(chosen.cache), "--one"]
        return [sys.executable, *options, row.name]

    runner = Runner(results, chosen.cache / "logs", chosen.jobs, command, done)
    broken = runner.run(lambda: plan.pending(results), until_s)
    for verdict in verdicts(shown, results):
        print(" | ".join(verdict))
    print(f"results and tables: {out}")
    wrong = faults(plan, results) if chosen.quick else [f"{row.name} failed" for row in broken]
    print("\n".join(wrong), end="\n" if wrong else "")
    return 1 if wrong else 0


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="make bench-robust", description=(__doc__ or "").splitlines()[0]
    )
    a = parser.add_argument
    a("--quick", action="store_true", help="two rules, six attacks, a few rounds")
    a("--list", action="store_true", help="the rows that are left, without running them")
    a("--rules", nargs="+", default=RULES, choices=RULES, metavar="RULE", help="without their f")
    a("--attacks", nargs="+", default=tuple(ATTACKS), choices=ATTACKS, metavar="ATTACK")
    a("--size", default=USUAL.size, choices=SIZES, help="of the model (default: %(default)s)")
    a("--steps", type=int, default=USUAL.steps, help="of each worker (default: %(default)s)")
    a("--sync-every", type=int, default=USUAL.sync_every, metavar="H", help="steps of a round")
    a("--workers", type=int, default=USUAL.workers)
    a("--attackers", type=int, default=USUAL.attackers, help="of them; every rule's f")
    a("--seeds", type=int, default=USUAL.seeds)
    a("--minutes", type=float, default=float("inf"), help="begin no row after this time")
    a("--jobs", type=int, default=1, help="rows at a time (default: %(default)s)")
    a("--out", type=Path, help="folder of results.jsonl and of what is made from it")
    a("--cache", type=Path, default=CACHE, help="folder of logs")
    a("--one", metavar="ROW", help=argparse.SUPPRESS)  # what the processes of rows are told
    return parser.parse_args()


def plan_of(chosen: argparse.Namespace) -> Plan:
    return Plan(
        size=chosen.size,
        steps=chosen.steps,
        sync_every=chosen.sync_every,
        workers=chosen.workers,
        attackers=chosen.attackers,
        seeds=chosen.seeds,
        rules=tuple(chosen.rules),
        attacks=tuple(chosen.attacks),
    )


def usual_folder(shown: Plan, quick: bool) -> Path:
    """What is committed is made with the usual numbers alone."""
    if quick:
        return CACHE / "quick"
    return KEPT if replace(shown, seeds=USUAL.seeds) == USUAL else CACHE / "trial"


def show_list(plan: Plan, results: Results) -> None:
    """The rows that are left, and how long they take by those that are there."""
    pending = plan.pending(results)
    for row in pending:
        print(row.name)
    print(f"{len(pending)} rows", end="")
    done = [result for row in plan.rows() if (result := results.get(row)) is not None]
    if done:
        row_s = sum(result.cpu_s for result in done) / len(done)
        print(f": {len(pending) * row_s / 60:.0f} minutes of CPU, at {row_s:.1f} s", end="")
    print()


if __name__ == "__main__":
    sys.exit(main())
