"""Run TLS 1.3 in memory over a raw socket, and carry out the first, asynchronous stage of its life.

``asyncio`` streams cannot give a connection to a thread once TLS runs on it, so atoll keeps the
socket and the TLS object itself. A connection is born a :class:`TlsChannel`, which does the
handshake and the hello in the event loop. Then :meth:`TlsChannel.take` moves it, with whatever
has already arrived inside the TLS object, either to a ``ControlLink`` (event loop) or to a
``TlsStream`` (a thread). At any time exactly one of them owns the socket and closes it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
import struct
import time
from dataclasses import dataclass

from atoll.collectives.errors import LocalProtocolError, RemoteProtocolError
from atoll.peer.links.tcp_info import TCP_INFO_BYTES
from atoll.peer.net.byte_counts import CONTROL, ByteCounts
from atoll.peer.net.connection_limits import plain_ip
from atoll.peer.net.hello import HELLO_BYTES_MAX, Hello, Refused
from atoll.peer.net.punched import is_punched
from atoll.peer.net.relayed import is_indirect, relay_of, remote_ip_of
from atoll.peer.net.wire import FRAME_HEADER_BYTES, decode, encode, frame

# One recv: large enough that a bulk stream spends its time in AES and not in system calls.
READ_BYTES = 256 << 10
# Whoever measures how fast bytes come needs pieces, the first of which starts the clock.
ZEROS_PIECES, ZEROS_BYTES_MIN = 16, 1 << 10
# The most that is read from a connection before its certificate has been verified. A peer of ours
# sends about 1 KiB.
UNPROVED_BYTES_MAX = 8 << 10
# The first byte that a TLS client sends: a handshake record.
TLS_FIRST_BYTE = 0x16
# A host that vanished without a word is noticed after 10 + 3 x 3 s even on an idle stream. Members
# notice sooner, by heartbeats.
KEEPALIVE_IDLE_S, KEEPALIVE_INTERVAL_S, KEEPALIVE_COUNT = 10, 3, 3
# Linux' struct tcp_info: tcpi_rtt, in microseconds.
RTT_US = struct.Struct("=68xI")
# A side that says goodbye waits this long for the other's, so that its last words arrive.
GOODBYE_TIMEOUT_S = 1.0


@dataclass(frozen=True, slots=True)
class TlsSocket:
    """Hold a connected non-blocking TCP socket and the TLS object that its bytes pass through."""

    sock: socket.socket
    tls: ssl.SSLObject
    incoming: ssl.MemoryBIO
    outgoing: ssl.MemoryBIO
    remote_ip: str
    rtt_s: float  # one round trip, measured while connecting; for timers, not for statistics


class TlsChannel:
    """Carry a connection while it proves itself. Every wait is the caller's to limit.

    ``head``: what the caller has read from the socket. ``counts``: where its bytes are counted.
    """

    def __init__(
        self,
        sock: socket.socket,
        context: ssl.SSLContext,
        *,
        server_side: bool,
        rtt_s: float = 0.0,
        head: bytes = b"",
        counts: ByteCounts | None = None,
    ) -> None:
        self._sock: socket.socket | None = sock  # ours from here on, also if this raises
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._incoming.write(head)
        self._loop = asyncio.get_running_loop()
        self._counts = counts if counts is not None else ByteCounts()
        self._counts.add_received(CONTROL, len(head))
        self._received_bytes = len(head)
        self._proved = False
        self.rtt_s = rtt_s
        try:
            sock.setblocking(False)
            # Here, where whoever made the socket expects errors: a connection that is reset later
            # does not know its other end any more.
            self.remote_ip = remote_ip_of(sock)
            tune(sock)
            self.tls = context.wrap_bio(self._incoming, self._outgoing, server_side=server_side)
        except BaseException:
            sock.close()
            raise

    async def handshake(self) -> None:
        """Prove both sides. Raises ssl.SSLError, OSError, or RemoteProtocolError for a stranger."""
        while True:
            try:
                self.tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                asks, asked_s = bool(self._outgoing.pending), time.monotonic()
                await self._flush()
                await self._fill()
                # The acceptor never sees its connect time: its flight's round trip stands in.
                self.rtt_s = self.rtt_s or (time.monotonic() - asked_s) * asks
            except ssl.SSLError:
                # The alert in `outgoing` tells the other side why. It may not care to hear it.
                with contextlib.suppress(OSError):
                    await self._flush()
                raise
        self._proved = True
        await self._flush()

    async def send(self, msg: object) -> None:
        """Send one message; return when the kernel has it."""
        self.tls.write(frame(encode(msg)))
        await self._flush()

    async def receive(self) -> Hello | Refused:
        """Receive the first message and not a byte beyond it: the next owner reads what follows."""
        msg = await self.receive_of(Hello, Refused)
        assert isinstance(msg, Hello | Refused)
        return msg

    async def receive_of(self, *kinds: type) -> object:
        """Receive one message of these kinds, as small as a hello, and not a byte beyond it."""
        length = int.from_bytes(await self._read_exactly(FRAME_HEADER_BYTES), "big")
        if not 0 < length <= HELLO_BYTES_MAX:
            raise RemoteProtocolError(
                f"a hello of {length:,} bytes; 1 to {HELLO_BYTES_MAX:,} are allowed"
            )
        return decode(await self._read_exactly(length), allowed=kinds)

    async def send_zeros(self, count: int) -> None:
        """Send so many bytes of nothing, a piece at a time; return when the kernel has them."""
        piece = max(ZEROS_BYTES_MIN, min(READ_BYTES, count // ZEROS_PIECES))
        for start in range(0, count, piece):
            if self._counts.up is not None:
                await self._counts.up.room()
            self.tls.write(bytes(min(piece, count - start)))
            await self._flush()

    async def discard(self, count: int) -> tuple[int, float]:
        """Receive so many bytes and throw them away; raise OSError if fewer come.

        Returns how many came after the first piece, and the seconds from there to the last.
        """
        left, first_bytes, began_s = count, 0, 0.0
        while left:
            if self._counts.down is not None:
                await self._counts.down.room()
            left -= len(await self._read_some(left))
            if not began_s:
                first_bytes, began_s = count - left, time.monotonic()
        return count - first_bytes, time.monotonic() - began_s if began_s else 0.0

    async def goodbye(self) -> None:
        """Close so that what was sent last arrives: close_notify, FIN, wait for the other's FIN.

        Closing with unread bytes would reset the connection and destroy our last message.
        """
        if self._sock is None:
            return
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(GOODBYE_TIMEOUT_S):
                if self._proved:
                    with contextlib.suppress(ssl.SSLError):
                        self.tls.unwrap()
                await self._flush()
                self._sock.shutdown(socket.SHUT_WR)
                drained_bytes = 0
                while drained_bytes < UNPROVED_BYTES_MAX:
                    data = await self._loop.sock_recv(self._sock, UNPROVED_BYTES_MAX)
                    drained_bytes += len(data)
                    self._counts.add_received(CONTROL, len(data))
                    if not data:
                        break
        self.close()

    @property
    def relay(self) -> bytes:
        """Return through whom the connection leads; b"" if it is direct, or not ours any more."""
        return relay_of(self._sock) if self._sock is not None else b""

    @property
    def is_indirect(self) -> bool:
        """Return whether the connection leads through a relay or a proxy, and is still ours."""
        return self._sock is not None and is_indirect(self._sock)

    @property
    def is_punched(self) -> bool:
        """Return whether both ends have dialled, because neither could dial the other."""
        return is_punched(self._sock)

    def close(self) -> None:
        """Close at once. Harmless when closed or taken."""
        if self._sock is not None:
            self._sock.close()
            self._sock = None

    def take(self) -> TlsSocket:
        """Hand the connection over; this channel is done with it."""
        if self._sock is None or not self._proved:
            raise LocalProtocolError("only an open connection that has proved itself can be taken")
        sock, self._sock = self._sock, None
        rtt_s = _kernel_rtt_s(sock) or self.rtt_s
        return TlsSocket(sock, self.tls, self._incoming, self._outgoing, self.remote_ip, rtt_s)

    async def _read_exactly(self, count: int) -> bytes:
        data = bytearray()
        while len(data) < count:
            data += await self._read_some(count - len(data))
        return bytes(data)

    async def _read_some(self, most: int) -> bytes:
        """Return at least one byte. Raise ConnectionResetError at the end of the stream."""
        while True:
            try:
                piece = self.tls.read(most)
            except ssl.SSLWantReadError:
                await self._flush()  # TLS may have had to answer the other side
                await self._fill()
                continue
            if not piece:
                raise ConnectionResetError("the other side closed the connection")
            return piece

    async def _fill(self) -> None:
        """Feed TLS with what arrives next.

        Raises ConnectionResetError at the end of the stream, and RemoteProtocolError for more than
        UNPROVED_BYTES_MAX from a side that has not proved itself.
        """
        assert self._sock is not None
        allowed = READ_BYTES if self._proved else UNPROVED_BYTES_MAX - self._received_bytes
        if allowed <= 0:
            raise RemoteProtocolError(
                f"more than {UNPROVED_BYTES_MAX:,} bytes and still no proof of identity"
            )
        data = await self._loop.sock_recv(self._sock, allowed)
        if not data:
            raise ConnectionResetError("the other side closed the connection")
        self._counts.add_received(CONTROL, len(data))
        self._received_bytes += len(data)
        self._incoming.write(data)

    async def _flush(self) -> None:
        assert self._sock is not None
        if data := self._outgoing.read():
            self._counts.add_sent(CONTROL, len(data))
            await self._loop.sock_sendall(self._sock, data)


def reason_of(error: BaseException) -> str:
    """Say what went wrong with a connection, in a few words and without a path or a line number."""
    if isinstance(error, ssl.SSLEOFError):
        return "the other side closed the connection without a goodbye"
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate does not verify: {error.verify_message}"
    if isinstance(error, ssl.SSLError):
        return f"TLS: {(error.reason or 'failed').lower().replace('_', ' ')}"
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, OSError) and error.errno is not None and error.errno > 0:
        return os.strerror(error.errno).lower()  # asyncio's own texts quote tuples
    if isinstance(error, OSError):
        return error.strerror or str(error) or type(error).__name__
    return str(error) or type(error).__name__


def is_broken(error: BaseException) -> bool:
    """Return whether an error of TLS says that bytes were not what the other side had sent."""
    ends = ssl.SSLEOFError | ssl.SSLZeroReturnError
    return isinstance(error, ssl.SSLError) and not isinstance(error, ends)


def _kernel_rtt_s(sock: socket.socket) -> float:
    """Return the smoothed round trip of the socket's packets in seconds.

    It is without what either side thinks about meanwhile; 0 where the kernel does not tell, as of
    the way behind a relay or a proxy.
    """
    if not hasattr(socket, "TCP_INFO") or is_indirect(sock):
        return 0.0
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, RTT_US.size)
    return float(RTT_US.unpack(info)[0]) / 1e6 if len(info) == RTT_US.size else 0.0


async def receive_exactly(sock: socket.socket, count: int) -> bytes:
    """Return the next ``count`` bytes of a connection; whoever calls limits how long that takes.

    Raises ConnectionResetError if it ends before.
    """
    loop, data = asyncio.get_running_loop(), b""
    while len(data) < count:
        piece = await loop.sock_recv(sock, count - len(data))
        if not piece:
            raise ConnectionResetError("the other side closed the connection")
        data += piece
    return data


def is_local(sock: socket.socket) -> bool:
    """Return whether both ends of this connection have one address: they are on this machine."""
    if is_indirect(sock):
        return False
    try:
        return bool(sock.getsockname()[0] == sock.getpeername()[0])
    except OSError:  # it was reset meanwhile
        return False


def local_ip(sock: socket.socket) -> str:
    """Return the IP address that this side has on a connection; "" if it was reset meanwhile."""
    try:
        return plain_ip(str(sock.getsockname()[0]))
    except OSError:
        return ""


def tcp_info(sock: socket.socket) -> bytes:
    """Return the kernel's struct tcp_info of a connection; b"" if none, or if closed."""
    with contextlib.suppress(OSError, AttributeError):
        return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_BYTES)
    return b""


def tune(sock: socket.socket) -> None:
    """Set what every connection between peers has: no waiting for more, and keepalive."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # small messages must not wait
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        ("TCP_KEEPIDLE", KEEPALIVE_IDLE_S),
        ("TCP_KEEPINTVL", KEEPALIVE_INTERVAL_S),
        ("TCP_KEEPCNT", KEEPALIVE_COUNT),
    ):
        if hasattr(socket, option):  # macOS names the first one otherwise; its default will do
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
