"""Trouble on one link ends that link and nothing else: resets, bad addresses, our own defects."""

from __future__ import annotations

import socket
import struct
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from atoll.collectives.errors import ConnectError, LocalProtocolError
from atoll.peer.net import listener
from atoll.peer.net.hello import Hello
from atoll.peer.net.listener import Listener
from atoll.peer.net.tls import TlsChannel
from atoll.peer.net.wire import message

if TYPE_CHECKING:
    from tests.unit.peer.conftest import Net, Node

RESET_ON_CLOSE = struct.pack("ii", 1, 0)  # SO_LINGER with zero seconds


@message(wire="TroubleNote")
class TroubleNote:
    number: int


async def still_works(a: Node, b: Node) -> None:
    """The link of the two nodes carries messages and never broke."""
    number = len(a.messages)
    assert b.host.send(a.id, TroubleNote(number))
    await a.until(lambda: (b.id, TroubleNote(number)) in a.messages)
    assert all(peer != b.id for peer, _ in a.downs)


def test_a_connection_that_is_reset_just_after_the_hello_is_a_link_that_ended(net: Net) -> None:
    async def scenario() -> None:
        a, b = await net.linked()
        rogue = net.node("rogue")

        async def answer_and_reset(channel: TlsChannel, peer_id: bytes, theirs: Hello) -> None:
            assert channel._sock is not None
            channel._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
            await channel.send(rogue.host._hello(theirs.kind))
            channel.close()

        greeter = SimpleNamespace(
            counts=rogue.host.counts,
            greet=answer_and_reset,
            accept_stream=rogue.host.accept_stream,
            is_member_ip=lambda ip: True,
            log=print,
        )
        door = Listener(rogue.tls.server, greeter)
        host, port = door.open("127.0.0.1", 0)
        try:
            assert await a.host.dial(f"{host}:{port}") == rogue.id
            await a.until(lambda: a.downs)
        finally:
            await door.close()
        assert [up[0] for up in a.ups] == [b.id, rogue.id]
        assert a.downs == [(rogue.id, "connection reset by peer")]
        await still_works(a, b)

    net.run(scenario())


def test_a_connection_that_is_reset_before_it_is_looked_at(net: Net) -> None:
    async def scenario() -> None:
        a = net.node("a")
        with socket.create_server(("127.0.0.1", 0)) as server:
            ours = socket.create_connection(server.getsockname())
            theirs, _ = server.accept()
            theirs.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
            theirs.close()
            with pytest.raises(OSError, match="not connected"):
                TlsChannel(ours, a.tls.client, server_side=False)
            assert ours.fileno() < 0

    net.run(scenario())


BAD_ADDRESSES = {
    "an empty label": "a..b:29",
    "a long label": "x" * 64 + ".org:29",
    "no port": "garbage",
    "no host": ":29",
    "a port too high": "127.0.0.1:70000",
    "a NUL": "a\0b:29",
    "nothing": "",
}


@pytest.mark.parametrize("address", BAD_ADDRESSES.values(), ids=BAD_ADDRESSES.keys())
def test_a_member_may_advertise_an_address_that_nobody_can_dial(net: Net, address: str) -> None:
    async def scenario() -> None:
        a, b = await net.linked()
        c = net.node("c")
        c.address = address
        await c.host.dial(a.address)
        await a.until(lambda: len(a.ups) == 2)
        assert a.ups[1] == (c.id, address, 1)
        c.host.drop(a.id, "a network that failed")
        await a.until(lambda: a.downs)
        assert await a.host.probe(address, 1.0) == "silent"
        with pytest.raises(ConnectError):
            await a.host.dial(address, expect_peer=c.id)
        with pytest.raises(ConnectError):
            await a.host.open_data(c.id, address)
        await still_works(a, b)

    net.run(scenario())


DEFECTS = [
    ZeroDivisionError("no\nlines"),
    LocalProtocolError("too large"),
    OSError(28, "disk full"),
]


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: type(defect).__name__)
def test_a_message_that_meets_our_defect_costs_its_link_and_is_logged(
    net: Net, defect: Exception
) -> None:
    async def scenario() -> None:
        a, b = await net.linked()
        c = net.node("c")
        await c.host.dial(a.address)
        take = a.host._daemon.on_message

        def handle(peer: bytes, msg: object) -> None:
            if peer == c.id:
                raise defect
            take(peer, msg)

        a.host._daemon.on_message = handle
        assert c.host.send(a.id, TroubleNote(1))
        assert c.host.send(a.id, TroubleNote(2))
        await a.until(lambda: a.downs)
        name = type(defect).__name__
        assert a.downs == [(c.id, f"its TroubleNote met a defect of this program: {name}")]
        (line,) = a.logs
        assert line.startswith("DEFECT, please report it: a TroubleNote of ")
        assert f" raised {name}: " in line
        assert line.endswith(" handle)")
        assert "test_connections_trouble.py:" in line
        assert "/" not in line.replace(str(defect), "")
        assert "\n" not in line
        await c.until(lambda: c.downs)
        assert await c.host.dial(a.address) == a.id
        await still_works(a, b)

    net.run(scenario())


def test_whoever_connects_is_turned_away_when_descriptors_are_scarce(
    net: Net, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        a, b = await net.linked()
        c = net.node("c")
        with monkeypatch.context() as patch:
            patch.setattr(listener, "is_scarce", lambda accepted: True)
            with pytest.raises(ConnectError):
                await c.host.dial(a.address)
        assert "too many file descriptors are in use" in a.logs[0]
        assert a.host._listener._limiter.pending == 0
        assert await c.host.dial(a.address) == a.id
        await still_works(a, b)

    net.run(scenario())
