"""How long a trainer waits that is to leave, and how it goes on after Ctrl+C; no real daemon."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from atoll.collectives.errors import AtollError, ConfigError, NoDaemonError, RoundTimeoutError
from atoll.peer.client import trainer_channel
from atoll.peer.client.shared_memory import Region, send_region
from atoll.peer.client.trainer_channel import ANSWER_S, AskedVector, TrainerChannel
from atoll.peer.daemon.ipc_server import IpcServer
from atoll.peer.net.identity import socket_path

USUAL_S = 600.0


class Clock:
    """A daemon that lets time pass, and never says what became of a round."""

    events: list[tuple[str, dict[str, Any]]]

    def __init__(self) -> None:
        self.now_s, self.events, self.patience_s = 100.0, [], list[float]()

    def monotonic(self) -> float:
        return self.now_s

    def receive(self, timeout_s: float, _lifeline: object) -> None:
        self.now_s += max(0.001, timeout_s)

    def ask(self, command: str, arguments: dict[str, Any], _: object, patience_s: float) -> Any:
        self.patience_s.append(patience_s)
        if command == "look_for_vector":
            self.now_s += arguments["timeout_s"]
            return "asked"
        return {"code": "E31", "text": "round 7 waits"}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    fake = SimpleNamespace(monotonic=clock.monotonic, sleep=time.sleep)
    monkeypatch.setattr(trainer_channel, "time", fake)
    return clock


@pytest.fixture
def channel(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> TrainerChannel:
    channel = TrainerChannel.__new__(TrainerChannel)
    monkeypatch.setattr(channel, "_check_process", lambda: None)
    channel.deadline_s, channel._reconnect_s, channel._hurries_until_s = USUAL_S, 60.0, math.inf
    channel._figures, channel._lifeline, channel.connection = {}, Any, 0
    channel._was_interrupted = False
    channel._client = clock  # type: ignore[assignment]
    return channel


def test_who_hurries_waits_no_longer_in_all_and_as_before_when_that_is_over(
    clock: Clock, channel: TrainerChannel
) -> None:
    with channel.hurry(30.0):
        assert channel.limited(USUAL_S) == 30.0
        with channel.hurry(40.0):
            assert channel.limited(USUAL_S) == 30.0
        clock.now_s += 20.0
        assert channel.limited(USUAL_S) == 10.0
        assert channel.limited(0.0) == 0.0  # it waits for no daemon at all
        clock.now_s += 20.0
        assert channel.limited(USUAL_S) == 0.0
    assert channel.limited(USUAL_S) == USUAL_S


def test_several_waits_of_who_hurries_are_over_together(
    clock: Clock, channel: TrainerChannel
) -> None:
    """For rounds and for vectors; what a daemon answers at once is still heard when time is up."""
    began_s, found = clock.now_s, list[float]()

    def fails(error: type[AtollError], act: Any) -> None:
        with pytest.raises(error):
            act()
        found.append(clock.now_s - began_s)

    with channel.hurry(20.0):
        clock.now_s += 12.0  # for a round that was over
        fails(RoundTimeoutError, lambda: channel._outcome(1))
        fails(RoundTimeoutError, lambda: channel._outcome(2))
        fails(RoundTimeoutError, lambda: AskedVector(channel, "it", 1, 4).wait(60.0))
    assert found == pytest.approx([20.0] * 3, abs=1.1)
    assert min(clock.patience_s) == ANSWER_S
    fails(RoundTimeoutError, lambda: channel._outcome(3))
    assert found[-1] - found[-2] == pytest.approx(USUAL_S, abs=1.1)


# ------------------------------------------------------------ calls that are interrupted


class Lender:
    """Hand out memory as a daemon does, from a thread, and nothing else."""

    def __init__(self, home: Path) -> None:
        self._home, self._is_ready, self._over = home, threading.Event(), asyncio.Event()
        self._loop, self._lent = asyncio.new_event_loop(), 0
        self._thread = threading.Thread(target=lambda: self._loop.run_until_complete(self._serve()))
        self._thread.start()
        assert self._is_ready.wait(10.0)

    async def _serve(self) -> None:
        self._server = IpcServer(lambda name: socket_path(self._home, name))
        self._server.start({"hello": self._hello, "exchange": self._exchange}, lambda client: None)
        self._is_ready.set()
        await self._over.wait()
        self._server.close()

    async def _hello(self, client: bytes, _: dict[str, Any]) -> dict[str, Any]:
        self._server.lifeline(client)
        return {"run": "demo", "peer": "a", "keeps_rounds": False}

    async def _exchange(self, client: bytes, arguments: dict[str, Any]) -> int:
        if arguments["elements"] > 100:
            raise ConfigError("no memory")
        region = Region("exchange", 2 * arguments["elements"])
        send_region(self._server.lifeline(client), region, writable=True)
        region.close()
        self._lent += 1
        return self._lent

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join(10.0)
        self._loop.close()


@pytest.fixture
def borrower(tmp_path: Path) -> Iterator[TrainerChannel]:
    """Yield a session that waits for no daemon that has ended: this one has not."""
    (tmp_path / "run").mkdir(mode=0o700)
    lender = Lender(tmp_path)
    borrower = TrainerChannel(tmp_path, 10.0, reconnect_s=0.0)
    yield borrower
    borrower.close()
    lender.close()


@pytest.mark.parametrize("kind", [KeyboardInterrupt, NoDaemonError])
@pytest.mark.parametrize("has_come", [False, True])
def test_memory_that_a_call_has_given_up_is_not_taken_for_the_next_ones(
    kind: type[BaseException],
    has_come: bool,
    borrower: TrainerChannel,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By Ctrl+C, say, or as the daemon took too long: the memory comes all the same."""
    client = borrower._client
    receive = client.receive

    def interrupted(*about: Any) -> None:
        if has_come:
            receive(*about)
        raise kind("interrupted")

    monkeypatch.setattr(client, "receive", interrupted)
    with pytest.raises(kind):
        borrower.exchange_memory(7)
    monkeypatch.setattr(client, "receive", receive)
    assert len(borrower.exchange_memory(5).shared) == 10
    assert len(borrower.new_exchange_memory(6).shared) == 12
    assert borrower.connection == 1


def test_an_interrupted_call_is_made_up_for_before_the_next_collective(
    borrower: TrainerChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory that the call would use is gone with the connection."""
    before = borrower.exchange_memory(5)

    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(trainer_channel, "receive_region", interrupted)
        with pytest.raises(KeyboardInterrupt):
            borrower.new_exchange_memory(7)
    assert borrower.has(before)
    borrower.check()
    assert not borrower.has(before)
    assert len(borrower.exchange_memory(5).shared) == 10
    assert borrower.connection == 1


def test_memory_that_the_daemon_refuses_leaves_the_rest_as_it_is(borrower: TrainerChannel) -> None:
    before = borrower.exchange_memory(5)
    with pytest.raises(ConfigError, match="no memory"):
        borrower.new_exchange_memory(101)
    borrower.check()
    assert borrower.exchange_memory(5) is before
    assert borrower.connection == 0
