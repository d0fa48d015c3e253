"""Names that a dial looks up: a resolver that does not answer is in nobody's way."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from atoll.collectives.errors import ConnectError
from atoll.peer.net import dial
from atoll.peer.net.dial import Dial, resolve

DIAL_S = 0.5


class Resolver:
    """Stand in for the machine's resolver, which answers for no name before it is let."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.answers = threading.Event()
        self._real = socket.getaddrinfo

    def __call__(self, host: str, port: int, *how: Any, **more: Any) -> Any:
        if more.get("flags") == socket.AI_NUMERICHOST:
            return self._real(host, port, *how, **more)
        self.asked.append(host)
        self.answers.wait(60)
        if host.startswith("dead"):
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return self._real("127.0.0.1", port, *how, **more)


@pytest.fixture
def resolver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Resolver]:
    made = Resolver()
    monkeypatch.setattr(socket, "getaddrinfo", made)
    yield made
    made.answers.set()


async def knocks(name: str) -> str:
    """Dial a name; return why that came to nothing."""
    attempt = Dial(f"{name}:29600", "demo", "tag")
    with pytest.raises(ConnectError) as failed:
        async with attempt.limited(DIAL_S):
            await attempt.knock()
    return failed.value.what


def test_names_that_nobody_answers_for_hold_no_thread_of_the_loop(resolver: Resolver) -> None:
    async def scenario() -> None:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(4))
        dials = [asyncio.create_task(knocks(f"dead{number % 3}")) for number in range(20)]
        await asyncio.sleep(DIAL_S / 5)
        began_s = time.monotonic()
        await asyncio.to_thread(int)
        assert time.monotonic() - began_s < DIAL_S / 2
        for what in await asyncio.gather(*dials):
            assert "(DNS, after" in what
        assert sorted(resolver.asked) == ["dead0", "dead1", "dead2"]  # each once at a time

    asyncio.run(scenario())


def test_the_loop_waits_for_no_name_of_a_dial_that_was_cancelled(resolver: Resolver) -> None:
    async def scenario() -> None:
        dialling = asyncio.create_task(resolve("dead3", 29600))
        await asyncio.sleep(0.1)
        dialling.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await dialling

    running = threading.Thread(target=lambda: asyncio.run(scenario()), daemon=True)
    running.start()
    running.join(10)
    assert not running.is_alive()
    assert resolver.asked == ["dead3"]


def test_a_second_dial_of_a_name_takes_the_answer_that_the_first_gave_up(
    resolver: Resolver,
) -> None:
    async def scenario() -> None:
        first = asyncio.create_task(resolve("live", 29600))
        second = asyncio.create_task(resolve("live", 29601))
        await asyncio.sleep(0.1)
        first.cancel()
        await asyncio.sleep(0.1)
        resolver.answers.set()
        assert await second == [(socket.AF_INET, ("127.0.0.1", 29601))]
        with pytest.raises(asyncio.CancelledError):
            await first
        assert resolver.asked == ["live"]
        assert await resolve("live", 29602) == [(socket.AF_INET, ("127.0.0.1", 29602))]
        assert resolver.asked == ["live", "live"]  # no answer is kept

    asyncio.run(scenario())


def test_a_few_names_are_looked_up_at_a_time_the_newest_first(
    resolver: Resolver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dial, "RESOLVERS_MAX", 2)
    monkeypatch.setattr(dial, "_names", dial._Names())

    async def scenario() -> None:
        dials = []
        for names in (("dead1", "dead2"), ("dead3", "dead4", "dead5", "dead3")):
            dials += [asyncio.create_task(resolve(name, 29600)) for name in names]
            await asyncio.sleep(0.2)
            assert sorted(resolver.asked) == ["dead1", "dead2"]
        resolver.answers.set()
        for failed in await asyncio.gather(*dials, return_exceptions=True):
            assert isinstance(failed, socket.gaierror)
        assert resolver.asked[2] == "dead3"  # asked for again
        assert sorted(resolver.asked[3:]) == ["dead4", "dead5"]

    asyncio.run(scenario())
    assert not dial._names._answers
