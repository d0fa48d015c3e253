"""Seeds for what is measured over all decision modules: of each kind what reaches all of them.

Every fourth has durable homes: what a ledger is for is reached in these only (durable.py); all else
is in the others (run.py). Each is followed by one that begins as a directed test (directed.py), and
by situations that plain seeds hardly ever come to (rare.py, rare_durable.py).
"""

from __future__ import annotations

from simulation.directed import run_directed
from simulation.durable import run_durable
from simulation.rare import run_rare
from simulation.rare_durable import run_rare_durable
from simulation.run import Outcome, run_seed

__all__ = ["DURABLE_EVERY", "run_mixed"]

DURABLE_EVERY = 4


def run_mixed(seed: int) -> Outcome:
    """Return the outcome of the plain or durable seed, or of the first that fails after it."""
    outcome = run_seed(seed) if seed % DURABLE_EVERY else run_durable(seed)
    if outcome.failure:
        return outcome
    for run in (run_directed, run_rare, run_rare_durable):
        more = run(seed)
        if more.failure:
            return more
    return outcome
