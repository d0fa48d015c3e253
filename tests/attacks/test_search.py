"""Attacks that try: the search, and the values that another library gives for these attacks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from harness.oracles import oracle

from atoll.collectives.robust import get_rule
from attacks.base import Attack, Seen
from attacks.crude import SignFlip
from attacks.hidden import ALittleIsEnough, InnerProduct
from attacks.search import EVALUATIONS, best_alie, best_ipm, line_maximum

CASES = range(3)
# The sign of byzfl's is the other one.
FORMULAS = {
    "SignFlipping": SignFlip(1.0),
    "IPM_tau2": InnerProduct(2.0),
    "ALIE_tau1.5": ALittleIsEnough(-1.5),
    "OptALIE_vs_TrMean": best_alie(),
    "OptIPM_vs_TrMean": best_ipm(),
}


@pytest.mark.parametrize("index", CASES)
@pytest.mark.parametrize("name", FORMULAS)
def test_attacks_send_the_values_of_the_oracle(name: str, index: int) -> None:
    case: dict[str, Any] = oracle("aggregators")["cases"][index]
    rows, places = np.array(case["inputs"]), case["byzantine_rows"]
    honest, own = np.delete(rows, places, axis=0), rows[places]
    rule = get_rule(f"trimmed(f={case['f']})")
    sent = FORMULAS[name].send(Seen(honest, own, rule, places=tuple(places)))
    assert np.allclose(sent, case["library"][f"attack:{name}"]["output"], rtol=1e-12)


def test_a_search_doubles_while_it_rises_and_then_closes_in() -> None:
    asked: list[float] = []

    def height(x: float) -> float:
        asked.append(x)
        return -abs(x - 37.0)

    assert line_maximum(height) == pytest.approx(37.0, abs=1.5)
    assert asked[:4] == [0.0, 10.0, 30.0, 70.0]
    assert len(asked) == EVALUATIONS
    assert min(asked) >= 0


def test_a_search_that_finds_nothing_better_stays() -> None:
    assert line_maximum(lambda x: -x) == 0.0
    assert line_maximum(lambda x: 1.0) == 0.0


@pytest.mark.parametrize("rule", ["median(f=3)", "trimmed(f=3)", "gm(f=3)", "nnm+trimmed(f=3)"])
@pytest.mark.parametrize("usual", [ALittleIsEnough(1.5), InnerProduct(0.5)], ids=["alie", "ipm"])
def test_what_was_searched_for_is_worse_than_what_is_usual(rule: str, usual: Attack) -> None:
    random = np.random.default_rng(3)
    rows = 1.0 + random.standard_normal((10, 300))
    seen = Seen(rows[3:], rows[:3], get_rule(rule))
    searched = best_alie() if isinstance(usual, ALittleIsEnough) else best_ipm()

    def harm(attack: Attack) -> float:
        return float(np.linalg.norm(seen.aggregated(attack.send(seen)) - seen.mean))

    assert harm(searched) >= 0.99 * harm(usual)
    assert harm(searched) > 0
