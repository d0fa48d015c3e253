"""Read what the simulator's command lines have in common."""

from __future__ import annotations

import argparse
import re

__all__ = ["jobs", "seeds"]


def seeds(text: str) -> tuple[int, int]:
    """``A..B``: from A to before B, at least one seed: a run of none would pass."""
    found = re.fullmatch(r"(\d+)\.\.(\d+)", text, re.ASCII)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not A..B, for example 0..1000")
    first, end = int(found[1]), int(found[2])
    if first >= end:
        raise argparse.ArgumentTypeError(f"{text!r} is no seed at all: B itself is not run")
    return first, end


def jobs(text: str) -> int:
    if not re.fullmatch(r"[1-9]\d{0,3}", text, re.ASCII):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of processes, 1 or more")
    return int(text)
