"""The one port: accepts connections, lets few strangers in at a time, and hears what they want.

The first byte of a connection says whether TLS follows or a data stream with a cipher of its own.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import ipaddress
import socket
import ssl
from collections.abc import Awaitable, Callable

from atoll.collectives.errors import (
    ERRORS_BY_CODE,
    AdmissionError,
    AtollError,
    ConfigError,
    RemoteProtocolError,
)
from atoll.peer.descriptors import is_scarce
from atoll.peer.net.certs import peer_id_of
from atoll.peer.net.gate import Gate, counted_as, plain_ip
from atoll.peer.net.hello import Hello, Refused
from atoll.peer.net.invite import format_address
from atoll.peer.net.streamkeys import STREAM_FIRST_BYTE
from atoll.peer.net.tls import TLS_FIRST_BYTE, TlsChannel, reason_of

__all__ = ["Listener"]

# For handshake and hello together, or the opening of a data stream, of whoever connects.
ADMISSION_TIMEOUT_S = 5.0
# Accepting pauses this long when the process is out of descriptors, instead of spinning.
ACCEPT_RETRY_S = 0.2
LISTEN_BACKLOG = 128
# Strangers must not fill the log: one line in this time, with a count of the others.
LOG_INTERVAL_S = 1.0


class _Caller:
    """A connection that nobody has taken yet."""

    def __init__(self, sock: socket.socket, where: str) -> None:
        self.where = where
        self.held: socket.socket | TlsChannel | None = sock
        self.welcome: bool | None = None  # False: nobody of the run, or one that may not come in

    def close(self) -> None:
        """Nothing, if it was taken."""
        if self.held is not None:
            self.held.close()


class Listener:
    """Brings connections as far as a proved peer id and a hello, then asks ``greet``.

    ``greet`` takes the channel (and returns None) or returns the refusal to send. ``accept_stream``
    takes the socket of a data stream, behind its first byte, or raises. What fails before that is
    logged, never raised.
    """

    def __init__(
        self,
        context: ssl.SSLContext,
        greet: Callable[[TlsChannel, bytes, Hello], Awaitable[Refused | None]],
        accept_stream: Callable[[socket.socket], Awaitable[None]],
        is_member_ip: Callable[[str], bool],
        log: Callable[[str], None],
    ) -> None:
        self._context, self._greet, self._accept_stream = context, greet, accept_stream
        self._is_member_ip, self._log = is_member_ip, log
        self._gate = Gate()
        self._tasks: set[asyncio.Task[None]] = set()
        self._socket: socket.socket | None = None
        self._retry: asyncio.TimerHandle | None = None
        self._logged_s, self._unlogged = -LOG_INTERVAL_S, 0

    def open(self, host: str, port: int) -> tuple[str, int]:
        """Listen; returns the bound address (``port`` 0 picks a free one). ConfigError if taken."""
        self._socket = _bound(host, port)
        asyncio.get_running_loop().add_reader(self._socket, self._on_acceptable)
        name = self._socket.getsockname()
        return str(name[0]), int(name[1])

    async def close(self) -> None:
        """Stop accepting and end every connection that has not been taken."""
        if self._retry is not None:
            self._retry.cancel()
        if self._socket is not None:
            asyncio.get_running_loop().remove_reader(self._socket)
            self._socket.close()
            self._socket = None
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _on_acceptable(self) -> None:
        assert self._socket is not None
        try:
            sock, name = self._socket.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as error:
            self._note(f"cannot accept connections: {reason_of(error)}")
            self._pause()
            return
        ip, where = plain_ip(str(name[0])), format_address(str(name[0]), int(name[1]))
        if is_scarce(sock):
            sock.close()
            self._note(f"turned away {where}: too many descriptors are in use")
            return
        loop = asyncio.get_running_loop()
        exempt = ipaddress.ip_address(ip).is_loopback or self._is_member_ip(ip)
        counted = counted_as(ip)
        if reason := self._gate.enter(counted, loop.time(), exempt=exempt):
            sock.close()
            self._note(f"turned away {where}: {reason}")
            return
        sock.setblocking(False)
        caller = _Caller(sock, where)
        task = loop.create_task(self._admit(caller), name=f"admit {where}")
        self._tasks.add(task)
        task.add_done_callback(functools.partial(self._admitted, caller, counted))

    def _pause(self) -> None:
        assert self._socket is not None
        loop, listening = asyncio.get_running_loop(), self._socket
        loop.remove_reader(listening)
        resume = functools.partial(loop.add_reader, listening, self._on_acceptable)
        self._retry = loop.call_later(ACCEPT_RETRY_S, resume)

    async def _admit(self, caller: _Caller) -> None:
        try:
            async with asyncio.timeout(ADMISSION_TIMEOUT_S):
                await self._hear(caller)
        except ssl.SSLError as error:
            caller.welcome = False
            self._note(f"turned away {caller.where}: {reason_of(error)} (another run or token?)")
        except OSError as error:
            self._note(f"turned away {caller.where}: {reason_of(error)}")
            return
        except AtollError as error:
            if isinstance(error, RemoteProtocolError):
                caller.welcome = False
            self._note(f"turned away {caller.where}: {error.what}")
            return
        if isinstance(caller.held, TlsChannel):
            await caller.held.goodbye()  # nothing, if the channel was taken

    async def _hear(self, caller: _Caller) -> None:
        """What the connection is for, and whether that may be."""
        sock = caller.held
        assert isinstance(sock, socket.socket)
        head = await asyncio.get_running_loop().sock_recv(sock, 1)
        if not head:
            raise ConnectionResetError("the other side closed the connection")
        if head[0] == TLS_FIRST_BYTE:
            channel = TlsChannel(sock, self._context, server_side=True, head=head)
            await self._hear_hello(caller, channel)
        elif head[0] == STREAM_FIRST_BYTE:
            await self._accept_stream(sock)
            caller.held, caller.welcome = None, True
        else:
            raise RemoteProtocolError(f"nothing of ours: the first byte is 0x{head[0]:02x}")

    async def _hear_hello(self, caller: _Caller, channel: TlsChannel) -> None:
        caller.held = channel
        await channel.handshake()
        peer_id = peer_id_of(channel.tls)
        hello = await channel.receive()
        if not isinstance(hello, Hello):
            raise RemoteProtocolError("it refused a connection that it had opened itself")
        refused = await self._greet(channel, peer_id, hello)
        kind = ERRORS_BY_CODE.get(refused.code, AtollError) if refused is not None else None
        caller.welcome = kind is None or not issubclass(kind, AdmissionError)
        if refused is not None:
            self._note(f'refused {caller.where}, telling it: "{refused.what}"')
            await channel.send(refused)

    def _admitted(self, caller: _Caller, address: str, task: asyncio.Task[None]) -> None:
        # Here and not in a `finally` of the task: one cancelled before its first step runs none.
        self._tasks.discard(task)
        self._gate.leave(address)
        if caller.welcome:
            self._gate.succeeded(address)
        elif caller.welcome is False:
            self._gate.failed(address, task.get_loop().time())
        caller.close()
        if not task.cancelled() and (error := task.exception()) is not None:
            context = {"message": f"defect in {task.get_name()}", "exception": error}
            task.get_loop().call_exception_handler(context)

    def _note(self, line: str) -> None:
        now_s = asyncio.get_running_loop().time()
        if now_s - self._logged_s < LOG_INTERVAL_S:
            self._unlogged += 1
            return
        others = f" ({self._unlogged} more not shown)" if self._unlogged else ""
        self._logged_s, self._unlogged = now_s, 0
        self._log(line + others)


def _bound(host: str, port: int) -> socket.socket:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, name = found[0]
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)  # [::] means both
            sock.bind(name)
            sock.listen(LISTEN_BACKLOG)
            sock.setblocking(False)
        except BaseException:
            sock.close()
            raise
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            what = f"port {port} of {host} is in use by another program, perhaps another peer"
            fix = "stop that one, or choose another port with --listen HOST:PORT (0: any free one)"
            raise ConfigError(what, fix=fix) from error
        raise ConfigError(
            f"cannot listen on {format_address(host, port)}: {reason_of(error)}",
            fix="choose another address with --listen HOST:PORT",
        ) from error
    return sock
