"""A TLS connection for one thread: bulk frames in one direction, blocking, never stuck."""

from __future__ import annotations

import contextlib
import socket
import ssl
import struct
import threading
from collections.abc import Callable
from typing import NoReturn, cast

from atoll.collectives.errors import ConnectError
from atoll.peer.net.tls import READ_BYTES, TlsSocket, reason_of

__all__ = [
    "NO_PROGRESS_TIMEOUT_S",
    "BlockingTls",
    "rate_bytes_per_s",
    "unsent_limit_bytes",
]

# A stream on which no byte moves for this long is broken (reliability_and_security.md 3.2).
NO_PROGRESS_TIMEOUT_S = 10.0
# What waits in the kernel unsent is lost when a round breaks, and delays the next attempt: no more
# than the stream sends in this time, which is long enough for its thread to come and add to it.
UNSENT_S = 0.05
# One record at least. At most what amortises the calls, stays in the cache, and is soon sent.
UNSENT_BYTES_MIN, UNSENT_BYTES_MAX = 16 << 10, 256 << 10
# tcpi_delivery_rate of struct tcp_info (linux/tcp.h): u64 bytes per second, 0 before it is known.
DELIVERY_RATE = struct.Struct("=160xQ")
# RFC 8446 5.5: AES-GCM keys wear out after 2^24.5 full records, about 388 GB. `ssl` cannot rekey.
KEY_BYTES_MAX = 256 << 30


class BlockingTls:
    """A data stream: the dialler sends, the other side receives; the owner is one thread.

    Only :meth:`close` may be called from any thread; it wakes the owner, whose call then raises
    ConnectError, as it does for everything else that can happen to a connection.
    """

    def __init__(self, connection: TlsSocket, peer: str) -> None:
        self.peer = peer  # how errors name the other side
        self.sent_bytes = 0  # plaintext, as is received_bytes
        self.received_bytes = 0
        # Encrypted, both ways, as they move: shows that a slow link lives. Without what is sent
        # aside: a round that gets nowhere must not look alive because a learner is being served.
        self.moved_bytes = 0
        self._aside = False
        self._sock, self._tls = connection.sock, connection.tls
        self._incoming, self._outgoing = connection.incoming, connection.outgoing
        # With a buffer, read() returns a count; typeshed knows only the form that returns bytes.
        self._read_into = cast(Callable[[int, memoryview], int], self._tls.read)
        self._scratch = memoryview(b"")  # made when the first bytes are awaited: senders need none
        self._in_use = threading.Lock()  # held while the socket is used, so that close can wait
        self._closed = False
        self._broken = False
        self._sock.settimeout(NO_PROGRESS_TIMEOUT_S)
        self._unsent_bytes_max = 0  # follows the rate, from frame to frame

    @property
    def closed(self) -> bool:
        """Nothing can be sent or received any more: closed here, or broken."""
        return self._closed or self._broken

    @property
    def worn(self) -> bool:
        """True when the keys have protected so much that a new stream should replace this one."""
        return self.sent_bytes + self.received_bytes > KEY_BYTES_MAX

    def sendall(self, *parts: bytes | memoryview, aside: bool = False) -> None:
        """Send ``parts`` back to back. ConnectError if it ends, or no byte moves for 10 s.

        ``aside``: they are no part of a round, so ``moved_bytes`` does not count them.
        """
        with self._in_use:
            try:
                self._check_open()
                self._aside = aside
                self._limit_unsent()
                for part in parts:
                    self._send(memoryview(part).cast("B"))
                self._flush()
            except (OSError, MemoryError) as error:
                self._fail(error, "to")

    def recv_into(self, view: memoryview, *, idle: bool = False) -> None:
        """Fill ``view`` (writable bytes) exactly. ConnectError if the stream ends before that.

        No byte for 10 s is an error too, but with ``idle`` the first byte may take for ever: that
        is how one waits for the next frame. Keepalive finds a vanished host meanwhile.
        """
        with self._in_use:
            try:
                self._check_open()
                self._receive(view.cast("B"), idle)
            except (OSError, MemoryError) as error:
                self._fail(error, "from")

    def close(self) -> None:
        """Wake the owner and close. From any thread; harmless when closed."""
        self._closed = True
        # Shutting down first ends the owner's call; the descriptor must not be closed (and its
        # number used again) while the owner still waits on it.
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        with self._in_use:
            self._sock.close()

    def _check_open(self) -> None:
        if self.closed:  # a frame that broke off must not be followed by another
            raise OSError("closed on this side" if self._closed else "it broke before")

    def _send(self, data: memoryview) -> None:
        sent = 0
        while sent < len(data):
            # OpenSSL makes one record (at most 16 KiB) per call.
            count = self._tls.write(data[sent : sent + self._unsent_bytes_max])
            sent += count
            self.sent_bytes += count
            if self._outgoing.pending >= self._unsent_bytes_max:
                self._flush()

    def _limit_unsent(self) -> None:
        limit_bytes = unsent_limit_bytes(rate_bytes_per_s(self._sock))
        if limit_bytes != self._unsent_bytes_max and hasattr(socket, "TCP_NOTSENT_LOWAT"):
            self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, limit_bytes)
        self._unsent_bytes_max = limit_bytes

    def _flush(self) -> None:
        # Not sock.sendall: its timeout is for the whole, ours is for progress.
        data = memoryview(self._outgoing.read())
        while data:
            count = self._sock.send(data)
            self.moved_bytes += 0 if self._aside else count
            data = data[count:]

    def _receive(self, view: memoryview, idle: bool) -> None:
        filled = 0
        while filled < len(view):
            try:
                count = self._read_into(len(view) - filled, view[filled:])
            except ssl.SSLWantReadError:
                self._fill(forever=idle and filled == 0)
                continue
            if count == 0:
                raise ConnectionResetError("the other side closed it")
            filled += count
        self.received_bytes += filled

    def _fill(self, *, forever: bool) -> None:
        if self._outgoing.pending:  # TLS may have had to answer the other side
            self._flush()
        self._sock.settimeout(None if forever else NO_PROGRESS_TIMEOUT_S)
        if not self._scratch:
            self._scratch = memoryview(bytearray(READ_BYTES))
        count = self._sock.recv_into(self._scratch)
        if count == 0:
            raise ConnectionResetError("the other side closed it")
        self.moved_bytes += count
        self._incoming.write(self._scratch[:count])

    def _fail(self, error: OSError | MemoryError, direction: str) -> NoReturn:
        self._broken = True
        if self._closed:
            what = "closed on this side"
        elif isinstance(error, TimeoutError):
            what = f"no byte moved for {NO_PROGRESS_TIMEOUT_S:.0f} s"
        else:
            what = reason_of(error)
        raise ConnectError(f"data stream {direction} {self.peer}: {what}") from error


def unsent_limit_bytes(rate_bytes_per_s: float) -> int:
    """What may wait in the kernel unsent on a stream of this rate; 0: it is not known yet."""
    if not rate_bytes_per_s:
        return UNSENT_BYTES_MAX
    return int(min(max(rate_bytes_per_s * UNSENT_S, UNSENT_BYTES_MIN), UNSENT_BYTES_MAX))


def rate_bytes_per_s(sock: socket.socket) -> int:
    """At which the other side acknowledged what was sent last; 0 where the kernel does not tell."""
    if not hasattr(socket, "TCP_INFO"):
        return 0
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, DELIVERY_RATE.size)
    return int(DELIVERY_RATE.unpack(info)[0]) if len(info) == DELIVERY_RATE.size else 0
