"""Protocol faults planted on purpose: a simulator that does not find them would find nothing.

Each (planted.py) is a change of a few words in the source of a decision module, made while it is
imported, in a process of its own. A fault counts as caught when a seed fails or its directed test
does. A change that no longer fits its source is an error: then the mutant must be written anew.

    python -m simulation.mutants NAME A..B     # seeds with that fault planted
    python -m simulation.mutants NAME --durable A..B   # ... of runs with durable homes
    python -m simulation.mutants NAME --directed A..B  # ... that begin as a directed test
    python -m simulation.mutants NAME --test   # its directed test
"""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from simulation.altered import alter
from simulation.planted import MUTANTS, Mutant
from simulation.planted_durable import DURABLE

__all__ = ["ALL", "CHEAP_SEEDS", "caught", "first_failure", "gate", "plant"]

SEEDS_MAX = 5_000
CHEAP_SEEDS = 200
TEST_S = 100.0  # some faults let a run go round and round in one moment of its clock
STEPS = (25, 100, 200, 500, 1_000, 2_000, SEEDS_MAX)
TESTS = Path(__file__).parents[1]
ALL = (*MUTANTS, *DURABLE)


def plant(name: str) -> None:
    """From now on this process imports the mutated module. Before atoll.peer is imported."""
    mutant = next(m for m in ALL if m.name == name)

    def act(source: str) -> str:
        fits = source.count(mutant.before) == 1
        assert fits, f"mutant {mutant.name!r} does not fit {mutant.module}.py"
        return source.replace(mutant.before, mutant.after)

    alter({mutant.module: act})


# ---------------------------------------------------------------- the gate


def first_failure(name: str, first: int, end: int, *, kind: str = "") -> str:
    """In processes of their own: "SEED INVARIANT" of the first seed that fails with the fault
    planted and does not without it, or nothing."""
    while first < end:
        found = _first_of(name, first, end, kind)
        if not found:
            return ""
        seed = int(found.split()[0])
        if not _first_of("", seed, seed + 1, kind):
            return found
        first = seed + 1
    return ""


def _first_of(name: str, first: int, end: int, kind: str) -> str:
    how = [f"--{kind}"] if kind else []
    done = subprocess.run(
        [sys.executable, "-m", "simulation.mutants", name, *how, f"{first}..{end}"],
        capture_output=True,
        text=True,
        check=False,
        cwd=TESTS,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()


def caught(mutant: Mutant) -> tuple[Mutant, str]:
    if mutant.test:
        done = subprocess.run(
            [sys.executable, "-m", "simulation.mutants", mutant.name, "--test"],
            capture_output=True,
            text=True,
            check=False,
            cwd=TESTS,
        )
        assert done.returncode in (0, 1), done.stdout[-2000:] + done.stderr[-2000:]
        return mutant, f"test {mutant.test}" if done.returncode == 1 else ""
    kind = "durable" if mutant in DURABLE else ""
    what = f"{kind} seed".strip()
    if mutant.seed is not None:
        found = first_failure(mutant.name, mutant.seed, mutant.seed + 1, kind=kind)
        if found:
            return mutant, f"{what} {found}"
    first = 0
    for end in STEPS:  # the cheap ones are found soon
        found = first_failure(mutant.name, first, end, kind=kind)
        if found:
            return mutant, f"{what} {found}"
        first = end
    return mutant, ""


def gate(jobs: int) -> int:
    """The table; 1 if a planted fault was not caught."""
    missed = 0
    with ThreadPoolExecutor(jobs) as pool:
        for mutant, how in pool.map(caught, ALL):
            missed += not how
            print(f"{mutant.name:28} {how or 'NOT CAUGHT'}", flush=True)
    return bool(missed)


def _main() -> int:
    name, what = sys.argv[1], sys.argv[-1]
    if name:
        plant(name)
    if what == "--test":
        import pytest

        test = next(m.test for m in ALL if m.name == name)
        how = ["-q", "-x", "-p", "no:cacheprovider", f"--timeout={TEST_S:.0f}"]
        return int(pytest.main([*how, str(TESTS / test)]))
    from simulation.directed import run_directed
    from simulation.durable import run_durable
    from simulation.run import run_seed

    kinds = {"--durable": run_durable, "--directed": run_directed}
    run = kinds.get(sys.argv[2], run_seed)
    first, end = map(int, what.split(".."))
    for seed in range(first, end):
        outcome = run(seed)
        if outcome.failure:
            print(seed, outcome.failure[:120])
            break
    return 0


if __name__ == "__main__":
    sys.exit(_main())
