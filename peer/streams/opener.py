"""Open all data streams of a daemon, by others and to others, and choose how each is protected.

A stream is sealed where both sides can do that (keys.py), and goes through TLS otherwise:
with peers that list no cipher in their hello, and with those where opening a sealed one has failed.
That is said once in the log and remembered: for ever of one without ciphers, else for a minute and
then for twice as long each time, so that a network that lets nothing but TLS through costs a few
tries, and a peer that was busy for a moment is not slow for days.

Both sides of a sealed or plain stream prove in the event loop that they have its key, before the
socket is given to the stream. Nothing of it is kept before the dialler has proved itself, and
nothing is read beyond that.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import secrets
import socket
import time
from typing import NamedTuple, Protocol
from weakref import WeakKeyDictionary

from atoll.collectives.errors import ConnectError, RemoteProtocolError
from atoll.collectives.schedule.plan import STREAMS_MAX
from atoll.peer.membership.view import short
from atoll.peer.net.byte_counts import CONTROL, ByteCounts
from atoll.peer.net.dial import Dial
from atoll.peer.net.link import ControlLink
from atoll.peer.net.tls import TlsSocket
from atoll.peer.streams.congestion import Congestion
from atoll.peer.streams.keys import (
    CIPHER_NONE,
    CIPHERS,
    CONN_ID_BYTES,
    DIALLER_PROOF_BYTES,
    GREETING_BYTES,
    KEY_BYTES,
    OPENING_BYTES,
    RANDOM_BYTES,
    STREAM_FIRST_BYTE,
    Grants,
    Handshake,
    StreamAsked,
    StreamDenied,
    StreamGranted,
    check_granted,
    choose_cipher,
    conn_id_of,
    permitted,
)
from atoll.peer.streams.stream import DataStream, PlainStream, SealedStream, TlsStream

# Incoming data streams of one peer: as many as a round may use, and two that replace others.
STREAMS_PER_PEER_MAX = STREAMS_MAX + 2
# Time for the whole exchange, of either side (reliability_and_security.md 3.1).
OPENING_TIMEOUT_S = 3.0
# For the answer to a question on a control link that works: many round trips. Less than a dial may
# take, because TLS is tried after it.
ANSWER_TIMEOUT_S = 2.0
# After a failure that may pass (the other side was busy, say) it is TLS for so long, then twice as
# long: what cannot be had costs a dial's time a few times an hour, and what can is soon back.
DETOUR_S, DETOUR_S_MAX = 60.0, 3600.0


class _PendingGrant(NamedTuple):
    """Keep a StreamAsked that waits for the answer of ``peer``, or for why there will be none."""

    peer: bytes
    answer: asyncio.Future[StreamGranted | str]

    def end(self, answer: StreamGranted | str) -> None:
        if not self.answer.done():
            self.answer.set_result(answer)


class _Detour(NamedTuple):
    """Say until when streams to a peer go through TLS.

    The detour is ``pause_s`` long if it is not for ever.
    """

    until_s: float
    pause_s: float


class ControlLinks(Protocol):
    """Serve whoever opens data streams with the control links of a daemon."""

    @property
    def counts(self) -> ByteCounts: ...

    def link_of(self, peer_id: bytes, /) -> ControlLink | None: ...

    def send(self, peer_id: bytes, msg: object, /) -> bool: ...

    def attempt(self, address: str, /) -> Dial: ...

    async def call_tls(self, peer_id: bytes, address: str, /) -> TlsSocket: ...

    def on_data(self, peer_id: bytes, stream: DataStream, /) -> None: ...

    def log(self, line: str, /) -> None: ...


class StreamOpener:
    """Open and accept data streams, in the event loop beside the control links.

    ``ciphers``: what this side can do, the preferred one first; ``congestion``: the control of what
    it sends, a name or AUTO.
    """

    def __init__(self, ciphers: tuple[str, ...], congestion: str, links: ControlLinks) -> None:
        self.ciphers = ciphers
        self._links, self._counts = links, links.counts
        self._congestion = Congestion(congestion, links.log)
        self.bbr = self._congestion.bbr
        self._grants = Grants()
        self._numbers = itertools.count(1)
        self._questions: dict[int, _PendingGrant] = {}
        self._detours: dict[bytes, _Detour] = {}  # of linked peers
        # Open streams, with the peer that opened each, b"" for us. They belong to who sends
        # or reads on them: one that has ended must not keep its buffers.
        self._open: WeakKeyDictionary[DataStream, bytes] = WeakKeyDictionary()
        self._closing = False

    def close(self) -> None:
        """End all streams, and what is being opened."""
        self._closing = True
        for stream in list(self._open):
            stream.close()
        for question in self._questions.values():
            question.end("this daemon is closing")

    def forget(self, peer: bytes) -> None:
        """Forget what was agreed on the control link to ``peer``, which is gone."""
        self._grants.forget(peer)
        self._detours.pop(peer, None)
        for question in self._questions.values():
            if question.peer == peer:
                question.end("its control link ended")

    def expel(self, peer: bytes) -> None:
        """End what ``peer`` has opened: it may not send any more."""
        for stream, by in list(self._open.items()):
            if by == peer:
                stream.close()

    # ------------------------------------------------------------ to others

    async def open(self, peer: bytes, address: str) -> DataStream:
        """Open a stream on which this side sends. Raises ConnectErrors as a dial does."""
        link = self._links.link_of(peer)
        if link is None:
            raise ConnectError(f"a data stream to {address} needs a control link first")
        detour = self._detours.get(peer)
        if detour is not None and time.monotonic() < detour.until_s:
            return await self._open_tls(link, address, detour.until_s)
        opened = await self._open_agreed(link, address)
        if isinstance(opened, DataStream):
            if self._detours.pop(peer, None) is not None:
                self._links.log(f"data streams to {short(peer)} go with {opened.cipher} again")
            return opened
        new = self._next_detour(link)
        stream = await self._open_tls(link, address, new.until_s)
        self._detours[peer] = new
        if detour is None:
            self._links.log(f"data streams to {short(peer)} go through TLS: {opened}")
        return stream

    def _next_detour(self, link: ControlLink) -> _Detour:
        if not self._usable(link):
            return _Detour(math.inf, math.inf)
        before = self._detours.get(link.peer_id)
        pause_s = min(2 * before.pause_s, DETOUR_S_MAX) if before else DETOUR_S
        return _Detour(time.monotonic() + pause_s, pause_s)

    def _usable(self, link: ControlLink) -> tuple[str, ...]:
        return tuple(name for name in self.ciphers if name in link.hello.ciphers)

    async def _open_tls(self, link: ControlLink, address: str, until_s: float) -> DataStream:
        stream = TlsStream(await self._links.call_tls(link.peer_id, address), address, until_s)
        try:
            self._check_current(link, address)
        except ConnectError:
            stream.close()
            raise
        return self._added(b"", stream)

    async def _open_agreed(self, link: ControlLink, address: str) -> DataStream | str:
        """Open a stream with a cipher that both have, or return why TLS is to be tried.

        Raises ConnectError where nobody can be reached at all, and where the control link has
        ended.
        """
        usable = self._usable(link)
        if not usable:
            return "it has none of our ciphers"
        attempt = self._links.attempt(address)
        try:
            async with attempt.limited():
                sock = await attempt.bare()
                try:
                    return self._added(b"", await self._agree(link.peer_id, usable, sock, address))
                except BaseException:
                    sock.close()
                    raise
        except ConnectError as error:
            if not attempt.is_connected or self._closing:
                raise
            self._check_current(link, address)
            return error.what

    def _check_current(self, link: ControlLink, address: str) -> None:
        """Raise ConnectError if the control link has ended meanwhile.

        A link that has ended takes its keys with it, which says nothing about the next one.
        """
        if self._links.link_of(link.peer_id) is not link:
            raise ConnectError(f"the control link to {address} has ended meanwhile")

    async def _agree(
        self, peer: bytes, usable: tuple[str, ...], sock: socket.socket, address: str
    ) -> DataStream:
        """Ask for a key and open the stream with it.

        The key is asked for when the connection stands: its address says which ciphers are
        permitted, and no key is given out that nobody comes for. Raises ConnectError if no cipher
        is left, or no key is granted.
        """
        remote_ip = str(sock.getpeername()[0])
        asked = StreamAsked(next(self._numbers), permitted(usable, remote_ip))
        if not asked.ciphers:
            raise ConnectError(f"of the ciphers of both none may be used with {remote_ip}")
        granted = await self._ask(peer, asked)
        if isinstance(granted, str):
            raise ConnectError(granted)
        check_granted(asked, granted, remote_ip)
        secret = await open_stream(sock, granted)
        self._counts.add_sent(CONTROL, OPENING_BYTES + DIALLER_PROOF_BYTES)
        self._counts.add_received(CONTROL, GREETING_BYTES)
        return _stream(sock, address, granted.cipher, secret, dialled=True)

    async def _ask(self, peer: bytes, asked: StreamAsked) -> StreamGranted | str:
        question = _PendingGrant(peer, asyncio.get_running_loop().create_future())
        self._questions[asked.number] = question
        try:
            if not self._links.send(peer, asked):
                return "its control link is ending"
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                return await question.answer
        finally:
            del self._questions[asked.number]

    # ------------------------------------------------------------ from others

    def on_message(self, link: ControlLink, msg: object) -> bool:
        """Take what has arrived on a control link if it is about streams; return whether it is."""
        if not isinstance(msg, StreamAsked | StreamGranted | StreamDenied):
            return False
        current, question = self._links.link_of(link.peer_id), self._questions.get(msg.number)
        if current is None or current.hello.life != link.hello.life:
            return True  # of a former life of this peer
        if isinstance(msg, StreamAsked):
            self._links.send(link.peer_id, self._answer(link, msg))
        elif question is not None and question.peer == link.peer_id:  # else it comes too late
            answer = msg if isinstance(msg, StreamGranted) else f"it gave no key: {msg.what}"
            question.end(answer)
        return True

    def _answer(self, link: ControlLink, asked: StreamAsked) -> StreamGranted | StreamDenied:
        if why_not := self.why_full(link.peer_id):
            return StreamDenied(asked.number, why_not)
        return answer_asked(
            self._grants, link.peer_id, asked, remote_ip=link.remote_ip, allowed=self.ciphers
        )

    def why_full(self, peer: bytes) -> str:
        """Return why ``peer`` may not open another stream; "" if it may."""
        count = sum(by == peer and not stream.closed for stream, by in self._open.items())
        return f"{count} data streams are open" if count >= STREAMS_PER_PEER_MAX else ""

    async def accept(self, sock: socket.socket) -> None:
        """Take a connection that began with STREAM_FIRST_BYTE, or raise: then it is not taken."""
        accepted = await accept_stream(sock, self._grants)
        self._counts.add_received(CONTROL, OPENING_BYTES + DIALLER_PROOF_BYTES)
        self._counts.add_sent(CONTROL, GREETING_BYTES)
        link = self._links.link_of(accepted.peer)
        if link is None:
            raise ConnectError("a data stream needs a control link first")
        if why_not := self.why_full(accepted.peer):
            raise ConnectError(why_not)
        name = link.hello.address or link.remote_ip
        stream = _stream(sock, name, accepted.cipher, accepted.secret, dialled=False)
        self._links.on_data(accepted.peer, self._added(accepted.peer, stream))

    def accept_tls(self, link: ControlLink, connection: TlsSocket) -> None:
        """Take the connection of a stream through TLS, whose hello has been answered."""
        stream = TlsStream(connection, link.hello.address or link.remote_ip)
        self._links.on_data(link.peer_id, self._added(link.peer_id, stream))

    def _added(self, opened_by: bytes, stream: DataStream) -> DataStream:
        if self._closing:
            stream.close()
            raise ConnectError("this daemon is closing")
        stream.counts = self._counts
        self._open[stream] = opened_by
        if not opened_by:
            self._congestion.apply(stream)
        return stream


def _stream(
    sock: socket.socket, name: str, cipher: str, secret: bytes, *, dialled: bool
) -> DataStream:
    if cipher == CIPHER_NONE:
        return PlainStream(sock, name)
    return SealedStream(sock, name, secret, dialled=dialled)


# ------------------------------------------------------------ the handshake on the socket


class AcceptedStream(NamedTuple):
    """Describe a stream that was opened to this side by ``peer``."""

    peer: bytes
    cipher: str
    secret: bytes


def answer_asked(
    grants: Grants,
    peer: bytes,
    asked: StreamAsked,
    *,
    remote_ip: str,
    allowed: tuple[str, ...] = CIPHERS,
) -> StreamGranted | StreamDenied:
    """Return what ``peer``, which asked for a stream, is told. Call it inside a running loop.

    ``remote_ip``: where its control link comes from. ``allowed``: the ciphers that this side's user
    permits, as far as they are ``permitted``. What is granted is added to ``grants``.
    """
    allowed = permitted(allowed, remote_ip)
    cipher = choose_cipher(asked.ciphers, allowed)
    if not cipher:
        return StreamDenied(asked.number, f"here only these ciphers are allowed: {allowed}")
    conn_id, key = secrets.token_bytes(CONN_ID_BYTES), secrets.token_bytes(KEY_BYTES)
    granted = StreamGranted(asked.number, cipher, conn_id, key)
    why_not = grants.add(peer, granted, asyncio.get_running_loop().time())
    return StreamDenied(asked.number, why_not) if why_not else granted


async def open_stream(sock: socket.socket, granted: StreamGranted) -> bytes:
    """Open a stream as the dialler, on a connected non-blocking socket; return its secret.

    Raises OSError (TimeoutError after OPENING_TIMEOUT_S) or RemoteProtocolError; the socket stays
    the caller's to close.
    """
    loop, handshake = asyncio.get_running_loop(), Handshake(granted)
    async with asyncio.timeout(OPENING_TIMEOUT_S):
        await loop.sock_sendall(sock, handshake.opening(secrets.token_bytes(RANDOM_BYTES)))
        greeting = await _exactly(sock, GREETING_BYTES)
        await loop.sock_sendall(sock, handshake.answer(greeting))
    return handshake.secret()


async def accept_stream(sock: socket.socket, grants: Grants) -> AcceptedStream:
    """Open a stream as the other side, once STREAM_FIRST_BYTE has been read from the socket.

    Raises errors as :func:`open_stream` does. The grant is used up when the dialler has proved
    itself.
    """
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(OPENING_TIMEOUT_S):
        opening = bytes((STREAM_FIRST_BYTE,)) + await _exactly(sock, OPENING_BYTES - 1)
        conn_id = conn_id_of(opening)
        grant = grants.find(conn_id, loop.time())
        if grant is None:
            raise RemoteProtocolError("a data stream whose id is not known, or not any more")
        cipher, remote_ip = grant.granted.cipher, str(sock.getpeername()[0])
        if cipher not in permitted((cipher,), remote_ip):  # the control link's address was
            raise RemoteProtocolError(f"a data stream from {remote_ip} needs a cipher")
        handshake = Handshake(grant.granted)
        greeting = handshake.greeting(opening, secrets.token_bytes(RANDOM_BYTES))
        await loop.sock_sendall(sock, greeting)
        handshake.finish(await _exactly(sock, DIALLER_PROOF_BYTES))
    if grants.take(conn_id, loop.time()) is not grant:
        raise RemoteProtocolError("a data stream whose id has been used meanwhile")
    return AcceptedStream(grant.peer, cipher, handshake.secret())


async def _exactly(sock: socket.socket, count: int) -> bytes:
    loop, data = asyncio.get_running_loop(), b""
    while len(data) < count:
        piece = await loop.sock_recv(sock, count - len(data))
        if not piece:
            raise ConnectionResetError("the other side closed the connection")
        data += piece
    return data
