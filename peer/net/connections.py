"""Keep all connections of a daemon: one port in, any number out, one control link per peer.

The shell between sockets and the daemon's decisions. What arrives is reported by callbacks in the
event loop; nothing here decides about membership. Any defect of the other side ends that side's
connection with a named reason and nothing else.

Two control links of a pair. When both sides dial at once, the link dialled by the smaller peer id
stays. That side closes the other link, because it is the last to learn which one stays; the other
side reads on until then. So no message is lost and nobody is reported down.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Collection, Container
from dataclasses import replace
from typing import Literal

from atoll.collectives.errors import ConnectError, IdentityInUseError, RemoteProtocolError
from atoll.collectives.version import VERSION
from atoll.peer.caps.caps import Caps
from atoll.peer.daemon.ports import ConnectionPort
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
from atoll.peer.net.reach import Reached, ReachService, ask_reach
from atoll.peer.net.reach_messages import DIALLED_MAX, AskReach
from atoll.peer.net.tls import TlsChannel, TlsSocket
from atoll.peer.net.wire import FRAME_HEADER_BYTES, decode, encode, frame, name_of
from atoll.peer.streams.congestion import AUTO
from atoll.peer.streams.keys import CIPHER_NONE, CIPHERS
from atoll.peer.streams.opener import StreamOpener
from atoll.peer.streams.stream import DataStream

LINKS_MAX = 4096  # peers that a run may have (reliability_and_security.md 3.2)
MET_MAX = 1024  # addresses whose peers find places of their own when they come back: 100 KiB


class ConnectionManager:
    """Listen, dial and carry messages. Use it inside one running event loop.

    ``daemon`` hears what happens, in that loop and not after :meth:`close` has begun. ``ciphers``:
    of data streams, the preferred one first; none means that they go through TLS. ``congestion``:
    see StreamOpener. ``policy``: what it takes to get a control link, beside the run secret; this
    side shows it too. ``of_rounds``: names of the messages whose bytes count as those of rounds.
    ``caps``: what all of this keeps to; None if to nothing.
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
    ) -> None:
        self.peer_id = peer_id
        self.counts = ByteCounts(caps)  # of everything that this daemon sends and receives
        self.outbound: Container[bytes] = ()  # peers that cannot be dialled from outside
        self._of_rounds = of_rounds
        self._tls, self._run = tls, run
        self._daemon = daemon
        self._policy = policy or AdmissionPolicy()
        self._links: dict[bytes, ControlLink] = {}
        self._met: dict[str, None] = {}  # ips of peers that had a link, the latest last
        self._leaving: set[ControlLink] = set()  # superseded or dropped, not yet ended
        self._closing = False
        self._dials: dict[tuple[bytes, str, bool], asyncio.Task[bytes]] = {}  # under way
        self._streams = StreamOpener(ciphers, congestion, self)
        self.bbr = self._streams.bbr  # see Congestion
        self._examiner = Examiner()
        self._reach = ReachService(self)
        self._listener = Listener(tls.server, self)

    async def listen(self, host: str, port: int) -> tuple[str, int]:
        """Open the port and return the bound address; ``port`` 0 picks a free one.

        Raises ConfigError if the address cannot be listened on.
        """
        if CIPHER_NONE in self._streams.ciphers:
            self.log("data streams are neither secret nor protected with peers that agree to that")
        return self._listener.open(host, port)

    async def close(self) -> None:
        """Send what is queued, say goodbye on every link, end all streams. Takes about a second."""
        self._closing = True
        for dial in self._dials.values():
            dial.cancel()
        await self._listener.close()
        await self._reach.close()
        links = [*self._links.values(), *self._leaving]
        self._links.clear()
        self._streams.close()
        for link in links:
            link.close()
        await asyncio.gather(*(link.ended.wait() for link in links))

    def send(self, peer_id: bytes, msg: object) -> bool:
        """Queue ``msg`` without blocking; return False if no control link to ``peer_id`` works."""
        link = self._links.get(peer_id)
        if link is None:
            return False
        is_of_round = name_of(msg) in self._of_rounds
        purpose = byte_counts.ROUNDS if is_of_round else byte_counts.CONTROL
        return link.send(frame(encode(msg)), purpose)

    def drop(self, peer_id: bytes, why: str, *, expelled: bool = False) -> None:
        """End the control link to ``peer_id``, if any; ``on_down`` follows.

        Data streams that the peer has opened outlive a link, unless it is ``expelled``.
        """
        if expelled:
            self._streams.expel(peer_id)
        link = self._links.pop(peer_id, None)
        if link is not None:
            if expelled:
                self._met.pop(link.remote_ip, None)
            self._streams.forget(peer_id)
            self._retire(link)
            link.close()
            asyncio.get_running_loop().call_soon(self._report_down, peer_id, why)

    def link_peers(self) -> tuple[bytes, ...]:
        """Return the peers with a control link, sorted."""
        return tuple(sorted(self._links))

    def links(self) -> tuple[ControlLink, ...]:
        """Return all control links that have not ended."""
        return (*self._links.values(), *self._leaving)

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
            raise refusal_error(answer, address)
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
            raise refusal_error(answer, address)
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
        async with attempt.limited():
            channel, peer_id = await attempt.reach(
                self._tls.client, expect_peer, expect_fingerprint
            )
            try:
                if peer_id == self.peer_id and not self._links:
                    mine = replace(mine, life=0)  # claims nothing: see _check_not_me
                answer = await attempt.greet(channel, mine)
                if isinstance(answer, Hello):
                    check(mine, answer, address)
                    self._check_not_me(address, peer_id, mine.life, answer.life)
                    if kind == CONTROL:
                        self._policy.admit(peer_id, answer, called=True)
                if self._closing:
                    raise ConnectError(f"{address}: this daemon is closing")
            except BaseException:
                channel.close()
                raise
        return channel, peer_id, answer

    def attempt(self, address: str) -> Dial:
        return Dial(address, self._run, self._tls.tag, self.counts)

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
        if old is not None and not self._prefers_new(old, theirs.life, dialled_by=peer_id):
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

    def _prefers_new(self, old: ControlLink, life: int, dialled_by: bytes) -> bool:
        """Return whether a new link to ``old``'s peer takes its place; both sides decide alike."""
        if life != old.hello.life:
            return life > old.hello.life
        if dialled_by == old.dialled_by:
            return True  # who dials again has lost the old one
        age_s = asyncio.get_running_loop().time() - old.since_s
        if age_s > DIAL_TIMEOUT_S:
            return True  # not at once: the dialler knew the old link, and has lost it
        return dialled_by < old.dialled_by

    def _install(self, link: ControlLink) -> bool:
        """Make ``link`` the peer's control link; return False if there is a better one."""
        peer_id, life = link.peer_id, link.hello.life
        old = self._links.get(peer_id)
        if old is not None and not self._prefers_new(old, life, link.dialled_by):
            return False
        self._links[peer_id] = link
        self._met.pop(link.remote_ip, None)
        self._met[link.remote_ip] = None
        if len(self._met) > MET_MAX:
            del self._met[next(iter(self._met))]
        if old is not None:
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
            self._daemon.on_up(peer_id, link.hello.address, link.hello.inc)
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
            if not (self._streams.on_message(link, msg) or self._reach.on_message(link, msg)):
                self._daemon.on_message(link.peer_id, msg)
        except RemoteProtocolError:
            raise
        except Exception as error:  # ours; the daemon goes on without the message that met it
            name, what = name_of(msg), defect_summary(error)
            self.log(f"DEFECT, please report it: a {name} of {short(link.peer_id)} raised {what}")
            link.end(f"its {name} met a defect of this program: {type(error).__name__}")

    def _on_end(self, link: ControlLink, why: str) -> None:
        if self._links.get(link.peer_id) is link:
            del self._links[link.peer_id]
            self._streams.forget(link.peer_id)
            self._report_down(link.peer_id, why)

    def _report_down(self, peer_id: bytes, why: str) -> None:
        if not self._closing:
            self._daemon.on_down(peer_id, why)

    def is_member_ip(self, ip: str) -> bool:
        return ip in self._met
