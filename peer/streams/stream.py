"""Carry bulk frames on a data stream: blocking, for one thread, and never stuck.

``DataStream`` is what all of them have in common: turns, time limits, counts, paces, one way to
end. What differs is how bytes are protected: in sealed records over bare TCP (``SealedStream``), in
TLS for peers with which no sealed stream comes about (``TlsStream``), or not at all
(``PlainStream``).
"""

from __future__ import annotations

import abc
import contextlib
import fcntl
import math
import select
import socket
import ssl
import struct
import sys
import termios
import threading
import time
from collections.abc import Callable
from typing import ClassVar, NoReturn, cast

from atoll.collectives.errors import ConnectError, ProtocolError, RemoteProtocolError
from atoll.peer.caps.caps import Cap
from atoll.peer.net.byte_counts import CONTROL, ROUNDS, URGENCY, ByteCounts
from atoll.peer.net.punched import is_punched
from atoll.peer.net.relayed import is_indirect, relay_of
from atoll.peer.net.tls import READ_BYTES, TlsSocket, is_broken, is_local, reason_of, tcp_info, tune
from atoll.peer.streams.congestion import ask, in_use
from atoll.peer.streams.fair_queue import LAST, FairQueue
from atoll.peer.streams.keys import CIPHER_AES, CIPHER_NONE, CIPHER_TLS
from atoll.peer.streams.sealed import (
    EPOCHS_WORN,
    RECORD_BYTES_MAX,
    RECORD_HEADER_BYTES,
    RECORD_OVERHEAD_BYTES,
    Opener,
    RecordKind,
    Sealer,
    direction_secrets,
)

# A stream on which no byte moves for this long is broken (reliability_and_security.md 3.2).
NO_PROGRESS_TIMEOUT_S = 10.0
# What waits in the kernel unsent is lost when a round breaks, and delays the next attempt: no more
# than the stream sends in this time, which is long enough for its thread to come and add to it.
UNSENT_S = 0.05
# One TLS record at least. At most what amortises the calls, stays in the cache, and is soon sent.
UNSENT_BYTES_MIN, UNSENT_BYTES_MAX = 16 << 10, 256 << 10
# tcpi_delivery_rate of struct tcp_info (linux/tcp.h): u64 bytes per second, 0 before it is known.
DELIVERY_RATE = struct.Struct("=160xQ")
# Buffers handed to the kernel in one call; it takes 1024 at most.
PARTS_MAX = 64
# One call takes or brings as much as it can in this time, so that slow links show progress.
TICK_S = 0.25
SO_MAX_PACING_RATE = 47  # of Linux; Python has no name for it
PACING_RATE, UNPACED = struct.Struct("@L"), (1 << 8 * struct.calcsize("@L")) - 1
COUNT = struct.Struct("@i")
# Elsewhere TIOCOUTQ (SIOCOUTQ of a socket) means something else, or nothing.
TELLS_DELIVERY = sys.platform == "linux"
TIMEVAL = struct.Struct("@ll")  # of the kernel: seconds, microseconds
# Of the kernel, each way, between two processes of one machine: what is sent is still in the
# processor's cache when it is received. Left alone, they grow to megabytes, which takes half as
# long again. Over a network they are left alone: the kernel grows them to twice what is on the way,
# up to tcp_wmem and tcp_rmem (4 and 6 MB usually: 200 Mbit/s at 100 ms; beyond that there are
# several streams). A size that is asked for ends that, and is at most net.core.wmem_max, which is
# usually 208 KiB.
LOCAL_BUFFER_BYTES = 128 << 10
# Small records (headers of frames) that travel in one call with a full one, in either direction.
AHEAD_BYTES = 4 << 10
# Both buffers of a sealed stream begin empty and grow to what passes through them, and no further.
BUFFER_BYTES_MAX = RECORD_BYTES_MAX + RECORD_OVERHEAD_BYTES + AHEAD_BYTES
# RFC 8446 5.5: AES-GCM keys wear out after 2^24.5 full records, about 388 GB. `ssl` cannot rekey.
KEY_BYTES_MAX = 256 << 30

_NOTHING = memoryview(b"")


