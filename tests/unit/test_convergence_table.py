"""What the rows of the convergence benchmark come to: means, bars, tables, plots."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from benchmarks.convergence import bars
from benchmarks.convergence.bars import MET, MISSED, OPEN
from benchmarks.convergence.figures import mean_of, paired_percent, summaries
from benchmarks.convergence.labels import Box, Leader, place
from benchmarks.convergence.methods import CEILING, METHODS, LossBar
from benchmarks.convergence.plan import Plan
from benchmarks.convergence.plot import Level, Mark, plot, ticks
from benchmarks.convergence.report import BEGIN, END, front, write_choices, write_report
from benchmarks.convergence.results import Result, Results
from benchmarks.convergence.row import WARM, Row
from benchmarks.convergence.table import choices, document, markdown
from benchmarks.convergence.training import ring_bytes
from harness.convergence import ELEMENTS, filled, result_of

from atoll.collectives.codecs import get_codec

PLAN = Plan()


# ---------------------------------------------------------------- figures


def test_means_and_their_errors() -> None:
    assert mean_of([2.0]).error is None
    figure = mean_of([1.0, 2.0, 3.0])
    assert (figure.mean, figure.count) == (2.0, 3)
    assert figure.error == pytest.approx(3**-0.5)
    assert figure.shown(2, "+") == "+2.00 ± 0.58"
    assert figure.ranged(1) == "2.0 (1.0 to 3.0)"
    assert mean_of([2.0]).ranged(1) == "2.0"


def test_differences_are_of_equal_seeds() -> None:
    line = PLAN.line(WARM, "diloco")
    mine = [result_of(Row(line, 4e-3, seed), loss) for seed, loss in enumerate((2.2, 3.3, 9.0))]
    others = [result_of(Row(line, 8e-3, seed), loss) for seed, loss in enumerate((2.0, 3.0))]
    figure = paired_percent(mine, others)
    assert figure is not None
    assert figure.mean == pytest.approx(10.0)
    assert figure.error == pytest.approx(0.0, abs=1e-9)
    assert figure.count == 2
    assert paired_percent(mine, []) is None
    assert paired_percent(mine, [result_of(Row(line, 8e-3, 0), failed="NaN")]) is None


@pytest.mark.parametrize(("codec", "factor"), [("int8", 118), ("fp4_e3m0", 213), ("int4", 213)])
def test_byte_factors_of_four_peers_at_thirty_steps(codec: str, factor: float) -> None:
    """Of a butterfly: each peer sends 2 (n-1)/n of the encoded vector, a 120th part as often."""
    elements, workers, h = 829_696, 4, 30
    sent = 2 * (workers - 1) / workers * get_codec(codec).encoded_bytes(elements)
    assert ring_bytes(elements, workers, h) / sent == pytest.approx(factor, abs=0.5)


def test_bytes_are_counted_from_the_end_of_the_warm_start(tmp_path: Path) -> None:
    results = filled(tmp_path / "results.jsonl", PLAN, result_of)
    for each in summaries(PLAN, results):
        steps = 900 if each.line.start == WARM else each.line.steps
        assert each.sent_bytes == pytest.approx(6 * ELEMENTS * steps / 100)
        assert each.factor == pytest.approx(100)
        warm = 6 * ELEMENTS * each.line.first_step
        assert each.whole_bytes == pytest.approx(warm + each.sent_bytes)
        assert each.whole_factor == pytest.approx(100 if not warm else 1 / (0.25 + 0.75 / 100))
        assert each.tokens is None  # the ceiling's loss does not fall


def test_tokens_are_those_of_data_parallel_with_the_same_loss(tmp_path: Path) -> None:
    """Let twice the tokens take a tenth of the loss away: what is a tenth above needs half."""

    def result(row: Row) -> Result:
        fallen = 2.0 / 1.1 if row.line.steps == 2 * PLAN.steps else 2.0
        return result_of(row, fallen * (1.1 if row.line.method == "diloco" else 1.0))

    results = filled(tmp_path / "results.jsonl", PLAN, result)
    for each in summaries(PLAN, results):
        half = each.line.method == "diloco"
        assert each.tokens == pytest.approx(0.5 if half else 1.0)
    row = next(line for line in document(PLAN, results).splitlines() if "| DiLoCo int8 |" in line)
    assert "| +10.0 ± 0.0 % | 50% |" in row


def test_the_front_is_what_nothing_beats() -> None:
    marks = [Mark(x, y, f"{x}") for x, y in ((1, 3), (2, 2), (2, 2.5), (3, 2), (4, 1), (5, 4))]
    assert [(mark.x, mark.y) for mark in front(marks)] == [(1, 3), (2, 2), (4, 1)]


# ---------------------------------------------------------------- bars


def test_bars_are_open_then_met_or_missed(tmp_path: Path) -> None:
    empty = bars.verdicts(PLAN, Results(tmp_path / "none.jsonl"))
    assert {verdict.said for verdict in empty} == {OPEN}

    equal = filled(tmp_path / "equal.jsonl", PLAN, result_of)
    verdicts = bars.verdicts(PLAN, equal)
    assert {v.said for v in verdicts if "loss above" in v.what} == {MET}
    in_bytes = {v.bar: v.said for v in verdicts if "fewer bytes" in v.what}
    assert in_bytes["≥ 50 times"] == MET  # all rows have 100
    assert in_bytes["≥ 200 times"] == MISSED

    def worse(row: Row) -> Result:
        return result_of(row, 2.0 if row.line.method == CEILING else 2.11)

    verdicts = bars.verdicts(PLAN, filled(tmp_path / "worse.jsonl", PLAN, worse))
    within_5 = [v for v in verdicts if v.bar == "≤ 5 %"]
    assert {v.said for v in within_5} == {MISSED}
    assert within_5[0].measured == "+5.50 ± 0.00 %, 3 of 3 seeds"


@pytest.mark.parametrize(("spread", "expected"), [(0.0, MISSED), (0.004, MISSED), (0.05, MET)])
def test_what_is_within_two_standard_errors_is_no_loss(
    tmp_path: Path, spread: float, expected: str
) -> None:
    """Half a percent worse in the mean, with seeds apart by ``spread``."""
    bar = next(bar for bar in METHODS["diloco-int4"].bars if isinstance(bar, LossBar))
    assert (bar.percent, bar.errors) == (0.3, 2.0)

    def result(row: Row) -> Result:
        four_bits = row.line.method == "diloco-int4"
        return result_of(row, 2.01 + spread * (row.seed - 1) if four_bits else 2.0)

    verdicts = bars.verdicts(PLAN, filled(tmp_path / "results.jsonl", PLAN, result))
    (found,) = [v for v in verdicts if v.what.startswith("DiLoCo int4, H=") and "loss" in v.what]
    assert found.said == expected


def test_a_bar_whose_row_diverged_is_missed(tmp_path: Path) -> None:
    def result(row: Row) -> Result:
        return result_of(row, failed="NaN" if row.line.method == "diloco" and row.seed else "")

    first = bars.verdicts(PLAN, filled(tmp_path / "results.jsonl", PLAN, result))[0]
    assert (first.measured, first.said) == ("diverged", MISSED)


# ---------------------------------------------------------------- the document


def test_the_document_has_a_row_for_each_line(tmp_path: Path) -> None:
    def result(row: Row) -> Result:
        return result_of(row, 2.0 + 1e-3 * row.seed)

    results = filled(tmp_path / "results.jsonl", PLAN, result)
    write_report(tmp_path, PLAN, results)
    text = (tmp_path / "README.md").read_text("utf-8")
    assert text == document(PLAN, results)
    tables = text.partition("## Bars")[0]
    assert (
        tables.count("\n| DiLoCo int8 | 30 | 0.002* | 2.001 (2.000 to 2.002) | +0.0 ± 0.0 % |") == 2
    )
    assert sum(line.startswith("| ") for line in tables.splitlines()) == len(PLAN.lines()) + 3
    named = {path.name for path in tmp_path.glob("*.svg")}
    assert named == {"warm-1200.svg", "scratch-1200.svg", "scratch-2400.svg"}
    assert all(f"({name})" in text for name in named)
    assert "do not compare" not in text


def test_the_page_on_choosing_has_every_method_and_keeps_its_own_text(tmp_path: Path) -> None:
    results = filled(tmp_path / "results.jsonl", PLAN, lambda row: result_of(row, 2.1))
    page = tmp_path / "choosing.md"
    page.write_text(f"before\n{BEGIN}old\n{END}after\n")
    write_choices(page, PLAN, results)
    text = page.read_text("utf-8")
    assert text == f"before\n{BEGIN}{choices(PLAN, results)}{END}after\n"
    assert "old" not in text
    assert all(f"\n| {entry.label} | " in text for entry in METHODS.values())
    diloco = next(line for line in text.splitlines() if line.startswith("| DiLoCo int8 | 30 |"))
    assert diloco.count("| +0.0 ") == 3
    page.write_text("without marks\n")
    with pytest.raises(ValueError, match="no marks"):
        write_choices(page, PLAN, results)
    assert page.read_text("utf-8") == "without marks\n"


def test_a_row_that_diverged_is_shown(tmp_path: Path) -> None:
    results = Results(tmp_path / "results.jsonl")
    tuned = PLAN.tuning("diloco")
    for row in tuned:
        results.add(result_of(row, failed="NaN" if row.lr > 2e-3 else ""))
    results.add(result_of(Row(tuned[0].line, 2e-3, seed=1), failed="NaN"))
    rates, lines = document(PLAN, results).split("## Learning rates")[::-1]
    assert "| DiLoCo int8 | 0.002: **2.000**, 0.004: diverged, 0.008: diverged |" in rates
    assert "| DiLoCo int8 | 30 | 0.002* | diverged |" in lines


def test_rows_of_two_origins_are_told(tmp_path: Path) -> None:
    results = Results(tmp_path / "results.jsonl")
    first, second = (result_of(row) for row in PLAN.tuning("diloco")[:2])
    results.add(first)
    results.add(replace(second, made_with="another machine"))
    assert "do not compare" in document(PLAN, results)


def test_a_document_without_rows_says_so(tmp_path: Path) -> None:
    write_report(tmp_path, PLAN, Results(tmp_path / "results.jsonl"))
    assert "No rows yet" in (tmp_path / "README.md").read_text("utf-8")
    assert not list(tmp_path.glob("*.svg"))


def test_markdown() -> None:
    assert markdown([("a", "b"), ("1", "")]) == "| a | b |\n|---|---|\n| 1 |  |\n"


# ---------------------------------------------------------------- the plot


@pytest.mark.parametrize("seed", range(2))
def test_no_label_lies_on_anything(seed: int) -> None:
    """Thirty points, most of them in a cluster."""
    inside, radius = Box(60, 60, 900, 540), 7.0
    random = np.random.default_rng(seed)
    spread = np.array([[300.0, 150.0]] * 10 + [[60.0, 40.0]] * 20)
    offsets = spread * random.uniform(-1, 1, (30, 2))
    points = [(480.0 + float(x), 300.0 + float(y)) for x, y in offsets]
    sizes = [(float(random.integers(60, 130)), 12.0) for _ in points]
    level = Box(60, 399, 900, 401)
    labels = place(points, sizes, inside, radius, [level])
    marks = [Box(x - radius, y - radius, x + radius, y + radius) for x, y in points]
    for number, label in enumerate(labels):
        assert inside.holds(label.box)
        assert label.box.right - label.box.left == pytest.approx(sizes[number][0])
        others = [each.box for each in labels if each is not label]
        assert not any(label.box.meets(box) for box in (*others, *marks, level))


def test_lines_to_labels_cross_nothing_where_there_is_room() -> None:
    points = [(200.0 + 20 * number, 300.0 + 5 * (number % 3)) for number in range(8)]
    labels = place(points, [(110.0, 12.0)] * 8, Box(60, 60, 900, 540), 7.0)
    lines = [label.leader for label in labels if label.leader]
    assert lines
    assert not any(line.crosses(label.box) for line in lines for label in labels)


def test_where_there_is_no_room_labels_stay_beside_their_points() -> None:
    labels = place([(50.0, 50.0)] * 3, [(90.0, 90.0)] * 3, Box(0, 0, 100, 100), 5.0)
    assert len(labels) == 3
    (alone,) = place([(50.0, 50.0)], [(200.0, 10.0)], Box(0, 0, 100, 100), 5.0)
    assert alone.box.left == 50.0


@pytest.mark.parametrize(
    ("line", "crosses"),
    [
        (Leader(0, 0, 10, 10), True),
        (Leader(0, 5, 10, 5), True),
        (Leader(5, 0, 5, 10), True),
        (Leader(0, 0, 3, 3), False),
        (Leader(0, 7, 10, 7), False),
        (Leader(0, 8, 10, 5), False),
    ],
)
def test_lines_and_boxes(line: Leader, crosses: bool) -> None:
    assert line.crosses(Box(4, 4, 6, 6)) is crosses


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.0, 1.0, [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (1.29, 1.61, [1.3, 1.35, 1.4, 1.45, 1.5, 1.55, 1.6]),
        (2.0, 10.0, [2, 4, 6, 8, 10]),
    ],
)
def test_ticks_are_round(low: float, high: float, expected: list[float]) -> None:
    assert ticks(low, high) == pytest.approx(expected)


def test_a_plot_has_every_mark_and_label() -> None:
    marks = [
        Mark(10.0**k, 2.0 - 0.1 * k, f"method {k} <&>", shape=k % 3, colour=k) for k in range(9)
    ]
    marks.append(Mark(1e5, 7.25, "far above"))
    text = plot("a title", ("x", "y"), marks, [Level(1.9, "floor")], ["a", "b", "c"], y_most=2.1)
    assert 'stroke-dasharray="2 4"' not in text
    assert 'stroke-dasharray="2 4"' in plot("", ("x", "y"), marks, front=front(marks))
    root = ElementTree.fromstring(text)
    shown = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {mark.label for mark in marks[:-1]} < set(shown)
    assert {"far above ↑ 7.25", "floor", "a title", "1 MB", "x", "y", "a", "b", "c"} < set(shown)
    assert not any(label and label.startswith("7") for label in shown)


def test_a_plot_without_marks_is_a_plot() -> None:
    assert ElementTree.fromstring(plot("nothing", ("x", "y"), [])).tag.endswith("svg")
