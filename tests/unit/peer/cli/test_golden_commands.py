"""Commands, options and exit codes are what scripts know: whoever changes one sees it here.

`make golden-rewrite` writes them anew, where a change was meant.
"""

from __future__ import annotations

import re

import pytest
from harness import golden_commands, golden_text

from atoll.collectives.errors import AtollError
from atoll.peer.cli import main


def test_commands_and_options_are_as_written() -> None:
    differs = golden_text.wrong("help.txt", golden_commands.help_lines())
    assert not differs, differs


def test_exit_codes_are_as_written() -> None:
    differs = golden_text.wrong("exit_codes.txt", golden_commands.exit_lines())
    assert not differs, differs


def test_every_error_has_a_code_of_its_own() -> None:
    """Peers tell each other codes, and programs read them."""
    kinds = golden_commands._below(AtollError)
    assert len({kind.code for kind in kinds}) == len(kinds)


def test_a_command_ends_with_the_code_of_its_error(capfd: pytest.CaptureFixture[str]) -> None:
    arguments = ["verify", "/nowhere/evidence"]
    code = main.main(arguments)
    shown = re.search(r"ATOLL-(E\d+)", capfd.readouterr().err)
    assert shown is not None
    assert f"{shown[1]} {code}" in golden_text.lines_of("exit_codes.txt")


@pytest.mark.parametrize("command", ["up", "join", "status", "checkpoint verify", "authority new"])
def test_help_names_what_the_golden_file_has(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main.main([*command.split(), "--help"])
    shown = capsys.readouterr().out
    lines = golden_text.lines_of("help.txt")
    own = [line.split() for line in lines if line.startswith(f"atoll {command} -")]
    options = {word for words in own for word in words if word.startswith("--")}
    assert options
    assert all(option in shown for option in options)
