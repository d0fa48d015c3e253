"""What strangers and broken members throw at the port. The daemon and its good links go on."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from typing import TYPE_CHECKING

import pytest

from atoll.collectives.errors import AdmissionError
from atoll.peer.net import connection_limits, listener, tls
from atoll.peer.net.dial import Dial
from atoll.peer.net.hello import (
    CONTROL,
    HELLO_BYTES_MAX,
    PROTOCOL_MAX,
    PROTOCOL_MIN,
    Hello,
)
from atoll.peer.net.link import CONTROL_QUEUE_BYTES_MAX
from atoll.peer.net.tls import TlsChannel
from atoll.peer.net.wire import CONTROL_FRAME_BYTES_MAX, encode, frame, message

if TYPE_CHECKING:
    from tests.unit.peer.conftest import Net, Node

HELLO = Hello(PROTOCOL_MIN, PROTOCOL_MAX, "demo", CONTROL, 1, "")


@message(wire="HostileNote")
class HostileNote:
    number: int
    blob: bytes = b""


async def throw(address: str, *pieces: bytes) -> bytes:
    """Send bytes from a bare socket; what comes back until the other side closes."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
        async with asyncio.timeout(30):
            return await reader.read(1 << 20)
    except ConnectionError:
        return b""
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):  # it was reset, which is the point
            await writer.wait_closed()


async def proved(node: Node, address: str) -> TlsChannel:
    """A connection of a real member that has said nothing yet."""
    channel, _ = await Dial(address, "demo", node.tls.tag).reach(node.tls.client)
    return channel


async def admissions_ended(node: Node) -> None:
    await asyncio.gather(*node.host._listener._tasks, return_exceptions=True)


async def still_works(a: Node, b: Node) -> None:
    """The link of the two nodes carries messages and never broke."""
    number = len(a.messages)
    assert b.host.send(a.id, HostileNote(number))
    await a.until(lambda: (b.id, HostileNote(number)) in a.messages)
    assert not a.downs or all(peer != b.id for peer, _ in a.downs)


GARBAGE = {
    "not tls": b"GET / HTTP/1.1\r\n\r\n",
    "a zero": b"\0",
    "a data stream of a later version": b"\xa7" * 96,
    "a data stream that nobody asked for": b"\xa7\x01" + bytes(96),
    "a broken record": b"\x16\x03\x01\x00\x05garbage!",
    "a huge record": b"\x16\x03\x01\xff\xff" + bytes(100),
    "random": b"\x16" + random.Random(1).randbytes(4000),
    "endless hello": b"\x16\x03\x01\x40\x00\x01\x00\xff\xff" + bytes(16_000),
}


@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE.keys())
def test_garbage_is_turned_away(net: Net, garbage: bytes) -> None:
    async def scenario() -> None:
        a, b = await net.linked()
        assert len(await throw(a.address, garbage)) < 100  # at most an alert
        await a.until(lambda: a.logs)
        assert a.logs[0].startswith("rejected 127.0.0.1:")
        await still_works(a, b)

    net.run(scenario())


def test_a_flood_of_garbage_leaves_nothing_behind(net: Net) -> None:
    async def scenario() -> None:
        a, b = await net.linked()
        pieces = [*GARBAGE.values()]
        await throw(a.address, pieces[0])
        before = len(os.listdir("/proc/self/fd"))
        for start in range(0, 200, 20):
            await asyncio.gather(
                *(throw(a.address, pieces[(start + i) % len(pieces)]) for i in range(20))
            )
        await admissions_ended(a)
        assert len(os.listdir("/proc/self/fd")) == before
        assert a.host._listener._limiter.pending == 0
        assert len(a.logs) < 20  # a flood does not fill the log
        await still_works(a, b)

    net.run(scenario())


def test_connections_that_come_to_nothing_count_until_one_does_not(net: Net) -> None:
    """Loopback is exempt from what follows, which the gate's own tests show."""

    async def scenario() -> None:
        a, b = net.node("a"), net.node("b")
        await a.listen()
        failures = a.host._listener._limiter._failures
        stranger = net.node("c", secret=bytes(32))
        wrong_run = net.node("d", run="other")
        for node in (stranger, wrong_run):
            with pytest.raises(AdmissionError):
                await node.host.dial(a.address)
        await throw(a.address, GARBAGE["not tls"])
        await admissions_ended(a)
        assert failures["127.0.0.1"].in_a_row == 4  # the stranger looked at the certificate again
        await b.host.dial(a.address)
        await admissions_ended(a)
        assert not failures

    net.run(scenario())


@pytest.mark.parametrize("first", [b"GET / HTTP/1.1", b"\0", b"\x15", b"\x17", b"\xa6", b"\xff"])
def test_the_first_byte_must_be_one_of_ours(net: Net, first: bytes) -> None:
    async def scenario() -> None:
        a, b = await net.linked()
        assert await throw(a.address, first) == b""
        await a.until(lambda: a.logs)
        assert f"nothing of ours: the first byte is 0x{first[0]:02x}" in a.logs[0]
        await still_works(a, b)

    net.run(scenario())


@pytest.mark.parametrize("words", [(), (b"\x16",), (b"\x16\x03\x01",), (b"\xa7",), (b"\xa7\x01",)])
def test_the_slow_are_turned_away(
    net: Net, monkeypatch: pytest.MonkeyPatch, words: tuple[bytes, ...]
) -> None:
    async def scenario() -> None:
        a, b = await net.linked()
        monkeypatch.setattr(listener, "FIRST_BYTE_TIMEOUT_S", 0.05)
        monkeypatch.setattr(listener, "ADMISSION_TIMEOUT_S", 0.05)
        assert await throw(a.address, *words) == b""
        await a.until(lambda: a.logs)
        assert "no answer in time" in a.logs[0]
        await still_works(a, b)

    net.run(scenario())


