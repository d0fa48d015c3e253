"""(f, kappa)-robustness: whichever f vectors are wrong, it stays near the mean of the rest.

``|F(x) - mean of S|^2 <= kappa * variance of S`` for every set S of n - f vectors (Allouah et al.
2023, definition 2; the bounds are theirs, with rho = f / (n - 2 f)).
"""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.collectives.robust import get_rule
from atoll.collectives.robust.coordinate import Rows
from atoll.collectives.robust.gram import add_gram

SIZES = [(5, 1), (7, 1), (7, 2), (8, 2), (9, 3), (11, 2)]


def _kappa(name: str, n: int, f: int) -> float:
    rho = f / (n - 2 * f)
    alone = {
        "trimmed": 6 * rho * (1 + rho),
        "median": 4 * (1 + rho) ** 2,
        "gm": 4 * (1 + rho) ** 2,
        "krum": 6 * (1 + rho),
        "multi_krum": 6 * (1 + rho),
    }
    if name.startswith("nnm+"):
        return 8 * f / (n - f) * (alone[name.removeprefix("nnm+")] + 1)
    return alone[name]


def aggregated(text: str, rows: Rows, key: int = 0) -> Rows:
    rule = get_rule(text)
    rule.check(len(rows))
    gram = np.zeros((len(rows), len(rows)))
    add_gram(rows, gram)
    return rule.aggregate(rows, rule.matrix(gram, len(rows), key))


@st.composite
def adversarial(draw: st.DrawFn) -> tuple[int, Rows]:
    """Some spread, some equal, and f that are anywhere: near, far, opposite, or in one place."""
    n, f = draw(st.sampled_from(SIZES))
    seed = draw(st.integers(0, 2**32 - 1))
    dice = np.random.default_rng(seed)
    rows = dice.normal(size=(n, draw(st.sampled_from([1, 3, 17])))) * draw(
        st.sampled_from([0.0, 0.01, 1.0, 30.0])
    )
    rows += dice.normal(size=rows.shape[1]) * draw(st.sampled_from([0.0, 1.0, 100.0]))
    wrong = dice.choice(n, f, replace=False)
    kind = draw(st.sampled_from(["far", "opposite", "together", "edge", "copy"]))
    if kind == "far":
        rows[wrong] = dice.normal(size=rows[wrong].shape) * draw(st.sampled_from([10.0, 1e6]))
    elif kind == "opposite":
        rows[wrong] = -draw(st.sampled_from([1.0, 10.0])) * rows.mean(axis=0)
    elif kind == "together":
        rows[wrong] = rows.mean(axis=0) + draw(st.sampled_from([0.3, 1.5, 5.0])) * rows.std(axis=0)
    elif kind == "edge":
        rows[wrong] = rows.max(axis=0)
    else:
        rows[wrong] = rows[dice.integers(n)]
    return f, rows


@pytest.mark.parametrize(
    "name", ["trimmed", "median", "gm", "krum", "multi_krum", "nnm+trimmed", "nnm+median", "nnm+gm"]
)
@settings(max_examples=60, deadline=None)
@given(adversarial())
def test_no_set_of_peers_moves_it_beyond_its_bound(name: str, drawn: tuple[int, Rows]) -> None:
    f, rows = drawn
    n = len(rows)
    if n < get_rule(f"{name}(f={f})").least:
        return
    found = aggregated(f"{name}(f={f})", rows)
    kappa = _kappa(name, n, f)
    for chosen in combinations(range(n), n - f):
        trusted = rows[list(chosen)]
        centre = trusted.mean(axis=0)
        variance = float(((trusted - centre) ** 2).sum(axis=1).mean())
        rounding = 1e-9 * float(np.abs(trusted).max() ** 2) + 1e-18
        assert float(((found - centre) ** 2).sum()) <= kappa * variance + rounding


RULES = [
    "trimmed",
    "median",
    "meamed",
    "krum",
    "multi_krum",
    "mda",
    "caf",
    "gm",
    "centered_clip",
    "flag",
    "nnm+trimmed",
    "arc+gm",
    "nnm+arc+median",
]


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("seed", range(5))
def test_the_order_of_the_peers_does_not_matter(name: str, seed: int) -> None:
    dice = np.random.default_rng(seed)
    rows = dice.normal(size=(9, 40))
    rows[:2] *= 30
    order = dice.permutation(9)
    one, other = aggregated(f"{name}(f=2)", rows), aggregated(f"{name}(f=2)", rows[order])
    np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", ["trimmed", "median", "meamed"])
def test_of_coordinate_rules_not_even_a_bit_depends_on_the_order(name: str) -> None:
    dice = np.random.default_rng(3)
    rows = dice.normal(size=(8, 5000)).astype(np.float32)
    rows[:, ::3] = np.round(rows[:, ::3])  # ties
    one, other = aggregated(f"{name}(f=2)", rows), aggregated(f"{name}(f=2)", rows[::-1].copy())
    assert one.tobytes() == other.tobytes()


@pytest.mark.parametrize("name", ["krum", "multi_krum", "mda", "bulyan"])
def test_of_equal_candidates_the_first_counts(name: str) -> None:
    """All distances are the same, so that every choice is a tie."""
    rows = np.eye(7)
    rule = get_rule(f"{name}(f=1)")
    gram = np.zeros((7, 7))
    add_gram(rows, gram)
    matrix = rule.matrix(gram, 7, 0)
    assert matrix is not None
    counted = np.flatnonzero(matrix.sum(axis=0))
    assert counted.tolist() == list(range(len(counted)))


@pytest.mark.parametrize("name", [*RULES, "bulyan"])
def test_vectors_that_are_all_equal_are_the_result(name: str) -> None:
    rows = np.tile(np.array([3.0, -4.0, 0.5]), (9, 1))
    np.testing.assert_allclose(aggregated(f"{name}(f=1)", rows), rows[0], rtol=1e-12)
    assert not aggregated(f"{name}(f=1)", np.zeros((9, 4))).any()
