"""Keep the port of a daemon forwarded by the router at home, as long as the daemon runs.

It asks at the start, once: only so somebody can join whoever founds a run behind a router. Whether
others get through is for the dial-back to find out (reach_watch.py). What a router is asked may
take seconds, and some hang: that is done in a thread of its own, for which nobody waits long.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Final, Protocol, TypeVar

from atoll.collectives.units import duration
from atoll.peer.net.invite import format_address
from atoll.peer.net.upnp import LEASE_S, PortMapping, RouterError

T = TypeVar("T")
# To find the router and have it forward a port; what hangs longer counts as no.
ASK_TIMEOUT_S: Final = 8.0
# The first dial-back waits so long for it, from the start: most routers have answered in a second,
# and people are to be told within three after joining.
HOLD_S: Final = 2.0
STOP_TIMEOUT_S: Final = 2.0  # a daemon that ends waits no longer; then the lease ends by itself
RENEW_S: Final = LEASE_S / 3
FAILURES_MAX: Final = 2  # of renewals in a row: then the lease has ended
AGAIN_S: Final = 1800.0  # where no router has answered: the machine may have moved


class PortForwarder(Protocol):
    """Forward ports. Every method may take seconds, and raises RouterError."""

    def forward(self, port: int, outer_port: int = 0, /) -> PortMapping: ...

    def stop(self, mapping: PortMapping, /) -> None: ...


class PortMapper:
    """Have a port forwarded, renew that, and end it. Use it inside one event loop.

    ``say``: writes a line for people, once for each decision.
    """

    def __init__(self, make: Callable[[], PortForwarder], say: Callable[[str], None]) -> None:
        self._make, self._say = make, say
        self._router = make()
        self._said = ""
        self._idle = asyncio.Event()  # no thread asks the router
        self._idle.set()
        self._made: PortMapping | None = None  # also when nobody waited for it any more
        self._is_over = False
        self._began_s = float("-inf")
        self._failures = 0
        self._soon = asyncio.Event()
        self.mapping: PortMapping | None = None
        self.is_asking = False  # for the first time: nothing is known yet

    def holds(self, now_s: float) -> bool:
        """Return whether a dial-back should wait, because the router is still being asked."""
        return self.is_asking and now_s < self._began_s + HOLD_S

    async def run(self, port: int, changed: Callable[[], None]) -> None:
        """Keep ``port`` forwarded, until cancelled. ``changed`` hears of each change."""
        self._began_s, self.is_asking = asyncio.get_running_loop().time(), True
        while True:
            before, found = self.mapping, await self._forwarded(port)
            self._failures = 0 if found is not None else self._failures + 1
            if found is not None or self._failures > FAILURES_MAX:
                self.mapping = self._made = found
            if found is None:
                self._router = self._make()  # it has begun anew, or the machine has moved
            is_first, self.is_asking = self.is_asking, False
            if self.mapping != before or is_first:
                changed()
            self._soon.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RENEW_S if self.mapping is not None else AGAIN_S):
                    await self._soon.wait()

    def renew(self) -> None:
        """Ask the router again now: nobody gets through any more, so it may have forgotten all."""
        if self.mapping is not None:
            self._soon.set()

    async def _forwarded(self, port: int) -> PortMapping | None:
        outer_port = self.mapping.outer_port if self.mapping is not None else 0
        router = self._router

        def forward() -> PortMapping:
            made = router.forward(port, outer_port)
            if self._is_over:
                router.stop(made)  # nobody else would before the lease ends
            return made

        try:
            found = await self._in_thread(forward, ASK_TIMEOUT_S)
        except RouterError as error:
            self._note(str(error))
            return None
        where = format_address(found.outer_ip, found.outer_port)
        self._note(
            f"the router at {found.router} forwards {where} to this peer, and is asked again every"
            f" {duration(RENEW_S)} (UPnP; --upnp off asks for nothing)"
        )
        return found

    async def close(self) -> None:
        """Have the router forget the mapping, also one that it is making.

        Takes STOP_TIMEOUT_S at most; what is made later, the thread that made it takes back.
        """
        loop = asyncio.get_running_loop()
        until_s = loop.time() + STOP_TIMEOUT_S
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(until_s):
                await self._idle.wait()
        self._is_over = True
        mapping, self.mapping = self.mapping or self._made, None
        self._made = None
        if mapping is None:
            return
        where, router = format_address(mapping.outer_ip, mapping.outer_port), self._router
        try:
            await self._in_thread(lambda: router.stop(mapping), until_s - loop.time())
        except RouterError as error:
            self._note(f"the router forwards {where} for up to {duration(LEASE_S)} more: {error}")
        else:
            self._note(f"the router forwards {where} no longer")

    async def _in_thread(self, work: Callable[[], T], limit_s: float) -> T:
        """Return what ``work`` returns, done in a thread that the process does not wait for.

        Raises RouterError, also where it takes longer, or the last one still hangs.
        """
        if not self._idle.is_set():
            raise RouterError("the router has not answered the last question yet")
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()

        def finish(result: T | None, error: Exception | None) -> None:
            self._idle.set()
            if isinstance(result, PortMapping):
                self._made = result
            if answer.done():
                return
            if error is not None:
                answer.set_exception(error)
            else:
                answer.set_result(result)  # type: ignore[arg-type]  # then it is one

        def ask() -> None:
            result, failed = None, None
            try:
                result = work()
            except Exception as error:
                failed = error
            with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
                loop.call_soon_threadsafe(finish, result, failed)

        threading.Thread(target=ask, name="upnp", daemon=True).start()
        self._idle.clear()  # `finish` has its turn later
        try:
            async with asyncio.timeout(limit_s):
                return await answer
        except TimeoutError as error:
            raise RouterError(f"the router has not answered in {duration(limit_s)}") from error

    def _note(self, line: str) -> None:
        if line != self._said:
            self._said = line
            self._say(line)
