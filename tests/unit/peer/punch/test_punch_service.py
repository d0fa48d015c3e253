"""Two ends and observers, over real sockets of this machine; a bus stands for control links."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import pytest

from atoll.collectives.errors import ConnectError
from atoll.peer.net.byte_counts import ByteCounts
from atoll.peer.net.link import ControlLink
from atoll.peer.net.punched import PunchedSocket, is_punched, met_ip_of
from atoll.peer.net.wire import decode, encode
from atoll.peer.punch.course import MEET_S
from atoll.peer.punch.messages import (
    OBSERVE_FIRST_BYTE,
    TOKEN_BYTES,
    ObserveAsked,
    Observed,
)
from atoll.peer.punch.pairs import PairState
from atoll.peer.punch.service import (
    OBSERVED_PER_PEER_MAX,
    TOKENS_MAX,
    Observer,
    PunchService,
)

A, B, FIRST, SECOND = (bytes((number,)) * 32 for number in range(4))
HERE, THERE = "127.0.0.1", "127.0.0.2"


@dataclass
class Link:
    """As much of a control link as a punch needs."""

    peer_id: bytes
    remote_ip: str = HERE
    rtt_s: float = 0.01
    relay: bytes = FIRST
    met_ip: str = ""


class End:
    """A peer: what its service asks for, and the port at which it can be observed."""

    def __init__(self, bus: Bus, peer_id: bytes) -> None:
        self.peer_id, self.counts = peer_id, ByteCounts()
        self.bus, self.lines, self.adopted = bus, list[str](), asyncio.Queue[PunchedSocket]()
        self.stated_ip, self.port_shift, self.is_deaf = HERE, 0, False
        self.met_ip = ""  # where the others have met this one already
        self.watched: list[Observer] = []
        self.service = PunchService(self)

    def link(self, peer: bytes) -> ControlLink:
        end = self.bus.ends[peer]
        return cast(ControlLink, Link(peer, end.stated_ip, met_ip=end.met_ip))

    def punch_link(self, peer: bytes) -> ControlLink | None:
        return self.link(peer) if peer in self.bus.ends else None

    def requester_ip(self, link: ControlLink) -> str:
        return HERE

    def observers(self) -> Sequence[Observer]:
        return self.watched

    def send(self, peer: bytes, msg: object) -> bool:
        if isinstance(msg, Observed) and self.port_shift:
            msg = Observed(msg.number, msg.ip, msg.port + self.port_shift)
        return self.bus.send(self, peer, msg)

    def send_on(self, link: ControlLink, msg: object) -> bool:
        return self.bus.send(self, link.peer_id, msg)

    def adopt(self, sock: PunchedSocket, peer: bytes) -> None:
        self.adopted.put_nowait(sock)

    def log(self, line: str) -> None:
        self.lines.append(line)


class Bus:
    """Carry messages between ends, in order, as bytes."""

    def __init__(self) -> None:
        self.ends: dict[bytes, End] = {}
        self.servers: list[asyncio.Task[None]] = []
        self.listeners: list[socket.socket] = []

    def send(self, sender: End, peer: bytes, msg: object) -> bool:
        other = self.ends[peer]
        if not other.is_deaf:
            link, payload = other.link(sender.peer_id), encode(msg)
            asyncio.get_running_loop().call_soon(
                lambda: other.service.on_message(link, decode(payload))
            )
        return True

    def add(self, peer_id: bytes) -> End:
        self.ends[peer_id] = end = End(self, peer_id)
        return end

    def observing(self, peer_id: bytes, ip: str) -> Observer:
        """An observer with a port; it is told the first byte by its listener, as in a daemon."""
        end = self.add(peer_id)
        listener = socket.create_server((ip, 0))
        listener.setblocking(False)
        self.listeners.append(listener)

        async def serve() -> None:
            loop = asyncio.get_running_loop()
            while True:
                sock, _ = await loop.sock_accept(listener)
                assert await loop.sock_recv(sock, 1) == bytes((OBSERVE_FIRST_BYTE,))
                await end.service.observe(sock)

        self.servers.append(asyncio.get_running_loop().create_task(serve()))
        return Observer(peer_id, ip, listener.getsockname()[1], HERE)

    async def close(self) -> None:
        for end in self.ends.values():
            end.service.close()
            while not end.adopted.empty():
                end.adopted.get_nowait().close()
        for server in self.servers:
            server.cancel()
        await asyncio.gather(*self.servers, return_exceptions=True)
        for listener in self.listeners:
            listener.close()


def with_ends(work: Callable[[Bus, End, End], Awaitable[Any]], observers: int = 1) -> None:
    async def run() -> None:
        bus = Bus()
        try:
            one, other = bus.add(A), bus.add(B)
            one.watched = [bus.observing(FIRST, HERE)]
            if observers > 1:
                one.watched.append(bus.observing(SECOND, THERE))
            other.watched = one.watched
            await work(bus, one, other)
        finally:
            await bus.close()

    asyncio.run(run())


@pytest.mark.parametrize("observers", [1, 2])
def test_both_ends_get_one_connection(observers: int) -> None:
    async def work(bus: Bus, one: End, other: End) -> None:
        loop = asyncio.get_running_loop()
        for first, second in ((one, other), (other, one), (one, other)):
            with await first.service.open(second.peer_id) as ours:
                with await second.adopted.get() as theirs:
                    assert is_punched(ours)
                    assert is_punched(theirs)
                    assert ours.getpeername() == theirs.getsockname()
                    await loop.sock_sendall(ours, b"word")
                    assert await loop.sock_recv(theirs, 100) == b"word", "and nothing before it"
        for end in (one, other):
            assert len(end.lines) == 1, "it is said once"
            assert "direct connection" in end.lines[0]

    with_ends(work, observers)


def test_many_at_once_are_as_many_connections() -> None:
    async def work(bus: Bus, one: End, other: End) -> None:
        socks = await asyncio.gather(*(one.service.open(B) for _ in range(6)))
        ours = {sock.getsockname(): sock.getpeername() for sock in socks}
        theirs = [await other.adopted.get() for _ in socks]
        assert {sock.getpeername(): sock.getsockname() for sock in theirs} == ours
        assert len(ours) == len(socks)
        for sock in (*socks, *theirs):
            sock.close()

    with_ends(work)


def test_a_symmetric_router_at_either_end_is_said_once_and_not_tried_again() -> None:
    async def work(bus: Bus, one: End, other: End) -> None:
        bus.ends[SECOND].port_shift = 1
        one.watched = one.watched[:1]
        for _ in range(2):
            with pytest.raises(OSError, match="another port"):
                await one.service.open(B)
        assert one.service.state(B) is other.service.state(A) is PairState.HOPELESS
        assert not one.service.may_try(B)
        assert len(one.lines) == 1
        said = [line for line in other.lines if line.startswith("the router of this peer gives")]
        assert len(said) == 1

    with_ends(work, observers=2)


def test_whoever_would_ask_and_has_a_symmetric_router_says_so_to_the_other_end() -> None:
    async def work(bus: Bus, one: End, other: End) -> None:
        bus.ends[SECOND].port_shift = 1
        for _ in range(2):
            with pytest.raises(OSError, match="another port"):
                await one.service.open(B)
        await asyncio.sleep(0)
        assert other.service.state(A) is PairState.HOPELESS
        assert len(other.lines) == 1
        assert "no direct connection to" in other.lines[0]
        assert "its router gives each connection another port" in other.lines[0]

    with_ends(work, observers=2)


def test_who_names_another_address_than_it_comes_from_is_not_dialled() -> None:
    async def work(bus: Bus, one: End, other: End) -> None:
        one.stated_ip = "127.0.0.9"
        with pytest.raises(ConnectError, match=r"127\.0\.0\.9 for the relay, and at 127\.0\.0\.1"):
            await one.service.open(B)
        assert other.service.state(A) is PairState.PAUSED
        assert "tried again in 10 s" in other.lines[0]
        assert not other.adopted.qsize()

    with_ends(work)


def test_who_was_met_already_is_dialled_where_it_was_met() -> None:
    """Behind one router the kernel may see another address than others do."""

    async def work(bus: Bus, one: End, other: End) -> None:
        one.stated_ip, one.met_ip = "127.0.0.9", HERE
        sock = await one.service.open(B)
        assert met_ip_of(sock) == HERE
        theirs = await other.adopted.get()
        assert met_ip_of(theirs) == HERE
        for end in (sock, theirs):
            end.close()

    with_ends(work)


def test_without_observers_there_is_no_punch() -> None:
    async def work(bus: Bus, one: End, other: End) -> None:
        other.watched = []
        with pytest.raises(ConnectError, match="nobody that can be dialled"):
            await one.service.open(B)
        one.watched = []
        with pytest.raises(ConnectError, match="nobody that can be dialled"):
            await one.service.open(B)

    with_ends(work)


def test_an_end_that_does_not_come_is_given_up() -> None:
    async def work(bus: Bus, one: End, other: End) -> None:
        other.is_deaf = True
        began_s = asyncio.get_running_loop().time()
        with pytest.raises(OSError, match="has not answered"):
            await one.service.open(B)
        assert asyncio.get_running_loop().time() - began_s < 3 * MEET_S
        assert not one.lines, "nothing is known of the routers"
        assert not one.service.may_try(B)
        assert one.service.state(B) is PairState.UNTRIED

    with_ends(work)


def test_nobody_takes_all_places_of_an_observer() -> None:
    """Whoever brings its tokens and stays holds connections, and others are observed still."""

    async def work(bus: Bus, one: End, other: End) -> None:
        observer, at = bus.ends[FIRST], one.watched[0]
        asked = [ObserveAsked(n, n.to_bytes(TOKEN_BYTES, "big")) for n in range(TOKENS_MAX)]
        with contextlib.ExitStack() as held:
            for question in asked:
                observer.service.on_message(observer.link(A), question)
                if question.token not in observer.service._tokens:
                    break
                sock = held.enter_context(socket.create_connection((at.ip, at.port)))
                sock.sendall(bytes((OBSERVE_FIRST_BYTE,)) + question.token)
                while question.token in observer.service._tokens:  # noqa: ASYNC110  # nobody tells
                    await asyncio.sleep(0.001)
            assert len(observer.service._held) == OBSERVED_PER_PEER_MAX
            question = ObserveAsked(1, b"t" * TOKEN_BYTES)
            observer.service.on_message(observer.link(B), question)
            assert question.token in observer.service._tokens

    with_ends(work)
