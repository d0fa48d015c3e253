"""Accept connections on the one port, let few strangers in at a time, and hear what they want.

The first byte of a connection says whether TLS follows, a data stream with a cipher of its own, or
one end of a circuit that this peer is to relay, or whether somebody wants to know where it comes
from.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import socket
import ssl
import struct
from typing import Protocol

from atoll.collectives.errors import (
    ERRORS_BY_CODE,
    AdmissionError,
    AtollError,
    ConfigError,
    RemoteProtocolError,
)
from atoll.peer.daemon.process import is_scarce
from atoll.peer.net.byte_counts import ByteCounts
from atoll.peer.net.certs import peer_id_of
from atoll.peer.net.connection_limits import (
    ConnectionLimiter,
    ConnectionOrigin,
    PendingConnection,
    origin_of,
)
from atoll.peer.net.dial import is_refusal
from atoll.peer.net.hello import Hello, Refused
from atoll.peer.net.invite import format_address
from atoll.peer.net.link import defect_summary
from atoll.peer.net.proxy import came_by_proxy
from atoll.peer.net.punched import PunchedSocket
from atoll.peer.net.relayed import RelayedSocket, remote_ip_of
from atoll.peer.net.tls import TLS_FIRST_BYTE, TlsChannel, is_local, reason_of
from atoll.peer.punch.messages import OBSERVE_FIRST_BYTE
from atoll.peer.relay.messages import CIRCUIT_FIRST_BYTE
from atoll.peer.streams.keys import STREAM_FIRST_BYTE

# Time for the first byte: a peer sends it once it is connected, and TCP repeats it in a second.
FIRST_BYTE_TIMEOUT_S = 2.0
# From there on for handshake and hello together, or the opening of a data stream.
ADMISSION_TIMEOUT_S = 5.0
# Accepted at once, before the event loop looks at anything else: a millisecond of a flood.
ACCEPTED_AT_ONCE = 32
# Accepting pauses this long when the process is out of descriptors, instead of spinning.
ACCEPT_RETRY_S = 0.2
# As long as the kernel allows (somaxconn): a flood of 6,400 a second that fills it while the event
# loop is busy makes the members' connections wait for a repetition, a second or more. Waiting in
# the kernel for the first byte (TCP_DEFER_ACCEPT) would move the flood into its queue of requests,
# which is as long and has no places for members.
LISTEN_BACKLOG = 4096
# An end at once (a reset): the kernel would keep a connection for a minute that is closed in order
# and that the other side keeps open, and floods keep them open.
_RESET = struct.pack("ii", 1, 0)
# What the kernel says of a socket for IPv6 where there is none.
_NO_IPV6 = (errno.EAFNOSUPPORT, errno.EADDRNOTAVAIL)
# Whose limits count where a relay states the address: those through relays are one network.
BY_RELAY = "{} by relay"
# Strangers must not fill the log: one line in this time, with a count of the others.
LOG_INTERVAL_S = 1.0


class _Caller:
    """Hold a connection that nobody has taken yet."""

    def __init__(self, sock: socket.socket, where: str, place: PendingConnection) -> None:
        self.where, self.place = where, place
        self.held: socket.socket | TlsChannel | None = sock
        self.is_silent = True
        self.welcome: bool | None = None  # False: nobody of the run, or one that may not come in

    def close(self) -> None:
        """Close the connection, unless it was taken."""
        if self.is_silent and isinstance(self.held, socket.socket):
            _reset(self.held)
        elif self.held is not None:
            self.held.close()


class Greeter(Protocol):
    """Take the connections that a listener has brought so far."""

    @property
    def counts(self) -> ByteCounts: ...

    async def greet(self, channel: TlsChannel, peer_id: bytes, theirs: Hello, /) -> Refused | None:
        """Take the channel and return None, or return the refusal to send."""

    async def accept_stream(self, sock: socket.socket, /) -> None:
        """Take the socket of a data stream, behind its first byte, or raise."""

    async def accept_circuit(self, sock: socket.socket, /) -> None:
        """Take the socket of an end of a circuit, behind its first byte, or raise."""

    async def accept_observed(self, sock: socket.socket, /) -> None:
        """Take a socket whose origin is to be told, behind its first byte, or raise."""

    def is_member_ip(self, ip: str, /) -> bool:
        """Return whether members have come from this address."""

    def log(self, line: str, /) -> None: ...


class Listener:
    """Bring connections as far as a proved peer id and a hello, then ask the ``greeter``.

    What fails before that is logged, never raised. ``behind_proxy``: this machine dials through a
    proxy, which may bring those who dial it, too, from an address of this machine.
    """

    def __init__(
        self, context: ssl.SSLContext, greeter: Greeter, *, behind_proxy: bool = False
    ) -> None:
        self._context, self._greeter = context, greeter
        self._behind_proxy = behind_proxy
        self._limiter = ConnectionLimiter()
        self._tasks: set[asyncio.Task[None]] = set()
        self._socket: socket.socket | None = None
        self._retry: asyncio.TimerHandle | None = None
        self._logged_s, self._unlogged = -LOG_INTERVAL_S, 0

    def open(self, host: str, port: int) -> tuple[str, int]:
        """Listen and return the bound address; ``port`` 0 picks a free one.

        Raises ConfigError if the address is taken, or cannot be listened on.
        """
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

    def adopt(
        self, sock: RelayedSocket | PunchedSocket, *, of_member: bool
    ) -> asyncio.Task[None] | None:
        """Take a connection that came about in another way as if its other end had dialled.

        Through a relay it counts for the address that this states, but not together with what comes
        from there: a relay could have anybody turned away. ``of_member``: it is said to be of a
        peer that has a link. Return the task that lets it in; None if there is no place.
        """
        try:
            ip = remote_ip_of(sock)
        except OSError:  # it was reset meanwhile
            sock.close()
            return None
        is_relayed = isinstance(sock, RelayedSocket)
        origin = origin_of(ip)
        if is_relayed:
            by = BY_RELAY.format(origin.address)
            origin = ConnectionOrigin(origin.ip, by, BY_RELAY.format("all"), is_loopback=False)
        of_member = of_member or (not is_relayed and self._greeter.is_member_ip(origin.ip))
        return self._take(sock, origin, 0, of_member=of_member)

    def _on_acceptable(self) -> None:
        assert self._socket is not None
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                sock, name = self._socket.accept()
            except (InterruptedError, ConnectionAbortedError):
                continue
            except BlockingIOError:
                return
            except OSError as error:
                self._note(f"cannot accept connections: {reason_of(error)}")
                self._pause()
                return
            if self._behind_proxy and is_local(sock):
                sock = came_by_proxy(sock)
            origin = origin_of(str(name[0]))
            of_member = self._greeter.is_member_ip(origin.ip)
            self._take(sock, origin, int(name[1]), of_member=of_member)

    def _take(
        self, sock: socket.socket, origin: ConnectionOrigin, port: int, *, of_member: bool
    ) -> asyncio.Task[None] | None:
        """Let a connection wait for its first byte, or end it and return None."""
        loop = asyncio.get_running_loop()
        if is_scarce(sock):
            found: PendingConnection | str = "too many file descriptors are in use"
        else:
            found = self._limiter.enter(origin, loop.time(), of_member=of_member)
        if isinstance(found, str):
            _reset(sock)
            if self._may_note():
                self._note(f"rejected {format_address(origin.ip, port)}: {found}")
            return None
        sock.setblocking(False)
        caller = _Caller(sock, format_address(origin.ip, port), found)
        task = loop.create_task(self._admit(caller), name=f"admit {caller.where}")
        found.give_up = functools.partial(_cancel, task)
        self._tasks.add(task)
        task.add_done_callback(functools.partial(self._admitted, caller))
        return task

    def _pause(self) -> None:
        assert self._socket is not None
        loop, listening = asyncio.get_running_loop(), self._socket
        loop.remove_reader(listening)
        resume = functools.partial(loop.add_reader, listening, self._on_acceptable)
        self._retry = loop.call_later(ACCEPT_RETRY_S, resume)

    async def _admit(self, caller: _Caller) -> None:
        try:
            async with asyncio.timeout(FIRST_BYTE_TIMEOUT_S):
                head = await self._hear_first(caller)
            async with asyncio.timeout(ADMISSION_TIMEOUT_S):
                await self._hear(caller, head)
        except ssl.SSLError as error:
            caller.welcome = False
            why = f"it is no peer of this run ({reason_of(error)})"
            if is_refusal(error):
                why = "it has another run's secret"
            self._note(f"rejected {caller.where}: {why}")
        except OSError as error:
            if isinstance(error, TimeoutError):
                caller.welcome = False
            self._note(f"rejected {caller.where}: {reason_of(error)}")
            return
        except AtollError as error:
            if isinstance(error, RemoteProtocolError):
                caller.welcome = False
            self._note(f"rejected {caller.where}: {error.what}")
            return
        except Exception as error:  # ours; the daemon goes on without the connection that met it
            what = defect_summary(error)
            self._note(f"rejected {caller.where}: DEFECT, please report it: it raised {what}")
            return
        if isinstance(caller.held, TlsChannel):
            await caller.held.goodbye()  # nothing, if the channel was taken

    async def _hear_first(self, caller: _Caller) -> bytes:
        """Return the first byte, once there is a place for a handshake.

        Raises ConnectionRefusedError where there is none.
        """
        assert isinstance(caller.held, socket.socket)
        head = await asyncio.get_running_loop().sock_recv(caller.held, 1)
        if not head:
            raise ConnectionResetError("the other side closed the connection")
        caller.is_silent = False
        if reason := self._limiter.speaks(caller.place):
            raise ConnectionRefusedError(reason)
        return head

    async def _hear(self, caller: _Caller, head: bytes) -> None:
        """Go on with a connection as its first byte asks: TLS and a hello, or a data stream.

        Raises RemoteProtocolError for a byte that begins neither, and what a handshake, a hello or
        the opening of a stream raises.
        """
        sock = caller.held
        assert isinstance(sock, socket.socket)
        if head[0] == TLS_FIRST_BYTE:
            channel = TlsChannel(
                sock, self._context, server_side=True, head=head, counts=self._greeter.counts
            )
            await self._hear_hello(caller, channel)
        elif head[0] == STREAM_FIRST_BYTE:
            await self._greeter.accept_stream(sock)
            caller.held, caller.welcome = None, True
        elif head[0] == CIRCUIT_FIRST_BYTE and not isinstance(sock, RelayedSocket):
            await self._greeter.accept_circuit(sock)
            caller.held, caller.welcome = None, True
        elif head[0] == OBSERVE_FIRST_BYTE:
            await self._greeter.accept_observed(sock)
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
        refused = await self._greeter.greet(channel, peer_id, hello)
        kind = ERRORS_BY_CODE.get(refused.code, AtollError) if refused is not None else None
        caller.welcome = kind is None or not issubclass(kind, AdmissionError)
        if refused is not None:
            self._note(f'rejected {caller.where}, telling it: "{refused.what}"')
            await channel.send(refused)

    def _admitted(self, caller: _Caller, task: asyncio.Task[None]) -> None:
        # Here and not in a `finally` of the task: one cancelled before its first step runs none.
        self._tasks.discard(task)
        self._limiter.leave(caller.place)
        address, gave_up = caller.place.origin.address, task.cancelled() and caller.is_silent
        if caller.welcome:
            self._limiter.succeeded(address)
        elif caller.welcome is False or gave_up:
            self._limiter.failed(address, task.get_loop().time())
        caller.close()
        if not task.cancelled() and (error := task.exception()) is not None:
            context = {"message": f"defect in {task.get_name()}", "exception": error}
            task.get_loop().call_exception_handler(context)

    def _may_note(self) -> bool:
        if asyncio.get_running_loop().time() - self._logged_s >= LOG_INTERVAL_S:
            return True
        self._unlogged += 1
        return False

    def _note(self, line: str) -> None:
        if not self._may_note():
            return
        now_s = asyncio.get_running_loop().time()
        others = f" ({self._unlogged} more not shown)" if self._unlogged else ""
        self._logged_s, self._unlogged = now_s, 0
        self._greeter.log(line + others)


def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()


def _reset(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    sock.close()


def check_port(host: str, port: int) -> None:
    """Raise ConfigError if a listener could not be opened there; ``port`` 0 is any that is free."""
    _bound(host, port).close()


def _bound(host: str, port: int) -> socket.socket:
    """Return a socket that listens there; host "" is every address. Raises ConfigError."""
    try:
        try:
            return _bound_to(host or "::", port)
        except OSError as error:
            if host or error.errno not in _NO_IPV6:
                raise
            return _bound_to("0.0.0.0", port)
    except (OSError, UnicodeError) as error:  # UnicodeError: a label that no DNS name may have
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            where, how = (
                (f"port {port} of {host}", "HOST:PORT") if host else (f"port {port}", ":PORT")
            )
            what = f"{where} is in use by another program, perhaps another peer"
            fix = f"stop that one, or choose another port with --listen {how} (0: any free one)"
            raise ConfigError(what, fix=fix) from error
        why = "not a host name" if isinstance(error, UnicodeError) else reason_of(error)
        raise ConfigError(
            f"cannot listen on {format_address(host, port)}: {why}",
            fix="choose another address with --listen HOST:PORT",
        ) from error


def _bound_to(host: str, port: int) -> socket.socket:
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
    return sock
