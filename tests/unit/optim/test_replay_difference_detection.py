"""How soon a cheat is found: the formula beside draws."""

from __future__ import annotations

import math

import numpy as np
import pytest

from atoll.collectives.errors import ConfigError
from atoll.optim.replay.difference import detection

CASES = [(10, 1, 1, 1, 8, 2), (10, 3, 2, 2, 7, 3), (5, 5, 1, 4, 8, 1), (4, 1, 4, 2, 16, 7)]


@pytest.mark.parametrize("case", CASES)
def test_draws_find_it_as_often_as_the_formula_says(case: tuple[int, ...]) -> None:
    """Peer 0 cheats, with the faulty ones before the first honest."""
    segments, cheated, audits, validators, peers, faulty = case
    random = np.random.default_rng(segments)
    draws, found = 40_000, 0
    for _ in range(draws):
        drawn = random.permutation(peers)[: 2 * validators]
        targets = drawn[validators:].tolist()
        if 0 not in targets or drawn[targets.index(0)] < faulty:
            continue
        found += bool((random.permutation(segments)[:audits] < cheated).any())
    expected = detection(*case).in_round
    spread = math.sqrt(expected * (1 - expected) / draws)
    assert abs(found / draws - expected) < 5 * spread


def test_of_one_segment_it_is_one_in_so_many() -> None:
    assert detection(10, 1, 1, 1, 8, 2).in_audit == pytest.approx(1 / 10)
    assert detection(10, 4, 1, 1, 8, 2).in_audit == pytest.approx(4 / 10)
    assert detection(10, 1, 10, 1, 8, 2).in_audit == 1


def test_the_mean_of_the_paper() -> None:
    """BTARD, 16 peers of which 7 attack, one validator: some 28 rounds. It draws the validator with
    replacement, which is 1/16 x 9/16; without, 1/16 x 9/15."""
    found = detection(1, 1, 1, 1, 16, 7)
    assert found.in_round == pytest.approx(1 / 16 * 9 / 15)
    assert found.expected_rounds == pytest.approx(26.67, abs=0.01)
    assert found.within(1) == pytest.approx(found.in_round)
    assert found.within(200) > 0.999


def test_who_does_not_cheat_is_not_found() -> None:
    honest = detection(10, 0, 1, 1, 8, 2)
    assert honest.in_audit == honest.in_round == honest.within(100) == 0
    assert math.isinf(honest.expected_rounds)


@pytest.mark.parametrize(
    "case",
    [(10, 11, 1, 1, 8, 2), (10, 1, 0, 1, 8, 2), (10, 1, 11, 1, 8, 2), (10, 1, 1, 5, 8, 2)],
)
def test_what_cannot_be_is_refused(case: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError):
        detection(*case)
