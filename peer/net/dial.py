"""Reach a peer: DNS, TCP, TLS, hello. Whatever fails is an error that names its stage.

"Failed to connect" alone sends people to edit library timeouts (style.md 2.1 no. 1); the stage,
the elapsed time and the next thing to try are what they need.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import ssl
import threading
import time
from collections.abc import AsyncIterator, Awaitable
from concurrent.futures import Future
from typing import Protocol, TypeAlias

from cryptography import x509

from atoll.collectives.errors import (
    AdmissionError,
    ConfigError,
    ConnectError,
    RemoteProtocolError,
)
from atoll.collectives.threads import worker
from atoll.peer.daemon.process import is_last
from atoll.peer.net.address_kind import WORDS, address_kind
from atoll.peer.net.byte_counts import ByteCounts
from atoll.peer.net.certs import peer_id_of, tag_of, unverified_context
from atoll.peer.net.hello import Hello, Refused
from atoll.peer.net.invite import fingerprint_of, parse_address
from atoll.peer.net.proxy import PAGE, Proxy, ProxyError, Socks, proxied
from atoll.peer.net.punched import PunchedSocket, parse_meeting
from atoll.peer.net.relayed import RelayedSocket, Route, parse_route, shown
from atoll.peer.net.tls import TlsChannel, reason_of

RELAY = "relay"  # stages of errors: no relay has brought us there
PROXY = "proxy"  # ... the proxy itself has not answered
BEHIND = "TCP behind the proxy"  # ... it has not made the connection
PUNCH = "punch"  # ... both have dialled, and nothing came through
UNREACHED = ("DNS", "TCP", RELAY, PROXY, BEHIND, PUNCH)  # ... there may be nobody at all
SECRET = "secret"  # ... somebody is there, with another run secret
IDENTITY = "identity"  # ... or another peer
ADMISSION = "admission"  # ... or one that does not answer our hello

NO_PROXY_FIX = f"is the proxy running there? see --proxy and ATOLL_PROXY, and {PAGE}"

# All stages together. Three round trips of an intercontinental link and a lost packet fit easily.
DIAL_TIMEOUT_S = 5.0
# Time to look at a certificate again, after a refusal.
TAG_TIMEOUT_S = 2.0
# A name may have many addresses; the dead ones must leave time for the living.
ADDRESSES_MAX = 4
# Names that are looked up at a time: a dead one may keep its thread for half a minute.
RESOLVERS_MAX = 8

# Addresses as sockets have them.
_Found: TypeAlias = list[tuple[socket.AddressFamily, tuple[object, ...]]]


class Relays(Protocol):
    """Make connections through relays."""

    def open(self, route: Route, /, *, bulk: bool) -> Awaitable[RelayedSocket]:
        """Return a connection to the route's peer. Raises ConnectError and OSError."""


class Punches(Protocol):
    """Make connections that both ends dial."""

    def open(self, peer: bytes, /) -> Awaitable[PunchedSocket]:
        """Return a connection to a peer. Raises ConnectError and OSError."""


