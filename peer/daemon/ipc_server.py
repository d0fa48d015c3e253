"""Serve the daemon's own machine: commands over zmq, memory and liveness over a unix socket.

Each client has a zmq DEALER (commands and answers, small msgpack) and a *lifeline*, a unix stream
connection with the same random id. The lifeline carries descriptors of shared memory, and its end
of file tells either side at once that the other process is gone, even after SIGKILL. Events for
everybody (the event log) go out on a PUB socket.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgpack
import zmq
import zmq.asyncio

from atoll.collectives.errors import AtollError, LocalProtocolError, SessionError
from atoll.peer.daemon.process import is_scarce

COMMANDS, LIFELINE, EVENTS = "commands.ipc", "lifeline.sock", "events.ipc"
CLIENT_ID_BYTES = 16
COMMAND_BYTES_MAX = 1 << 20  # the specification blob of 512 KiB is the largest thing said here
CLIENTS_MAX = 64  # lifelines; status commands do not need one
EVENT_QUEUE_MAX = 1000  # of a subscriber that does not read: then it misses events
ACCEPT_RETRY_S = 0.2  # accepting pauses so long when the process is out of descriptors

Handler = Callable[[bytes, dict[str, Any]], Awaitable[Any]]


def unpack(data: bytes) -> Any:
    """Decode a local message, with the same caps as the wire's.

    Raises LocalProtocolError if it is broken.
    """
    if len(data) > COMMAND_BYTES_MAX:
        raise LocalProtocolError(f"local message of {len(data)} bytes")
    try:
        return msgpack.unpackb(
            data, max_bin_len=COMMAND_BYTES_MAX, max_str_len=COMMAND_BYTES_MAX, max_ext_len=0
        )
    except (ValueError, msgpack.UnpackException) as error:
        raise LocalProtocolError(f"undecodable local message: {error}") from error


class IpcServer:
    """Serve the daemon's local clients: commands, lifelines and events."""

    def __init__(self, socket_path: Callable[[str], Path]) -> None:
        self._context = zmq.asyncio.Context()
        self._paths = {name: socket_path(name) for name in (COMMANDS, LIFELINE, EVENTS)}
        for path in self._paths.values():
            path.unlink(missing_ok=True)  # of a daemon that crashed: the home lock is ours
        self._router = self._bind(zmq.ROUTER, COMMANDS)
        self._publisher = self._bind(zmq.PUB, EVENTS)
        self._lifelines: dict[bytes, socket.socket] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.setblocking(False)
        self._listener.bind(os.fspath(self._paths[LIFELINE]))
        self._listener.listen(CLIENTS_MAX)

    def _bind(self, kind: int, name: str) -> zmq.asyncio.Socket:
        bound = self._context.socket(kind)
        bound.setsockopt(zmq.LINGER, 200)
        bound.setsockopt(zmq.MAXMSGSIZE, COMMAND_BYTES_MAX)
        bound.setsockopt(zmq.SNDHWM, EVENT_QUEUE_MAX)
        bound.bind(f"ipc://{self._paths[name]}")
        return bound

    def start(self, handlers: dict[str, Handler], on_gone: Callable[[bytes], None]) -> None:
        """Answer clients from now on; ``on_gone`` is told of each that has ended.

        ``handlers`` maps command names to ``async (client_id, arguments) -> answer``.
        """
        self._spawn(self._serve_commands(handlers))
        self._spawn(self._serve_lifelines(on_gone))

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        for lifeline in self._lifelines.values():
            lifeline.close()
        self._listener.close()
        self._router.close()
        self._publisher.close()
        self._context.term()
        for path in self._paths.values():
            path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # a folder in /tmp would stay; the home's may be in use
            self._paths[COMMANDS].parent.rmdir()

    def push(self, client: bytes, name: str, value: dict[str, Any]) -> None:
        """Tell one client something it did not ask; drop that if the client is gone."""
        self._send(client, [0, name, value])

    def publish(self, event: dict[str, Any]) -> None:
        self._spawn(_quietly(self._publisher.send(msgpack.packb(event))))

    def lifeline(self, client: bytes) -> socket.socket:
        """Return a client's lifeline. Raise SessionError if it has none (any more)."""
        found = self._lifelines.get(client)
        if found is None:
            raise SessionError("this client has no lifeline", fix="use atoll.connect()")
        return found

    def _send(self, client: bytes, message: list[Any]) -> None:
        self._pass_on(client, msgpack.packb(message))

    def _pass_on(self, client: bytes, packed: bytes) -> None:
        self._spawn(_quietly(self._router.send_multipart([client, packed])))

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # ------------------------------------------------------------ commands

    async def _serve_commands(self, handlers: dict[str, Handler]) -> None:
        while True:
            client, data = (await self._router.recv_multipart())[:2]
            self._spawn(self._answer(handlers, client, data))

    async def _answer(self, handlers: dict[str, Handler], client: bytes, data: bytes) -> None:
        number = 0
        try:
            number, name, arguments = unpack(data)
            handler = handlers.get(name)
            if handler is None:
                raise LocalProtocolError(f"unknown command {name!r}; are both sides this version?")
            answer = msgpack.packb([number, "ok", await handler(client, arguments)])
        except AtollError as error:
            told = {"code": error.code, "what": error.what, "fix": error.fix}
            answer = msgpack.packb([number, "error", told])
        except Exception as error:  # a broken client must not end the daemon
            what = f"malformed command: {type(error).__name__}: {error}"
            told = {"code": LocalProtocolError.code, "what": what, "fix": ""}
            answer = msgpack.packb([number, "error", told])
        self._pass_on(client, answer)

    # ------------------------------------------------------------ lifelines

    async def _serve_lifelines(self, on_gone: Callable[[bytes], None]) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(self._listener)
            except OSError:
                await asyncio.sleep(ACCEPT_RETRY_S)
                continue
            if len(self._lifelines) >= CLIENTS_MAX or is_scarce(connection):
                connection.close()
                continue
            connection.setblocking(False)
            self._spawn(self._watch(connection, on_gone))

    async def _watch(self, connection: socket.socket, on_gone: Callable[[bytes], None]) -> None:
        """Hold a lifeline until the client's process ends; it sends its id and then nothing."""
        loop = asyncio.get_running_loop()
        client = b""
        try:
            async with asyncio.timeout(5):
                while len(client) < CLIENT_ID_BYTES:
                    part = await loop.sock_recv(connection, CLIENT_ID_BYTES - len(client))
                    if not part:
                        return
                    client += part
            self._lifelines[client] = connection
            await loop.sock_sendall(connection, b"!")  # known: commands may refer to it
            while await loop.sock_recv(connection, 64):
                pass
        except (OSError, TimeoutError):
            pass  # the same as end of file: the client is gone
        finally:
            connection.close()
            if self._lifelines.pop(client, None) is not None:
                on_gone(client)


async def _quietly(sending: Any) -> None:
    """Await a send and ignore its failure: the lifeline tells when a client is gone."""
    with contextlib.suppress(zmq.ZMQError):
        await sending
