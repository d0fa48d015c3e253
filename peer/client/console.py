"""Print lines for the people who look at a trainer."""

from __future__ import annotations

import sys

_speaks = True


def say(text: str) -> None:
    """Print a line for people, in the first of the processes of a trainer."""
    if _speaks:
        print(f"atoll: {text}", file=sys.stderr, flush=True)


def speak(speaks: bool) -> None:
    """Set whether this process says anything from now on; RankSession knows which rank it is."""
    global _speaks
    _speaks = speaks
