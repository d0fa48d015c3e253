"""Make the lines of `tests/golden/help.txt` and of `tests/golden/exit_codes.txt`: what
programs rely on of the command line.

Of ``--help`` the commands, their arguments and options are kept, not the words: those may change,
and versions of Python lay them out differently.
"""

from __future__ import annotations

import argparse
import contextlib
import io
from collections.abc import Iterator

from atoll.collectives.errors import AtollError
from atoll.peer.cli import main
from atoll.peer.cli.daemon import INTERRUPTED

__all__ = ["EXIT_HEAD", "HELP_HEAD", "exit_lines", "help_lines"]

HELP_HEAD = (
    "Every command with its arguments and options: how many values, default, choices.",
    "make golden-rewrite writes it anew.",
)
EXIT_HEAD = (
    "The exit code of commands, by the code of the error that is shown, and of what is none.",
    "make golden-rewrite writes it anew.",
)


def help_lines() -> Iterator[str]:
    yield from _lines(main.command_parser())


def _lines(of: argparse.ArgumentParser) -> Iterator[str]:
    yield f"{of.prog}"
    for action in of._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from _lines(below)
        else:
            yield f"{of.prog} {_described(action)}"
    for group in of._mutually_exclusive_groups:
        names = ", ".join(_name(action) for action in group._group_actions)
        yield f"{of.prog} only one of {names}{', required' if group.required else ''}"


def _described(action: argparse.Action) -> str:
    """Return an argument or option as a program that calls the command knows it."""
    parts = [_name(action)]
    if action.option_strings and action.nargs != 0:
        parts.append(str(action.metavar or "VALUE"))
    if action.nargs not in (None, 0):
        parts.append(f"nargs {action.nargs}")
    if action.required:
        parts.append("required")
    if action.default not in (None, False, argparse.SUPPRESS):
        parts.append(f"default {action.default!r}")
    if action.choices:
        parts.append(f"one of {', '.join(map(str, action.choices))}")
    return " ".join(parts)


def _name(action: argparse.Action) -> str:
    return " ".join(action.option_strings) or str(action.metavar or action.dest)


def exit_lines() -> Iterator[str]:
    found = {kind.code: kind.exit_code for kind in _below(AtollError)}
    yield from (f"{code} {number}" for code, number in sorted(found.items()))
    yield f"interrupted {INTERRUPTED}"
    yield f"usage {_ends_with('no-such-command')}"
    yield f"version {_ends_with('--version')}"


def _below(kind: type[AtollError]) -> set[type[AtollError]]:
    """Return the errors of the product; tests may have some of their own."""
    own = {kind} if kind.__module__.startswith("atoll.") else set()
    return own.union(*map(_below, kind.__subclasses__()))


def _ends_with(*arguments: str) -> int:
    quiet = io.StringIO()
    with contextlib.redirect_stdout(quiet), contextlib.redirect_stderr(quiet):
        try:
            return main.main(arguments)
        except SystemExit as end:
            return int(end.code or 0)
