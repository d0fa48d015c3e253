"""The driver of the benchmarks: its table fits the scripts, and it reads what they print."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from benchmarks import bars
from benchmarks.bars import COMMANDS, FOLDER, ROWS, Command, Figure, Row
from harness import results


@pytest.mark.parametrize("name", COMMANDS)
def test_a_script_has_the_options_that_it_is_given(name: str) -> None:
    script, *rest = bars.words(COMMANDS[name], times=0)
    known = set(re.findall(r'add_argument\(\s*"(--[a-z-]+)"', (FOLDER / script).read_text()))
    assert not {word for word in rest if word.startswith("--")} - known


def test_rows_and_commands_fit_each_other() -> None:
    assert {row.command for row in ROWS} == COMMANDS.keys()
    assert len({(row.command, row.figure) for row in ROWS}) == len(ROWS)


def test_repetitions_can_be_others() -> None:
    command = Command("x.py --mib 4", "--times 5")
    assert bars.words(command, 0) == ["x.py", "--mib", "4", "--times", "5"]
    assert bars.words(command, 2) == ["x.py", "--mib", "4", "--times", "2"]
    assert bars.words(Command("x.py"), 2) == ["x.py"]


def test_rows_are_picked_by_parts_of_their_names() -> None:
    assert bars.picked([]) == list(ROWS)
    assert {row.command for row in bars.picked(["wan"])} == {"wan", "wan-loss", "wan-slow"}
    assert [row.figure for row in bars.picked(["far/first", "100000000/peak"])] == [
        "100000000/peak",
        "far/first/worst",
    ]
    assert not bars.picked(["nothing"])


def test_figures_count_also_of_a_script_that_fails_later(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\nprint('text')\nprint(f'RESULT a/b {float(sys.argv[1]):.4g} ms')\nsys.exit(3)"
    )
    assert bars.measured("name", [str(script), "1234567"]) == {"a/b": Figure(1.235e6, "ms")}
    shown = capsys.readouterr().out
    assert "text\n" in shown
    assert "name ended with exit code 3" in shown


def test_results_are_read_as_they_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    for value in (0.0, -3.25, 1e-9, 1e12):
        results.say("a/b", value, "%")
        assert results.parsed(capsys.readouterr().out) == ("a/b", value, "%")
    for line in ("RESULT a b c", "RESULT a 1", "x RESULT a 1 s", "a 1 s"):
        assert results.parsed(line) is None


@pytest.mark.parametrize(
    ("bar", "value", "said"),
    [
        (">= 1.4 x", 1.4, "yes"),
        (">= 1.4 x", 1.39, "NO"),
        ("<= 10 x", 10.0, "yes"),
        ("<= 10 x", 10.1, "NO"),
        ("< 20 x", 20.0, "NO"),
        ("< 20 x", -1.0, "yes"),
        ("< 20 s", 1.0, "not in s"),
        ("", 1.0, "-"),
    ],
)
def test_verdicts(bar: str, value: float, said: str) -> None:
    assert bars.verdict(bar, Figure(value, "x")) == said


def test_the_table_says_where_a_figure_is_missing() -> None:
    rows = [Row("first", "c", "f", "< 1 s"), Row("second", "c", "g", "")]
    assert bars.table(rows, {"c": {"f": Figure(0.5, "s")}}) == [
        "what   | bar   | measured | met?",
        "first  | < 1 s | 0.5 s    | yes",
        "second | none  |          | no figure",
    ]
