"""Vectors from peer to peer over real TLS links, with peers that do not do as they should."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness.linkhost import link_host

from atoll.collectives import get_codec, grid_for
from atoll.collectives.errors import (
    AtollError,
    CodecError,
    ConfigError,
    ConnectError,
    RemoteProtocolError,
    RoundTimeoutError,
    StateError,
)
from atoll.peer.membership.view import short
from atoll.peer.net.identity import Home
from atoll.peer.streams import transfers
from atoll.peer.streams.frames import DataHeader
from atoll.peer.streams.manager import FrameOutlet, Streams
from atoll.peer.streams.router import Router
from atoll.peer.streams.transfers import TransferKind
from atoll.peer.vectors import client as client_module
from atoll.peer.vectors.client import FETCHES_MAX, VectorClient, VectorFetch
from atoll.peer.vectors.messages import AskVector, DropVector, VectorIs
from atoll.peer.vectors.server import VectorServer

PATIENCE_S = 30.0
ELEMENTS = 300_000  # 64 chunks
VECTOR = int(TransferKind.VECTOR)


class Site:
    """A link host with what a daemon has for vectors; ``answers`` may take the place of that."""

    def __init__(self, home: Home) -> None:
        self.me, self.address = home.peer_id, ""
        self.trains = True
        self.logs: list[str] = []
        self.heard: list[object] = []
        self.answers: Callable[[bytes, AskVector], None] | None = None
        self.host = link_host(
            home,
            address=lambda: self.address,
            streams=lambda: self.streams,
            on_message=self._on_message,
            log=self.logs.append,
        )
        self.router = Router(lambda peer, why: None)
        self.streams = Streams(self.host, self.router)
        self.server = VectorServer(self.host, self.streams, lambda: self.trains, self.logs.append)
        self.fetches = VectorClient(self.me, self.host, self.router.transfers, self.server.store)

    def _on_message(self, peer: bytes, message: object) -> None:
        self.heard.append(message)
        if isinstance(message, VectorIs):
            self.fetches.on_head(peer, message)
        elif isinstance(message, AskVector) and self.answers is not None:
            self.answers(peer, message)
        else:
            assert isinstance(message, AskVector | DropVector)
            self.server.on_message(peer, message)

    async def publish(self, number: int, codec: str = "float32", name: str = "phi") -> np.ndarray:
        values = np.random.default_rng(number).standard_normal(ELEMENTS).astype(np.float32)
        await self.server.publish(name, number, values, codec)
        return values

    def ask(
        self, other: Site, number: int, codec: str = "float32", name: str = "phi"
    ) -> VectorFetch:
        return self.fetches.start(other.me, name, number, ELEMENTS, codec)

    async def send(self, peer: bytes, number: int, ticket: int, chunk: int, data: bytes) -> None:
        """Any frame."""
        header = DataHeader(VECTOR, 0, 0, 0, bytes(8), 0, number, ticket, 0)
        outlet = FrameOutlet(await self.streams.to(peer), header, aside=True)
        await asyncio.to_thread(outlet.send, VECTOR, chunk, memoryview(data))

    async def close(self) -> None:
        self.fetches.drop_all()
        self.server.close()
        self.streams.close()
        await self.host.close()


async def value(fetch: VectorFetch) -> np.ndarray:
    """What has come; or the error is raised."""
    async with asyncio.timeout(PATIENCE_S):
        await fetch.ended.wait()
    if fetch.error is not None:
        raise fetch.error
    assert fetch.encoded is not None
    encoded, out = fetch.encoded, np.empty(fetch.elements, np.float32)
    for chunk in range(encoded.grid.count):
        encoded.codec.decode(encoded.view(chunk), out[slice(*encoded.grid.bounds(chunk))])
    return out


async def eventually(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110  # what is waited for comes from threads
            await asyncio.sleep(0.002)


def play(folder: Path, scenario: Callable[..., Awaitable[None]], names: str = "ab") -> None:
    """With linked sites; nothing may be left that nobody looked at."""

    async def whole() -> None:
        defects: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, what: defects.append(what))
        homes = [Home.open(folder / name) for name in names]
        sites = [Site(home) for home in homes]
        try:
            for site in sites:
                host, port = await site.host.listen("127.0.0.1", 0)
                site.address = f"{host}:{port}"
            for i, site in enumerate(sites):
                for other in sites[:i]:
                    await site.host.dial(other.address)
            await scenario(*sites)
        finally:
            for site in sites:
                await site.close()
            for home in homes:
                home.close()
        assert not defects

    asyncio.run(whole())


@pytest.mark.parametrize("codec", ["float32", "bfloat16", "int8"])
def test_what_is_published_arrives_as_its_publisher_sees_it(tmp_path: Path, codec: str) -> None:
    async def scenario(a: Site, b: Site) -> None:
        seen = await a.publish(1, codec)
        assert (await value(b.ask(a, 1, codec))).tobytes() == seen.tobytes()
        assert await b.fetches.newest(a.me, "phi") == 1
        assert await b.fetches.newest(a.me, "other") == 0
        own = await value(a.ask(a, 1, codec))  # of its own trainer, in the same way
        assert own.tobytes() == seen.tobytes()
        nbytes = get_codec(codec).encoded_bytes(ELEMENTS)
        assert nbytes < b.streams.received_bytes < 1.02 * nbytes + 64 * 64
        await eventually(lambda: not a.server._published._sending)

    play(tmp_path, scenario)


def test_a_question_waits_until_it_is_published_and_goes_on_with_many(tmp_path: Path) -> None:
    async def scenario(a: Site, b: Site, c: Site) -> None:
        asked = [site.ask(a, 2) for site in (b, c)]
        other = b.ask(a, 2, name="delta")
        await eventually(lambda: len(a.heard) == 3)
        assert {fetch.state for fetch in asked} == {"asked"}
        await a.publish(1)
        assert {fetch.state for fetch in asked} == {"asked"}
        seen = await a.publish(2)
        for fetch in asked:
            assert (await value(fetch)).tobytes() == seen.tobytes()
            assert fetch.state == "here"
        assert other.state == "asked"

    play(tmp_path, scenario, "abc")


def test_what_never_comes_is_said_at_once(tmp_path: Path) -> None:
    async def scenario(a: Site, b: Site) -> None:
        for number in (1, 2, 3):
            await a.publish(number)
        with pytest.raises(StateError, match=f"phi 1 of {short(a.me)} cannot .* newest is 3"):
            await value(b.ask(a, 1))
        waits = b.ask(a, 4)
        await eventually(lambda: a.server._published._waiting)
        a.trains = False
        a.server.trainer_ended()
        with pytest.raises(StateError, match="its trainer has ended"):
            await value(waits)
        assert len(await value(b.ask(a, 3))) == ELEMENTS  # what there is can still be had
        with pytest.raises(StateError, match="phi 9 is not kept"):
            await value(a.ask(a, 9))

    play(tmp_path, scenario)


def test_another_vector_than_was_asked_for_is_refused(tmp_path: Path) -> None:
    async def scenario(a: Site, b: Site) -> None:
        await a.publish(1, "int8")
        with pytest.raises(RemoteProtocolError, match="300,000 elements in 'int8', not"):
            await value(b.ask(a, 1, "float32"))
        with pytest.raises(RemoteProtocolError, match=f"phi 1 of {short(a.me)}"):
            await value(b.fetches.start(a.me, "phi", 1, 5, "int8"))
        await eventually(lambda: any(isinstance(m, DropVector) for m in a.heard))
        a.answers = lambda peer, ask: None
        fetch = b.ask(a, 2, "zip")
        b.fetches.on_head(a.me, VectorIs(fetch.ticket, 2, ELEMENTS, "zip"))
        with pytest.raises(CodecError, match="no codec"):
            await value(fetch)

    play(tmp_path, scenario)


@pytest.mark.parametrize("harm", ["too long", "too short", "no such chunk", "garbage"])
def test_frames_that_cannot_be_are_an_error_that_names_the_peer(tmp_path: Path, harm: str) -> None:
    async def scenario(a: Site, b: Site) -> None:
        a.answers = lambda peer, ask: None
        fetch = b.ask(a, 1, "int8")
        await eventually(lambda: a.heard)
        a.host.send(b.me, VectorIs(fetch.ticket, 1, ELEMENTS, "int8"))
        size = get_codec("int8").encoded_bytes(grid_for(ELEMENTS).size(0))
        chunk, data = {
            "too long": (0, bytes(size + 1)),
            "too short": (0, bytes(size - 1)),
            "no such chunk": (64, bytes(size)),
            "garbage": (0, b"\xff" * size),
        }[harm]
        await a.send(b.me, 1, fetch.ticket, chunk, data)
        with pytest.raises(StateError, match=f"from {short(a.me)} broke"):
            await value(fetch)
        a.answers = None  # only the stream has ended: the next fetch goes on another one
        seen = await a.publish(2, "int8")
        assert (await value(b.ask(a, 2, "int8"))).tobytes() == seen.tobytes()

    play(tmp_path, scenario)


def test_a_peer_that_says_it_follows_and_sends_nothing_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfers, "STALL_TIMEOUT_S", 0.3)
    monkeypatch.setattr(client_module, "ANSWER_S", 0.3)

    async def scenario(a: Site, b: Site) -> None:
        a.answers = lambda peer, ask: None
        fetch = b.ask(a, 1)
        await eventually(lambda: a.heard)
        b.fetches.on_head(b.me, VectorIs(fetch.ticket, 9, why="of somebody else"))
        assert fetch.state == "asked"
        a.host.send(b.me, VectorIs(fetch.ticket, 1, ELEMENTS, "float32"))
        with pytest.raises(RoundTimeoutError, match=f"{short(a.me)} sent no chunk"):
            await value(fetch)
        with pytest.raises(RoundTimeoutError, match=f"{short(a.me)} has not said"):
            await b.fetches.newest(a.me, "phi")
        # What comes of it now is dropped.
        data = np.ones(grid_for(ELEMENTS).size(0), np.float32).tobytes()
        await a.send(b.me, 1, fetch.ticket, 0, data)
        a.answers = None
        assert len(await _published_and_fetched(a, b)) == ELEMENTS

    play(tmp_path, scenario)


async def _published_and_fetched(a: Site, b: Site) -> np.ndarray:
    await a.publish(5)
    return await value(b.ask(a, 5))


def test_a_peer_that_goes_is_an_error_at_once(tmp_path: Path) -> None:
    async def scenario(a: Site, b: Site) -> None:
        waits, looks = b.ask(a, 1), asyncio.ensure_future(b.fetches.newest(a.me, "phi"))
        a.answers = lambda peer, ask: None
        await eventually(lambda: len(a.heard) == 2)
        arrives = b.ask(a, 2)
        await eventually(lambda: len(a.heard) == 3)
        a.host.send(b.me, VectorIs(arrives.ticket, 2, ELEMENTS, "float32"))
        await eventually(lambda: arrives.state == "coming")
        b.fetches.lost(a.me, "it was killed")
        with pytest.raises(ConnectError, match=f"{short(a.me)} ended: it was killed"):
            await value(waits)
        with pytest.raises(StateError, match=f"{short(a.me)} broke: the link ended"):
            await value(arrives)
        await a.close()
        await eventually(lambda: not b.host.link_peers())
        with pytest.raises(AtollError):
            await looks
        with pytest.raises(ConnectError, match="no control link"):
            await value(b.ask(a, 1))
        # Nobody looks at this one: it must not be taken for a defect.
        b.ask(a, 3)
        b.fetches.lost(a.me, "it was killed")
        await asyncio.sleep(0)

    play(tmp_path, scenario)


def test_what_a_gone_peer_has_asked_for_is_forgotten(tmp_path: Path) -> None:
    async def scenario(a: Site, b: Site) -> None:
        b.ask(a, 1)
        await eventually(lambda: a.server._published._waiting)
        a.server.lost(b.me)
        assert not a.server._published._waiting
        await a.publish(1)
        assert not a.server._tasks

    play(tmp_path, scenario)


def test_who_gives_up_gets_no_more_and_is_no_burden(tmp_path: Path) -> None:
    async def scenario(a: Site, b: Site) -> None:
        waits = b.ask(a, 1)
        await eventually(lambda: a.heard)
        b.fetches.drop(waits)
        await eventually(lambda: not a.server._published._waiting)
        await a.publish(1)
        assert not a.server._tasks
        assert b.fetches.find(waits.ticket) is None
        before = b.ask(a, 2)
        b.fetches.drop(before)  # before the question has left
        for _ in range(FETCHES_MAX):
            b.ask(a, 9)
        with pytest.raises(ConfigError, match=f"{FETCHES_MAX} vectors are being fetched"):
            b.ask(a, 9)
        await eventually(lambda: sum(isinstance(m, VectorIs) for m in b.heard) == FETCHES_MAX - 16)
        b.fetches.drop_all()
        await eventually(lambda: not a.server._published._waiting)

    play(tmp_path, scenario)


def test_a_slow_reader_loses_what_was_replaced_twice(tmp_path: Path) -> None:
    """One vector is kept for whoever is in the middle of it, and no more."""

    async def scenario(a: Site, b: Site) -> None:
        await a.publish(1)
        stuck = asyncio.Event()
        push = a.server._push
        loop = asyncio.get_running_loop()
        goes_on = [asyncio.Event() for _ in range(3)]

        def slow(request: Any, stored: Any, outlet: Any) -> None:
            loop.call_soon_threadsafe(stuck.set)
            waiting = goes_on[request.number - 1].wait()
            asyncio.run_coroutine_threadsafe(waiting, loop).result(PATIENCE_S)
            push(request, stored, outlet)

        a.server._push = slow  # type: ignore[method-assign]
        first = b.ask(a, 1)
        await stuck.wait()
        await a.publish(2)
        second = b.ask(a, 2)
        await eventually(lambda: len(a.server._tasks) == 2)
        await a.publish(3)
        await a.publish(4)
        for event in goes_on:
            event.set()
        assert len(await value(first)) == ELEMENTS
        with pytest.raises(StateError, match="broke: newer ones have taken its place"):
            await value(second)
        await eventually(lambda: not a.server._tasks)
        assert any("phi 2" in line for line in a.logs)

    play(tmp_path, scenario)


def test_what_cannot_be_published_leaves_questions_waiting(tmp_path: Path) -> None:
    async def scenario(a: Site, b: Site) -> None:
        asked = b.ask(a, 1)
        await eventually(lambda: a.heard)
        with pytest.raises(CodecError, match="phi 1: NaN"):
            await a.server.publish("phi", 1, np.full(ELEMENTS, np.nan, np.float32), "float32")
        assert asked.state == "asked"
        seen = await a.publish(1)
        assert (await value(asked)).tobytes() == seen.tobytes()

    play(tmp_path, scenario)
