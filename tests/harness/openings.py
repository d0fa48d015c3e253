"""Data streams between two LinkHosts of a test, opened as daemons do and step by step."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from atoll.peer.streams.keys import CIPHERS, StreamAsked, StreamGranted
from atoll.peer.streams.stream import DataStream
from harness.wires import receive

if TYPE_CHECKING:
    from tests.unit.peer.conftest import Node

__all__ = ["FRAME", "carries", "dialled", "grants_of", "key_of", "opened"]

FRAME = bytes(range(251)) * 10


async def opened(a: Node, b: Node) -> tuple[DataStream, DataStream]:
    """The sending end at ``b`` and the receiving end at ``a`` of one more stream."""
    before = len(a.streams)
    sender = await b.host.open_data(a.id, a.address)
    await a.until(lambda: len(a.streams) > before)
    return sender, a.streams[before]


async def carries(a: Node, b: Node) -> str:
    """Open a stream and send a frame on it; its cipher."""
    sender, receiver = await opened(a, b)
    sender.sendall(FRAME)  # less than the kernel keeps
    assert await asyncio.to_thread(receive, receiver, len(FRAME)) == FRAME
    assert sender.cipher == receiver.cipher
    sender.close()
    receiver.close()
    return sender.cipher


def grants_of(node: Node) -> int:
    """How many keys it has given out that nobody has used."""
    return len(node.host._streams._grants)


async def key_of(a: Node, b: Node) -> StreamGranted:
    """What ``a`` gives out when ``b`` asks."""
    streams = b.host._streams
    granted = await streams._ask(a.id, StreamAsked(next(streams._numbers), CIPHERS))
    assert isinstance(granted, StreamGranted)
    return granted


@contextlib.asynccontextmanager
async def dialled(a: Node) -> AsyncIterator[socket.socket]:
    """A connection to ``a`` on which nothing has been said."""
    host, _, port = a.address.rpartition(":")
    with socket.socket() as sock:
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, (host, int(port)))
        yield sock
