"""Serving others goes on, or ends with a word, when this peer runs out of memory or of links."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import numpy as np
import pytest

from atoll.collectives import ChunkGrid, RoundResult, get_codec, grid_for
from atoll.collectives.errors import ConnectError
from atoll.peer.daemon import daemon as daemon_module
from atoll.peer.daemon.daemon import Daemon
from atoll.peer.daemon.options import DaemonOptions
from atoll.peer.membership.messages import STEP, Begin
from atoll.peer.net.identity import Home
from atoll.peer.rounds.log import RoundLog
from atoll.peer.state_sync import messages as msg
from atoll.peer.state_sync import server as donor_module
from atoll.peer.state_sync.client import HEAD_TIMEOUT_S, ResultFetcher
from atoll.peer.state_sync.server import RESULTS_MAX, SERVES_MAX, SyncServer
from atoll.peer.streams.manager import Streams, StripeId
from atoll.peer.streams.transfers import Transfers

PEER = b"p" * 32
BEGIN = Begin(b"L" * 32, 1, 2, 1, STEP, (PEER,), (1.0,))
PATIENCE_S = 30.0


def test_streams_come_and_go_while_a_donor_counts() -> None:
    interval_s = sys.getswitchinterval()
    streams = Streams(SimpleNamespace(), SimpleNamespace())  # type: ignore[arg-type]  # no link
    stream = SimpleNamespace(sent_bytes=1, sent_for_rounds_bytes=3, close=lambda: None)
    errors: list[RuntimeError] = []
    over = threading.Event()

    def count() -> None:
        while not over.is_set():
            try:
                assert streams.sent_bytes >= 0
                assert streams.sent_for_rounds_bytes >= 0
            except RuntimeError as error:
                errors.append(error)
                return

    sys.setswitchinterval(1e-6)  # so that a thread is stopped in the middle of its sum
    eligibility = threading.Thread(target=count)
    eligibility.start()
    try:
        for number in range(4000):
            with streams._count_lock:  # as Streams._dial
                peer = number.to_bytes(4, "big")
                streams._outgoing[StripeId(peer, 0)] = stream  # type: ignore[assignment]
            if number >= 8:
                streams.close_to((number - 8).to_bytes(4, "big"))
    finally:
        over.set()
        eligibility.join()
        sys.setswitchinterval(interval_s)
    assert not errors
    assert (streams.sent_bytes, streams.sent_for_rounds_bytes) == (4000, 12_000)


class Wire:
    """In the place of links and streams: remembers what was sent."""

    sent_for_rounds_bytes = 0

    def __init__(self, *, up: bool = True) -> None:
        self.sent: list[object] = []
        self._up = up

    def send(self, peer: bytes, message: object) -> bool:
        self.sent.append(message)
        return self._up

    async def to(self, peer: bytes) -> Wire:
        return self


async def eventually(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110  # what is waited for comes from threads
            await asyncio.sleep(0.002)


def test_a_donor_without_memory_refuses_what_it_was_asked_for() -> None:
    def no_memory(*_: object) -> Any:
        raise MemoryError

    async def scenario() -> None:
        failures: list[object] = []
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: failures.append(context))
        wire, logs = Wire(), list[str]()
        donor = SyncServer(wire, wire, lambda *_: None, RoundLog(), logs.append)  # type: ignore[arg-type]
        donor.state = SimpleNamespace(grid=SimpleNamespace(count=2), read_chunk=no_memory)  # type: ignore[assignment]
        for ticket in (1, 2):
            donor.on_message(PEER, msg.FetchPiece(ticket, 0))
        await eventually(lambda: len(wire.sent) == 2)
        assert wire.sent == [msg.NoPiece(ticket, "no memory for it") for ticket in (1, 2)]
        await eventually(lambda: not donor._queues)
        wire.to = no_memory  # type: ignore[method-assign]
        donor.on_message(PEER, msg.FetchPiece(3, 0))
        await eventually(lambda: len(wire.sent) == 3)
        assert ": no memory" in logs[-1]
        assert not failures
        donor.close()

    asyncio.run(scenario())


RESULT = RoundResult(get_codec("int8"), ChunkGrid(10_240, 4096))  # three chunks
ASKED = msg.FetchResult(b"L" * 32, 1, 2, 1)


class Slow:
    """In the place of all data streams: a chunk goes when ``going`` lets it."""

    def __init__(self) -> None:
        self.going = threading.Semaphore(0)
        self.chunks: list[int] = []
        self.begun = 0

    def sendall(self, *parts: memoryview, aside: bool, urgency: int, purpose: str) -> int:
        self.begun += 1
        assert self.going.acquire(timeout=PATIENCE_S)
        self.chunks.append(sum(map(len, parts)))
        return 0

    def has_delivered(self, end: int) -> bool:
        return True


class Holder:
    """A donor with a result, for as long as it ``holds`` it; nothing may go wrong in its loop."""

    def __init__(self) -> None:
        self.wire, self.slow, self.holds = Wire(), Slow(), True
        self.wire.to = AsyncMock(return_value=self.slow)  # type: ignore[method-assign]
        self.failures: list[object] = []
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: self.failures.append(context))
        self.donor = SyncServer(self.wire, self.wire, self.find, RoundLog(), self.failures.append)  # type: ignore[arg-type]

    def find(self, number: int, attempt: int) -> Any:
        return (RESULT.array, RESULT.layout, RESULT.grid.count) if self.holds else None

    def ask(self, number: int, message: msg.FetchResult = ASKED) -> None:
        self.donor.on_message(bytes([number]) * 32, message)

    @property
    def heads(self) -> list[bool]:
        return [head.found for head in self.wire.sent if isinstance(head, msg.ResultHead)]

    async def ends(self) -> None:
        await eventually(lambda: not self.donor._tasks)
        assert not self.failures
        self.donor.close()


def test_many_who_want_a_result_get_it_one_after_the_other() -> None:
    """Members that do not contribute all ask the first peer that holds it."""

    async def scenario() -> None:
        holder = Holder()
        for number in range(RESULTS_MAX + 1):
            holder.ask(number)
        assert holder.heads == [False], "one too many"
        await eventually(lambda: holder.slow.begun == SERVES_MAX)
        await asyncio.sleep(0)
        assert holder.heads == [False] + [True] * SERVES_MAX, "the others wait for their turn"
        holder.slow.going.release(3 * RESULTS_MAX)
        await eventually(lambda: len(holder.slow.chunks) == 3 * RESULTS_MAX)
        await holder.ends()
        assert holder.heads.count(True) == RESULTS_MAX

    asyncio.run(scenario())


def test_who_waits_for_long_is_told_to_ask_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it gives up by itself."""
    assert HEAD_TIMEOUT_S > donor_module.RESULT_WAIT_S
    monkeypatch.setattr(donor_module, "RESULT_WAIT_S", 0.05)

    async def scenario() -> None:
        holder = Holder()
        for number in range(SERVES_MAX + 3):
            holder.ask(number)
        await eventually(lambda: holder.heads.count(False) == 3)
        holder.slow.going.release(3 * SERVES_MAX)
        await holder.ends()
        assert len(holder.slow.chunks) == 3 * SERVES_MAX

    asyncio.run(scenario())


