"""Who takes over whose weights in a population."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.optim.methods.population import PopulationMember, exploited, explored

NAN = math.nan
scores = st.floats(-5, 5, width=16) | st.just(NAN)
populations = st.lists(st.tuples(scores, st.booleans()), min_size=1, max_size=40).map(
    lambda given: [PopulationMember(f"m{i}", *each) for i, each in enumerate(given)]
)


def members(*scores: float) -> list[PopulationMember]:
    return [PopulationMember(f"m{i}", score) for i, score in enumerate(scores)]


@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        ([1.0], {}),
        ([NAN], {}),
        ([1.0, 2.0], {"m1": "m0"}),
        ([2.0, 1.0], {"m0": "m1"}),
        ([1.0, 1.0], {}),
        ([NAN, NAN], {}),
        ([NAN, 5.0], {"m0": "m1"}),
        ([5.0, NAN], {"m1": "m0"}),
        ([3.0, 1.0, 2.0], {"m0": "m1"}),
        ([1.0, 1.0, 2.0], {"m2": "m0"}),  # of equals the first
        ([1.0, 2.0, 2.0], {"m2": "m0"}),
        ([1.0, NAN, NAN], {"m2": "m0"}),
        ([4.0, 3.0, 2.0, 1.0], {"m0": "m3"}),
        ([-1.0, -3.0, -2.0, 0.0, -5.0, -4.0], {"m3": "m4"}),
    ],
)
def test_small_populations(scores, expected):
    assert exploited(members(*scores), seed=0, turn=1) == expected


def test_of_ten_two_copy_one_of_two():
    found = [exploited(members(*range(10)), seed=0, turn=turn) for turn in range(50)]
    assert all(copies.keys() == {"m8", "m9"} for copies in found)
    chosen = [copies["m9"] for copies in found]
    assert set(chosen) == {"m0", "m1"}
    assert 10 < chosen.count("m0") < 40
    assert any(copies["m8"] != copies["m9"] for copies in found)
    assert found == [exploited(members(*range(10)), seed=0, turn=turn) for turn in range(50)]
    assert found != [exploited(members(*range(10)), seed=1, turn=turn) for turn in range(50)]


@settings(deadline=None, derandomize=True)
@given(populations, st.integers(0, 2**62))
def test_what_always_holds(population, turn):
    copies = exploited(population, 3, turn)
    by_name = {member.name: member for member in population}
    for name, donor in copies.items():
        assert not by_name[donor].is_fresh
        assert not math.isnan(by_name[donor].score)
        assert donor not in copies
        if not by_name[name].is_fresh:
            assert not by_name[name].score <= by_name[donor].score
    experienced = sum(not member.is_fresh for member in population)
    copying = sum(not by_name[name].is_fresh for name in copies)
    assert copying <= max(1, experienced // 5)
    if any(not m.is_fresh and not math.isnan(m.score) for m in population):
        assert all(m.name in copies for m in population if m.is_fresh)
    else:
        assert not copies


def test_exploring_is_a_fifth_less_or_more_within_bounds():
    found = {explored(1.0, (0.0, 9.0), 0, turn, "m0", "lr") for turn in range(20)}
    assert found == {0.8, 1.2}
    assert {explored(1.0, (0.9, 1.1), 0, turn, "m0", "lr") for turn in range(20)} == {0.9, 1.1}
    assert {explored(0.0, (0.0, 1.0), 0, turn, "m0", "lr") for turn in range(20)} == {0.0}
    turns = range(40)
    for other in (("m1", "lr"), ("m0", "decay")):
        assert [explored(1.0, (0, 9), 0, turn, *other) for turn in turns] != [
            explored(1.0, (0, 9), 0, turn, "m0", "lr") for turn in turns
        ]
