"""Seeds through the machines that ship, as part of the suite: safety, then liveness.

One seed is a whole run with its own kinds of faults (simulation/options.py). A failure names its
seed; `make replay SEED=N` shows the run, `make simulate SEEDS=A..B` runs more of them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from harness.grids import rest_is_slow

from simulation.options import draw
from simulation.run import run_seed
from simulation.script import Fault
from simulation.shrink import shrink_script

SEEDS = 5_000
SEEDS_PER_TEST = 250
SEEDS_QUICK = 200  # CI runs 5,000 beside the suite
TESTS = Path(__file__).parents[1]
# Fewer, and the faults are so wild that nothing is shown; all, and they are too tame.
RECOVERED_MIN, RECOVERED_MAX = 0.5, 0.98


def run_seeds(first: int, end: int) -> float:
    """The share of runs that could go on; every one of them did."""
    recovered = 0
    for seed in range(first, end):
        outcome = run_seed(seed)
        assert not outcome.failure, f"make replay SEED={seed}: {outcome.failure}"
        recovered += outcome.verdict == "recovered"
    return recovered / (end - first)


@pytest.mark.parametrize("first", rest_is_slow(range(0, SEEDS_QUICK, 50), 1))
def test_faults_break_no_invariant_and_end_in_commits(first: int) -> None:
    assert RECOVERED_MIN < run_seeds(first, first + 50) <= 1.0


def test_who_has_missed_a_view_with_bans_is_led_through_it() -> None:
    """A coordinator misses two views, one with a ban, whose voters are too few of its own view."""
    outcome = run_seed(48064)
    assert outcome.verdict == "recovered", outcome.failure


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("first", range(SEEDS_QUICK, SEEDS, SEEDS_PER_TEST))
def test_many_more_seeds(first: int) -> None:
    share = run_seeds(first, min(first + SEEDS_PER_TEST, SEEDS))
    assert RECOVERED_MIN < share < RECOVERED_MAX


@pytest.mark.parametrize("seed", [11, 20, 24])
def test_a_seed_is_the_whole_run_whatever_the_hashes_are(seed: int) -> None:
    """Replay needs it: no order may come from a set of bytes or from luck."""
    code = (
        "import hashlib, sys; from simulation.run import run_seed;"
        "print(hashlib.sha256(run_seed(int(sys.argv[1]), True).trace.encode()).hexdigest())"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", code, str(seed)],
            cwd=TESTS,
            env={**os.environ, "PYTHONHASHSEED": hashes},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hashes in ("1", "2")
    }
    assert len(found) == 1


def test_tracing_changes_nothing() -> None:
    plain, traced = run_seed(3), run_seed(3, tracing=True)
    assert traced.trace
    assert replace(traced, trace="") == plain


def test_a_failing_script_is_shrunk_to_what_it_needs() -> None:
    """A machine that is paused for ever does not come back in time: only that fault is needed."""
    options = replace(draw(1), hosts=3, witnesses=0, archives=0, network="streams", kinds=("kill",))
    script = [
        Fault(0.5, "clog", "ab", 0.2),
        Fault(1.0, "break_everything", "a"),  # no such fault: the run crashes when it comes
        Fault(1.5, "pause", "b", 0.2),
    ]
    _, smallest, outcome = shrink_script(options, script)
    assert [fault.kind for fault in smallest] == ["break_everything"]
    assert outcome.failure.startswith("crash")
