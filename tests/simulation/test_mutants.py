"""The mutation gate: faults planted in the decision modules must be found.

`make mutants` runs the whole table. Here: every mutant fits its source, and those that are found
within a few seeds are found.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import atoll.peer.membership
from simulation.mutants import ALL, CHEAP_SEEDS, caught, first_failure
from simulation.planted import CHEAP, MUTANTS

GROUP = Path(next(iter(atoll.peer.membership.__path__)))


@pytest.mark.parametrize("mutant", ALL, ids=lambda mutant: mutant.name)
def test_the_fault_fits_its_source(mutant) -> None:  # type: ignore[no-untyped-def]
    assert (GROUP / f"{mutant.module}.py").read_text("utf-8").count(mutant.before) == 1


@pytest.mark.parametrize("name", CHEAP)
def test_a_cheap_mutant_is_caught(name: str) -> None:
    assert first_failure(name, 0, CHEAP_SEEDS)


def test_a_seed_that_begins_as_a_directed_test_fails_with_a_fault() -> None:
    """What the test itself expects is not looked at; what every seed checks is."""
    assert "COMMIT" in first_failure("commit before quorum", 0, 3, kind="directed")


@pytest.mark.slow
@pytest.mark.parametrize(
    "mutant", [m for m in ALL if m.test or m.seed is not None], ids=lambda mutant: mutant.name
)
def test_a_directed_test_fails_with_its_fault(mutant) -> None:  # type: ignore[no-untyped-def]
    assert caught(mutant)[1]


def test_there_are_at_least_twelve() -> None:
    assert len(MUTANTS) >= 12
