"""An event loop for a test that ends when nothing more happens in it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

__all__ = ["run_to_rest"]

QUIET_TURNS = 50  # of the loop, in which nothing is begun


def run_to_rest(act: Callable[[], Awaitable[None]]) -> None:
    """And wait for the tasks that it has begun, and for what comes of these: a coroutine that is
    thrown away would be a warning in some later test."""

    async def run() -> None:
        await act()
        quiet = 0
        while quiet < QUIET_TURNS:
            others = asyncio.all_tasks() - {asyncio.current_task()}
            quiet = 0 if others else quiet + 1
            await asyncio.gather(*others)
            await asyncio.sleep(0)

    asyncio.run(run())
