"""What the convergence benchmark keeps of its rows, and how it runs them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from benchmarks.convergence.plan import Plan
from benchmarks.convergence.results import Results
from benchmarks.convergence.row import Row
from benchmarks.convergence.runner import Runner
from harness.convergence import result_of

PLAN = Plan()
NAME = "0.8M/warm-1200/4x/diloco/H30/lr0.004/seed0"


def test_results_are_read_as_they_were_kept(tmp_path: Path) -> None:
    path = tmp_path / "a folder" / "results.jsonl"
    rows = PLAN.tuning("diloco")
    kept = [result_of(rows[0], 1.25), result_of(rows[1], failed="NaN")]
    results = Results(path)
    for each in kept:
        results.add(each)
    results.add(result_of(rows[0], 9.0))  # the first counts
    for seen in (results, Results(path)):
        assert seen.all() == kept
        assert seen.get(rows[0]) == kept[0]
        assert seen.get(rows[2]) is None


def test_a_line_that_was_cut_is_written_anew(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    first, second = (result_of(row) for row in PLAN.tuning("diloco")[:2])
    Results(path).add(first)
    whole = path.read_bytes()
    line = second.to_json().encode() + b"\n"
    for cut in range(len(line)):
        path.write_bytes(whole + line[:cut])
        results = Results(path)
        assert results.all() == [first]
        results.add(second)
        assert path.read_bytes() == whole + line
    assert Results(path).all() == [first, second]


def test_a_line_that_is_no_result_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    Results(path).add(result_of(PLAN.tuning("diloco")[0]))
    whole = path.read_text()
    for wrong in ("{}", "nothing", whole.strip().replace("seed0", "seed"), '{"name": 1}'):
        path.write_text(whole + wrong + "\n" + whole)
        with pytest.raises(ValueError, match="line 2 is no result"):
            Results(path)


# ---------------------------------------------------------------- many processes


def script(text: str) -> Callable[[Row], list[str]]:
    return lambda row: [sys.executable, "-c", text, row.name]


def run_all(tmp_path: Path, text: str, **options: float) -> tuple[Results, list[Row]]:
    results = Results(tmp_path / "results.jsonl")
    wanted = PLAN.tuning("diloco")
    runner = Runner(results, tmp_path / "logs", 2, script(text), lambda result: None)
    pending = lambda: [row for row in wanted if results.get(row) is None]  # noqa: E731
    return results, runner.run(pending, **options)


def test_each_row_is_run_and_kept(tmp_path: Path) -> None:
    line = result_of(Row.of(NAME)).to_json()
    text = f"import sys; print({line!r}.replace({NAME!r}, sys.argv[1]))"
    results, broken = run_all(tmp_path, text)
    assert not broken
    assert {each.row for each in Results(results.path).all()} == set(PLAN.tuning("diloco"))


def test_a_process_that_fails_is_told_and_not_tried_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "import sys; print('why', file=sys.stderr); sys.exit(3)"
    results, broken = run_all(tmp_path, text)
    assert set(broken) == set(PLAN.tuning("diloco"))
    assert not results.all()
    assert capsys.readouterr().out.count("failed:\n    why") == 3


def test_nothing_is_begun_when_the_time_is_over(tmp_path: Path) -> None:
    results, broken = run_all(tmp_path, "raise SystemExit(1)", until_s=0.0)
    assert not results.all()
    assert not broken
