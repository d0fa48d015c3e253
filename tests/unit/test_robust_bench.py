"""The benchmark of attacks: its rows, what an attack costs, its bars, one row with a tiny model."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from attacks.catalogue import ATTACKS
from benchmarks.convergence.bars import MET, MISSED, OPEN
from benchmarks.convergence.results import Point, Result, Results
from benchmarks.convergence.row import Row
from benchmarks.robust.figures import (
    RUINED_LEAST,
    cost,
    faults,
    ruined,
    standing_still,
    verdicts,
)
from benchmarks.robust.plan import BEST, MEAN, NONE, RULES, Plan, Setting, quick_plan
from benchmarks.robust.table import document
from benchmarks.robust.training import AttackedRun

from atoll.peer.demo.text import Text

PLAN = Plan()
FIRST, FREE = 5.0, 3.0  # losses: untrained, and at the end without an attack


def result_of(row: Row, loss: float = FREE, failed: str = "") -> Result:
    then = PLAN.first_attacked_step
    points = (Point(0, FIRST, 0.0), Point(then, 3.5, 1.0), Point(PLAN.steps, loss, 2.0))
    return Result(row, points[:1] if failed else points, 100, 1.0, 1.0, "a machine", failed)


def filled(path: Path, plan: Plan, make: Callable[[Setting, Row], Result]) -> Results:
    results = Results(path / "results.jsonl")
    for row in plan.pending(results):
        results.add(make(Setting.of(row.line.method), row))
    return results


def usual(setting: Setting, row: Row) -> Result:
    """A mean that every attack ruins, and rules that lose 2 %."""
    if setting.attack == NONE:
        return result_of(row)
    if setting.rule == MEAN:
        return result_of(row, failed="NaN") if setting.attack == "nan" else result_of(row, 9.0)
    return result_of(row, FREE + 0.02 * (FIRST - FREE))


# ---------------------------------------------------------------- rows


def test_every_row_can_be_found_again_by_its_name() -> None:
    rows = list(PLAN.rows())
    assert len({row.name for row in rows}) == len(rows)
    for row in rows:
        assert Row.of(row.name) == row
        setting = Setting.of(row.line.method)
        assert setting.method == row.line.method
        assert setting.attackers == (0 if setting.attack == NONE else PLAN.attackers)
    with pytest.raises(ValueError, match="no attack"):
        Setting.of("mean:3x:flattery")


def test_every_possible_rule_meets_every_attack_and_none() -> None:
    found = {(each.rule, each.attack) for row in PLAN.rows() for each in [setting_of(row)]}
    rules = {PLAN.text_of(rule) for rule in PLAN.possible}
    assert found == {(rule, attack) for rule in rules for attack in (NONE, *ATTACKS)}


def setting_of(row: Row) -> Setting:
    return Setting.of(row.line.method)


def test_a_rule_whose_precondition_does_not_hold_is_not_run_and_named() -> None:
    assert {*RULES} - {*PLAN.possible} == {"bucketing(s=2)+trimmed"}
    assert "needs at least 13 peers, and here are 10" in PLAN.why_not("bucketing(s=2)+trimmed")
    assert replace(PLAN, workers=14).possible == RULES


def test_attacks_begin_with_a_round_after_a_third() -> None:
    assert PLAN.first_attacked_step == PLAN.steps // 3
    assert PLAN.first_attacked_step % PLAN.sync_every == 0
    quick = quick_plan()
    assert quick.first_attacked_step == quick.steps // 3
    assert {*quick.attacks} <= ATTACKS.keys()


# ---------------------------------------------------------------- figures


def test_a_cost_is_a_share_of_the_same_rules_improvement(tmp_path: Path) -> None:
    results = Results(tmp_path / "results.jsonl")
    assert cost(PLAN, results, MEAN, "alie") is None
    results.add(result_of(PLAN.row(MEAN)))
    assert cost(PLAN, results, MEAN, "alie") is None
    results.add(result_of(PLAN.row(MEAN, "alie"), 3.5))
    assert cost(PLAN, results, MEAN, "alie") == pytest.approx(0.25)
    results.add(result_of(PLAN.row(MEAN, "nan"), failed="NaN"))
    assert cost(PLAN, results, MEAN, "nan") == math.inf
    assert standing_still(PLAN, results, MEAN) == pytest.approx(0.25)
    assert standing_still(PLAN, results, BEST) is None


def test_a_cost_is_the_mean_over_seeds_and_waits_for_all(tmp_path: Path) -> None:
    plan, results = replace(PLAN, seeds=2), Results(tmp_path / "results.jsonl")
    for seed, loss in ((0, 3.2), (1, 3.4)):
        assert cost(plan, results, BEST, "mimic") is None
        results.add(result_of(plan.row(BEST, seed=seed)))
        results.add(result_of(plan.row(BEST, "mimic", seed), loss))
    assert cost(plan, results, BEST, "mimic") == pytest.approx(0.15)


def test_what_is_ruined() -> None:
    assert [ruined(share) for share in (None, -1.0, 0.49, 0.5, math.inf, math.nan)] == [
        False,
        False,
        False,
        True,
        True,
        True,
    ]


def test_bars_are_open_then_met_or_missed(tmp_path: Path) -> None:
    assert [v.said for v in verdicts(PLAN, Results(tmp_path / "none.jsonl"))] == [OPEN, OPEN]
    met = filled(tmp_path / "met", PLAN, usual)
    assert [v.said for v in verdicts(PLAN, met)] == [MET, MET]
    assert "2.0 %" in verdicts(PLAN, met)[0].measured

    def other(setting: Setting, row: Row) -> Result:
        """One attack costs the best rule more, and too few ruin the mean."""
        if setting == Setting("nnm+trimmed(f=3)", 3, "mimic"):
            return result_of(row, FREE + 0.051 * (FIRST - FREE))
        few = list(ATTACKS)[: RUINED_LEAST - 1]
        if setting.rule == MEAN and setting.attack not in few:
            return result_of(row)
        return usual(setting, row)

    missed = verdicts(PLAN, filled(tmp_path / "missed", PLAN, other))
    assert [v.said for v in missed] == [MISSED, MISSED]
    assert "5.1 % (mimic)" in missed[0].measured


def test_a_bar_with_some_attacks_is_not_met_yet(tmp_path: Path) -> None:
    results = Results(tmp_path / "results.jsonl")
    for attack in (NONE, "alie", "mimic"):
        results.add(usual(Setting("", 0, attack), PLAN.row(BEST, attack)))
    best, _ = verdicts(PLAN, results)
    assert (best.said, "2 of 22 attacks" in best.measured) == (OPEN, True)


def test_quick_finds_a_best_rule_that_is_ruined_and_attacks_that_do_nothing(tmp_path: Path) -> None:
    plan = quick_plan()
    assert faults(plan, filled(tmp_path / "good", plan, usual)) == []

    def bad(setting: Setting, row: Row) -> Result:
        lost = setting.rule != MEAN and setting.attack == "nan"
        return result_of(row, FIRST if lost else FREE)

    found = faults(plan, filled(tmp_path / "bad", plan, bad))
    assert len(found) == 2
    assert "nnm+trimmed(f=3) is ruined by nan" in found[0]
    assert "the mean is ruined by 0 of 6" in found[1]
    missing = faults(plan, Results(tmp_path / "none.jsonl"))
    assert len(missing) == len(list(plan.rows())) + 1

    def diverging(setting: Setting, row: Row) -> Result:
        return result_of(row, failed="NaN") if setting.rule != MEAN else usual(setting, row)

    found = faults(plan, filled(tmp_path / "diverging", plan, diverging))
    assert found == ["nnm+trimmed(f=3) diverges without any attack"]


# ---------------------------------------------------------------- the document


def test_the_document_shows_every_attack_and_rule(tmp_path: Path) -> None:
    text = document(PLAN, filled(tmp_path, PLAN, usual))
    costs = text.partition("## Costs")[2].partition("## Losses")[0]
    assert "| nan | **stopped** | 2.0% |" in costs
    assert "| alie | **300.0%** | 2.0% |" in costs
    assert "| *worst* | **stopped** | 2.0% |" in costs
    assert "| *standing still* | 25.0% | 25.0% |" in costs
    losses = text.partition("## Losses")[2]
    assert "| none | 3.000 | 3.000 |" in losses
    assert "- `mean:3x:nan`: NaN\n" in text
    for name in ATTACKS:
        assert text.count(f"\n| {name} |") == 3
    assert "13 peers, and here are 10" in text


def test_a_document_without_rows_says_how_to_get_some(tmp_path: Path) -> None:
    text = document(PLAN, Results(tmp_path / "results.jsonl"))
    assert "No rows yet" in text
    assert text.count(f"| {OPEN} |") == 2


# ---------------------------------------------------------------- one row

TINY = replace(PLAN, size="tiny", steps=24, sync_every=2)


@pytest.fixture(scope="module")
def text() -> Text:
    picked = np.random.default_rng(0).integers(2, size=3000)
    data = "".join(["import ", "return\n"][k] for k in picked).encode()
    return Text(train=np.frombuffer(data, np.uint8), heldout=np.frombuffer(data[:3000], np.uint8))


def run(plan: Plan, text: Text, rule: str, attack: str = NONE) -> Result:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    row = plan.row(rule, attack)
    try:
        return AttackedRun(row, text, Path("nowhere"), lambda: None).result()
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("attack", ["sign-flip-1000", "label-flip"])
def test_a_run_is_the_same_until_it_is_attacked(text: Text, attack: str) -> None:
    free, attacked = run(TINY, text, BEST), run(TINY, text, BEST, attack)
    then = TINY.first_attacked_step
    assert [point.step for point in free.points] == [0, 6, 8, 12, 18, 24]
    same = [one == other for one, other in zip(free.points, attacked.points, strict=True)]
    assert same == [point.step <= then for point in free.points]
    assert abs(attacked.loss - free.loss) < 0.5 * (free.points[0].loss - free.loss)


def test_the_mean_is_ruined_and_says_so(text: Text) -> None:
    free, attacked = run(TINY, text, MEAN), run(TINY, text, MEAN, "sign-flip-1000")
    assert attacked.loss > free.points[0].loss
    assert run(TINY, text, MEAN, "infinity").loss == math.inf


def test_a_run_with_too_few_for_its_rule_stands_still(text: Text) -> None:
    assert "at least 9 peers" in run(TINY, text, "multi_krum", "nan").failed