class DataStream(abc.ABC):
    """Carry frames on one connection: one owner at a time, progress or an error, one way to end.

    One side sends, usually the dialler; the other side receives. Threads that send take turns,
    frame by frame, and one thread receives; :meth:`close` may be called from any, and wakes them:
    their calls then raise ConnectError, as they do for everything else that can happen to a
    connection.
    """

    cipher: ClassVar[str]  # by which people and `atoll status` know the kind of stream

    def __init__(self, sock: socket.socket, peer: str) -> None:
        self.peer = peer  # how errors name the other side
        self.sent_bytes = 0  # what was asked to be sent, without framing; so is received_bytes
        self.received_bytes = 0
        # Received on the wire, as it comes: shows that a slow link lives. What is sent shows
        # nothing: the kernel takes it whether or not it arrives, and who receives it counts it.
        self.moved_bytes = 0
        self.sent_for_rounds_bytes = 0  # without what is sent aside, to learners
        self.counts = ByteCounts()  # what is sent, by purpose; one for all streams of a daemon
        self.arrived_bytes = 0  # on the wire: only a reader of frames knows what for ...
        self.arriving = ROUNDS  # ... and says so here, for the sake of the caps
        self.pace_bytes_per_s = 0.0  # what pace() has asked for; 0: none
        self.is_local = is_local(sock)  # both ends are on this machine
        self.is_reversed = False  # this side sends, and the other one has dialled
        self.relay = relay_of(sock)  # through whom it leads; b"" if it is direct
        # Called, in whichever thread, with what is wrong with the way and whether that is certain.
        self.on_fault: Callable[[str, bool], None] | None = None
        self.is_outdated = False  # there is a better way to the peer now
        self.is_indirect = is_indirect(sock)  # through a relay or a proxy
        self.is_punched = is_punched(sock)  # neither end can dial the other
        self.began_s = time.monotonic()
        self._aside = False
        self._purpose = CONTROL  # of what is given to the kernel at the moment
        self._handed_bytes = 0  # to the kernel, with framing
        self._delivered_bytes = 0  # of these, as far as one knows
        self._sock = sock
        self._asking = threading.Lock()  # what is asked must be this socket, and not closed
        self._keeps_congestion = False
        self._turns = FairQueue()
        self._in_use = threading.Lock()  # held while the socket is used, so that close can wait
        self._closed = False
        self._broken = False
        self._unsent_bytes_max = 0  # follows the rate, from frame to frame
        # The kernel waits, and goes on within a call: Python's own timeouts take two calls for each
        # few packets.
        sock.settimeout(None)
        self._readable = select.poll()
        self._readable.register(sock, select.POLLIN)
        for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            sock.setsockopt(socket.SOL_SOCKET, option, _timeval(TICK_S))
        tune(sock)
        if self.is_local:
            for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
                sock.setsockopt(socket.SOL_SOCKET, option, LOCAL_BUFFER_BYTES)

    @property
    def closed(self) -> bool:
        """Return whether nothing can be sent or received any more: closed here, or broken."""
        return self._closed or self._broken

    @property
    @abc.abstractmethod
    def worn(self) -> bool:
        """Return whether a new stream, with a new key, should replace this one."""

    @property
    def is_fit(self) -> bool:
        """Return whether a round or a transfer may begin on this stream."""
        return not (self.closed or self.worn or self.is_outdated)

    def sendall(
        self,
        *parts: bytes | memoryview,
        aside: bool = False,
        urgency: int = 0,
        purpose: str = ROUNDS,
    ) -> int:
        """Send ``parts`` back to back; return where they end, for ``has_delivered``.

        ConnectError if the stream ends, or if no byte moves for 10 s.

        ``aside``: the parts belong to no round, are not counted as its bytes, and are sent last.
        Else the smaller ``urgency`` goes first (fair_queue.py). ``purpose``: what they are counted
        as (peer/net/byte_counts.py).
        """
        views = [view for part in parts if (view := memoryview(part).cast("B"))]
        with self._turns.turn(LAST if aside else urgency), self._in_use:
            try:
                self._check_open()
                self._aside, self._purpose = aside, purpose
                self._limit_unsent()
                self._send(views)
                return self._handed_bytes
            except (OSError, MemoryError, ProtocolError) as error:
                self._fail(error, "to")
            except BaseException:
                self._broken = True  # nobody knows how much of it has left
                raise

    def has_delivered(self, end: int) -> bool:
        """Return whether the other side's kernel is known to have all bytes up to ``end``.

        Never waits.
        """
        if end > self._delivered_bytes:  # mostly an answer for several frames
            with self._asking:
                handed = self._handed_bytes  # before the question: it may only be too small
                waiting = unacknowledged_bytes(self._sock)
                if waiting is not None:
                    self._delivered_bytes = max(self._delivered_bytes, handed - waiting)
        return end <= self._delivered_bytes

    def recv_into(self, view: memoryview, *, idle: bool = False) -> None:
        """Fill ``view`` (writable bytes) exactly; ConnectError if the stream ends before that.

        No byte for 10 s is an error too, but with ``idle`` the first byte may take for ever: that
        is how to wait for the next frame. Keepalive finds a vanished host meanwhile.
        """
        target = view.cast("B")
        with self._in_use:
            try:
                self._check_open()
                self._receive(target, idle)
                self.received_bytes += len(target)
            except (OSError, MemoryError, ProtocolError) as error:
                self._fail(error, "from")
            except BaseException:
                self._broken = True
                raise

    def pace(self, bytes_per_s: float = 0.0, congestion: str = "") -> bool:
        """Send no faster than ``bytes_per_s`` from now on, headers included.

        0: as fast as TCP finds right. A sender that knows its share of a link and keeps to it fills
        no queue, and loses nothing there. ``congestion``: see ``use_congestion``. Return False if
        the kernel lacks one of the two; without that control the pace stays as it is.
        """
        if congestion and self.use_congestion(congestion):
            return False
        with contextlib.suppress(OSError):
            rate = PACING_RATE.pack(round(bytes_per_s) or UNPACED)
            self._sock.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, rate)
            self.pace_bytes_per_s = bytes_per_s
            return True
        return False

    def use_congestion(self, name: str, *, lasting: bool = False) -> str:
        """Send with this congestion control ("cubic", "bbr") from now on; return "", or why not.

        ``lasting``: the user wants it, and later requests for another one that do not last are
        ignored.
        """
        if self._keeps_congestion and not lasting:
            return ""
        why_not = ask(self._sock, name)
        self._keeps_congestion = lasting and not why_not
        return why_not

    @property
    def congestion(self) -> str:
        """Return the congestion control in use; "" where the system does not tell."""
        return in_use(self._sock)

    def tcp_info(self) -> bytes:
        """Return what the kernel tells of this connection (``struct tcp_info``).

        Empty where it tells nothing, or if the stream is closed.
        """
        return tcp_info(self._sock)

    def close(self) -> None:
        """Say goodbye if nobody is in the middle of a call, wake the owner, and close.

        From any thread; harmless when closed.
        """
        if self._in_use.acquire(blocking=False):
            try:
                if not self.closed:
                    self._closed, self._purpose = True, CONTROL
                    with contextlib.suppress(OSError, ProtocolError, MemoryError):
                        self._goodbye()
            finally:
                self._in_use.release()
        self._closed = True
        # Shutting down first ends the owner's call; the descriptor must not be closed (and its
        # number used again) while the owner still waits on it.
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self.counts.wake()
        with self._in_use, self._asking:
            self._sock.close()

    @abc.abstractmethod
    def _send(self, views: list[memoryview]) -> None:
        """Send the views; none of them is empty."""

    @abc.abstractmethod
    def _receive(self, view: memoryview, idle: bool) -> None:
        """Fill ``view``; with ``idle`` its first byte may take for ever."""

    @abc.abstractmethod
    def _goodbye(self) -> None:
        """Tell the other side that nothing follows. Must not wait."""

    def _check_open(self) -> None:
        if self.closed:  # a frame that broke off must not be followed by another
            raise OSError("closed on this side" if self._closed else "it broke before")

    def _put(self, views: list[memoryview], *, wait: bool = True) -> None:
        """Hand the views to the kernel, waiting for room. ``views`` is used up."""
        views.reverse()
        moved_s = time.monotonic()
        cap = self.counts.up if wait else None
        while views:
            parts = views[: -PARTS_MAX - 1 : -1]
            granted = count = 0
            if cap is not None:
                # What a round waits for is as urgent as the round.
                purpose = ROUNDS if self._turns.holds_up_a_round else self._purpose
                granted, waited_s = self._granted(cap, len(views[-1]), purpose)
                moved_s += waited_s
                parts = [views[-1][:granted]]
            try:
                flags = 0 if wait else socket.MSG_DONTWAIT
                count = self._sock.sendmsg(parts, (), flags)
            except BlockingIOError:
                if not wait or time.monotonic() - moved_s >= NO_PROGRESS_TIMEOUT_S:
                    raise TimeoutError from None
                continue
            finally:
                if cap is not None and count != granted:
                    cap.charge(count - granted)
            moved_s = time.monotonic()
            self._handed_bytes += count
            self.counts.add_sent(self._purpose, count, asked=cap is not None)
            if not self._aside:
                self.sent_for_rounds_bytes += count
            while views and count >= len(views[-1]):
                count -= len(views.pop())
            if count:
                views[-1] = views[-1][count:]

    def _granted(self, cap: Cap, wanted: int, purpose: str) -> tuple[int, float]:
        """Wait until some of these bytes may move; return how many, and for how long it was.

        Raises OSError when the stream is closed meanwhile.
        """
        asked_s = time.monotonic()
        granted = cap.take(wanted, URGENCY[purpose], lambda: self._closed)
        if not granted:
            self._check_open()
        return granted, time.monotonic() - asked_s

    def _get(self, view: memoryview, *, forever: bool) -> None:
        """Fill the view; with ``forever`` its first byte may take for ever."""
        filled = self._get_some(view, forever=True) if forever else 0
        while filled < len(view):
            rest = view[filled:] if filled else view
            filled += self._get_some(rest, forever=False, flags=socket.MSG_WAITALL)

    def _get_some(self, view: memoryview, *, forever: bool, flags: int = 0) -> int:
        """Receive at least one byte, at most the view full; return how many."""
        if forever:
            flags = socket.MSG_DONTWAIT  # what is awaited for ever is mostly there
        waited_s = 0.0
        while True:
            count = self._take(view, flags)
            if count is None and forever:
                self._readable.poll()
                continue
            if count is None:
                waited_s += TICK_S
                if waited_s >= NO_PROGRESS_TIMEOUT_S:
                    raise TimeoutError
                continue
            if count == 0:
                raise ConnectionResetError(self._cut_off())
            self.moved_bytes += count
            self.arrived_bytes += count
            return count

    def _take(self, view: memoryview, flags: int) -> int | None:
        """Receive as much as there is, and as the cap allows; None: nothing came in a TICK_S."""
        cap = self.counts.down
        granted = self._granted(cap, len(view), self.arriving)[0] if cap is not None else 0
        count = None
        try:
            count = self._sock.recv_into(view, granted, flags)
        except BlockingIOError:
            pass
        finally:
            if cap is not None and count != granted:
                cap.charge((count or 0) - granted)
        return count

    def _cut_off(self) -> str:
        return "the other side closed it"

    def _limit_unsent(self) -> None:
        limit_bytes = unsent_limit_bytes(rate_bytes_per_s(self._sock))
        if limit_bytes != self._unsent_bytes_max and hasattr(socket, "TCP_NOTSENT_LOWAT"):
            self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, limit_bytes)
        self._unsent_bytes_max = limit_bytes

    def _fail(self, error: OSError | MemoryError | ProtocolError, direction: str) -> NoReturn:
        self._broken = True
        if self._closed:
            what = "closed on this side"
        elif isinstance(error, TimeoutError):
            what = f"no byte moved for {NO_PROGRESS_TIMEOUT_S:.0f} s"
        else:
            what = error.what if isinstance(error, ProtocolError) else reason_of(error)
        is_damage = isinstance(error, RemoteProtocolError) or is_broken(error)
        if self.on_fault is not None and (is_damage or isinstance(error, TimeoutError)):
            self.on_fault(what, is_damage)
        raise ConnectError(f"data stream {direction} {self.peer}: {what}") from error