class Dial:
    """Make one attempt to reach ``address`` as a member of ``run``. Use :meth:`limited` around it.

    ``tag``: that of our run secret, for errors. ``counts``: where its bytes are counted.
    ``relays``: what makes a connection if the address is a route through a relay; ``punches``: if
    it means to meet a peer that dials as well. ``proxy``: what makes all others, but those within
    this machine. Raises ConnectError for what is no address.
    """

    def __init__(
        self,
        address: str,
        run: str,
        tag: str,
        counts: ByteCounts | None = None,
        relays: Relays | None = None,
        proxy: Proxy | None = None,
        punches: Punches | None = None,
    ) -> None:
        self.address = address
        self.is_bulk = False  # a relay carries control and data at different rates
        self._route = parse_route(address) if relays is not None else None
        self._meets = parse_meeting(address) if punches is not None else None
        self._relays, self._punches = relays, punches
        self.host, self.port = "", 0
        try:
            if self._route is None and self._meets is None:
                self.host, self.port = parse_address(address)
        except ConfigError as error:  # peers advertise addresses: a bad one is not our user's fault
            raise ConnectError(f"no address to dial: {error.what}", fix=error.fix) from error
        self.proxy = proxy if proxy is not None and proxy.leads_to(self.host) else None
        self._run = run
        self._tag = tag  # of our run secret
        self._counts = counts if counts is not None else ByteCounts()
        self._stage = "DNS"
        self._started_s = time.monotonic()
        self.addresses: tuple[str, ...] = ()  # of the host, as far as they are known, and
        self.resolve_s = self.connect_s = 0.0  # how long it took to find them, and to connect

    @property
    def is_connected(self) -> bool:
        """Return whether TCP has connected: then somebody is there, whoever it is."""
        return self._stage not in UNREACHED

    @contextlib.asynccontextmanager
    async def limited(self, timeout_s: float = DIAL_TIMEOUT_S) -> AsyncIterator[None]:
        """End what runs inside after ``timeout_s``; turn its errors into ConnectErrors.

        Where a certificate was refused, by either side, that is an AdmissionError, unless both
        name the same secret: then bytes were damaged on their way, and another dial may do.
        """
        try:
            async with asyncio.timeout(timeout_s):
                yield
        except OSError as error:  # TimeoutError and ssl.SSLError are OSErrors
            if isinstance(error, ssl.SSLError) and is_refusal(error):
                raise await self._refused() from error
            raise self._explained(error) from error
        except RemoteProtocolError as error:
            raise ConnectError(f"cannot reach {self._where}: {error.what}") from error

    async def reach(
        self,
        context: ssl.SSLContext,
        expect_peer: bytes | None = None,
        expect_fingerprint: bytes | None = None,
    ) -> tuple[TlsChannel, bytes]:
        """Return a channel that has proved who is there, and that peer's id.

        Raises ConnectError if it is another peer than the one that is expected.
        """
        sock, rtt_s = await self._connect()
        counts = self._counts
        channel = TlsChannel(sock, context, server_side=False, rtt_s=rtt_s, counts=counts)
        try:
            self._stage = "TLS"
            await channel.handshake()
            self._stage = IDENTITY
            peer_id = peer_id_of(channel.tls)
            wrong_peer = expect_peer is not None and peer_id != expect_peer
            other_print = expect_fingerprint not in (None, fingerprint_of(peer_id))
            if wrong_peer or other_print:
                raise ConnectError(
                    f"cannot reach {self._where}: that is another peer of run {self._run}",
                    fix="get a fresh invite; that peer may have moved or lost its home folder",
                    stage=IDENTITY,
                )
        except BaseException:
            channel.close()
            raise
        return channel, peer_id

    async def bare(self) -> socket.socket:
        """Return a connection on which nothing has been said, to open a data stream on."""
        self.is_bulk = True
        sock, _ = await self._connect()
        self._stage = "data stream"
        return sock

    async def greet(self, channel: TlsChannel, mine: Hello) -> Hello | Refused:
        """Send our hello and return the answer to it."""
        await self.say(channel, mine)
        return await channel.receive()

    async def say(self, channel: TlsChannel, mine: Hello) -> None:
        """Send our hello."""
        self._stage = ADMISSION
        await channel.send(mine)

    async def ask(self, channel: TlsChannel, mine: Hello, question: object, answer: type) -> object:
        """Send our hello and a question; return the answer, or a refusal."""
        self._stage = "answer"
        await channel.send(mine)
        await channel.send(question)
        return await channel.receive_of(Refused, answer)

    @property
    def _where(self) -> str:
        elapsed_s = time.monotonic() - self._started_s
        # In tenths: a failure that comes again has the same words, and is said once.
        where = shown(self.address)
        where += f" through proxy {self.proxy}" if self.proxy is not None else ""
        return f"{where} ({self._stage}, after {elapsed_s:.1f} s)"

    async def knock(self) -> None:
        """Connect and hang up: somebody listens there."""
        sock, _ = await self._connect()
        sock.close()

    async def _connect(self) -> tuple[socket.socket, float]:
        """Return a connected socket and one round trip, in seconds; try the addresses in turn.

        Through a relay or a proxy and after a punch the round trip is not known yet, and 0.
        """
        if self._route is not None and self._relays is not None:
            self._stage = RELAY
            return await self._relays.open(self._route, bulk=self.is_bulk), 0.0
        if self._meets is not None and self._punches is not None:
            self._stage = PUNCH
            return await self._punches.open(self._meets), 0.0
        if self.proxy is not None:
            return await self._connect_through(self.proxy), 0.0
        found = await resolve(self.host, self.port)
        self.addresses = tuple(str(where[0]) for _, where in found)
        self.resolve_s = time.monotonic() - self._started_s
        self._stage = "TCP"
        sock, self.connect_s = await _connect_to(found)
        return sock, self.connect_s

    async def _connect_through(self, proxy: Proxy) -> socket.socket:
        """Return a connection that a proxy has made, which resolves the name, too."""
        self._stage, asked_s = PROXY, time.monotonic()
        sock = await _connect_to_proxy(proxy)
        try:
            socks = Socks(sock, proxy)
            await socks.log_in()
            self._stage = BEHIND
            await socks.connect(self.host, self.port)
            self.connect_s = time.monotonic() - asked_s
            return proxied(sock, self.host)
        except BaseException:
            sock.close()
            raise

    async def _refused(self) -> ConnectError:
        where, theirs = self._where, await self._their_tag()
        if theirs == self._tag:
            return ConnectError(
                f"cannot reach {where}: a certificate was refused, though both sides hold the run"
                f" secret with tag {theirs}",
                fix="the next dial may do; if not, something on the way changes what is sent",
                stage=SECRET,
            )
        return AdmissionError(
            f"not admitted to run {self._run} at {where}: that peer holds another run secret"
            f" (tag {theirs}, yours has tag {self._tag})",
            fix="copy the whole `atoll join` line that `atoll up` printed on that machine",
            stage=SECRET,
        )

    async def _their_tag(self) -> str:
        """Return what the other side's certificate says about its secret, for the error only.

        That is the tag of the secret, or "unknown".
        """
        try:
            async with asyncio.timeout(TAG_TIMEOUT_S):
                sock, rtt_s = await self._connect()
                channel = TlsChannel(
                    sock,
                    unverified_context(),
                    server_side=False,
                    rtt_s=rtt_s,
                    counts=self._counts,
                )
                try:
                    await channel.handshake()
                    der = channel.tls.getpeercert(binary_form=True) or b""
                    return tag_of(x509.load_der_x509_certificate(der))
                finally:
                    channel.close()
        except Exception:  # a stranger's certificate may be anything, and it is for words only
            return "unknown"

    def _explained(self, error: OSError) -> ConnectError:
        where = self._where
        fix = error.fix if isinstance(error, ProxyError) else ""
        fix = fix or {
            "DNS": f"check the spelling of {self.host}, or use its IP address",
            RELAY: f"is the relay up, and does it let connections in? see {PAGE}",
            PUNCH: f"one of the two needs an open port, or a relay; see {PAGE}",
            PROXY: NO_PROXY_FIX,
            BEHIND: f"may the proxy connect there? if so: {self._how_to_be_dialled(error)}",
            "TCP": self._how_to_be_dialled(error),
        }.get(self._stage, "is that an atoll port? if so, look at the log of the peer there")
        what = f"cannot reach {where}: {reason_of(error)}"
        return ConnectError(what, fix=fix, stage=self._stage)

    def _how_to_be_dialled(self, error: OSError) -> str:
        silent = not isinstance(error, ConnectionRefusedError)
        return how_to_be_dialled(self.host, self.port, silent=silent)


