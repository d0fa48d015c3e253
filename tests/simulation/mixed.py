"""Seeds for what is measured over all decision modules: every fourth has durable homes.

What a ledger is for is reached in these only (durable.py); all else is in the others (run.py).
"""

from __future__ import annotations

from simulation.durable import run_durable
from simulation.run import Outcome, run_seed

__all__ = ["DURABLE_EVERY", "run_mixed"]

DURABLE_EVERY = 4


def run_mixed(seed: int) -> Outcome:
    return run_seed(seed) if seed % DURABLE_EVERY else run_durable(seed)
