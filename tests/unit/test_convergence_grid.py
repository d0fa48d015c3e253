"""The grid of inner rates, outer rates and momenta: its rows, what they build on, its tables."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.convergence import grid
from benchmarks.convergence.grid import ADAMW, CEILING, LARGE_BATCH, MUON, STAGES, Grid, Setting
from benchmarks.convergence.results import Result, Results
from benchmarks.convergence.row import Row
from harness.convergence import result_of

BEST = Setting("diloco", ADAMW, 0.7, 0.8)


def results_in(folder: Path) -> Results:
    return Results(folder / "results.jsonl")


def of_row(row: Row) -> Result:
    """Return a result that is the better the nearer a setting is to the best one."""
    setting = Setting.of(row.line.method)
    far = abs(setting.outer_lr - BEST.outer_lr) + abs(setting.momentum - BEST.momentum)
    above = 0.15 + 0.1 * far if setting.outer_lr else 0.0
    return result_of(row, loss=1.496 + above + row.lr + 0.01 * row.seed)


def fill(table: Grid) -> None:
    while rows := table.pending():
        for row in rows:
            table.results.add(of_row(row))


def test_a_setting_can_be_told_from_its_name() -> None:
    assert BEST.name == "diloco-adamw@0.7,0.8"
    for setting in (BEST, Setting(CEILING, MUON), Setting("noloco", MUON, 1.4, 0.5)):
        assert Setting.of(setting.name) == setting
    for name in ("diloco", "diloco-adamw@0.7", "diloco-sgd@0.7,0.8", "unknown-adamw@0.7,0.8"):
        with pytest.raises(ValueError):
            Setting.of(name)


def rates_of(table: Grid, setting: Setting) -> set[float]:
    return {row.lr for row in table.rows() if row.line.method == setting.name}


def test_the_first_size_looks_for_inner_rates_in_the_middle(tmp_path: Path) -> None:
    table = Grid("0.1M", results_in(tmp_path))
    rows = table.rows()
    assert len(rows) == len(set(rows)) == 2 * 3 * (1 + 1 + 3)
    assert rates_of(table, BEST) == {0.004, 0.008, 0.016}
    assert rates_of(table, Setting(LARGE_BATCH, ADAMW)) == {0.008, 0.016, 0.032}
    assert rates_of(table, Setting("diloco", ADAMW, 0.4, 0.6)) == set()
    assert all(Row.of(row.name) == row for row in rows)


def test_the_first_size_has_all_settings_at_the_best_rate_and_the_best_two_at_all(
    tmp_path: Path,
) -> None:
    table = Grid("0.1M", results_in(tmp_path))
    announced = table.hours()
    fill(table)
    rows = table.rows()
    assert len(rows) == len(set(rows)) == len(table.results.all())
    every = {0.004, 0.008, 0.016}
    second = Setting("diloco", ADAMW, 0.7, 0.9)  # as near to the best one as any other
    settings = table.settings("diloco", ADAMW)
    assert len(settings) == 9
    assert rates_of(table, BEST) == rates_of(table, second) == every
    of_others = [rates_of(table, each) for each in settings if each not in (BEST, second)]
    assert of_others == [{0.004}] * 7
    assert all(table.best(each) for each in settings)
    assert announced >= len(rows) * 4 * 900 * STAGES["0.1M"].step_s / 3600
    assert table.hours() == 0


def test_a_middle_that_diverges_everywhere_is_no_place_to_look_from(tmp_path: Path) -> None:
    table = Grid("0.1M", results_in(tmp_path))
    for row in table.tuning(BEST):
        table.results.add(result_of(row, failed="NaN"))
    assert rates_of(table, Setting("diloco", ADAMW, 0.4, 0.6)) == {0.004, 0.008, 0.016}


def test_a_size_builds_on_the_best_of_the_one_before_it(tmp_path: Path) -> None:
    results = results_in(tmp_path)
    assert not Grid("0.8M-clip", results).rows()
    fill(Grid("0.1M", results))
    second = Grid("0.8M-clip", results)
    assert {row.line.method for row in second.rows()} == {
        "data-parallel-adamw",
        "data-parallel-muon",
    }
    settings = second.settings("diloco", ADAMW)
    assert settings[0] == BEST
    assert len(settings) == STAGES["0.8M-clip"].best
    announced = second.hours()
    assert announced > 0
    fill(second)
    done = [each for each in results.all() if each.row.line.size == "0.8M-clip"]
    steps = sum(4 * 900 for _ in done)
    assert announced == pytest.approx(steps * STAGES["0.8M-clip"].step_s / 3600)
    assert second.hours() == 0
    assert [each.row.seed for each in second.of_seeds(BEST)] == [0, 1, 2]
    [rate] = {each.row.lr for each in done if each.row.line.method == BEST.name}
    assert rate == min(BEST.rates("0.8M-clip"))  # data-parallel's best, as at the size before
    assert Grid("3M", results).settings("diloco", ADAMW) == [BEST]


def test_a_setting_whose_rates_all_diverge_is_not_among_the_best(tmp_path: Path) -> None:
    results = results_in(tmp_path)
    table = Grid("0.1M", results)
    for row in table.tuning(BEST):
        results.add(result_of(row, failed="NaN"))
    fill(table)
    assert table.best(BEST) is None
    assert BEST not in Grid("0.8M-clip", results).settings("diloco", ADAMW)


def test_the_tables_say_what_is_best_and_how_far_it_is_from_data_parallel(tmp_path: Path) -> None:
    results = results_in(tmp_path)
    fill(Grid("0.1M", results))
    text = grid.document(results)
    assert "## 0.1M" in text
    assert "0.8M" not in text
    assert "| data-parallel | AdamW |  | 0.004* | 1.500 |  | 1 |" in text
    assert "| DiLoCo int4 | AdamW | 0.7, 0.8 | 0.004* | 1.650 | +10.0 % | 1 |" in text
    assert "### NoLoCo bfloat16, Muon" in text


def test_one_row_of_a_setting_trains_what_it_says() -> None:
    run = grid.SettingRun.entry_of(None, BEST.name)  # type: ignore[arg-type]
    assert run.make is not None
    assert not run.muon
    large = grid.SettingRun.entry_of(None, Setting(LARGE_BATCH, MUON).name)  # type: ignore[arg-type]
    assert large.make is None
    assert large.accumulates
    assert large.muon


def test_a_size_waits_until_the_one_before_it_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["grid", "--size", "0.8M-clip", "--out", str(tmp_path)])
    assert grid.main() == 2
    assert "0.8M-clip is of the best of 0.1M, of which 30 rows are left" in capsys.readouterr().out