def how_to_be_dialled(host: str, port: int, *, silent: bool) -> str:
    """Say what to look at, and what would help, where nobody answers at an address.

    ``silent``: nothing came back at all, as from behind a router that lets nobody in.
    """
    fix = f"is `atoll up` running there, and may TCP port {port} pass its firewall?"
    if not silent:
        return fix
    kind = address_kind(host)
    if kind in WORDS:
        fix += f" {host} is {WORDS[kind]}: only machines there can dial it."
    return (
        f"{fix} If that machine is behind a router, nobody can join it before TCP port {port} is"
        " open and forwarded to it. Two machines that can only dial out need one that can be"
        " dialled and relays for them: `atoll up --run NAME --witness --relay 20` there, and join"
        " it from both (docs/reachability.md)"
    )


class _Names:
    """Look names up, a few at a time and each one once, whoever asks for it meanwhile.

    A resolver may take half a minute to give a name up, and a dial gives up before: in the threads
    of the event loop such names would be in the way of all other work, and of the process's end.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._answers: dict[str, Future[_Found]] = {}
        self._waiting: dict[str, None] = {}  # for a thread, the newest last
        self._threads = 0

    def ask(self, host: str) -> Future[_Found]:
        """Return what will have the addresses of a name, or a socket.gaierror."""
        with self._lock:
            if host in self._answers:
                if host in self._waiting:
                    self._wait(host)  # as one that is asked for now
                return self._answers[host]
            if self._threads < RESOLVERS_MAX:
                worker(self._look_up, "names").start()  # first: it fails where threads are scarce
                self._threads += 1
            answer = self._answers[host] = Future()
            answer.set_running_or_notify_cancel()  # a dial that gives up ends it for no other
            self._wait(host)
            return answer

    def _wait(self, host: str) -> None:
        self._waiting.pop(host, None)
        self._waiting[host] = None

    def _look_up(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._threads -= 1
                    return
                host, _ = self._waiting.popitem()  # of the others the dials may have given up
            found: _Found = []
            failed: Exception | None = None
            try:
                found = _look_up(host, 0)
            except Exception as error:
                failed = error
            with self._lock:
                answer = self._answers.pop(host)
            if failed is not None:
                answer.set_exception(failed)
            else:
                answer.set_result(found)


def _look_up(host: str, port: int, flags: int = 0) -> _Found:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
    return [(family, where) for family, _, _, _, where in found]


_names = _Names()


async def resolve(host: str, port: int) -> _Found:
    """Return families and addresses of a host, ADDRESSES_MAX at most. Raises socket.gaierror."""
    try:  # a literal address needs no resolver and so no thread
        found = _look_up(host, port, socket.AI_NUMERICHOST)
    except socket.gaierror:
        answer = await asyncio.wrap_future(_names.ask(host))
        found = [(family, (where[0], port, *where[2:])) for family, where in answer]
    except UnicodeError as error:  # a label that no DNS name may have
        raise socket.gaierror(socket.EAI_NONAME, "not a host name") from error
    return found[:ADDRESSES_MAX]


async def _connect_to(
    found: list[tuple[socket.AddressFamily, tuple[object, ...]]],
) -> tuple[socket.socket, float]:
    """Return a socket that is connected to one of these, tried in turn, and how long that took."""
    loop = asyncio.get_running_loop()
    last: OSError = OSError("no address")
    for left, (family, where) in zip(range(len(found), 0, -1), found, strict=True):
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setblocking(False)
        asked_s = time.monotonic()
        try:
            if is_last(sock):
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            async with asyncio.timeout(DIAL_TIMEOUT_S / left if left > 1 else None):
                await loop.sock_connect(sock, where)
            return sock, time.monotonic() - asked_s
        except OSError as error:
            sock.close()
            last = error
        except BaseException:
            sock.close()
            raise
    raise last


async def _connect_to_proxy(proxy: Proxy) -> socket.socket:
    """Return a connection to a proxy. Raises ProxyError: what it meets is no refusal of a peer."""
    try:
        sock, _ = await _connect_to(await resolve(proxy.host, proxy.port))
    except OSError as error:
        raise ProxyError(f"the proxy cannot be reached: {reason_of(error)}") from error
    return sock


async def greet_proxy(proxy: Proxy) -> None:
    """Find out whether a proxy lets this machine in. Raises ConnectError."""
    try:
        async with asyncio.timeout(DIAL_TIMEOUT_S):
            sock = await _connect_to_proxy(proxy)
            try:
                await Socks(sock, proxy).log_in()
            finally:
                sock.close()
    except OSError as error:
        fix = (error.fix if isinstance(error, ProxyError) else "") or NO_PROXY_FIX
        what = f"proxy {proxy} does not let this machine in: {reason_of(error)}"
        raise ConnectError(what, fix=fix, stage=PROXY) from error


def is_refusal(error: ssl.SSLError) -> bool:
    """Return whether a certificate was refused: in both cases the run secrets differ.

    Either ours was (an alert, in TLS 1.3 seen as late as the first read), or we refused the other
    side's.
    """
    if isinstance(error, ssl.SSLCertVerificationError):
        return True
    reason = error.reason or ""
    return "ALERT" in reason and "PROTOCOL_VERSION" not in reason