def test_a_member_that_never_says_hello_is_turned_away(net: Net) -> None:
    async def scenario() -> None:
        a, b = await net.linked()
        c = net.node("c")
        channel = await proved(c, a.address)
        for task in a.host._listener._tasks:
            task.cancel()  # what the timeout does, at once
        with pytest.raises(ConnectionResetError):
            await channel.receive()
        channel.close()
        await still_works(a, b)

    net.run(scenario())


def test_only_so_many_wait_to_be_admitted(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("STRANGERS_SPEAKING", "MEMBERS_SPEAKING"):  # loopback is a member's address here
        monkeypatch.setattr(connection_limits, name, connection_limits.PlaceLimits(3, 3, 3))

    async def scenario() -> None:
        a, b = await net.linked()
        host, _, port = a.address.rpartition(":")
        waiting = [await asyncio.open_connection(host, int(port)) for _ in range(3)]
        for _, writer in waiting:
            writer.write(b"\x16")
        places = a.host._listener._limiter._speaking
        async with asyncio.timeout(30):
            while sum(len(kind) for kind in places.values()) < 3:  # noqa: ASYNC110
                await asyncio.sleep(0.01)  # nobody says so
        assert await throw(a.address, b"\x16") == b""
        await a.until(lambda: a.logs)
        assert "3 connections are already waiting" in a.logs[0]
        await still_works(a, b)
        for _, writer in waiting:
            writer.close()
            await writer.wait_closed()
        await admissions_ended(a)
        c = net.node("c")
        assert await c.host.dial(a.address) == a.id

    net.run(scenario())


@pytest.mark.parametrize(
    "words",
    [
        (HELLO_BYTES_MAX + 1).to_bytes(4, "big"),
        bytes(4),
        frame(b"\xc1garbage"),
        frame(encode(HostileNote(1))),
    ],
    ids=["too long", "empty", "garbage", "another message"],
)
def test_a_bad_hello_is_turned_away(net: Net, words: bytes) -> None:
    async def scenario() -> None:
        a, b = await net.linked()
        channel = await proved(net.node("c"), a.address)
        channel.tls.write(words)
        await channel._flush()
        with pytest.raises(ConnectionResetError):
            await channel.receive()
        channel.close()
        await a.until(lambda: a.logs)
        await still_works(a, b)

    net.run(scenario())


BROKEN = {
    "a frame too long": ((CONTROL_FRAME_BYTES_MAX + 1).to_bytes(4, "big"), "1,048,577 bytes"),
    "an empty frame": (bytes(4), "of 0 bytes"),
    "garbage": (frame(b"\xc1" * 100), "undecodable control message"),
    "an unknown message": (frame(b"\x92\xa6Nobody\x80"), "'Nobody' message is not allowed"),
    "nested": (frame(b"\x91" * 100_000), "undecodable control message"),
}


@pytest.mark.parametrize(("words", "why"), BROKEN.values(), ids=BROKEN.keys())
def test_a_member_that_breaks_the_protocol_loses_its_link(net: Net, words: bytes, why: str) -> None:
    async def scenario() -> None:
        a, b = await net.linked()
        c = net.node("c")
        await c.host.dial(a.address)
        assert c.host._links[a.id].send(words)
        await a.until(lambda: a.downs)
        assert a.downs[0][0] == c.id
        assert a.downs[0][1].startswith("broke the protocol: ")
        assert why in a.downs[0][1]
        await c.until(lambda: c.downs)
        await still_works(a, b)

    net.run(scenario())


def test_a_member_that_stops_in_a_frame_and_dies(net: Net) -> None:
    async def scenario() -> None:
        a, b = await net.linked()
        c = net.node("c")
        await c.host.dial(a.address)
        assert c.host._links[a.id].send(b"\0\0\1\0half a frame")
        c.host._links[a.id].end("killed")
        await a.until(lambda: a.downs)
        assert a.downs == [(c.id, "the other side closed the connection without a goodbye")]
        await still_works(a, b)

    net.run(scenario())


def test_a_member_that_does_not_read_is_cut_off(net: Net) -> None:
    async def scenario() -> None:
        a, b = await net.linked()
        c = net.node("c")
        channel = await proved(c, a.address)
        await channel.send(HELLO)
        await a.until(lambda: len(a.ups) == 2)
        large, taken = HostileNote(1, bytes(1_000_000)), 0
        while a.host.send(c.id, large):  # within one turn of the loop: nothing can drain
            taken += 1
        assert taken >= CONTROL_QUEUE_BYTES_MAX // 1_000_000 - 1
        assert not a.downs
        await a.until(lambda: a.downs)
        assert a.downs[0][0] == c.id
        assert "it does not read" in a.downs[0][1]
        channel.close()
        await still_works(a, b)

    net.run(scenario())


def test_before_the_proof_little_is_read(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tls, "UNPROVED_BYTES_MAX", 600)  # less than a handshake needs

    async def scenario() -> None:
        a, b = net.node("a"), net.node("b")
        await throw(await a.listen(), GARBAGE["endless hello"])
        await a.until(lambda: a.logs)
        assert "more than 600 bytes and still no proof of identity" in a.logs[0]
        assert not b.ups

    net.run(scenario())
