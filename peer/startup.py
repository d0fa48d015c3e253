"""What a daemon does to its own process before it serves, and what it says of that in its log."""

from __future__ import annotations

from collections.abc import Callable

from atoll.collectives.native import say_once
from atoll.peer import allocator, descriptors

__all__ = ["prepare_process"]


def prepare_process(note: Callable[[str, str], None]) -> None:
    """Before the first thread starts. ``note`` takes the kind and the text of a line."""
    memory = f"{allocator.cap_arenas()}; {allocator.give_back_large()}"
    note("limits", f"{descriptors.raise_limit()}; {memory}")
    say_once(lambda line: note("codecs", line))
