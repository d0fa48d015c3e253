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
import time
from collections.abc import AsyncIterator

from cryptography import x509

from atoll.collectives.errors import (
    AdmissionError,
    ConfigError,
    ConnectError,
    RemoteProtocolError,
)
from atoll.peer.daemon.process import is_last
from atoll.peer.net.address_kind import WORDS, address_kind
from atoll.peer.net.byte_counts import ByteCounts
from atoll.peer.net.certs import peer_id_of, tag_of, unverified_context
from atoll.peer.net.hello import Hello, Refused
from atoll.peer.net.invite import fingerprint_of, parse_address
from atoll.peer.net.tls import TlsChannel, reason_of

UNREACHED = ("DNS", "TCP")  # stages of errors: there may be nobody at all
SECRET = "secret"  # ... somebody is there, with another run secret
IDENTITY = "identity"  # ... or another peer
ADMISSION = "admission"  # ... or one that does not answer our hello

# All stages together. Three round trips of an intercontinental link and a lost packet fit easily.
DIAL_TIMEOUT_S = 5.0
# Time to look at a certificate again, after a refusal.
TAG_TIMEOUT_S = 2.0
# A name may have many addresses; the dead ones must leave time for the living.
ADDRESSES_MAX = 4


class Dial:
    """Make one attempt to reach ``address`` as a member of ``run``. Use :meth:`limited` around it.

    ``tag``: that of our run secret, for errors. ``counts``: where its bytes are counted. Raises
    ConnectError for what is no address.
    """

    def __init__(self, address: str, run: str, tag: str, counts: ByteCounts | None = None) -> None:
        self.address = address
        try:
            self.host, self.port = parse_address(address)
        except ConfigError as error:  # peers advertise addresses: a bad one is not our user's fault
            raise ConnectError(f"no address to dial: {error.what}", fix=error.fix) from error
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
        return f"{self.address} ({self._stage}, after {elapsed_s:.1f} s)"

    async def knock(self) -> None:
        """Connect and hang up: somebody listens there."""
        sock, _ = await self._connect()
        sock.close()

    async def _connect(self) -> tuple[socket.socket, float]:
        """Return a connected socket and one round trip, in seconds; try the addresses in turn."""
        loop = asyncio.get_running_loop()
        found = await _resolve(self.host, self.port)
        self.addresses = tuple(str(where[0]) for _, where in found)
        self.resolve_s = time.monotonic() - self._started_s
        self._stage = "TCP"
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
                self.connect_s = time.monotonic() - asked_s
                return sock, self.connect_s
            except OSError as error:
                sock.close()
                last = error
            except BaseException:
                sock.close()
                raise
        raise last

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
        except (OSError, ValueError, x509.ExtensionNotFound, RemoteProtocolError):
            return "unknown"

    def _explained(self, error: OSError) -> ConnectError:
        where = self._where
        fix = {
            "DNS": f"check the spelling of {self.host}, or use its IP address",
            "TCP": how_to_be_dialled(
                self.host, self.port, silent=not isinstance(error, ConnectionRefusedError)
            ),
        }.get(self._stage, "is that an atoll port? if so, look at the log of the peer there")
        what = f"cannot reach {where}: {reason_of(error)}"
        return ConnectError(what, fix=fix, stage=self._stage)


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
        " dialled: let that one found the run, and join it from both. A relay would do, which atoll"
        " does not have yet (docs/reachability.md)"
    )


async def _resolve(host: str, port: int) -> list[tuple[socket.AddressFamily, tuple[object, ...]]]:
    loop = asyncio.get_running_loop()
    kind = socket.SOCK_STREAM
    try:  # a literal address needs no resolver and so no thread
        found = socket.getaddrinfo(host, port, type=kind, flags=socket.AI_NUMERICHOST)
    except socket.gaierror:
        found = await loop.getaddrinfo(host, port, type=kind)
    except UnicodeError as error:  # a label that no DNS name may have
        raise socket.gaierror(socket.EAI_NONAME, "not a host name") from error
    return [(family, where) for family, _, _, _, where in found[:ADDRESSES_MAX]]


def is_refusal(error: ssl.SSLError) -> bool:
    """Return whether a certificate was refused: in both cases the run secrets differ.

    Either ours was (an alert, in TLS 1.3 seen as late as the first read), or we refused the other
    side's.
    """
    if isinstance(error, ssl.SSLCertVerificationError):
        return True
    reason = error.reason or ""
    return "ALERT" in reason and "PROTOCOL_VERSION" not in reason