class PlainStream(DataStream):
    """Carry frames on bare TCP, neither secret nor protected from changes.

    For networks that are trusted, and benchmarks.
    """

    cipher = CIPHER_NONE

    @property
    def worn(self) -> bool:
        return False

    def _send(self, views: list[memoryview]) -> None:
        self.sent_bytes += sum(map(len, views))
        self._put(views)

    def _receive(self, view: memoryview, idle: bool) -> None:
        self._get(view, forever=idle)

    def _goodbye(self) -> None:
        """Do nothing: bare TCP has no goodbye but its own."""


class SealedStream(DataStream):
    """Carry frames encrypted and authenticated with AES-256-GCM.

    A part that is sent is enciphered from where it lies into a buffer of this stream and handed to
    the kernel. A record that arrives is collected in another buffer and deciphered from there to
    where its reader wants it. Nothing else copies payload, unless a reader takes a record in
    smaller pieces.

    ``secret``: 32 bytes of which the two sides have agreed, for this connection alone; ``dialled``:
    whether this side is the dialler. What arrives is given to the reader when it is authenticated.
    """

    cipher = CIPHER_AES

    def __init__(
        self,
        sock: socket.socket,
        peer: str,
        secret: bytes,
        *,
        dialled: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(sock, peer)
        ours, theirs = direction_secrets(secret)
        if not dialled:
            ours, theirs = theirs, ours
        self._clock = clock
        self._sealer, self._opener = Sealer(ours, clock()), Opener(theirs)
        self._out = _NOTHING
        self._out_end = 0  # sealed, and not yet sent
        self._in = _NOTHING
        self._in_end = 0  # how far the present record has arrived
        self._opened = _NOTHING  # what is left of a record that its reader takes in pieces
        self._opened_buffer = _NOTHING

    @property
    def worn(self) -> bool:
        """Return whether the keys were renewed so often that a new stream should replace this."""
        return max(self._sealer.epoch, self._opener.epoch) >= EPOCHS_WORN

    # ------------------------------------------------------------ sending

    def _send(self, views: list[memoryview]) -> None:
        for view in views:
            for start in range(0, len(view), RECORD_BYTES_MAX):
                piece = view[start : start + RECORD_BYTES_MAX]
                self._seal(RecordKind.DATA, piece)
                self.sent_bytes += len(piece)
        self._flush()

    def _seal(self, kind: RecordKind, plain: memoryview) -> None:
        now_s = self._clock()
        if self._sealer.is_due(len(plain), now_s):
            self._out_end += self._sealer.rekey(self._room(RECORD_OVERHEAD_BYTES), now_s)
        room = self._room(len(plain) + RECORD_OVERHEAD_BYTES)
        self._out_end += self._sealer.seal(kind, plain, room)

    def _room(self, count: int) -> memoryview:
        """Return where to seal the next ``count`` bytes: behind what waits there already."""
        if self._out_end + count > BUFFER_BYTES_MAX:
            self._flush()
        if self._out_end + count > len(self._out):
            self._out = _grown(self._out[: self._out_end], self._out_end + count)
        return self._out[self._out_end :]

    def _flush(self, *, wait: bool = True) -> None:
        if self._out_end:
            waiting, self._out_end = self._out[: self._out_end], 0
            self._put([waiting], wait=wait)

    def _goodbye(self) -> None:
        self._seal(RecordKind.END, _NOTHING)
        self._flush(wait=False)

    # ------------------------------------------------------------ receiving

    def _receive(self, view: memoryview, idle: bool) -> None:
        filled = 0
        while filled < len(view):
            if not self._opened:
                filled += self._open_into(view[filled:], idle=idle and filled == 0)
                continue
            count = min(len(self._opened), len(view) - filled)
            view[filled : filled + count] = self._opened[:count]
            self._opened = self._opened[count:]
            filled += count

    def _open_into(self, view: memoryview, *, idle: bool) -> int:
        """Open the next record into ``view``, or beside it if it is longer.

        Return how many bytes are in ``view`` now.
        """
        self._in_end = 0
        kind, length = self._opener.expect(self._await(RECORD_HEADER_BYTES, idle=idle))
        record = self._await(length + RECORD_OVERHEAD_BYTES)
        target = view[:length] if length <= len(view) else self._beside(length)
        self._opener.open(record, target)
        if kind is RecordKind.END:
            raise ConnectionResetError("the other side closed it")
        if length <= len(view):
            return length
        self._opened = target
        return 0

    def _beside(self, length: int) -> memoryview:
        if length > len(self._opened_buffer):
            self._opened_buffer = memoryview(bytearray(length))
        return self._opened_buffer[:length]

    def _await(self, count: int, *, idle: bool = False) -> memoryview:
        """Return the first ``count`` bytes of a record, some of which may be here already."""
        if count > len(self._in):
            self._in = _grown(self._in[: self._in_end], count)
        have, self._in_end = self._in_end, count
        self._get(self._in[have:count], forever=idle and not have)
        return self._in[:count]

    def _cut_off(self) -> str:
        return "it was cut off: no goodbye came before its end"


def _grown(kept: memoryview, count: int) -> memoryview:
    """Return a larger buffer that begins with ``kept`` and holds ``count`` bytes.

    At least doubled, up to BUFFER_BYTES_MAX.
    """
    size = min(BUFFER_BYTES_MAX, max(count, 2 * len(kept)))
    buffer = memoryview(bytearray(size))
    buffer[: len(kept)] = kept
    return buffer


class TlsStream(DataStream):
    """Carry frames inside TLS, slower than a ``SealedStream``.

    OpenSSL makes and takes records of 16 KiB, one per call.
    """

    cipher = CIPHER_TLS

    def __init__(self, connection: TlsSocket, peer: str, until_s: float = math.inf) -> None:
        """Take over a connection.

        ``until_s``, of the monotonic clock: then a better one may be had in its place.
        """
        super().__init__(connection.sock, peer)
        self._until_s = until_s
        self._tls = connection.tls
        self._incoming, self._outgoing = connection.incoming, connection.outgoing
        # With a buffer, read() returns a count; typeshed knows only the form that returns bytes.
        self._read_into = cast(Callable[[int, memoryview], int], self._tls.read)
        self._scratch = memoryview(b"")  # made when the first bytes are awaited: senders need none

    @property
    def worn(self) -> bool:
        is_old = time.monotonic() >= self._until_s
        return is_old or self.sent_bytes + self.received_bytes > KEY_BYTES_MAX

    def _send(self, views: list[memoryview]) -> None:
        for view in views:
            start = 0
            while start < len(view):
                count = self._tls.write(view[start : start + self._unsent_bytes_max])
                start += count
                self.sent_bytes += count
                if self._outgoing.pending >= self._unsent_bytes_max:
                    self._flush()
        self._flush()

    def _goodbye(self) -> None:
        with contextlib.suppress(ssl.SSLError):  # "want read": the other's goodbye is to come
            self._tls.unwrap()
        self._flush(wait=False)

    def _flush(self, *, wait: bool = True) -> None:
        if self._outgoing.pending:
            self._put([memoryview(self._outgoing.read())], wait=wait)

    def _receive(self, view: memoryview, idle: bool) -> None:
        filled = 0
        while filled < len(view):
            try:
                count = self._read_into(len(view) - filled, view[filled:])
            except ssl.SSLWantReadError:
                self._fill(forever=idle and filled == 0)
                continue
            if count == 0:
                raise ConnectionResetError(self._cut_off())
            filled += count

    def _fill(self, *, forever: bool) -> None:
        self._flush()  # TLS may have had to answer the other side
        if not self._scratch:
            self._scratch = memoryview(bytearray(READ_BYTES))
        self._incoming.write(self._scratch[: self._get_some(self._scratch, forever=forever)])


# ------------------------------------------------------------ what the kernel tells


def unsent_limit_bytes(rate_bytes_per_s: float) -> int:
    """Return how many bytes may wait unsent in the kernel on a stream of this rate.

    A rate of 0 is one that is not known yet.
    """
    if not rate_bytes_per_s:
        return UNSENT_BYTES_MAX
    return int(min(max(rate_bytes_per_s * UNSENT_S, UNSENT_BYTES_MIN), UNSENT_BYTES_MAX))


def rate_bytes_per_s(sock: socket.socket) -> int:
    """Return the rate at which the other side acknowledged what was sent last.

    In bytes per second; 0 where the kernel does not tell, or does not know yet.
    """
    if not hasattr(socket, "TCP_INFO"):
        return 0
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, DELIVERY_RATE.size)
    return int(DELIVERY_RATE.unpack(info)[0]) if len(info) == DELIVERY_RATE.size else 0


def unacknowledged_bytes(sock: socket.socket) -> int | None:
    """Return how many bytes of what the kernel was given the other side has not acknowledged.

    They are unsent or on their way; also of a connection that was reset. None where the kernel does
    not tell, or if the socket is closed.
    """
    if not TELLS_DELIVERY:
        return None
    with contextlib.suppress(OSError, ValueError):  # ValueError: closed
        return int(COUNT.unpack(fcntl.ioctl(sock, termios.TIOCOUTQ, bytes(COUNT.size)))[0])
    return None


def _timeval(seconds_s: float) -> bytes:
    return TIMEVAL.pack(int(seconds_s), round(seconds_s % 1 * 1e6))
