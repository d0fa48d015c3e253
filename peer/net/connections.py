"""Keep all connections of a daemon: one port in, any number out, one control link per peer.

The shell between sockets and the daemon's decisions. What arrives is reported by callbacks in the
event loop; nothing here decides about membership. Any defect of the other side ends that side's
connection with a named reason and nothing else.

Two control links of a pair. When both sides dial at once, the link dialled by the smaller peer id
stays. That side closes the other link, because it is the last to learn which one stays; the other
side reads on until then. So no message is lost and nobody is reported down. A direct link takes the
place of one through a relay, whoever dialled, and never the other way round. A second link through
another relay stands by: when the first ends, it takes its place at once. Where the first one was
punched through two routers, which may forget it, the one through a relay stands by.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Collection, Container, Sequence
from dataclasses import replace
from typing import Literal, Protocol

from atoll.collectives.errors import ConnectError, IdentityInUseError, RemoteProtocolError
from atoll.collectives.version import VERSION
from atoll.peer.caps.caps import Caps
from atoll.peer.daemon.ports import ConnectionPort
from atoll.peer.links.tcp_info import silence_s
from atoll.peer.membership.view import short
from atoll.peer.net import byte_counts
from atoll.peer.net.admission_policy import AdmissionPolicy
from atoll.peer.net.byte_counts import ByteCounts
from atoll.peer.net.certs import RunTls
from atoll.peer.net.dial import DIAL_TIMEOUT_S, Dial
from atoll.peer.net.examination import Examiner
from atoll.peer.net.hello import (
    CONTROL,
    COPIED_HOME_FIX,
    DATA,
    DUPLICATE,
    EXAMINE,
    PROBE,
    PROTOCOL_MAX,
    PROTOCOL_MIN,
    REACH,
    Hello,
    Refused,
    check,
    refusal_error,
    refusal_of,
)
from atoll.peer.net.link import ControlLink, defect_summary
from atoll.peer.net.listener import Listener
from atoll.peer.net.proxy import Proxy
from atoll.peer.net.punched import PunchedSocket
from atoll.peer.net.reach import Reached, ReachService, ask_reach
from atoll.peer.net.reach_messages import DIALLED_MAX, AskReach
from atoll.peer.net.relayed import RelayedSocket, Route, shown
from atoll.peer.net.tls import TlsChannel, TlsSocket
from atoll.peer.net.wire import FRAME_HEADER_BYTES, decode, encode, frame, name_of
from atoll.peer.punch.service import Observer, PunchService
from atoll.peer.relay.service import RelayService
from atoll.peer.streams.congestion import AUTO
from atoll.peer.streams.keys import CIPHER_NONE, CIPHERS
from atoll.peer.streams.opener import StreamOpener
from atoll.peer.streams.stream import DataStream

LINKS_MAX = 4096  # peers that a run may have (reliability_and_security.md 3.2)
# A punched link on which nothing was acknowledged for so long may be dead.
PUNCHED_SILENT_S = 1.5
MET_MAX = 1024  # addresses whose peers find places of their own when they come back: 100 KiB


class KnownRelays(Protocol):
    """Know who relays, and remember who does it badly."""

    def relays_to(self, peer: bytes, /, *, bulk: bool) -> Sequence[bytes]:
        """Return through whom a peer may be reached, the best first."""

    def blame_relay(self, relay: bytes, why: str, peer: bytes, /) -> None:
        """Hear that what came through a relay was not what the other end had sent.

        ``peer``: that other end, which may lie or have done it.
        """

    def observers(self) -> Sequence[Observer]:
        """Return who can say where this peer comes from."""


class _NoRelays:
    """Know nothing yet."""

    def relays_to(self, peer: bytes, /, *, bulk: bool) -> Sequence[bytes]:
        return ()

    def blame_relay(self, relay: bytes, why: str, peer: bytes, /) -> None:
        """Forget it: nobody is asked to relay yet."""

    def observers(self) -> Sequence[Observer]:
        return ()


class ConnectionManager:
    """Listen, dial and carry messages. Use it inside one running event loop.

    ``daemon`` hears what happens, in that loop and not after :meth:`close` has begun. ``ciphers``:
    of data streams, the preferred one first; none means that they go through TLS. ``congestion``:
    see StreamOpener. ``policy``: what it takes to get a control link, beside the run secret; this
    side shows it too. ``of_rounds``: names of the messages whose bytes count as those of rounds.
    ``caps``: what all of this keeps to; None if to nothing. ``relay_bytes_per_s``: what this peer
    carries of others' data; 0: none, and their control links all the same. ``proxy``: through which
    all is dialled that is not on this machine.
    """

    def __init__(
        self,
        *,
        peer_id: bytes,
        tls: RunTls,
        run: str,
        daemon: ConnectionPort,
        ciphers: tuple[str, ...] = CIPHERS,
        congestion: str = AUTO,
        policy: AdmissionPolicy | None = None,
        of_rounds: Collection[str] = (),
        caps: Caps | None = None,
        relay_bytes_per_s: float = 0.0,
        proxy: Proxy | None = None,
    ) -> None:
        self.peer_id = peer_id
        self.counts = ByteCounts(caps)  # of everything that this daemon sends and receives
        self.relay_bytes_per_s = relay_bytes_per_s
        self.proxy = proxy
        self.outbound: Container[bytes] = ()  # peers that cannot be dialled from outside
        self.known_relays: KnownRelays = _NoRelays()
        self._of_rounds = of_rounds
        self._last: tuple[object, bytes] | None = None  # a message, and its frame
        self._tls, self._run = tls, run
        self._daemon = daemon
        self._policy = policy or AdmissionPolicy()
        self._links: dict[bytes, ControlLink] = {}
        self._met: dict[str, None] = {}  # ips of peers that had a link, the latest last
        self._standby: dict[bytes, ControlLink] = {}  # through another relay than the first
        self._down_due: dict[bytes, str] = {}  # dropped links whose end is to be reported, and why
        self._leaving: set[ControlLink] = set()  # superseded or dropped, not yet ended
        self._closing = False
        self._loop = asyncio.get_running_loop()
        self._dials: dict[tuple[bytes, str, bool], asyncio.Task[bytes]] = {}  # under way
        self._streams = StreamOpener(ciphers, congestion, self)
        self.bbr = self._streams.bbr  # see Congestion
        self._examiner = Examiner()
        self._reach = ReachService(self)
        self.relay = RelayService(self)
        self.punch = PunchService(self)
        self._listener = Listener(tls.server, self, behind_proxy=proxy is not None)

    async def listen(self, host: str, port: int) -> tuple[str, int]:
        """Open the port and return the bound address; ``port`` 0 picks a free one.

        Raises ConfigError if the address cannot be listened on.
        """
        if CIPHER_NONE in self._streams.ciphers:
            self.log("data streams are neither secret nor protected with peers that agree to that")
        if self.proxy is not None:
            self.log(f"proxy {self.proxy} makes all connections to other machines, and finds names")
        return self._listener.open(host, port)

    async def close(self) -> None:
        """Send what is queued, say goodbye on every link, end all streams. Takes about a second."""
        self._closing = True
        for dial in self._dials.values():
            dial.cancel()
        await self._listener.close()
        await self._reach.close()
        links = [*self._links.values(), *self._standby.values(), *self._leaving]
        self._links.clear()
        self._standby.clear()
        self._streams.close()
        self.punch.close()
        self.relay.close()
        for link in links:
            link.close()
        await asyncio.gather(*(link.ended.wait() for link in links))

    def send(self, peer_id: bytes, msg: object) -> bool:
        """Queue ``msg`` without blocking; return False if no control link to ``peer_id`` works."""
        link = self._links.get(peer_id)
        return link is not None and self.send_on(link, msg)

    def send_on(self, link: ControlLink, msg: object) -> bool:
        """Queue ``msg`` on one link without blocking; return False if it is ending."""
        is_of_round = name_of(msg) in self._of_rounds
        purpose = byte_counts.ROUNDS if is_of_round else byte_counts.CONTROL
        if self._last is None or self._last[0] is not msg:  # many go to several peers
            self._last = (msg, frame(encode(msg)))
        return link.send(self._last[1], purpose)

    def drop(self, peer_id: bytes, why: str, *, expelled: bool = False) -> None:
        """End the control link to ``peer_id``, if any; ``on_down`` follows.

        Data streams that the peer has opened outlive a link, unless it is ``expelled``.
        """
        if expelled:
            self._streams.expel(peer_id)
            self.relay.cut(peer_id)
        second = self._standby.pop(peer_id, None)
        if second is not None:
            self._retire(second)
            second.close()
        link = self._links.pop(peer_id, None)
        if link is not None:
            if expelled:
                self._met.pop(link.proved_ip, None)
            self._streams.forget(peer_id)
            self._retire(link)
            link.close()
            self._down_due[peer_id] = why  # not now: whoever drops it may be in the machine
            asyncio.get_running_loop().call_soon(self._report_due, peer_id)

    def link_peers(self) -> tuple[bytes, ...]:
        """Return the peers with a control link, sorted."""
        return tuple(sorted(self._links))

    def links(self) -> tuple[ControlLink, ...]:
        """Return all control links that have not ended."""
        return (*self._links.values(), *self._standby.values(), *self._leaving)

    def linked_life(self, peer_id: bytes) -> int:
        """Return to which process of ``peer_id`` there is a link; -1 without one."""
        link = self._links.get(peer_id)
        return link.hello.life if link is not None else -1

    def srtt_s(self, peer_id: bytes) -> float:
        """Return a round trip to ``peer_id`` in seconds; 0 without a link.

        It was measured while connecting.
        """
        link = self._links.get(peer_id)
        return link.rtt_s if link is not None else 0.0

    def is_local(self, peer_id: bytes) -> bool:
        """Return whether ``peer_id`` is known to run on this machine."""
        link = self._links.get(peer_id)
        return link is not None and link.is_local

    def tcp_info(self, peer_id: bytes) -> bytes:
        """Return the kernel's struct tcp_info of the link to ``peer_id``; b"" without one."""
        link = self._links.get(peer_id)
        return link.tcp_info() if link is not None else b""

    def least_rtt_s(self, peer_id: bytes) -> float:
        """Return the least round trip to ``peer_id`` of late in seconds; 0 if none is known."""
        link = self._links.get(peer_id)
        return link.least_rtt_s() if link is not None else 0.0

    async def dial(
        self,
        address: str,
        expect_fingerprint: bytes | None = None,
        expect_peer: bytes | None = None,
        *,
        anew: bool = False,
    ) -> bytes:
        """Make a control link, or find that there is one, and return the peer's id.

        ``anew``: the one that there is does not reach the peer any more, and is to be replaced.
        Takes at most 5 s. Raises ConnectError naming the stage, AdmissionError, VersionError, or
        IdentityInUseError. Whoever dials a peer that is being dialled there waits for that dial:
        where processors are short, more handshakes at once mean that none of them ends in time.
        """
        if expect_peer is None:
            return await self._dial(address, expect_fingerprint, None, anew=anew)
        if expect_peer in self._links and not anew:
            return expect_peer
        key = expect_peer, address, anew
        under_way = self._dials.get(key)
        if under_way is None:
            dialling = self._dial(address, expect_fingerprint, expect_peer, anew=anew)
            under_way = self._dials[key] = asyncio.get_running_loop().create_task(dialling)
            under_way.add_done_callback(lambda done: self._dialled(key, done))
        return await asyncio.shield(under_way)

    def _dialled(self, key: tuple[bytes, str, bool], done: asyncio.Task[bytes]) -> None:
        """Forget a dial that is over; whoever asked for it may not wait for it any more."""
        del self._dials[key]
        if not done.cancelled():
            done.exception()

    async def _dial(
        self,
        address: str,
        expect_fingerprint: bytes | None,
        expect_peer: bytes | None,
        *,
        anew: bool,
    ) -> bytes:
        channel, peer_id, answer = await self._call(
            CONTROL, address, expect_peer, expect_fingerprint
        )
        linked = peer_id in self._links
        if isinstance(answer, Refused):
            channel.close()
            if answer.code == DUPLICATE and linked:
                return peer_id
            raise refusal_error(answer, shown(address))
        link = self._link(channel, peer_id, answer, self.peer_id, address)
        if not self._install(link):
            self._retire(link)
            if answer.life < self._links[peer_id].hello.life:
                link.close()  # an older life: told why it is over when it dials us
            else:
                link.drain()  # the other side keeps the link that it dialled and closes this one
        return peer_id

    async def open_data(self, peer_id: bytes, address: str) -> DataStream:
        """Open a stream on which this side sends to ``peer_id``.

        Takes at most 5 s, and as long again if TLS has to be tried after a sealed stream. Raises
        ConnectErrors as :meth:`dial` does.
        """
        return await self._streams.open(peer_id, address)

    def link_of(self, peer_id: bytes) -> ControlLink | None:
        """Return the control link to ``peer_id``."""
        return self._links.get(peer_id)

    def standby_of(self, peer_id: bytes) -> ControlLink | None:
        """Return the link that takes the place of the one to ``peer_id`` when that ends."""
        return self._standby.get(peer_id)

    def bulk_routes(self, peer_id: bytes) -> list[str]:
        """Return the ways for data through relays to ``peer_id``, the best first."""
        relays = self.known_relays.relays_to(peer_id, bulk=True)
        return [str(Route(relay, peer_id)) for relay in relays]

    def relayed_pairs(self) -> list[tuple[ControlLink, ControlLink | None]]:
        """Return the links through relays or routers, each with the one that stands by for it."""
        links = [link for link in self._links.values() if link.relay or link.is_punched]
        return [(link, self._standby.get(link.peer_id)) for link in links]

    def on_fault(self, peer_id: bytes, relay: bytes, what: str, is_damage: bool) -> None:
        """Hear that a data stream of ``peer_id`` broke on its way; in whichever thread."""
        with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
            self._loop.call_soon_threadsafe(
                self.relay.on_stream_fault, peer_id, relay, what, is_damage
            )

    def blame_relay(self, relay: bytes, why: str, peer: bytes) -> None:
        """Hear that a relay has changed or lost what it carries on the way to this peer."""
        self._streams.avoid(relay, peer)
        self.known_relays.blame_relay(relay, why, peer)

    def is_member(self, peer_id: bytes) -> bool:
        """Return whether ``peer_id`` is a member of the view that this peer is in."""
        return peer_id in self._daemon.member_peers()

    def punch_link(self, peer_id: bytes) -> ControlLink | None:
        """Return a control link on which a peer hears us even if a punched one has died."""
        link, second = self._links.get(peer_id), self._standby.get(peer_id)
        if link is None or second is None or not link.is_punched:
            return link
        return second if silence_s(link.tcp_info()) >= PUNCHED_SILENT_S else link

    def requester_ip(self, link: ControlLink) -> str:
        """Return the address of the other end of a link, or of the relay that it leads through."""
        between = self._links.get(link.relay) if link.relay else link
        return between.remote_ip if between is not None else ""

    def observers(self) -> Sequence[Observer]:
        """Return who can say where this peer comes from."""
        return self.known_relays.observers() if self.proxy is None else ()

    def adopt(self, sock: RelayedSocket | PunchedSocket, peer: bytes) -> asyncio.Task[None] | None:
        """Take a connection that came about in another way as if its other end had dialled.

        ``peer``: whose it is said to be. Whoever is linked opens as many streams at once as others.
        Return the task that ends when it has proved itself, or has not; None if there is no place.
        """
        if not self._closing:
            return self._listener.adopt(sock, of_member=peer in self._links)
        sock.close()
        return None

    async def accept_circuit(self, sock: socket.socket) -> None:
        """Take the connection of an end that this peer is to relay, behind its first byte."""
        await self.relay.take(sock)

    async def accept_observed(self, sock: socket.socket) -> None:
        """Take a connection whose origin is to be told, behind its first byte."""
        await self.punch.observe(sock)

    def on_data(self, peer_id: bytes, stream: DataStream) -> None:
        """Pass on a stream that ``peer_id`` has opened."""
        self._daemon.on_data(peer_id, stream)

    def log(self, line: str) -> None:
        """Write a line about connections."""
        self._daemon.note("link", line)

    async def accept_stream(self, sock: socket.socket) -> None:
        """Take the connection of a data stream, behind its first byte, or raise."""
        await self._streams.accept(sock)

    async def call_tls(self, peer_id: bytes, address: str, offer: bytes = b"") -> TlsSocket:
        """Return a connection for a data stream through TLS, when both sides have said hello.

        ``offer``: the id of the stream that was offered to us. Raises the error of a refusal.
        """
        channel, _, answer = await self._call(DATA, address, peer_id, None, offer)
        if isinstance(answer, Refused):
            channel.close()
            raise refusal_error(answer, shown(address))
        return channel.take()

    async def probe(self, address: str, timeout_s: float) -> Literal["up", "refused", "silent"]:
        """Find out whether anybody listens there, by TCP alone.

        "refused": the machine answers, nobody listens. "silent": anything else. Who is there does
        not matter, and a handshake would cost a processor's time, which a slow peer lacks.
        """
        try:
            attempt = self.attempt(address)
            async with attempt.limited(timeout_s):
                await attempt.knock()
        except ConnectError as error:
            return "refused" if isinstance(error.__cause__, ConnectionRefusedError) else "silent"
        return "up"

    async def prove(self, attempt: Dial, peer_id: bytes) -> None:
        """Dial, and return when ``peer_id`` has proved itself there.

        Raises what a dial raises inside its limits.
        """
        channel, _ = await attempt.reach(self._tls.client, expect_peer=peer_id)
        try:
            await channel.send(self._hello(PROBE))
        finally:
            channel.close()

    async def ask_reach(self, peer_id: bytes, address: str, port: int) -> Reached:
        """Ask a member whether this peer can be dialled at ``port`` (reach.py)."""
        dialled = [peer for peer, link in self._links.items() if link.dialled_address]
        asked = AskReach(port, tuple(dialled[-DIALLED_MAX:]))
        mine = self._hello(REACH)
        return await ask_reach(self.attempt(address), self._tls.client, mine, asked, peer_id)

    async def _call(
        self,
        kind: str,
        address: str,
        expect_peer: bytes | None,
        expect_fingerprint: bytes | None,
        offer: bytes = b"",
    ) -> tuple[TlsChannel, bytes, Hello | Refused]:
        """Dial and say hello; return the channel, the peer's id and its answer.

        Raises an error if that peer is this one.
        """
        mine = replace(self._hello(kind), offer=offer)
        attempt = self.attempt(address)
        attempt.is_bulk = kind == DATA
        async with attempt.limited():
            channel, peer_id = await attempt.reach(
                self._tls.client, expect_peer, expect_fingerprint
            )
            try:
                if peer_id == self.peer_id and not self._links:
                    mine = replace(mine, life=0)  # claims nothing: see _check_not_me
                answer = await attempt.greet(channel, mine)
                if isinstance(answer, Hello):
                    check(mine, answer, shown(address))
                    self._check_not_me(shown(address), peer_id, mine.life, answer.life)
                    if kind == CONTROL:
                        self._policy.admit(peer_id, answer, called=True)
                if self._closing:
                    raise ConnectError(f"{shown(address)}: this daemon is closing")
            except BaseException:
                channel.close()
                raise
        return channel, peer_id, answer

    def attempt(self, address: str) -> Dial:
        ways = self.relay, self.proxy, self.punch
        return Dial(address, self._run, self._tls.tag, self.counts, *ways)

    def _check_not_me(self, address: str, peer_id: bytes, said_life: int, life: int) -> None:
        """Raise an error if the peer that answered is one with our own identity.

        Of two processes with one identity exactly one stays: the newer, once a peer has a link to
        it; before that, the one that was found running. Raises IdentityInUseError if the other's
        life is the higher one, ConnectError if it is this daemon itself or an older life of it.
        """
        if peer_id != self.peer_id:
            return
        own = self._daemon.life()
        if life == own:
            raise ConnectError(
                f"{address} is this daemon itself", fix="give the address of another peer"
            )
        if life < said_life:
            raise ConnectError(f"{address} was an older life of this peer, and ends now")
        raise IdentityInUseError(
            f"this identity also runs at {address} (life {life}, ours {own})",
            fix=COPIED_HOME_FIX,
        )

    async def greet(self, channel: TlsChannel, peer_id: bytes, theirs: Hello) -> Refused | None:
        """Answer the hello of a connection made to us; return the refusal to send, if any."""
        mine = self._hello(theirs.kind)
        try:
            check(theirs, mine)  # in words for the dialler
            if theirs.kind == CONTROL and peer_id != self.peer_id:
                others = [x.remote_ip for peer, x in self._links.items() if peer != peer_id]
                self._policy.check_address(channel.remote_ip, others)
                self._policy.admit(peer_id, theirs, called=False)
        except ConnectError as error:
            return refusal_of(error)
        if theirs.kind == PROBE:
            return None
        if theirs.kind == EXAMINE:
            return await self._examiner.serve(channel, self._daemon.outline())
        if theirs.kind == REACH:
            await self._reach.serve(channel, peer_id, theirs)
            return None
        if peer_id == self.peer_id:
            if theirs.life > mine.life:
                self._daemon.on_conflict(theirs.life)
            await channel.send(mine)  # whoever dialled compares the lives
            return None
        if theirs.kind == DATA:
            return await self._greet_data(channel, peer_id, mine, theirs)
        return self._greet_control(channel, peer_id, mine, theirs)

    def _greet_control(
        self, channel: TlsChannel, peer_id: bytes, mine: Hello, theirs: Hello
    ) -> Refused | None:
        old = self._links.get(peer_id)
        if old is not None and theirs.life < old.hello.life:
            what = f"life {old.hello.life} of this identity is linked, yours is {theirs.life}"
            return Refused(IdentityInUseError.code, what)
        wanted = old is None or self._prefers_new(
            old, channel.relay, theirs.life, peer_id, is_punched=channel.is_punched
        )
        if not wanted and not (old and self._may_stand_by(old, channel.relay, peer_id)):
            return Refused(DUPLICATE, "there is a better control link between the two already")
        if len(self._links) >= LINKS_MAX:
            return Refused(ConnectError.code, f"{LINKS_MAX} peers are linked already")
        link = self._link(channel, peer_id, theirs, dialled_by=peer_id)
        link.send(frame(encode(mine)))  # before on_up, after which other messages may follow
        self._install(link)
        return None

    async def _greet_data(
        self, channel: TlsChannel, peer_id: bytes, mine: Hello, theirs: Hello
    ) -> Refused | None:
        link = self._links.get(peer_id)
        if link is None or link.hello.life != theirs.life:
            return Refused(ConnectError.code, "a data stream needs a control link first")
        if why_not := self._streams.why_not_tls(peer_id, theirs.offer):
            return Refused(ConnectError.code, why_not)
        await channel.send(mine)
        self._streams.accept_tls(link, channel.take(), theirs.offer)
        return None

    def _hello(self, kind: str) -> Hello:
        inc, address, ciphers = (
            self._daemon.incarnation(),
            self._daemon.advertised(),
            self._streams.ciphers,
        )
        shown = self._policy.credential, self._policy.role, VERSION, self._daemon.life()
        return Hello(PROTOCOL_MIN, PROTOCOL_MAX, self._run, kind, inc, address, ciphers, *shown)

    def _link(
        self,
        channel: TlsChannel,
        peer_id: bytes,
        theirs: Hello,
        dialled_by: bytes,
        dialled_address: str = "",
    ) -> ControlLink:
        return ControlLink(
            channel.take(),
            peer_id,
            theirs,
            dialled_by,
            self._on_payload,
            self._on_end,
            self.counts,
            dialled_address,
        )

    def _prefers_new(
        self,
        old: ControlLink,
        relay: bytes,
        life: int,
        dialled_by: bytes,
        *,
        is_punched: bool = False,
    ) -> bool:
        """Return whether a new link to ``old``'s peer takes its place; both sides decide alike.

        ``relay``: through whom the new one leads, b"" if it is direct. One that a peer was dialled
        for is better than a punched one, which its routers may forget, and which tells nobody that
        the other end can be dialled.
        """
        if life != old.hello.life:
            return life > old.hello.life
        if bool(relay) != bool(old.relay):
            return not relay
        if relay != old.relay:
            return False  # it stands by
        if is_punched != old.is_punched:
            return not is_punched
        if dialled_by == old.dialled_by:
            return True  # who dials again has lost the old one
        age_s = asyncio.get_running_loop().time() - old.since_s
        if age_s > DIAL_TIMEOUT_S:
            return True  # not at once: the dialler knew the old link, and has lost it
        return dialled_by < old.dialled_by

    def _may_stand_by(self, old: ControlLink, relay: bytes, dialled_by: bytes) -> bool:
        """Return whether a link through this relay may stand by for ``old``."""
        second = self._standby.get(old.peer_id)
        may_fail = bool(old.relay) or old.is_punched
        if not (relay and may_fail) or relay == old.relay:
            return False
        if second is None:
            return True
        life = old.hello.life
        return relay == second.relay and self._prefers_new(second, relay, life, dialled_by)

    def _install(self, link: ControlLink) -> bool:
        """Make ``link`` the peer's control link, or let it stand by.

        Return False if there is a better one.
        """
        peer_id, life = link.peer_id, link.hello.life
        old = self._links.get(peer_id)
        if old is not None and not self._prefers_new(
            old, link.relay, life, link.dialled_by, is_punched=link.is_punched
        ):
            if life != old.hello.life or not self._may_stand_by(old, link.relay, link.dialled_by):
                return False
            before = self._standby.get(peer_id)
            if before is not None:
                self._retire(before)
                before.close(deliver=True)
            self._standby[peer_id] = link
            self.relay.watch()
            return True
        second = self._standby.get(peer_id)
        is_direct = not (link.relay or link.is_punched)
        if second is not None and (is_direct or second.hello.life != life):
            del self._standby[peer_id]
            self._retire(second)
            second.close()
        self._links[peer_id] = link
        if link.relay:
            self.relay.watch()
        elif old is not None and old.relay and not link.is_punched:  # see Streams.renew
            self._streams.prefer_direct(peer_id)
        if link.proved_ip:  # a relay could name anybody's
            self._met.pop(link.proved_ip, None)
            self._met[link.proved_ip] = None
        if len(self._met) > MET_MAX:
            del self._met[next(iter(self._met))]
        if old is not None and not (link.is_punched and self._steps_back(old, link)):
            self._retire(old)
            if old.hello.life != life:
                self._streams.forget(peer_id)
                old.close()
                self._daemon.on_down(peer_id, f"it was restarted (life {life})")
            elif link.dialled_by == self.peer_id:
                old.close(deliver=True)
            else:
                old.drain()
        if old is None or old.hello.life != life:
            self._report_due(
                peer_id
            )  # else the end of the one before would seem to be that of this
            self._daemon.on_up(peer_id, link.hello.address, link.hello.inc)
        return True

    def _steps_back(self, old: ControlLink, link: ControlLink) -> bool:
        """Let a relayed link stand by for a punched one that takes its place, if there is room."""
        if not old.relay or old.hello.life != link.hello.life:
            return False
        who = short(old.peer_id)
        self.log(f"{who} is linked directly now, no longer through relay {short(old.relay)}")
        if old.peer_id in self._standby:
            return False
        self._standby[old.peer_id] = old
        return True

    def _retire(self, link: ControlLink) -> None:
        self._leaving = {other for other in self._leaving if not other.ended.is_set()} | {link}

    def _on_payload(self, link: ControlLink, payload: bytes) -> None:
        if self._closing:
            return
        msg = decode(payload)
        if name_of(msg) in self._of_rounds:  # it was counted before anybody could read it
            count = FRAME_HEADER_BYTES + len(payload)
            self.counts.add_received(byte_counts.CONTROL, -count)
            self.counts.add_received(byte_counts.ROUNDS, count)
        try:
            services = self._streams, self._reach, self.relay, self.punch
            if not any(service.on_message(link, msg) for service in services):
                self._daemon.on_message(link.peer_id, msg)
        except RemoteProtocolError:
            raise
        except Exception as error:  # ours; the daemon goes on without the message that met it
            name, what = name_of(msg), defect_summary(error)
            self.log(f"DEFECT, please report it: a {name} of {short(link.peer_id)} raised {what}")
            link.end(f"its {name} met a defect of this program: {type(error).__name__}")

    def _on_end(self, link: ControlLink, why: str) -> None:
        peer_id = link.peer_id
        if link.relay and link.is_damaged:
            what = f"a control link to {short(peer_id)} broke: {why}"
            self.blame_relay(link.relay, what, peer_id)
        if link.relay:  # else it reads as if the other end had gone
            why = f"{why} (it led through relay {short(link.relay)})"
        if self._standby.get(peer_id) is link:
            del self._standby[peer_id]
        if self._links.get(peer_id) is link:
            del self._links[peer_id]
            self._streams.forget(peer_id)
            self._report_down(peer_id, why)
            self._promote(peer_id)

    def _promote(self, peer_id: bytes) -> None:
        """Let the link that stands by take the place of the one that has ended.

        Both are reported, because what was under way on the first is lost.
        """
        second = self._standby.pop(peer_id, None)
        if second is None or self._closing:
            return
        self._links[peer_id] = second
        self.log(f"relay {short(second.relay)} carries the connection to {short(peer_id)} now")
        self._daemon.on_up(peer_id, second.hello.address, second.hello.inc)

    def _report_due(self, peer_id: bytes) -> None:
        """Report the end of a link that was dropped, once, and before there is another one."""
        why = self._down_due.pop(peer_id, None)
        if why is not None:
            self._report_down(peer_id, why)

    def _report_down(self, peer_id: bytes, why: str) -> None:
        if not self._closing:
            self._daemon.on_down(peer_id, why)

    def is_member_ip(self, ip: str) -> bool:
        return ip in self._met
