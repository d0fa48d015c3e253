"""The first steps of a daemon: to its own process, and what it says of them in its log."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from atoll.collectives.native import say_once
from atoll.peer import allocator, descriptors
from atoll.peer.snapshot import missing_founders

if TYPE_CHECKING:
    from atoll.peer.daemon import Daemon

__all__ = ["prepare_process", "say_who_is_missing"]

MISSING_PAUSE_S = 10.0  # between two lines about founders that are missing, at first ...
MISSING_PAUSE_MAX_S = 600.0  # ... and at last: they may be missing for days


def prepare_process(note: Callable[[str, str], None]) -> None:
    """Before the first thread starts. ``note`` takes the kind and the text of a line."""
    memory = f"{allocator.cap_arenas()}; {allocator.give_back_large()}"
    note("limits", f"{descriptors.raise_limit()}; {memory}")
    say_once(lambda line: note("codecs", line))


async def say_who_is_missing(daemon: Daemon) -> None:
    """While founders gather; less and less often."""
    pause_s = MISSING_PAUSE_S
    while True:
        await asyncio.sleep(pause_s)
        if not daemon.node.genesis.waiting:
            return
        daemon.note("genesis", missing_founders(daemon))
        pause_s = min(2 * pause_s, MISSING_PAUSE_MAX_S)
