"""Values that other libraries and exact computations of the definitions have given."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from harness.oracles import oracle

from atoll.collectives.robust import get_rule
from atoll.collectives.robust.coordinate import Rows
from atoll.collectives.robust.gram import Matrix, add_gram

CASES = range(3)
# rule -> (group, entry) of the file, and the relative error that float64 may make of it: a centre
# is found from differences of inner products, and some vectors are a hundred times as long.
EXACT = {
    "median": ("library", "Median", 1e-12),
    "trimmed": ("library", "TrMean", 1e-12),
    "meamed": ("library", "Meamed", 1e-12),
    "krum": ("reference", "krum_blanchard", 1e-12),
    "multi_krum": ("reference", "multikrum_blanchard_m=n-f", 1e-12),
    "mda": ("reference", "mda_exact", 1e-12),
    "gm": ("reference", "geometric_median_exact", 1e-11),
    "nnm+trimmed": ("library", "NNM+TrMean", 1e-12),
    "nnm+median": ("library", "NNM+Median", 1e-12),
}


def _case(index: int) -> tuple[dict[str, Any], Rows, Matrix]:
    case = oracle("aggregators")["cases"][index]
    rows = np.array(case["inputs"])
    gram = np.zeros((len(rows), len(rows)))
    add_gram(rows, gram)
    return case, rows, gram


def _given(text: str, rows: Rows, gram: Matrix) -> Rows:
    rule = get_rule(text)
    rule.check(len(rows))
    return rule.aggregate(rows, rule.matrix(gram, len(rows), 0))


def _error(found: Rows, expected: Any) -> float:
    wanted = np.array(expected)
    return float(np.abs(found - wanted).max() / np.abs(wanted).max())


@pytest.mark.parametrize("index", CASES)
@pytest.mark.parametrize("name", EXACT)
def test_rules_give_the_values_of_the_oracle(name: str, index: int) -> None:
    case, rows, gram = _case(index)
    group, entry, tolerance = EXACT[name]
    found = _given(f"{name}(f={case['f']})", rows, gram)
    assert _error(found, case[group][entry]["output"]) < tolerance


@pytest.mark.parametrize("index", CASES)
@pytest.mark.parametrize("name", ["median", "trimmed", "krum", "multi_krum", "nnm+trimmed"])
def test_float32_is_near_them(name: str, index: int) -> None:
    case, rows, gram = _case(index)
    group, entry, _ = EXACT[name]
    single = rows.astype(np.float32)
    found = _given(f"{name}(f={case['f']})", single, gram)
    assert found.dtype == np.float32
    assert _error(found, case[group][entry]["output"]) < 1e-5


@pytest.mark.parametrize("index", CASES)
@pytest.mark.parametrize("tau", [1, 10])
def test_centered_clipping_converges_to_the_fixed_point(tau: int, index: int) -> None:
    case, rows, gram = _case(index)
    expected = case["reference"][f"btard_centeredclip_tau{tau}_converged"]
    found = _given(f"centered_clip(f={case['f']},tau={tau})", rows, gram)
    assert _error(found, expected["output"]) < 1e-11  # it was stopped at steps of 1e-12


@pytest.mark.parametrize("index", CASES)
def test_bulyan(index: int) -> None:
    case, rows, gram = _case(index)
    expected = case["reference"]["bulyan"]
    found = _given(f"bulyan(f={expected['params']['f']})", rows, gram)
    assert _error(found, expected["output"]) < 1e-12


@pytest.mark.parametrize("index", CASES)
def test_pre_aggregators(index: int) -> None:
    case, rows, gram = _case(index)
    for name, entry in (("nnm", case["reference"]["nnm"]), ("arc", case["library"]["pre:ARC"])):
        matrix = get_rule(f"{name}+median(f={case['f']})").matrix(gram, len(rows), 0)
        assert matrix is not None
        assert _error(matrix @ rows, entry["output"]) < 1e-12


@pytest.mark.parametrize("index", CASES)
def test_flag_finds_the_same_direction(index: int) -> None:
    """The length is another: ours is the median of the vectors', theirs that of unit vectors."""
    case, rows, gram = _case(index)
    expected = case["reference"]["flag_aggregator"]
    found = _given(f"flag(f={case['f']},r={expected['params']['r']})", rows, gram)
    wanted = np.array(expected["output_unit_gradients"])
    cosine = found @ wanted / np.linalg.norm(found) / np.linalg.norm(wanted)
    assert cosine > 1 - 1e-9


@pytest.mark.parametrize("index", CASES)
def test_the_filter_is_as_good_as_the_exact_one(index: int) -> None:
    """The oracle's shrinks weights by the largest score of all, dead vectors too, and takes 18,000
    steps for one of these; ours by the largest of the living, as its bound of 2 f steps needs."""
    case, rows, gram = _case(index)
    found = _given(f"caf(f={case['f']})", rows, gram)
    squared = float(((found - np.array(case["honest_mean"])) ** 2).sum())
    kappa = squared / case["honest_variance"]
    assert kappa < 2 * case["kappa_hat"]["caf_exact"]
