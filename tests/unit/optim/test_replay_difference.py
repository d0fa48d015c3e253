"""How far two ends are from each other, and what is borne."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from atoll.optim.replay.checkpoint import Array, WorkCheckpoint
from atoll.optim.replay.difference import (
    Differences,
    ReplayVerdict,
    Tolerance,
    compare,
    differences,
    differing_values,
)


def judged(
    start: WorkCheckpoint,
    mine: WorkCheckpoint,
    theirs: WorkCheckpoint,
    tolerance: Tolerance,
    **others: Any,
) -> ReplayVerdict:
    return compare(differences(start, mine, theirs), tolerance, **others)


def at(value: float, **values: Any) -> WorkCheckpoint:
    data = np.array([3.0, value], np.float32).view(np.uint8)
    return WorkCheckpoint({"w": Array("float32", (2,), data)}, {}, {}, values)


def test_a_difference_is_relative_to_what_has_moved() -> None:
    verdict = judged(at(4.0), at(5.01), at(5.0), Tolerance())
    assert verdict.differences["parameters"] == pytest.approx(0.01, rel=1e-4)
    assert verdict.difference == verdict.worst_difference
    assert "parameters differ by 0.01" in verdict.why
    assert not judged(at(4.0), at(5.01), at(5.0), Tolerance(0.1, 1e-3)).passed
    assert not judged(at(4.0), at(5.01), at(5.0), Tolerance(1e-3, 0.1)).passed
    assert judged(at(4.0), at(5.01), at(5.0), Tolerance(0.02, 0.02)).passed


@pytest.mark.parametrize("claimed", [4.0, 4.1, -1.0, 100.0, 1e6])
def test_a_claim_that_moves_otherwise_is_far_away(claimed: float) -> None:
    """However far: else a long step would hide what it differs by in its own length."""
    verdict = judged(at(4.0), at(5.0), at(claimed), Tolerance())
    assert verdict.difference >= abs(claimed - 5.0) * 0.999


def test_steps_that_move_nothing_are_no_cheat() -> None:
    assert judged(at(4.0), at(4.0), at(4.0), Tolerance(0, 0)).passed
    assert judged(at(4.0), at(np.nextafter(np.float32(4), 5)), at(4.0), Tolerance(2, 2)).passed
    assert not judged(at(4.0), at(4.001), at(4.0), Tolerance()).passed


@pytest.mark.parametrize("claimed", [float("nan"), float("inf"), -float("inf"), 3e38])
def test_what_is_no_number_is_found(claimed: float) -> None:
    verdict = judged(at(4.0), at(5.0), at(claimed), Tolerance(0.5, 0.5))
    assert not verdict.passed
    assert not verdict.difference <= 0.5


def test_tensors_that_only_one_has_are_found() -> None:
    mine, other = (
        at(5.0),
        replace(at(5.0), inner={"0.0.more": Array("int8", (), np.zeros(1, np.uint8))}),
    )
    assert (
        judged(mine, mine, other, Tolerance()).why == "inner 0.0.more is () int8, and here missing"
    )
    assert "is missing" in judged(mine, other, mine, Tolerance()).why
    shaped = replace(mine, parameters={"w": Array("float32", (2, 1), mine.parameters["w"].data)})
    assert "(2, 1) float32, and here (2,) float32" in judged(mine, mine, shaped, Tolerance()).why


@pytest.mark.parametrize(
    ("theirs", "same"),
    [
        ({"a": {"b": [1, 2.0, "x", None]}}, True),
        ({"a": {"b": [1, 2.0000001, "x", None]}}, True),
        ({"a": {"b": [1, 2.1, "x", None]}}, False),
        ({"a": {"b": [2, 2.0, "x", None]}}, False),
        ({"a": {"b": [True, 2.0, "x", None]}}, False),
        ({"a": {"b": [1, 2.0, "x"]}}, False),
        ({"a": {"c": []}}, False),
        ({"a": 1}, False),
    ],
)
def test_numbers_are_compared_as_well(theirs: dict[str, Any], same: bool) -> None:
    mine = {"a": {"b": [1, 2.0, "x", None]}}
    ends = at(5.0, **mine), at(5.0, **theirs)
    assert (differing_values(*ends, Tolerance()) == "") == same
    line = differing_values(*ends, Tolerance())
    assert judged(at(4.0), *ends, Tolerance(), values=line).passed == same


def test_what_differs_between_two_own_ends_is_borne_within_bounds() -> None:
    """Five times as much, up to 2e-2 of a group and 2 of a tensor."""
    tolerance = Tolerance()

    def verdict(group: float, tensor: float, own_group: float, own_tensor: float) -> ReplayVerdict:
        found = Differences({"parameters": group}, {"w": tensor})
        return compare(found, tolerance, Differences({"parameters": own_group}, {"w": own_tensor}))

    assert not verdict(4e-3, 0.5, 0.0, 0.0).passed
    assert verdict(4e-3, 0.5, 1e-3, 0.11).passed
    assert not verdict(4e-3, 0.5, 1e-3, 0.09).passed
    assert not verdict(6e-3, 0.5, 1e-3, 0.11).passed
    assert verdict(1.9e-2, 1.9, 1.5e-2, 1.0).passed
    for found in ((2.1e-2, 0.0), (0.0, 2.1), (float("nan"), 0.0), (0.0, float("inf"))):
        lie = verdict(*found, 1.9e-2, 1.4)
        assert not lie.passed
        assert lie.decided


def test_where_two_own_ends_are_far_apart_nothing_is_decided() -> None:
    near = Differences({"parameters": 1e-6})
    for own, decided in ((0.1, False), (0.03, False), (0.019, True), (float("nan"), True)):
        found = Differences({"parameters": 0.1}, {"w": 0.1})
        verdict = compare(found, Tolerance(), Differences({"parameters": own}, {"w": 0.1}))
        assert not verdict.passed
        assert verdict.decided == decided
        assert ("too long" in verdict.why) != decided
    far = Differences({"parameters": 0.1})
    assert compare(near, Tolerance(), far).decided  # what is close by needs no excuse
    assert compare(near, Tolerance(), far).passed
