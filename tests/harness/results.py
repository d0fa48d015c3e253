"""Figures of a benchmark as lines that a program can read: ``RESULT name value unit``."""

from __future__ import annotations

import re

__all__ = ["RESULT", "parsed", "say"]

RESULT = re.compile(r"^RESULT (\S+) (-?[0-9.e+-]+) (\S+)$")


def say(name: str, value: float, unit: str) -> None:
    print(f"RESULT {name} {value:.4g} {unit}", flush=True)


def parsed(line: str) -> tuple[str, float, str] | None:
    """(name, value, unit), if the line is one."""
    found = RESULT.match(line.rstrip())
    return (found[1], float(found[2]), found[3]) if found else None
