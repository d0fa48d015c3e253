"""The port at a router: each decision is said once, nobody waits for a router that hangs.

How real routers answer is in tests/netlab/test_upnp.py.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from atoll.peer.daemon import port_mapper
from atoll.peer.daemon.port_mapper import PortMapper
from atoll.peer.net.upnp import PortMapping, RouterError

PORT = 29600
FIRST, OTHER = (PortMapping("192.168.1.1", "203.0.113.7", port, PORT) for port in (PORT, 31000))
AFTER_S = 20.0  # only a hang takes so long


class Answers:
    """A router that answers what is next in a list, and says what it was asked for."""

    def __init__(self, *answers: PortMapping | str) -> None:
        self.answers = list(answers)
        self.asked: list[int] = []
        self.stopped: list[PortMapping] = []
        self.let_go = threading.Event()
        self.let_go.set()

    def forward(self, port: int, outer_port: int = 0) -> PortMapping:
        assert port == PORT
        self.asked.append(outer_port)
        self.let_go.wait(AFTER_S)
        answer = self.answers.pop(0)
        if isinstance(answer, str):
            raise RouterError(answer)
        return answer

    def stop(self, mapping: PortMapping) -> None:
        self.let_go.wait(AFTER_S)
        self.stopped.append(mapping)


@contextmanager
def hangs(router: Answers) -> Iterator[None]:
    router.let_go.clear()
    try:
        yield
    finally:
        router.let_go.set()


async def turn() -> None:
    """Let other threads run, too."""
    await asyncio.sleep(0.001)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(AFTER_S):
        while not condition():
            await turn()


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Renew without a pause, and try again without one."""
    monkeypatch.setattr(port_mapper, "RENEW_S", 0.01)
    monkeypatch.setattr(port_mapper, "AGAIN_S", 0.01)


@pytest.mark.usefixtures("at_once")
def test_it_is_renewed_at_the_same_port_said_once_and_ended() -> None:
    async def scenario() -> None:
        router, lines, changes = Answers(FIRST, FIRST, FIRST, OTHER, *[OTHER] * 1000), [], []
        mapper = PortMapper(lambda: router, lines.append)
        task = asyncio.create_task(mapper.run(PORT, lambda: changes.append(mapper.mapping)))
        await until(lambda: len(router.asked) > 6)
        task.cancel()
        assert router.asked[:6] == [0, PORT, PORT, PORT, OTHER.outer_port, OTHER.outer_port]
        assert changes == [FIRST, OTHER]
        assert [":29600 " in lines[0], ":31000 " in lines[1], len(lines)] == [True, True, 2]
        await until(mapper._idle.is_set)
        await mapper.close()
        assert router.stopped == [OTHER]
        assert lines[-1] == "the router forwards 203.0.113.7:31000 no longer"
        await mapper.close()
        assert len(router.stopped) == 1

    asyncio.run(scenario())


@pytest.mark.usefixtures("at_once")
def test_two_renewals_may_fail_and_the_third_ends_it() -> None:
    async def scenario() -> None:
        router, lines = Answers(FIRST, "no", "no", FIRST, *["never"] * 1000), list[str]()
        mapper = PortMapper(lambda: router, lines.append)
        seen: list[PortMapping | None] = []
        task = asyncio.create_task(mapper.run(PORT, lambda: seen.append(mapper.mapping)))
        await until(lambda: len(seen) == 2)
        task.cancel()
        assert seen == [FIRST, None]
        assert router.asked[:7] == [0, *[PORT] * 6]
        assert [line.partition(" ")[0] for line in lines] == ["the", "no", "the", "never"]

    asyncio.run(scenario())


def test_it_is_renewed_at_once_when_nobody_gets_through() -> None:
    async def scenario() -> None:
        router = Answers(FIRST, FIRST)
        mapper = PortMapper(lambda: router, lambda line: None)
        task = asyncio.create_task(mapper.run(PORT, lambda: None))
        await until(lambda: mapper.mapping)
        mapper.renew()
        await until(lambda: len(router.asked) == 2)
        task.cancel()

    asyncio.run(scenario())


