"""How long a trainer waits that is to leave, and how it goes on after Ctrl+C; no real daemon."""

from __future__ import annotations

import asyncio
import math
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from atoll.collectives.errors import (
    AtollError,
    ConfigError,
    NoDaemonError,
    RoundTimeoutError,
    SessionError,
)
from atoll.peer.client import trainer_channel
from atoll.peer.client.shared_memory import Region, send_region
from atoll.peer.client.trainer_channel import ANSWER_S, AskedVector, TrainerChannel
from atoll.peer.daemon.ipc_server import LIFELINE, Handler, IpcServer
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
    """Hand out memory and tickets as a daemon does, from a thread, and nothing else."""

    def __init__(self, home: Path, *, is_silent: bool = False) -> None:
        (home / "run").mkdir(mode=0o700, exist_ok=True)  # the one before has removed it
        self._is_silent, self._tickets, self.dropped = is_silent, 0, list[int]()
        self._home, self._is_ready, self._over = home, threading.Event(), asyncio.Event()
        self._loop, self._lent = asyncio.new_event_loop(), 0
        self._thread = threading.Thread(target=lambda: self._loop.run_until_complete(self._serve()))
        self._thread.start()
        assert self._is_ready.wait(10.0)

    async def _serve(self) -> None:
        self._server = IpcServer(lambda name: socket_path(self._home, name))
        handlers: dict[str, Handler] = {
            "hello": self._hello,
            "exchange": self._exchange,
            "vector_memory": self._vector_memory,
            "ask_vector": self._ask_vector,
            "drop_vector": self._drop_vector,
        }
        self._server.start(handlers, lambda client: None)
        self._is_ready.set()
        await self._over.wait()
        self._server.close()

    async def _hello(self, client: bytes, _: dict[str, Any]) -> dict[str, Any]:
        self._server.lifeline(client)
        if self._is_silent:
            await self._over.wait()
        return {"run": "demo", "peer": "a", "keeps_rounds": False}

    async def _exchange(self, client: bytes, arguments: dict[str, Any]) -> int:
        if arguments["elements"] > 100:
            raise ConfigError("no memory")
        self._lend(client, 2 * arguments["elements"])
        self._lent += 1
        return self._lent

    async def _vector_memory(self, client: bytes, arguments: dict[str, Any]) -> None:
        self._lend(client, arguments["elements"])

    def _lend(self, client: bytes, elements: int) -> None:
        region = Region("lent", elements)
        send_region(self._server.lifeline(client), region, writable=True)
        region.close()

    async def _ask_vector(self, client: bytes, arguments: dict[str, Any]) -> int:
        assert arguments["number"] == 7
        self._tickets += 1
        return self._tickets

    async def _drop_vector(self, client: bytes, arguments: dict[str, Any]) -> None:
        self.dropped.append(arguments["ticket"])

    def close(self) -> None:
        if self._loop.is_closed():
            return
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join(10.0)
        self._loop.close()


@pytest.fixture
def lender(tmp_path: Path) -> Iterator[Lender]:
    lender = Lender(tmp_path)
    yield lender
    lender.close()


@pytest.fixture
def borrower(tmp_path: Path, lender: Lender) -> Iterator[TrainerChannel]:
    """Yield a session that waits for no daemon that has ended: this one has not."""
    borrower = TrainerChannel(tmp_path, 10.0, reconnect_s=0.0)
    yield borrower
    borrower.close()


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


def test_arguments_that_cannot_travel_are_refused_and_nothing_was_sent(
    borrower: TrainerChannel,
) -> None:
    before = borrower.exchange_memory(5)
    with pytest.raises(ConfigError, match=r"`exchange` cannot be sent .*int64"):
        borrower.new_exchange_memory(np.int64(5))  # type: ignore[arg-type]
    borrower.check()
    assert borrower.has(before)
    assert borrower.connection == 0


def test_memory_of_an_earlier_daemon_takes_none_of_the_next_ones_with_it(
    borrower: TrainerChannel,
) -> None:
    """Numbers begin at 1 with each."""
    before = borrower.exchange_memory(5)
    borrower._exchanges[before.number] = after = trainer_channel.ExchangeMemory(
        before.number, before.shared
    )
    borrower.drop(before)
    assert borrower.has(after)
    borrower.drop(after)
    borrower.drop(after)
    assert not borrower.has(after)
    assert borrower._dropped == [after.number]


def test_vectors_that_nobody_refers_to_are_dropped_with_the_next_question(
    lender: Lender, borrower: TrainerChannel
) -> None:
    number: Any = np.int64(7)  # as of numpy's random generators
    for _ in range(3):
        asked = borrower.ask_vector("a", "phi", number, 4)
    assert lender.dropped == [1]
    asked.drop()
    asked = borrower.ask_vector("a", "phi", number, 4)
    assert lender.dropped == [1, 3, 2]


def test_tickets_of_an_earlier_daemon_are_not_dropped_at_the_next(
    tmp_path: Path, lender: Lender
) -> None:
    borrower = TrainerChannel(tmp_path, 10.0, reconnect_s=10.0)
    asked = borrower.ask_vector("a", "phi", 7, 4)
    lender.close()
    borrower.forget_vector(1, borrower.connection)  # before anybody sees that it has ended
    another = Lender(tmp_path)
    borrower.check()
    del asked
    borrower.ask_vector("a", "phi", 7, 4)
    assert another.dropped == []
    borrower.close()
    another.close()


@pytest.mark.timeout(30)
def test_a_daemon_that_hangs_is_none_when_the_time_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer_channel, "ANSWER_S", 0.1)
    began_s = time.monotonic()
    (tmp_path / "run").mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(socket_path(tmp_path, LIFELINE)))
        listener.listen()  # and accepts nobody, as when it is stopped
        with pytest.raises(NoDaemonError, match=r"has not answered this session for \d+ ms"):
            TrainerChannel(tmp_path, 0.2)
    silent = Lender(tmp_path, is_silent=True)
    with pytest.raises(NoDaemonError, match="has not answered `hello`"):
        TrainerChannel(tmp_path, 0.2)
    silent.close()
    assert time.monotonic() - began_s < trainer_channel.COMMAND_TIMEOUT_S


def test_who_gives_up_waiting_for_a_daemon_waits_again_with_the_next_call(
    tmp_path: Path, lender: Lender, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a notebook: Ctrl+C does not close the session."""
    borrower = TrainerChannel(tmp_path, 10.0, reconnect_s=10.0)
    lender.close()

    def interrupted(_: float) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(borrower, "_wait_for_daemon", interrupted)
        with pytest.raises(KeyboardInterrupt):
            borrower.exchange_memory(5)
        with pytest.raises(KeyboardInterrupt):
            borrower.check()
    another = Lender(tmp_path)
    assert len(borrower.exchange_memory(5).shared) == 10
    borrower.close()
    with pytest.raises(SessionError, match="is closed"):
        borrower.exchange_memory(5)
    another.close()


def test_what_was_submitted_is_there_after_coming_back_was_interrupted(
    borrower: TrainerChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, manifest = trainer_channel._collectives()
    borrower._attached = trainer_channel._Attached(spec, manifest, "refuse", lambda flat: None)
    borrower._region = np.ones(3, np.float32)
    monkeypatch.setattr(borrower, "ask_once", lambda *_, **__: {"state": "ready", "text": ""})
    monkeypatch.setattr(borrower, "_receive", lambda *_, **__: np.zeros(3, np.float32))

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(np, "copyto", interrupted)
        with pytest.raises(KeyboardInterrupt):
            borrower._resume()
    assert borrower._region.tolist() == [1.0] * 3
