"""The simulator's command line: what cannot be done is one line and exit code 2, no success."""

from __future__ import annotations

import pytest

from simulation.__main__ import main


@pytest.mark.parametrize(
    "words",
    [
        ("--seeds", "9..9"),
        ("--seeds", "9..3"),
        ("--seeds", "9"),
        ("--seeds", "a..b"),
        ("--seeds", "0..10..20"),
        ("--seeds", ""),
        ("--seeds", "0..5", "--jobs", "0"),
        ("--seeds", "0..5", "--jobs", "-1"),
        ("--seeds", "0..5", "--jobs", "two"),
        ("--seed", "x"),
        ("--unknown",),
    ],
    ids=" ".join,
)
def test_what_cannot_be_done_is_one_line(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(list(words))
    assert ended.value.code == 2
    said = capsys.readouterr()
    assert said.err.count("\n") == 1
    assert words[-1] in said.err
    assert not said.out


def test_seeds_are_run_and_counted(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seeds", "3..5", "--jobs", "1"]) == 0
    assert capsys.readouterr().out.startswith("2 seeds in ")