def test_who_asks_again_gets_it_once() -> None:
    async def scenario() -> None:
        holder = Holder()
        for number in range(SERVES_MAX):
            holder.ask(number)
        await eventually(lambda: holder.slow.begun == SERVES_MAX)
        for _ in range(3):
            holder.ask(99)
        holder.ask(99, replace(ASKED, attempt=2))  # a retry: this is in place of the other
        holder.ask(99, replace(ASKED, round=3))  # in flight beside it
        holder.slow.going.release(3 * (SERVES_MAX + 2))
        await holder.ends()
        assert len(holder.slow.chunks) == 3 * (SERVES_MAX + 2)
        heads = [head for head in holder.wire.sent if isinstance(head, msg.ResultHead)]
        assert [(head.round, head.attempt) for head in heads[SERVES_MAX:]] == [(2, 2), (3, 1)]

    asyncio.run(scenario())


def test_a_result_that_is_over_is_not_sent_to_the_end() -> None:
    """It was committed, or given up: who waited for it has gone on, or catches up."""

    async def scenario() -> None:
        holder = Holder()
        for number in range(SERVES_MAX + 2):
            holder.ask(number)
        await eventually(lambda: holder.slow.begun == SERVES_MAX)
        holder.holds = False
        holder.slow.going.release(SERVES_MAX)  # chunks that are on their way
        await holder.ends()
        assert len(holder.slow.chunks) == SERVES_MAX
        assert holder.heads == [True] * SERVES_MAX + [False] * 2

    asyncio.run(scenario())


def test_a_question_that_cannot_be_sent_leaves_nothing_behind() -> None:
    async def scenario() -> None:
        fetcher = ResultFetcher(Wire(up=False), Transfers())  # type: ignore[arg-type]
        result = RoundResult(get_codec("int8"), grid_for(10_000))
        with pytest.raises(ConnectError, match="no control link"):
            await fetcher.fetch(BEGIN, PEER, result)
        assert not fetcher._heads

    asyncio.run(scenario())


def test_only_lacking_chunks_are_asked_for() -> None:
    async def asked(final: list[int]) -> bytes:
        wire = Wire(up=False)
        result = RoundResult(get_codec("int8"), grid_for(10_000))
        for chunk in final:
            result.digests[chunk] = b"d" * 32
        fetcher = ResultFetcher(wire, Transfers())  # type: ignore[arg-type]
        with pytest.raises(ConnectError):
            await fetcher.fetch(BEGIN, PEER, result)
        [question] = wire.sent
        assert isinstance(question, msg.FetchResult)
        return question.chunks

    assert asyncio.run(asked([])) == b""
    assert asyncio.run(asked([1])) == np.array([0, 2], ">u4").tobytes()


def test_a_full_disk_only_delays_a_new_incarnation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(daemon_module, "RENEW_PAUSE_S", 0.0)

    async def scenario(home: Home) -> None:
        options = DaemonOptions(
            run="demo",
            secret=b"s" * 32,
            listen_host="127.0.0.1",
            listen_port=0,
            advertise="127.0.0.1",
            found=True,
        )
        daemon = Daemon(home, options, lambda line: None)
        before, store, tries = daemon._inc, home.next_incarnation, []

        def next_incarnation(now_ns: int) -> int:
            tries.append(now_ns)
            if len(tries) < 3:
                raise OSError(28, "No space left on device")
            return store(now_ns)

        monkeypatch.setattr(home, "next_incarnation", next_incarnation)
        await daemon._renew()
        assert daemon._inc > before
        assert not daemon._end.done()
        assert [event["kind"] for event in daemon.parts.event_log.events].count("disk") == 2
        await daemon._close()

    with Home.open(tmp_path / "home") as home:
        asyncio.run(scenario(home))
