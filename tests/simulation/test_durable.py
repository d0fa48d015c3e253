"""Seeds of runs with durable homes, as part of the suite: whoever crashes and comes back, the run
goes on, and has lost nothing.

A failure names its seed; `python -m simulation.durable --seed N` in tests/ shows the run.
"""

from __future__ import annotations

from collections import Counter

import pytest
from harness.grids import rest_is_slow

from simulation.durable import run_durable

SEEDS, SEEDS_PER_TEST = 1_000, 25
# Of these seeds nearly all must be able to go on: nothing else shows that they do. Those in which
# some may go on without the others have no one history to which that could be said.
RECOVERED_MIN = 0.6
APART = "some may go on alone"


@pytest.mark.parametrize("first", rest_is_slow(range(0, SEEDS, SEEDS_PER_TEST), 3))
def test_crashes_of_any_number_end_in_commits(first: int) -> None:
    recovered = bound = 0
    seen: Counter[str] = Counter()
    for seed in range(first, first + SEEDS_PER_TEST):
        outcome = run_durable(seed)
        assert not outcome.failure, f"seed {seed}: {outcome.failure}"
        recovered += outcome.verdict == "recovered"
        bound += outcome.verdict != APART
        seen.update(outcome.seen)
    assert recovered > RECOVERED_MIN * bound
    assert bound > SEEDS_PER_TEST / 2
    assert seen["recovered"] > 2 * SEEDS_PER_TEST  # processes that came back as the same voters
