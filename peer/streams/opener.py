"""Open all data streams of a daemon, by others and to others, and choose how each is protected.

A stream is sealed where both sides can do that (keys.py), and goes through TLS otherwise:
with peers that list no cipher in their hello, and with those where opening a sealed one has failed.
That is said once in the log and remembered: for ever of one without ciphers, else for a minute and
then for twice as long each time, so that a network that lets nothing but TLS through costs a few
tries, and a peer that was busy for a moment is not slow for days.

Whoever wants to send dials. Where that fails or takes long, the stream is offered over the control
link, and the reader dials: a machine behind a router can be sent to that way by everyone whom it
can dial. Which way is likelier goes first, the other follows, and the first that opens a stream is
used (RFC 8305 treats the addresses of a name so); what has worked goes first from then on.

Both sides of a sealed or plain stream prove in the event loop that they have its key, before the
socket is given to the stream. Nothing of it is kept before the dialler has proved itself, and
nothing is read beyond that.
"""

from __future__ import annotations

import asyncio
import enum
import itertools
import math
import secrets
import socket
import time
from collections.abc import Awaitable, Callable, Container, Sequence
from functools import partial
from typing import NamedTuple, Protocol
from weakref import WeakKeyDictionary

from atoll.collectives.errors import AtollError, ConnectError, RemoteProtocolError
from atoll.collectives.schedule.plan import STREAMS_MAX
from atoll.peer.membership.view import short
from atoll.peer.net.byte_counts import CONTROL, ByteCounts
from atoll.peer.net.dial import Dial
from atoll.peer.net.link import ControlLink
from atoll.peer.net.punched import meeting
from atoll.peer.net.relayed import proved_ip_of, shown
from atoll.peer.net.tls import TlsSocket, receive_exactly
from atoll.peer.streams.congestion import Congestion
from atoll.peer.streams.keys import (
    CIPHER_NONE,
    CIPHER_TLS,
    CIPHERS,
    CONN_ID_BYTES,
    DIALLER_PROOF_BYTES,
    GRANT_S,
    GREETING_BYTES,
    KEY_BYTES,
    OPENING_BYTES,
    RANDOM_BYTES,
    STREAM_FIRST_BYTE,
    WHAT_CHARACTERS_MAX,
    Grants,
    Handshake,
    StreamAsked,
    StreamDenied,
    StreamGranted,
    StreamOffered,
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
# The less likely way to a peer is tried too when the first has brought nothing for so long (that of
# RFC 8305), and for so many round trips: TCP, the question on the control link, the opening.
OTHER_WAY_S, OTHER_WAY_TRIPS = 0.25, 4
# A relay is tried too when a punch has brought nothing for so long: it takes an observer's answer,
# a question, another observer's answer, and the meeting.
PUNCH_S, PUNCH_TRIPS = 0.5, 8
# Streams offered to us that we dial for at a time, for each peer: all that a round uses, at once.
OFFERS_PER_PEER_MAX = STREAMS_MAX
NEITHER_DIALS_FIX = (
    "one of the two needs an open port: forward a TCP port to it, let it pass the firewall, and"
    " start that peer with --advertise HOST:PORT"
)


# Relays that are tried for one stream: the second where the first does not answer.
ROUTES_TRIED_MAX = 2
NO_RELAY_FIX = "start a peer that can be dialled with --relay MBIT; see docs/reachability.md"


class DialWay(enum.Enum):
    """Say who dials for a stream on which this side sends."""

    DIRECT = "direct"  # this side, as usual
    PUNCH = "punch"  # both, at the same moment
    REVERSE = "reverse"  # the reader, to whom the stream is offered


class _PendingGrant(NamedTuple):
    """Keep a StreamAsked that waits for the answer of ``peer``, or for why there will be none."""

    peer: bytes
    answer: asyncio.Future[StreamGranted | str]

    def end(self, answer: StreamGranted | str) -> None:
        if not self.answer.done():
            self.answer.set_result(answer)


class _PendingOffer(NamedTuple):
    """Keep a StreamOffered until ``peer`` has dialled, or has said why it cannot."""

    peer: bytes
    number: int
    answer: asyncio.Future[DataStream | StreamDenied]
    until_s: float  # how long the stream is good, if it goes through TLS

    def end(self, answer: DataStream | StreamDenied) -> bool:
        """Give the answer; return False if nobody waits for it any more."""
        if self.answer.done():
            return False
        self.answer.set_result(answer)
        return True


class _Detour(NamedTuple):
    """Say until when streams to a peer go through TLS.

    The detour is ``pause_s`` long if it is not for ever.
    """

    until_s: float
    pause_s: float


class Punching(Protocol):
    """Know with whom connections come about that both ends dial."""

    def may_try(self, peer: bytes, /) -> bool:
        """Return whether that is worth trying now."""


class ControlLinks(Protocol):
    """Serve whoever opens data streams with the control links of a daemon."""

    @property
    def counts(self) -> ByteCounts: ...

    @property
    def outbound(self) -> Container[bytes]:
        """Return the peers that are known to be unable to accept connections from outside."""

    @property
    def punch(self) -> Punching: ...

    def link_of(self, peer_id: bytes, /) -> ControlLink | None: ...

    def bulk_routes(self, peer_id: bytes, /) -> Sequence[str]:
        """Return the ways for data through relays to a peer, as addresses, the best first."""

    def on_fault(self, peer_id: bytes, relay: bytes, what: str, is_damage: bool, /) -> None:
        """Hear that a data stream of ``peer_id`` through ``relay`` broke; in whichever thread.

        ``is_damage``: it is certain that the relay, or the way to it, has changed something.
        """

    def send(self, peer_id: bytes, msg: object, /) -> bool: ...

    def attempt(self, address: str, /) -> Dial: ...

    async def call_tls(self, peer_id: bytes, address: str, offer: bytes = b"", /) -> TlsSocket: ...

    def on_data(self, peer_id: bytes, stream: DataStream, /) -> None: ...

    def log(self, line: str, /) -> None: ...


class _StreamSide(NamedTuple):
    """Say whose a stream is. ``is_ours``: this side sends on it, and not ``peer``."""

    peer: bytes
    is_ours: bool


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
        self._offers: dict[bytes, _PendingOffer] = {}  # by connection id
        self._dialling: dict[asyncio.Task[None], bytes] = {}  # for offers of these peers
        self._reversed: set[bytes] = set()  # linked peers that dial for our streams
        self._detours: dict[bytes, _Detour] = {}  # of linked peers
        # Open streams, with the peer that sends on each, b"" for us. They belong to who sends
        # or reads on them: one that has ended must not keep its buffers.
        self._open: WeakKeyDictionary[DataStream, _StreamSide] = WeakKeyDictionary()
        self._closing = False

    def close(self) -> None:
        """End all streams, and what is being opened."""
        self._closing = True
        for stream in list(self._open):
            stream.close()
        for question in self._questions.values():
            question.end("this daemon is closing")
        for offer in self._offers.values():
            offer.end(StreamDenied(offer.number, "this daemon is closing"))
        for task in self._dialling:
            task.cancel()

    def forget(self, peer: bytes) -> None:
        """Forget what was agreed on the control link to ``peer``, which is gone."""
        self._grants.forget(peer)
        self._detours.pop(peer, None)
        self._reversed.discard(peer)
        for question in self._questions.values():
            if question.peer == peer:
                question.end("its control link ended")
        for offer in self._offers.values():
            if offer.peer == peer:
                offer.end(StreamDenied(offer.number, "its control link ended"))

    def expel(self, peer: bytes) -> None:
        """End the streams on which ``peer`` sends: it may not any more."""
        for stream, opened in list(self._open.items()):
            if opened == (peer, False):
                stream.close()

    def prefer_direct(self, peer: bytes) -> None:
        """Let the streams to ``peer`` that lead through relays be replaced: there is a way now."""
        for stream, opened in list(self._open.items()):
            if opened == (peer, True) and stream.relay:
                stream.is_outdated = True

    def avoid(self, relay: bytes, peer: bytes) -> None:
        """Let our streams to a peer through this relay be replaced."""
        for stream, opened in list(self._open.items()):
            if opened.is_ours and stream.relay == relay and opened.peer == peer:
                stream.is_outdated = True

    # ------------------------------------------------------------ to others

    async def open(self, peer: bytes, address: str) -> DataStream:
        """Open a stream on which this side sends. Raises ConnectErrors as a dial does.

        ``address``: where the peer says it can be dialled, "" if nowhere.
        """
        link = self._links.link_of(peer)
        if link is None:
            who = address or short(peer)
            raise ConnectError(f"a data stream to {who} needs a control link first")
        pause_s = OTHER_WAY_S + OTHER_WAY_TRIPS * link.rtt_s
        if link.relay or link.is_punched:
            return await self._open_apart(link, pause_s)
        address = link.dialled_address or address
        ways = self._ways(link, address)
        tries = [partial(self._open_by, way, link, address) for way in ways]
        number, stream, errors = await _first_opened(tries, pause_s)
        self._remember(link, ways[number], errors if address else ["it advertises no address"])
        return stream

    async def _open_apart(self, link: ControlLink, pause_s: float) -> DataStream:
        """Open a stream to a peer where neither of the two can dial the other.

        That is by a punch, if the control link has come about so, or through a relay, which both
        dial. Raises ConnectErrors.
        """
        peer = link.peer_id
        routes = self._links.bulk_routes(peer)[:ROUTES_TRIED_MAX]
        tries = [partial(self._open_by, DialWay.DIRECT, link, route) for route in routes]
        if link.is_punched and (not routes or self._links.punch.may_try(peer)):
            tries.insert(0, partial(self._open_by, DialWay.PUNCH, link, meeting(peer)))
            pause_s = PUNCH_S + PUNCH_TRIPS * link.rtt_s
        if not tries:
            raise ConnectError(
                f"no way for data to {short(peer)}: neither can dial the other, and no relay that"
                " both are connected to carries data",
                fix=NO_RELAY_FIX,
            )
        return (await _first_opened(tries, pause_s))[1]

    def _ways(self, link: ControlLink, address: str) -> list[DialWay]:
        """Return in which order to try who dials for a stream to this peer."""
        peer = link.peer_id
        if not address:
            return [DialWay.REVERSE]
        was_dialled_by = link.dialled_by == peer and peer in self._links.outbound
        if peer in self._reversed or was_dialled_by:
            return [DialWay.REVERSE, DialWay.DIRECT]
        return [DialWay.DIRECT, DialWay.REVERSE]

    def _remember(self, link: ControlLink, way: DialWay, errors: Sequence[str]) -> None:
        """Let the way that has worked go first from now on; say once when it is the reverse one."""
        peer = link.peer_id
        if way is DialWay.DIRECT:
            self._reversed.discard(peer)
        elif self._links.link_of(peer) is link and peer not in self._reversed:
            self._reversed.add(peer)
            why = errors[0] if errors else "nothing has come of dialling it so far"
            if peer in self._links.outbound:
                why = "it cannot be dialled from outside"
            self._links.log(f"{short(peer)} dials for the data streams to it: {why}")

    async def _open_by(self, way: DialWay, link: ControlLink, address: str) -> DataStream:
        """Open a stream in one of the two ways: with a cipher that both have, else with TLS."""
        is_direct = way is not DialWay.REVERSE
        agree = self._dial_agreed if is_direct else self._offer_agreed
        tls = self._dial_tls if is_direct else self._offer_tls
        peer = link.peer_id
        detour = self._detours.get(peer)
        if detour is not None and time.monotonic() < detour.until_s:
            return await tls(link, address, detour.until_s)
        opened = await agree(link, address)
        if isinstance(opened, DataStream):
            if self._detours.pop(peer, None) is not None:
                self._links.log(f"data streams to {short(peer)} go with {opened.cipher} again")
            return opened
        new = self._next_detour(link)
        stream = await tls(link, address, new.until_s)
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

    async def _dial_tls(self, link: ControlLink, address: str, until_s: float) -> DataStream:
        stream = TlsStream(
            await self._links.call_tls(link.peer_id, address), shown(address), until_s
        )
        try:
            self._check_current(link, address)
        except ConnectError:
            stream.close()
            raise
        return self._added(link.peer_id, stream, is_ours=True)

    async def _dial_agreed(self, link: ControlLink, address: str) -> DataStream | str:
        """Dial a stream with a cipher that both have, or return why TLS is to be tried.

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
                    stream = await self._agree(link.peer_id, usable, sock, address)
                    return self._added(link.peer_id, stream, is_ours=True)
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
            raise ConnectError(f"the control link to {shown(address)} has ended meanwhile")

    async def _agree(
        self, peer: bytes, usable: tuple[str, ...], sock: socket.socket, address: str
    ) -> DataStream:
        """Ask for a key and open the stream with it.

        The key is asked for when the connection stands: its address says which ciphers are
        permitted, and no key is given out that nobody comes for. Raises ConnectError if no cipher
        is left, or no key is granted.
        """
        remote_ip = proved_ip_of(sock)
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
        return _stream(sock, shown(address), granted.cipher, secret, dialled=True)

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

    # ------------------------------------------------------------ to others, who dial

    async def _offer_agreed(self, link: ControlLink, address: str) -> DataStream | str:
        """Offer a stream with a cipher that both have, or return why TLS is to be tried.

        Raises ConnectError where the other side cannot reach us.
        """
        usable = permitted(self._usable(link), link.proved_ip)
        if not usable:
            return "it has none of our ciphers"
        answer = await self._offer(link, usable[0])
        if isinstance(answer, DataStream):
            return answer
        if not answer.connected or self._closing:
            raise ConnectError(f"{short(link.peer_id)} cannot dial this peer: {answer.what}")
        self._check_current(link, address)
        return answer.what

    async def _offer_tls(self, link: ControlLink, address: str, until_s: float) -> DataStream:
        answer = await self._offer(link, CIPHER_TLS, until_s)
        if isinstance(answer, StreamDenied):
            raise ConnectError(f"{short(link.peer_id)} cannot dial this peer: {answer.what}")
        return answer

    async def _offer(
        self, link: ControlLink, cipher: str, until_s: float = math.inf
    ) -> DataStream | StreamDenied:
        """Offer a stream and wait until the other side has dialled, or has said why it cannot.

        ``until_s``: how long a stream through TLS is good.
        """
        loop, number, peer = asyncio.get_running_loop(), next(self._numbers), link.peer_id
        conn_id, key = secrets.token_bytes(CONN_ID_BYTES), secrets.token_bytes(KEY_BYTES)
        if cipher != CIPHER_TLS:
            granted = StreamGranted(number, cipher, conn_id, key)
            if why_not := self._grants.add(peer, granted, loop.time()):
                return StreamDenied(number, why_not)
        offer = self._offers[conn_id] = _PendingOffer(peer, number, loop.create_future(), until_s)
        try:
            if not self._links.send(peer, StreamOffered(number, cipher, conn_id, key)):
                return StreamDenied(number, "its control link is ending")
            async with asyncio.timeout(GRANT_S):
                return await offer.answer
        except TimeoutError:
            return StreamDenied(number, f"it has not come for {GRANT_S:g} s")
        except asyncio.CancelledError:
            if offer.answer.done() and not offer.answer.cancelled():
                stream = offer.answer.result()
                if isinstance(stream, DataStream):
                    stream.close()
            raise
        finally:
            del self._offers[conn_id]
            self._grants.take(conn_id, loop.time())

    def _on_offered(self, link: ControlLink, offered: StreamOffered) -> None:
        """Dial in the background for a stream on which the other side sends."""
        peer = link.peer_id
        if sum(other == peer for other in self._dialling.values()) >= OFFERS_PER_PEER_MAX:
            what = f"{OFFERS_PER_PEER_MAX} streams are being dialled for already"
            self._links.send(peer, StreamDenied(offered.number, what))
            return
        task = asyncio.get_running_loop().create_task(self._take_offer(link, offered))
        self._dialling[task] = peer
        task.add_done_callback(lambda done: self._dialling.pop(done, None))

    async def _take_offer(self, link: ControlLink, offered: StreamOffered) -> None:
        peer, address = link.peer_id, link.dialled_address or link.hello.address
        attempt: Dial | None = None
        try:
            if why_not := self.why_full(peer):
                raise ConnectError(why_not)
            if not address:
                raise ConnectError("you advertise no address")
            if offered.cipher == CIPHER_TLS:
                connection = await self._links.call_tls(peer, address, offered.conn_id)
                stream: DataStream = self._added(peer, TlsStream(connection, shown(address)))
            else:
                attempt = self._links.attempt(address)
                stream = await self._dial_offered(peer, attempt, offered)
        except AtollError as error:
            connected = attempt is not None and attempt.is_connected
            denied = StreamDenied(offered.number, error.what[:WHAT_CHARACTERS_MAX], connected)
            self._links.send(peer, denied)
            return
        self._links.on_data(peer, stream)

    async def _dial_offered(self, peer: bytes, attempt: Dial, offered: StreamOffered) -> DataStream:
        """Dial the peer that has offered a stream, and open it. Raises ConnectError."""
        async with attempt.limited():
            sock = await attempt.bare()
            try:
                allowed = permitted(self.ciphers, proved_ip_of(sock))
                if offered.cipher not in allowed:
                    raise ConnectError(f"here only these ciphers are allowed: {allowed}")
                granted = StreamGranted(
                    offered.number, offered.cipher, offered.conn_id, offered.key
                )
                secret = await open_stream(sock, granted)
                self._counts.add_sent(CONTROL, OPENING_BYTES + DIALLER_PROOF_BYTES)
                self._counts.add_received(CONTROL, GREETING_BYTES)
                stream = _stream(sock, shown(attempt.address), offered.cipher, secret, dialled=True)
                return self._added(peer, stream)
            except BaseException:
                sock.close()
                raise

    def _came(self, offer: _PendingOffer, stream: DataStream) -> None:
        """Take a stream that this side has offered and the other one has dialled."""
        stream.is_reversed = True
        self._added(offer.peer, stream, is_ours=True)
        if not offer.end(stream):
            stream.close()
            raise ConnectError("the stream that was offered has come too late")

    # ------------------------------------------------------------ from others

    def on_message(self, link: ControlLink, msg: object) -> bool:
        """Take what has arrived on a control link if it is about streams; return whether it is."""
        if not isinstance(msg, StreamAsked | StreamGranted | StreamOffered | StreamDenied):
            return False
        current = self._links.link_of(link.peer_id)
        if current is None or current.hello.life != link.hello.life:
            return True  # of a former life of this peer
        if isinstance(msg, StreamAsked):
            self._links.send(link.peer_id, self._answer(link, msg))
        elif isinstance(msg, StreamOffered):
            self._on_offered(link, msg)
        else:
            self._on_answer(link.peer_id, msg)
        return True

    def _on_answer(self, peer: bytes, msg: StreamGranted | StreamDenied) -> None:
        question = self._questions.get(msg.number)
        if question is not None and question.peer == peer:  # else it comes too late
            question.end(msg if isinstance(msg, StreamGranted) else f"it gave no key: {msg.what}")
        if isinstance(msg, StreamDenied):
            for offer in self._offers.values():
                if (offer.peer, offer.number) == (peer, msg.number):
                    offer.end(msg)

    def _answer(self, link: ControlLink, asked: StreamAsked) -> StreamGranted | StreamDenied:
        if why_not := self.why_full(link.peer_id):
            return StreamDenied(asked.number, why_not)
        return answer_asked(
            self._grants, link.peer_id, asked, remote_ip=link.proved_ip, allowed=self.ciphers
        )

    def why_full(self, peer: bytes) -> str:
        """Return why ``peer`` may not open another stream; "" if it may."""
        count = sum(
            opened == (peer, False) and not stream.closed for stream, opened in self._open.items()
        )
        return f"{count} data streams are open" if count >= STREAMS_PER_PEER_MAX else ""

    async def accept(self, sock: socket.socket) -> None:
        """Take a connection that began with STREAM_FIRST_BYTE, or raise: then it is not taken."""
        accepted = await accept_stream(sock, self._grants)
        self._counts.add_received(CONTROL, OPENING_BYTES + DIALLER_PROOF_BYTES)
        self._counts.add_sent(CONTROL, GREETING_BYTES)
        link = self._links.link_of(accepted.peer)
        if link is None:
            raise ConnectError("a data stream needs a control link first")
        offer = self._offers.get(accepted.conn_id)
        why_not = self.why_full(accepted.peer) if offer is None else ""
        if why_not:
            raise ConnectError(why_not)
        name = link.hello.address or link.remote_ip
        stream = _stream(sock, name, accepted.cipher, accepted.secret, dialled=False)
        if offer is not None:
            self._came(offer, stream)
        else:
            self._links.on_data(accepted.peer, self._added(accepted.peer, stream))

    def why_not_tls(self, peer: bytes, conn_id: bytes) -> str:
        """Return why ``peer`` may not open a stream through TLS; "" if it may.

        ``conn_id``: of a stream that it was offered, b"" if it wants to open one of its own.
        """
        if not conn_id:
            return self.why_full(peer)
        offer = self._offers.get(conn_id)
        is_current = offer is not None and offer.peer == peer
        return "" if is_current else "no such stream has been offered, or not any more"

    def accept_tls(self, link: ControlLink, connection: TlsSocket, conn_id: bytes) -> None:
        """Take the connection of a stream through TLS, whose hello has been answered."""
        name, offer = link.hello.address or link.remote_ip, self._offers.get(conn_id)
        if not conn_id:
            stream = TlsStream(connection, name)
            self._links.on_data(link.peer_id, self._added(link.peer_id, stream))
        elif offer is not None:
            self._came(offer, TlsStream(connection, name, offer.until_s))
        else:
            connection.sock.close()

    def _added(self, peer: bytes, stream: DataStream, *, is_ours: bool = False) -> DataStream:
        """Take a stream of ``peer`` into account; ``is_ours``: this side sends on it."""
        if self._closing:
            stream.close()
            raise ConnectError("this daemon is closing")
        stream.counts = self._counts
        self._open[stream] = _StreamSide(peer, is_ours)
        if stream.relay:
            stream.on_fault = partial(self._links.on_fault, peer, stream.relay)
        if is_ours:
            self._congestion.apply(stream)
        return stream


async def _first_opened(
    tries: Sequence[Callable[[], Awaitable[DataStream]]], pause_s: float
) -> tuple[int, DataStream, list[str]]:
    """Make the tries, each when the one before has failed or ``pause_s`` is over.

    Return the number of the first that has opened a stream, the stream, and why others had failed
    by then; the rest is given up. Raises the error of the first try if all fail.
    """
    tasks: list[asyncio.Task[DataStream]] = []
    opened: asyncio.Task[DataStream] | None = None
    try:
        while opened is None:
            if len(tasks) < len(tries):
                tasks.append(asyncio.ensure_future(tries[len(tasks)]()))
            waiting = [task for task in tasks if not task.done()]
            if waiting:
                limit_s = pause_s if len(tasks) < len(tries) else None
                await asyncio.wait(waiting, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
            elif len(tasks) == len(tries):
                raise _none_opened([task.exception() for task in tasks])
            opened = next((t for t in tasks if t.done() and t.exception() is None), None)
        errors = [t.exception() for t in tasks if t.done()]
        whats = [error.what for error in errors if isinstance(error, AtollError)]
        return tasks.index(opened), opened.result(), whats
    finally:
        for task in tasks:
            if task is not opened:
                task.add_done_callback(_give_up)
                task.cancel()


def _none_opened(errors: Sequence[BaseException | None]) -> BaseException:
    """Return the error of the first try, which says of the others why they failed too."""
    first, *others = errors
    assert first is not None
    whats = [error.what for error in others if isinstance(error, AtollError)]
    if isinstance(first, ConnectError) and whats:
        what = "; ".join((first.what, *whats))
        return ConnectError(what, fix=NEITHER_DIALS_FIX, stage=first.stage)
    return first


def _give_up(task: asyncio.Task[DataStream]) -> None:
    """Close the stream of a try that nobody waits for any more."""
    if not task.cancelled() and task.exception() is None:
        task.result().close()


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
    conn_id: bytes


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
        greeting = await receive_exactly(sock, GREETING_BYTES)
        await loop.sock_sendall(sock, handshake.answer(greeting))
    return handshake.secret()


async def accept_stream(sock: socket.socket, grants: Grants) -> AcceptedStream:
    """Open a stream as the other side, once STREAM_FIRST_BYTE has been read from the socket.

    Raises errors as :func:`open_stream` does. The grant is used up when the dialler has proved
    itself.
    """
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(OPENING_TIMEOUT_S):
        opening = bytes((STREAM_FIRST_BYTE,)) + await receive_exactly(sock, OPENING_BYTES - 1)
        conn_id = conn_id_of(opening)
        grant = grants.find(conn_id, loop.time())
        if grant is None:
            raise RemoteProtocolError("a data stream whose id is not known, or not any more")
        cipher, remote_ip = grant.granted.cipher, proved_ip_of(sock)
        if cipher not in permitted((cipher,), remote_ip):  # the control link's address was
            raise RemoteProtocolError(f"a data stream from {remote_ip or 'a relay'} needs a cipher")
        handshake = Handshake(grant.granted)
        greeting = handshake.greeting(opening, secrets.token_bytes(RANDOM_BYTES))
        await loop.sock_sendall(sock, greeting)
        handshake.finish(await receive_exactly(sock, DIALLER_PROOF_BYTES))
    if grants.take(conn_id, loop.time()) is not grant:
        raise RemoteProtocolError("a data stream whose id has been used meanwhile")
    return AcceptedStream(grant.peer, cipher, handshake.secret(), conn_id)
