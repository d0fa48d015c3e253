"""Both ends of a TCP connection over loopback, and data streams on them."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from atoll.peer.net.certs import run_tls
from atoll.peer.net.identity import Home
from atoll.peer.net.tls import TlsChannel
from atoll.peer.streams.stream import DataStream, PlainStream, SealedStream, TlsStream

__all__ = ["SECRET", "Call", "ends", "pair", "receive", "sockets", "tls_ends"]

SECRET = bytes(range(32))


@contextlib.contextmanager
def sockets() -> Iterator[tuple[socket.socket, socket.socket]]:
    """The dialler's end of a TCP connection over loopback, and the other one."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        dialled = socket.create_connection(listening.getsockname())
        accepted, _ = listening.accept()
    with dialled, accepted:
        yield dialled, accepted


def ends(wires: tuple[socket.socket, socket.socket]) -> tuple[SealedStream, SealedStream]:
    """A sealed stream: the sending and the receiving end."""
    return (
        SealedStream(wires[0], "a", SECRET, dialled=True),
        SealedStream(wires[1], "b", SECRET, dialled=False),
    )


def tls_ends(
    wires: tuple[socket.socket, socket.socket], folder: Path
) -> tuple[TlsStream, TlsStream]:
    """A stream through TLS: the sending and the receiving end."""
    with Home.open(folder / "home") as home:
        tls = run_tls(home, SECRET)

    async def shaken() -> tuple[TlsStream, TlsStream]:
        dialler = TlsChannel(wires[0], tls.client, server_side=False)
        acceptor = TlsChannel(wires[1], tls.server, server_side=True)
        await asyncio.gather(dialler.handshake(), acceptor.handshake())
        return TlsStream(dialler.take(), "a"), TlsStream(acceptor.take(), "b")

    return asyncio.run(shaken())


def pair(
    cipher: str, wires: tuple[socket.socket, socket.socket], folder: Path
) -> tuple[DataStream, DataStream]:
    """Return both ends of one stream with this cipher."""
    if cipher == "none":
        return PlainStream(wires[0], "a"), PlainStream(wires[1], "b")
    return tls_ends(wires, folder) if cipher == "tls" else ends(wires)


def receive(stream: DataStream, count: int, *, idle: bool = False) -> bytes:
    """The next ``count`` bytes."""
    data = bytearray(count)
    stream.recv_into(memoryview(data), idle=idle)
    return bytes(data)


class Call(threading.Thread):
    """Calls a function in a thread; :meth:`end` gives what it returned or raises what it raised."""

    def __init__(self, function: Callable[[], object]) -> None:
        super().__init__(daemon=True)
        self._function = function
        self._result: object = None
        self._error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self._result = self._function()
        except BaseException as error:
            self._error = error

    def end(self) -> object:
        self.join(30)
        assert not self.is_alive()
        if self._error is not None:
            raise self._error
        return self._result
