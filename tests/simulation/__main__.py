"""Command line of the simulator.

    python -m simulation --seed 17            # options, script, trace, verdict
    python -m simulation --seeds 0..1000 --jobs 2
    python -m simulation --shrink 17          # the smallest script with the same failure
    python -m simulation --mutants            # the gate, as a table

Exit code 1 if anything failed, 2 if what was asked cannot be done. `make simulate`, `make replay`
and `make mutants` are the same.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NoReturn

from simulation.arguments import jobs, seeds
from simulation.mutants import gate
from simulation.options import draw
from simulation.run import Outcome, run_script, run_seed
from simulation.script import draw_script
from simulation.shrink import shrink

BATCH = 50
TAIL_LINES = 60
SHOWN = 20  # failures that are listed one by one


def commit() -> str:
    """What the seeds were run on: a seed means the same run only on the same commit."""
    here = Path(__file__).parent
    found, changed = (
        subprocess.run(["git", *words], capture_output=True, text=True, cwd=here, check=False)
        for words in (("rev-parse", "--short", "HEAD"), ("status", "--porcelain"))
    )
    return (found.stdout.strip() or "unknown") + ("+changes" if changed.stdout.strip() else "")


def batch(first: int, count: int) -> list[Outcome]:
    return [run_seed(seed) for seed in range(first, first + count)]


def show(outcome: Outcome) -> None:
    print(f"FAILED seed {outcome.seed}, commit {commit()}: {outcome.failure}")
    print(f"  replay: make replay SEED={outcome.seed}")


def many(first: int, end: int, jobs: int) -> int:
    """All seeds from ``first`` to before ``end``; prints failures and a summary."""
    started_s = time.perf_counter()
    verdicts: Counter[str] = Counter()
    seen: Counter[str] = Counter()
    failed: list[Outcome] = []
    done = rounds = views = 0
    with ProcessPoolExecutor(jobs) as pool:
        starts = range(first, end, BATCH)
        sizes = [min(BATCH, end - start) for start in starts]
        for outcomes in pool.map(batch, starts, sizes):
            for outcome in outcomes:
                done += 1
                rounds += outcome.rounds
                views += outcome.views
                seen.update(outcome.seen)
                if outcome.failure:
                    failed.append(outcome)
                    if len(failed) <= SHOWN:
                        show(outcome)
                else:
                    verdicts[outcome.verdict] += 1
    took_s = time.perf_counter() - started_s
    each_ms = took_s * jobs / max(done, 1) * 1e3
    print(f"{done} seeds in {took_s:.0f} s ({each_ms:.0f} ms each on {jobs} processes): ", end="")
    print(f"{len(failed)} failed; {rounds} rounds, {views} views; commit {commit()}")
    for verdict, count in verdicts.most_common():
        print(f"  {count:6} {verdict}")
    print("  seen: " + ", ".join(f"{count} {what}" for what, count in sorted(seen.items())))
    return bool(failed)


def one(seed: int) -> int:
    options = draw(seed)
    script = draw_script(options)
    outcome = run_script(options, script, tracing=True)
    print(f"seed {seed}, commit {commit()}\n{options.text()}")
    print("\n".join(str(fault) for fault in script))
    print("\n".join(outcome.trace.splitlines()[-TAIL_LINES:]))
    print(outcome.failure or f"{outcome.verdict}: {outcome.rounds} rounds, {outcome.views} views")
    return bool(outcome.failure)


def smallest(seed: int) -> int:
    options, script, outcome = shrink(seed)
    print(f"seed {seed}, commit {commit()}\n{options.text()}")
    print("\n".join(str(fault) for fault in script))
    print("\n".join(outcome.trace.splitlines()[-TAIL_LINES:]))
    print(outcome.failure or "does not fail")
    return bool(outcome.failure)


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line, without the usage before it."""
        self.exit(2, f"{self.prog}: {message}\n")


def main(arguments: list[str] | None = None) -> int:
    parser = Parser(prog="simulation", description=__doc__)
    parser.add_argument("--seed", type=int, help="one seed, with its trace")
    parser.add_argument("--seeds", type=seeds, default=(0, 1000), help="A..B: from A to before B")
    parser.add_argument("--shrink", type=int, metavar="SEED", help="the smallest failing script")
    parser.add_argument("--mutants", action="store_true", help="every planted fault must be caught")
    parser.add_argument("--jobs", type=jobs, default=2, help="processes, 2 unless it is said")
    asked = parser.parse_args(arguments)
    if asked.seed is not None:
        return one(asked.seed)
    if asked.shrink is not None:
        return smallest(asked.shrink)
    if asked.mutants:
        return gate(asked.jobs)
    return many(*asked.seeds, asked.jobs)


if __name__ == "__main__":
    sys.exit(main())
