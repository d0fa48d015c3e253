"""Situations that take the right faults in the right order: each once, and what they have found."""

from __future__ import annotations

import pytest

from simulation.directed import DIRECTED, cases
from simulation.rare import RARE, run_rare
from simulation.rare_durable import RARE_DURABLE, run_rare_durable


@pytest.mark.parametrize("seed", range(len(RARE)), ids=list(RARE))
def test_a_situation_breaks_no_invariant(seed: int) -> None:
    assert not run_rare(seed).failure


@pytest.mark.parametrize("seed", range(len(RARE_DURABLE)), ids=list(RARE_DURABLE))
def test_a_situation_with_disks_breaks_no_invariant(seed: int) -> None:
    assert not run_rare_durable(seed).failure


def test_two_foundings_of_one_run_are_not_both_decided() -> None:
    """Who was sent to a run that had just been founded forgot which founding it had put off."""
    assert not run_rare(633).failure


def test_rounds_of_a_lineage_that_gave_way_are_not_taken_for_those_of_the_other() -> None:
    """A restart before the first checkpoint there came back with a state of the old lineage."""
    assert not run_rare_durable(14).failure


def test_a_promise_of_the_old_coordinator_ends_no_candidacy() -> None:
    """Who had it promised took it for a sign that the old one goes on; five ballots in 14 s."""
    assert not run_rare_durable(2223).failure


def test_every_directed_test_is_there() -> None:
    names = {name for name, plays in cases() if plays}
    assert {f"{module}: {test}" for module, tests in DIRECTED.items() for test in tests} <= names