@pytest.mark.usefixtures("at_once")
def test_a_refusal_is_said_once_and_another_router_is_looked_for() -> None:
    async def scenario() -> None:
        routers = [Answers("no"), Answers("no"), Answers(FIRST, *[FIRST] * 1000)]
        lines: list[str] = []
        made = iter(routers)
        mapper = PortMapper(lambda: next(made), lines.append)
        task = asyncio.create_task(mapper.run(PORT, lambda: None))
        await until(lambda: mapper.mapping)
        task.cancel()
        assert lines[0] == "no"
        assert len(lines) == 2

    asyncio.run(scenario())


def test_nobody_waits_for_a_router_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(port_mapper, "ASK_TIMEOUT_S", 0.05)
    monkeypatch.setattr(port_mapper, "STOP_TIMEOUT_S", 0.05)
    monkeypatch.setattr(port_mapper, "AGAIN_S", 0.05)

    async def scenario() -> None:
        router, lines = Answers(FIRST, FIRST), list[str]()
        mapper = PortMapper(lambda: router, lines.append)
        loop = asyncio.get_running_loop()
        with hangs(router):
            task = asyncio.create_task(mapper.run(PORT, lambda: None))
            await asyncio.sleep(0)
            assert mapper.holds(loop.time())
            assert not mapper.holds(loop.time() + port_mapper.HOLD_S)
            await until(lambda: not mapper.is_asking)
            assert mapper.mapping is None
            assert not mapper.holds(loop.time())
            await until(lambda: len(lines) == 2)
            assert "has not answered in 50 ms" in lines[0]
            assert "has not answered the last question" in lines[1]
            assert router.asked == [0], "one thread at a time"
            task.cancel()
            mapper.mapping = FIRST
            await mapper.close()
        assert "forwards 203.0.113.7:29600 for up to 60 min more" in lines[-1]

    asyncio.run(scenario())


async def closed_while_asking(router: Answers, lines: list[str]) -> PortMapper:
    """Return the mapper of a daemon that begins to end while the router is asked first."""
    mapper = PortMapper(lambda: router, lines.append)
    task = asyncio.create_task(mapper.run(PORT, lambda: None))
    await until(lambda: router.asked)
    task.cancel()
    await turn()
    return mapper


def test_what_the_router_makes_while_the_daemon_ends_is_taken_back() -> None:
    async def scenario() -> None:
        router, lines = Answers(FIRST), list[str]()
        with hangs(router):
            mapper = await closed_while_asking(router, lines)
            closing = asyncio.create_task(mapper.close())
            await turn()
        await closing
        assert router.stopped == [FIRST]
        assert lines == ["the router forwards 203.0.113.7:29600 no longer"]

    asyncio.run(scenario())


def test_an_answer_that_nobody_heard_is_taken_back() -> None:
    """End the daemon in the very turn in which the answer comes."""

    async def scenario() -> None:
        router = Answers(FIRST)
        mapper = PortMapper(lambda: router, lambda line: None)
        task = asyncio.create_task(mapper.run(PORT, lambda: None))
        await asyncio.sleep(0)  # it asks
        for thread in threading.enumerate():
            if thread.name == "upnp":
                thread.join(AFTER_S)
        asyncio.get_running_loop().call_soon(task.cancel)  # behind the answer
        await turn()
        await mapper.close()
        assert router.stopped == [FIRST]

    asyncio.run(scenario())


def test_what_the_router_makes_after_the_daemon_has_ended_is_taken_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(port_mapper, "STOP_TIMEOUT_S", 0.05)

    async def scenario() -> None:
        router, lines = Answers(FIRST), list[str]()
        with hangs(router):
            mapper = await closed_while_asking(router, lines)
            await mapper.close()
            assert router.stopped == []
        await until(lambda: router.stopped)
        assert router.stopped == [FIRST]
        assert lines == []

    asyncio.run(scenario())
