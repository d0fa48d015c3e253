"""Bulk streams: every byte, in a thread, and never a call that does not come back."""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING

import pytest

from atoll.collectives.errors import ConnectError
from atoll.peer.net.links import STREAMS_PER_PEER_MAX
from atoll.peer.rounds import datastream
from atoll.peer.rounds.datastream import (
    UNSENT_BYTES_MAX,
    UNSENT_BYTES_MIN,
    BlockingTls,
    unsent_limit_bytes,
)

if TYPE_CHECKING:
    from tests.unit.peer.conftest import Net

PATTERN = bytes(range(251)) * 20_000  # 5 MB whose period shares no factor with a record


async def streams(net: Net) -> tuple[BlockingTls, BlockingTls]:
    """The sending and the receiving end of one stream."""
    a, b = await net.linked()
    sender = await b.host.open_data(a.id, a.address)
    await a.until(lambda: a.streams)
    return sender, a.streams[0]


async def in_a_call(stream: BlockingTls) -> None:
    """Until the thread that owns ``stream`` is inside one of its calls."""
    while not stream._in_use.locked():  # noqa: ASYNC110  # a lock of threads has no event
        await asyncio.sleep(0)


def receive(stream: BlockingTls, count: int, *, idle: bool = False) -> bytes:
    data = bytearray(count)
    stream.recv_into(memoryview(data), idle=idle)
    return bytes(data)


def test_every_byte_arrives_whatever_the_pieces(net: Net) -> None:
    async def scenario() -> None:
        sender, receiver = await streams(net)
        view = memoryview(PATTERN)
        pieces = [view[:1], view[1:41], view[41:41], view[41:3_000_000], view[3_000_000:]]

        def send() -> None:
            sender.sendall(*pieces[:3])
            for piece in pieces[3:]:
                sender.sendall(piece)

        sending = asyncio.create_task(asyncio.to_thread(send))
        for start, stop in ((0, 7), (7, 1_000_000), (1_000_000, len(PATTERN))):
            part = await asyncio.to_thread(receive, receiver, stop - start)
            assert part == PATTERN[start:stop]
        await sending
        assert sender.sent_bytes == receiver.received_bytes == len(PATTERN)
        assert not sender.worn

    net.run(scenario())


def test_bytes_sent_before_the_receiver_looks_are_kept(net: Net) -> None:
    async def scenario() -> None:
        a, b = await net.linked()
        sender = await b.host.open_data(a.id, a.address)
        sender.sendall(b"at once, behind the hello")
        await a.until(lambda: a.streams)
        assert await asyncio.to_thread(receive, a.streams[0], 25) == b"at once, behind the hello"

    net.run(scenario())


@pytest.mark.parametrize(
    ("rate_bytes_per_s", "limit_bytes"),
    [
        (0, UNSENT_BYTES_MAX),  # not known
        (1, UNSENT_BYTES_MIN),
        (1_000_000, 50_000),
        (5_000_000, 250_000),
        (10_000_000_000, UNSENT_BYTES_MAX),
    ],
)
def test_50_ms_may_wait_in_the_kernel(rate_bytes_per_s: int, limit_bytes: int) -> None:
    assert unsent_limit_bytes(rate_bytes_per_s) == limit_bytes


def test_the_kernel_is_told_the_limit(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datastream, "unsent_limit_bytes", lambda rate: 20_000 + (rate > 0))

    async def scenario() -> None:
        sender, receiver = await streams(net)
        for _ in range(2):  # the rate is known when something has arrived
            await asyncio.to_thread(sender.sendall, PATTERN[:100_000])
            await asyncio.to_thread(receive, receiver, 100_000)
        option = socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT
        assert sender._sock.getsockopt(*option) == 20_001

    net.run(scenario())


@pytest.mark.parametrize("idle", [True, False])
def test_close_wakes_a_receiver(net: Net, idle: bool) -> None:
    async def scenario() -> None:
        _, receiver = await streams(net)
        waiting = asyncio.create_task(asyncio.to_thread(receive, receiver, 1, idle=idle))
        await in_a_call(receiver)
        receiver.close()
        with pytest.raises(ConnectError, match=r"data stream from .*: closed on this side"):
            await waiting
        receiver.close()
        with pytest.raises(ConnectError, match=r"closed on this side"):
            receiver.recv_into(memoryview(bytearray(1)))

    net.run(scenario())


