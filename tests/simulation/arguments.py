"""Read what the simulator's command lines have in common."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from typing import Protocol

__all__ = ["jobs", "play", "seeds"]


class Failing(Protocol):
    """Say whether a seed has failed."""

    @property
    def failure(self) -> str: ...


def play(
    run: Callable[[int], Failing],
    title: str,
    of: str,
    show: Callable[[int], object],
    arguments: Sequence[str] | None,
) -> int:
    """Run the seeds that a command line names, or show one; return 1 if any has failed."""
    parser = argparse.ArgumentParser(description=title)
    parser.add_argument("seeds", type=seeds, nargs="?", default=(0, 1000), help="A..B, before B")
    parser.add_argument("--seed", type=int, help="one of them, shown")
    asked = parser.parse_args(arguments)
    if asked.seed is not None:
        print(show(asked.seed))
        return bool(run(asked.seed).failure)
    first, end = asked.seeds
    failures = {seed: failure for seed in range(first, end) if (failure := run(seed).failure)}
    for seed, failure in failures.items():
        print(f"seed {seed}: {failure}")
    print(f"{end - first} seeds of {of}, {len(failures)} failed")
    return bool(failures)


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
