"""Seeds for what is measured over all decision modules: of each kind what reaches all of them.

Every fourth has durable homes: what a ledger is for is reached in these only (durable.py); all else
is in the others (run.py). And each is followed by one that begins as a directed test (directed.py).
"""

from __future__ import annotations

from simulation.directed import run_directed
from simulation.durable import run_durable
from simulation.run import Outcome, run_seed

__all__ = ["DURABLE_EVERY", "run_mixed"]

DURABLE_EVERY = 4


def run_mixed(seed: int) -> Outcome:
    """Return the outcome of the plain or durable seed, or of the directed one if that fails."""
    outcome = run_seed(seed) if seed % DURABLE_EVERY else run_durable(seed)
    if outcome.failure:
        return outcome
    directed = run_directed(seed)
    return directed if directed.failure else outcome