def test_close_wakes_a_sender_that_nobody_reads(net: Net) -> None:
    async def scenario() -> None:
        sender, _ = await streams(net)

        def send() -> None:
            while True:
                sender.sendall(PATTERN)

        sending = asyncio.create_task(asyncio.to_thread(send))
        await in_a_call(sender)
        sender.close()
        with pytest.raises(ConnectError, match=r"data stream to .*: closed on this side"):
            await sending

    net.run(scenario())


def test_the_end_of_the_other_side_ends_a_call(net: Net) -> None:
    async def scenario() -> None:
        sender, receiver = await streams(net)
        sender.sendall(b"half")
        sender.close()
        with pytest.raises(ConnectError, match=r"from .*: the other side closed it"):
            await asyncio.to_thread(receive, receiver, 8)

    net.run(scenario())


def test_a_reader_that_leaves_ends_the_sender(net: Net) -> None:
    async def scenario() -> None:
        sender, receiver = await streams(net)
        receiver.close()

        def send() -> None:
            while True:
                sender.sendall(PATTERN)

        with pytest.raises(ConnectError, match=r"to .*: (connection reset|broken pipe)"):
            await asyncio.to_thread(send)

    net.run(scenario())


def test_no_progress_is_an_error_but_idling_is_not(
    net: Net, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datastream, "NO_PROGRESS_TIMEOUT_S", 0.05)

    async def scenario() -> None:
        sender, receiver = await streams(net)
        idling = asyncio.create_task(asyncio.to_thread(receive, receiver, 2, idle=True))
        with pytest.raises(ConnectError, match=r"to .*: no byte moved for"):
            # Far more than all socket buffers hold; the receiver takes two bytes.
            await asyncio.to_thread(lambda: [sender.sendall(PATTERN) for _ in range(100)])
        assert await idling == PATTERN[:2]
        sender.close()

    net.run(scenario())


def test_a_stream_that_stops_within_a_frame_is_an_error(
    net: Net, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datastream, "NO_PROGRESS_TIMEOUT_S", 0.05)

    async def scenario() -> None:
        sender, receiver = await streams(net)
        sender.sendall(b"x")
        with pytest.raises(ConnectError, match=r"from .*: no byte moved for"):
            await asyncio.to_thread(receive, receiver, 2, idle=True)

    net.run(scenario())


def test_damaged_bytes_end_the_stream(net: Net) -> None:
    async def scenario() -> None:
        sender, receiver = await streams(net)
        sender._sock.send(b"\x17\x03\x03\x00\x20" + bytes(32))  # a record with a wrong tag
        with pytest.raises(ConnectError, match=r"from .*: TLS: .*bad record mac"):
            await asyncio.to_thread(receive, receiver, 1)

    net.run(scenario())


def test_streams_of_one_peer_are_limited(net: Net) -> None:
    async def scenario() -> None:
        a, b = await net.linked()
        opened = [await b.host.open_data(a.id, a.address) for _ in range(STREAMS_PER_PEER_MAX)]
        with pytest.raises(ConnectError, match=f"{STREAMS_PER_PEER_MAX} data streams are open"):
            await b.host.open_data(a.id, a.address)
        await a.until(lambda: len(a.streams) == STREAMS_PER_PEER_MAX)
        opened[0].close()
        a.streams[0].close()
        await b.host.open_data(a.id, a.address)

    net.run(scenario())


def test_closing_the_host_ends_its_streams(net: Net) -> None:
    async def scenario() -> None:
        a, b = await net.linked()
        sender = await b.host.open_data(a.id, a.address)
        await a.until(lambda: a.streams)
        waiting = asyncio.create_task(asyncio.to_thread(receive, a.streams[0], 1, idle=True))
        await a.host.close()
        with pytest.raises(ConnectError, match=r"closed on this side"):
            await waiting
        assert a.streams[0].closed
        assert not sender.closed

    net.run(scenario())


def test_nothing_follows_a_frame_that_broke_off(net: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other side would take it for the rest of that frame."""
    monkeypatch.setattr(datastream, "NO_PROGRESS_TIMEOUT_S", 0.05)

    async def scenario() -> None:
        sender, _ = await streams(net)

        def send() -> None:
            while True:
                sender.sendall(PATTERN)

        with pytest.raises(ConnectError, match="no byte moved"):
            await asyncio.to_thread(send)
        sent_bytes = sender.sent_bytes
        with pytest.raises(ConnectError, match="it broke before"):
            await asyncio.to_thread(sender.sendall, b"next")
        assert sender.sent_bytes == sent_bytes

    net.run(scenario())
