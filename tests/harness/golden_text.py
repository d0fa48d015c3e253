"""Golden files of plain text: a line for each case, read in reviews, compared whole."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from pathlib import Path

__all__ = ["FOLDER", "lines_of", "write", "wrong"]

FOLDER = Path(__file__).parents[1] / "golden"
SHOWN = 20  # lines of a difference


def lines_of(name: str) -> list[str]:
    """Return the lines of a golden file that are not comments."""
    lines = (FOLDER / name).read_text("utf-8").splitlines()
    return [line for line in lines if not line.startswith("#")]


def wrong(name: str, found: Iterable[str]) -> str:
    """Return how ``found`` differs from the golden file; "" if it does not."""
    diff = difflib.unified_diff(lines_of(name), list(found), "golden", "found", n=0, lineterm="")
    shown = [line if len(line) < 300 else f"{line[:300]}..." for line in diff][:SHOWN]
    return "\n".join([*shown, "make golden-rewrite, and read the difference"]) if shown else ""


def write(name: str, head: Sequence[str], lines: Iterable[str]) -> None:
    comments = [f"# {line}" for line in head]
    (FOLDER / name).write_text("\n".join([*comments, *lines]) + "\n", "utf-8")
