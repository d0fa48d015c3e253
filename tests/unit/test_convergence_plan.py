"""Which rows the convergence benchmark has, and in which order."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.convergence import quick
from benchmarks.convergence.methods import CEILING, FLOOR, METHODS, BytesBar
from benchmarks.convergence.plan import Plan, quick_plan
from benchmarks.convergence.results import Results
from benchmarks.convergence.row import SCRATCH, WARM, Line, Row
from benchmarks.convergence.training import EVALUATIONS
from harness.convergence import filled, result_of

PLAN = Plan()
NAME = "0.8M/warm-1200/4x/diloco/H30/lr0.004/seed0"


def test_a_row_can_be_told_from_its_name() -> None:
    row = Row(Line("0.8M", WARM, 1200, 4, "diloco", 30), 0.004, 0)
    assert row.name == NAME  # what has been measured is kept by it
    assert Row.of(NAME) == row
    for line in (*PLAN.lines(), *quick_plan().lines()):
        assert Row.of(Row(line, 2.5e-4, 17).name) == Row(line, 2.5e-4, 17)
    for name in ("", NAME + "/", NAME.replace("warm", "cold"), NAME.replace("seed0", "seed")):
        with pytest.raises(ValueError):
            Row.of(name)


def test_each_method_has_its_lines() -> None:
    lines = PLAN.lines()
    assert len(set(lines)) == len(lines)
    assert {line.method for line in lines} == METHODS.keys()
    of_diloco = [line for line in lines if line.method == "diloco"]
    assert {(line.start, line.steps, line.sync_every) for line in of_diloco} == {
        (WARM, 1200, 30),
        (WARM, 1200, 100),
        (SCRATCH, 1200, 30),
        (SCRATCH, 1200, 100),
        (SCRATCH, 2400, 30),
    }
    assert {line.sync_every for line in lines if line.method in (FLOOR, CEILING)} == {1}


def test_rounds_end_where_losses_are_read() -> None:
    for line in PLAN.lines():
        assert line.steps % EVALUATIONS == 0
        assert line.steps // EVALUATIONS % line.sync_every == 0
        assert line.first_step % line.sync_every == 0


def test_what_an_entry_says_fits_the_others() -> None:
    for name, entry in METHODS.items():
        assert entry.name == name
        tuned_as = METHODS[entry.tuned_as or name]
        assert not tuned_as.tuned_as
        for bar in entry.bars:
            assert isinstance(bar, BytesBar) or bar.against in METHODS
    assert len({entry.label for entry in METHODS.values()}) == len(METHODS)


def test_learning_rates_come_first_and_then_seeds(tmp_path: Path) -> None:
    results = Results(tmp_path / "results.jsonl")
    tuning = PLAN.tuning("diloco")
    assert [row.lr for row in tuning] == [2e-3, 4e-3, 8e-3]
    assert {row for row in PLAN.pending(results) if row.line.method == "diloco"} == set(tuning)
    for row in tuning:
        assert PLAN.best_rate("diloco", results) is None
        results.add(result_of(row, loss=2 + abs(row.lr - 4e-3)))
    assert PLAN.best_rate("diloco", results) == 4e-3
    assert PLAN.best_rate("diloco-int4", results) == 4e-3
    found = [row for row in PLAN.pending(results) if row.line == tuning[0].line]
    assert found == [Row(tuning[0].line, 4e-3, seed) for seed in (1, 2)]
    pairs = [row for row in PLAN.pending(results) if row.line.method == "diloco-int4"]
    assert {(row.lr, row.seed) for row in pairs if row.line.start == WARM} >= {
        (4e-3, seed) for seed in range(3)
    }


def test_a_rate_that_diverges_is_not_the_best(tmp_path: Path) -> None:
    results = Results(tmp_path / "results.jsonl")
    for row in PLAN.tuning("diloco"):
        results.add(result_of(row, failed="" if row.lr == 2e-3 else "NaN"))
    assert PLAN.best_rate("diloco", results) == 2e-3
    for row in PLAN.tuning("local-sgd"):
        results.add(result_of(row, failed="NaN"))
    assert PLAN.best_rate("local-sgd", results) is None
    assert not [row for row in PLAN.pending(results) if row.line.method.startswith("local-sgd")]
    assert not [line for line in PLAN.later(results) if line.method.startswith("local-sgd")]


def test_as_many_rows_are_run_as_were_announced(tmp_path: Path) -> None:
    empty = Results(tmp_path / "none.jsonl")
    announced = len(PLAN.pending(empty)) + len(PLAN.later(empty))
    results = filled(tmp_path / "results.jsonl", PLAN, result_of)
    assert len(results.all()) == announced
    assert not PLAN.later(results)


def test_a_pattern_brings_what_it_needs(tmp_path: Path) -> None:
    results = Results(tmp_path / "results.jsonl")
    pattern = "warm.*diloco-int4/H30"
    assert set(PLAN.pending(results, pattern)) == set(PLAN.tuning("diloco"))
    assert len(PLAN.later(results, pattern)) == 3
    for row in PLAN.tuning("diloco"):
        results.add(result_of(row))
    assert {row.line.method for row in PLAN.pending(results, pattern)} == {"diloco-int4"}


def test_quick_has_every_method_once_and_tunes_nothing(tmp_path: Path) -> None:
    plan, results = quick_plan(), Results(tmp_path / "results.jsonl")
    rows = plan.pending(results)
    assert sorted(row.line.method for row in rows) == sorted(METHODS)
    assert not plan.later(results)
    faults = quick.faults(plan, results)
    assert len(faults) == len(rows)
    assert all("no result" in fault for fault in faults)
    assert quick.faults(plan, results, "qsr") == ["LocalSGD QSR int8 has no result"]
    for number, row in enumerate(rows):
        margin = METHODS[row.line.method].quick_margin
        loss = 5.5 - margin + (0.01 if number == 1 else -0.01)
        results.add(result_of(row, loss, failed="NaN in it" if number == 0 else ""))
    first, second = quick.faults(plan, results)
    assert "has diverged: NaN in it" in first
    assert METHODS[rows[0].line.method].label in first
    assert METHODS[rows[1].line.method].label in second
