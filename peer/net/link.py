"""Run one control link: frames both ways over an established TLS connection, in the event loop.

No task and no stream: the loop calls back when the socket can be read or written, so the death of
the other process (EOF or RST) is reported in the same turn of the loop in which it is seen.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import socket
import ssl
import threading
import time
import traceback
from collections.abc import Callable
from ipaddress import ip_address
from pathlib import PurePath

from atoll.collectives.errors import ConfigError, RemoteProtocolError
from atoll.peer.links.tcp_info import parse
from atoll.peer.net.address_kind import LINK_LOCAL, NAME, address_kind
from atoll.peer.net.byte_counts import CONTROL, ByteCounts
from atoll.peer.net.hello import Hello
from atoll.peer.net.invite import format_address, parse_address
from atoll.peer.net.punched import is_punched, met_ip_of
from atoll.peer.net.relayed import is_indirect, is_proxied, relay_of
from atoll.peer.net.tls import (
    GOODBYE_TIMEOUT_S,
    READ_BYTES,
    TlsSocket,
    is_broken,
    is_local,
    local_ip,
    reason_of,
    tcp_info,
)
from atoll.peer.net.wire import FrameReader

# Eight of the largest messages. A peer that lets this much pile up does not read any more.
CONTROL_QUEUE_BYTES_MAX = 8 << 20
# A link with something to send on which no byte moves for this long is broken.
NO_PROGRESS_TIMEOUT_S = 10.0
# How long the side that does not close a superseded link waits for the side that does.
DRAIN_TIMEOUT_S = 5.0
# Some 25 beats: what the first round trip was weighs a thirtieth of a smoothed one by then.
PUNCHED_RTT_S = 6.0
# So many calls of a defect's traceback are in the log: where it arose and who called that.
DEFECT_CALLS = 4


class _State(enum.Enum):
    OPEN = "open"
    FAILED = "failed"  # a send found it broken; the end is reported in the next turn of the loop
    DRAINING = "draining"  # superseded: only reads; the other side will close it
    LEAVING = "leaving"  # goodbye is said or queued; waiting for the other side's
    CLOSED = "closed"


class _ReadMemory(threading.local):
    """Hold what is read, until it is copied: memory of that size, made anew, costs system calls."""

    def __init__(self) -> None:
        self.bytes = memoryview(bytearray(READ_BYTES))


_read_memory = _ReadMemory()


class ControlLink:
    """Carry frames both ways between this peer and another.

    Calls ``on_payload(link, payload)`` for each frame and ``on_end(link, why)`` once. ``on_end`` is
    for ends that this side did not ask for; after :meth:`close` it is not called. ``counts``: where
    its bytes are counted. ``dialled_address``: at which this side has reached the peer, "" if the
    peer has dialled. ``relay``: through whom it leads, b"" if it is direct. ``is_punched``: direct,
    but neither end can dial the other (punched.py).
    """

    def __init__(
        self,
        connection: TlsSocket,
        peer_id: bytes,
        hello: Hello,
        dialled_by: bytes,
        on_payload: Callable[[ControlLink, bytes], None],
        on_end: Callable[[ControlLink, str], None],
        counts: ByteCounts | None = None,
        dialled_address: str = "",
    ) -> None:
        self.peer_id, self.hello, self.dialled_by = peer_id, hello, dialled_by
        self.dialled_address = dialled_address
        self.remote_ip, self.rtt_s = connection.remote_ip, connection.rtt_s
        self.ended = asyncio.Event()
        self._counts = counts if counts is not None else ByteCounts()
        self._sock, self._tls = connection.sock, connection.tls
        self._incoming, self._outgoing = connection.incoming, connection.outgoing
        self.relay, self.is_punched = relay_of(self._sock), is_punched(self._sock)
        self.met_ip = met_ip_of(self._sock)
        self._began_s = time.monotonic()
        self.is_proxied = is_proxied(self._sock)  # through this machine's proxy
        self._is_indirect = is_indirect(self._sock)
        self.local_ip = local_ip(self._sock)
        # The other side is on this machine.
        is_here = is_local(self._sock) or ip_address(self.remote_ip).is_loopback
        self.is_local = is_here and not self._is_indirect
        self._on_payload, self._on_end = on_payload, on_end
        self._loop = asyncio.get_running_loop()
        self.since_s = self._loop.time()
        self.is_damaged = False  # bytes came that the other side had not sent
        self.heard_s = self.since_s  # when something has last arrived on it
        self._reader = FrameReader()
        self._unsent = bytearray()
        self._state = _State.OPEN
        self._deliver, self._said_goodbye = True, False
        self._stall_timer: asyncio.TimerHandle | None = None
        self._leave_timer: asyncio.TimerHandle | None = None
        self._loop.add_reader(self._sock, self._on_readable)
        self._loop.call_soon(self._pump)  # something may have arrived behind the hello

    def send(self, data: bytes, purpose: str = CONTROL) -> bool:
        """Queue one frame, never blocking. Returns False if the link is ending."""
        if self._state is not _State.OPEN:
            return False
        if len(self._unsent) + len(data) > CONTROL_QUEUE_BYTES_MAX:
            self._fail_soon(
                f"it does not read: {len(self._unsent):,} bytes wait to be sent"
                f" (limit {CONTROL_QUEUE_BYTES_MAX:,})"
            )
            return False
        view = memoryview(data)
        while view:  # OpenSSL makes one record per call
            view = view[self._tls.write(view) :]
        self._flush(purpose)
        return True

    def tcp_info(self) -> bytes:
        """Return the kernel's struct tcp_info of this connection; b"" if none, or if closed.

        None of one through a relay or a proxy: what that acknowledges says nothing about the peer.
        """
        return b"" if self._is_indirect else tcp_info(self._sock)

    def least_rtt_s(self) -> float:
        """Return the least round trip of late in seconds, as far as the kernel knows it, else 0."""
        known = parse(self.tcp_info())
        if known is None:  # as through a relay, of which it knows only the way there
            return self.rtt_s
        if not self.is_punched:
            return known.min_rtt_s
        # Where both ends have dialled at once, its first round trip is the time between their SYNs,
        # anything from 0 on: the least for minutes, and forgotten by the mean after some beats.
        return known.rtt_s if time.monotonic() - self._began_s > PUNCHED_RTT_S else 0.0

    @property
    def proved_ip(self) -> str:
        """Return the peer's address if the kernel vouches for it; "" through a relay or a proxy."""
        return "" if self._is_indirect else self.remote_ip

    @property
    def address(self) -> str:
        """Return where to dial the peer: where this side has, else what it advertises; "" if none.

        If that is of the other family of addresses it is where the peer comes from, at its port:
        the peer has both, and this machine perhaps not. But nobody can dial a link-local address
        without its zone, which has no place in HOST:PORT.
        """
        advertised = self.dialled_address or self.hello.address
        try:
            host, port = parse_address(advertised)
        except ConfigError:
            return advertised
        is_other = address_kind(host) != NAME and (":" in host) != (":" in self.remote_ip)
        can_dial_own = self.proved_ip and address_kind(self.remote_ip) != LINK_LOCAL
        use_own = is_other and can_dial_own and not self.dialled_address
        return format_address(self.remote_ip, port) if use_own else advertised

    def close(self, *, deliver: bool = False) -> None:
        """Send what is queued, say goodbye, and end within GOODBYE_TIMEOUT_S, unless ended.

        ``deliver``: messages that still arrive are delivered (the link was superseded).
        """
        if self._state not in (_State.OPEN, _State.DRAINING):
            return
        self._leave(_State.LEAVING, GOODBYE_TIMEOUT_S, deliver)
        # Not before what came behind the hello is read: OpenSSL throws away what it has not read.
        self._loop.call_soon(self._say_goodbye)

    def _say_goodbye(self) -> None:
        if self.ended.is_set():
            return
        with contextlib.suppress(ssl.SSLError):  # "want read": the other's goodbye is to come
            self._tls.unwrap()
        self._said_goodbye = True
        self._flush()

    def drain(self) -> None:
        """Read on but take nothing more to send: a newer link took this one's place.

        The other side will close this one; if it does not, it ends after DRAIN_TIMEOUT_S.
        """
        if self._state is _State.OPEN:
            self._leave(_State.DRAINING, DRAIN_TIMEOUT_S, deliver=True)

    def end(self, why: str) -> None:
        """Close at once; ``on_end`` hears of it unless this side was leaving."""
        if self.ended.is_set():
            return
        unasked = self._state in (_State.OPEN, _State.FAILED)
        self._state = _State.CLOSED
        self._loop.remove_reader(self._sock)
        self._loop.remove_writer(self._sock)
        for timer in (self._stall_timer, self._leave_timer):
            if timer is not None:
                timer.cancel()
        self._sock.close()
        self._unsent.clear()
        self.ended.set()
        if unasked:
            self._on_end(self, why)

    def _leave(self, state: _State, timeout_s: float, deliver: bool) -> None:
        if self._leave_timer is not None:
            self._leave_timer.cancel()
        self._state, self._deliver = state, deliver
        self._leave_timer = self._loop.call_later(timeout_s, self.end, "left")

    def _fail_soon(self, why: str) -> None:
        # Not at once: the caller of send() must not be called back from inside its own call.
        if self._state is _State.OPEN:
            self._state = _State.FAILED
            self._loop.call_soon(self.end, why)

    def _on_readable(self) -> None:
        try:
            count = self._sock.recv_into(_read_memory.bytes)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self.end(reason_of(error))
            return
        if count:
            self.heard_s = self._loop.time()
            self._counts.add_received(CONTROL, count)
            self._incoming.write(_read_memory.bytes[:count])
        else:
            self._incoming.write_eof()
        self._pump()

    def _pump(self) -> None:
        """Decrypt and deliver what has arrived: at most READ_BYTES in one turn of the loop."""
        try:
            while not self.ended.is_set():
                count = self._tls.read(READ_BYTES, _read_memory.bytes)
                if not count:
                    self.end("the other side said goodbye")
                    return
                for payload in self._reader.feed(_read_memory.bytes[: int(count)]):
                    if self._deliver and not self.ended.is_set():
                        self._on_payload(self, payload)
        except ssl.SSLWantReadError:
            self._flush()  # TLS may have had to answer the other side
        except ssl.SSLError as error:  # after our own goodbye, the other's comes as an SSLError too
            self.is_damaged = is_broken(error)
            self.end(reason_of(error))
        except RemoteProtocolError as error:
            self.end(f"broke the protocol: {error.what}")

    def _flush(self, purpose: str = CONTROL) -> None:
        """Give the kernel what it takes; the loop calls again when it takes more.

        ``purpose``: of what TLS has made since the last call.
        """
        sealed = self._outgoing.read()
        self._counts.add_sent(purpose, len(sealed))
        self._unsent += sealed
        try:
            while self._unsent:
                with memoryview(self._unsent)[:READ_BYTES] as view:
                    count = self._sock.send(view)
                del self._unsent[:count]
                self._watch_progress(stop=True)
        except (BlockingIOError, InterruptedError):
            self._watch_progress(stop=False)
            return
        except OSError as error:
            self._unsent.clear()
            self._fail_soon(reason_of(error))
            return
        if self._said_goodbye:
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_WR)

    def _watch_progress(self, *, stop: bool) -> None:
        """Arm or disarm the writable callback and the limit on a link that moves no byte."""
        if stop and self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None
            self._loop.remove_writer(self._sock)
        elif not stop and self._stall_timer is None:
            self._loop.add_writer(self._sock, self._flush)
            why = f"no byte could be sent for {NO_PROGRESS_TIMEOUT_S:.0f} s"
            self._stall_timer = self._loop.call_later(NO_PROGRESS_TIMEOUT_S, self.end, why)


def defect_summary(error: Exception) -> str:
    """Return the error and the calls that led to it, as one line for the log."""
    calls = traceback.extract_tb(error.__traceback__)[-DEFECT_CALLS:]
    where = ", ".join(f"{PurePath(call.filename).name}:{call.lineno} {call.name}" for call in calls)
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text} (in {where})"
