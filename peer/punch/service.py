"""Make connections that both ends dial, and observe for others: what acts of punches, in the loop.

What is said is in messages.py, how one punch goes in course.py, and what is remembered of a pair in
pairs.py. A connection that comes about is given to whoever asked for it, as one that it has
dialled, and at the other end to the listener, as one that was accepted.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
import socket
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

from atoll.collectives.errors import AtollError, ConnectError, RemoteProtocolError
from atoll.collectives.schedule.plan import STREAMS_MAX
from atoll.peer.daemon.process import is_scarce
from atoll.peer.membership.view import short
from atoll.peer.net.byte_counts import CONTROL, ByteCounts
from atoll.peer.net.connection_limits import origin_of, plain_ip
from atoll.peer.net.invite import format_address
from atoll.peer.net.link import ControlLink
from atoll.peer.net.punched import PunchedSocket, punched
from atoll.peer.net.tls import reason_of, receive_exactly
from atoll.peer.punch.course import (
    OBSERVERS_MAX,
    REFUSED_S,
    Mapped,
    PunchCourse,
    PunchState,
    PunchTrigger,
    judge_mappings,
    meet_s,
    try_s,
    why_not_meet,
)
from atoll.peer.punch.messages import (
    NONCE_BYTES,
    OBSERVE_FIRST_BYTE,
    TOKEN_BYTES,
    WHAT_CHARACTERS_MAX,
    ObserveAsked,
    Observed,
    PunchAsked,
    PunchDenied,
    PunchReady,
)
from atoll.peer.punch.pairs import PairState, PairTrigger, PunchPairs
from atoll.peer.punch.preamble import PREAMBLE_BYTES, Preamble

# A connection to a member that can be dialled, and its answer: a lost packet is repeated in 1 s.
OBSERVE_S: Final = 1.5
# For the other end's answer, which has to be observed first.
ANSWER_S: Final = 2.5
# For the other end's first bytes on a connection that stands.
PROOF_S: Final = 1.0
# Punches that others have asked for, at a time: a round's streams, each with five descriptors.
ANSWERING_MAX: Final = 32
ANSWERING_PER_PEER_MAX: Final = STREAMS_MAX + 2
# As an observer: a connection is kept while the other end punches, so that its router remembers
# the port.
HOLD_S: Final = 8.0
TOKENS_MAX: Final = 256  # that have been announced and not been brought yet, and kept connections
# ... of one peer, so that nobody takes all places: the streams of a round to two others, twice.
OBSERVED_PER_PEER_MAX: Final = 4 * STREAMS_MAX
BACKLOG: Final = 4


ITS_ROUTER: Final = "its router gives each connection another port"


class Observer(NamedTuple):
    """Name a linked peer that can be dialled, and so can say where this one comes from."""

    peer: bytes
    ip: str
    port: int
    local_ip: str  # of this machine, on the way there


class PunchPort(Protocol):
    """Serve whoever punches with the connections of a daemon."""

    @property
    def peer_id(self) -> bytes: ...

    @property
    def counts(self) -> ByteCounts: ...

    def punch_link(self, peer: bytes, /) -> ControlLink | None:
        """Return a control link on which a peer hears us even if a punched one has died."""

    def requester_ip(self, link: ControlLink, /) -> str:
        """Return the address of the other end of a link, or of the relay that it leads through."""

    def observers(self) -> Sequence[Observer]:
        """Return who can observe this peer."""

    def send(self, peer: bytes, msg: object, /) -> bool: ...

    def send_on(self, link: ControlLink, msg: object, /) -> bool: ...

    def adopt(self, sock: PunchedSocket, peer: bytes, /) -> object:
        """Take a connection as if its other end, ``peer``, had dialled this peer's port."""

    def log(self, line: str, /) -> None: ...


class _Symmetric(OSError):
    """Say that a router gives each connection another port, so that no punch can work."""


_PunchAnswer: TypeAlias = Observed | PunchReady | PunchDenied


class _Unanswered(OSError):
    """Say that an observer or the other end has not answered, which tells nothing of routers."""


class _PunchQuestion(NamedTuple):
    peer: bytes
    answer: asyncio.Future[_PunchAnswer]


class _MappedPort(NamedTuple):
    """Hold a port of this machine for one punch, and where it appears to others."""

    local: tuple[str, int]
    listener: socket.socket
    mapped: Mapped


class PunchService:
    """Make punched connections, and observe where others come from."""

    def __init__(self, port: PunchPort) -> None:
        self._port = port
        self._pairs = PunchPairs()
        self._numbers = itertools.count(1)
        self._questions: dict[int, _PunchQuestion] = {}
        self._answering: dict[asyncio.Task[None], bytes] = {}
        self._tokens: dict[bytes, tuple[bytes, int, float]] = {}  # announced by whom, until when
        self._held: dict[asyncio.Task[None], bytes] = {}  # observed connections, and whose
        self._said_symmetric = False
        self._loop = asyncio.get_running_loop()

    def close(self) -> None:
        for task in (*self._answering, *self._held):
            task.cancel()

    def may_try(self, peer: bytes) -> bool:
        """Return whether a punch with this peer is worth trying now."""
        return self._pairs.may_try(peer, self._loop.time()) and bool(self._port.observers())

    def state(self, peer: bytes) -> PairState:
        return self._pairs.state(peer)

    def on_message(self, link: ControlLink, msg: object) -> bool:
        """Take what has arrived on a control link if it is about punches; return whether so."""
        if isinstance(msg, ObserveAsked):
            self._on_observe_asked(link.peer_id, msg)
        elif isinstance(msg, PunchAsked):
            self._on_punch_asked(link, msg)
        elif isinstance(msg, Observed | PunchReady | PunchDenied):
            question = self._questions.get(msg.number)
            if question is not None and question.peer == link.peer_id:
                if not question.answer.done():
                    question.answer.set_result(msg)
            elif isinstance(msg, PunchDenied) and msg.hopeless:  # it wanted to ask us, and cannot
                self._failed(PunchCourse(), link.peer_id, _Symmetric(ITS_ROUTER), over=link)
        else:
            return False
        return True

    # ------------------------------------------------------------ as an observer

    def _on_observe_asked(self, peer: bytes, asked: ObserveAsked) -> None:
        now_s = self._loop.time()
        self._tokens = {t: entry for t, entry in self._tokens.items() if now_s < entry[2]}
        of_peer = [entry[0] for entry in self._tokens.values()].count(peer)
        of_peer += [*self._held.values()].count(peer)
        if of_peer < OBSERVED_PER_PEER_MAX and len(self._tokens) + len(self._held) < TOKENS_MAX:
            self._tokens[asked.token] = peer, asked.number, now_s + HOLD_S

    async def observe(self, sock: socket.socket) -> None:
        """Take a connection behind OBSERVE_FIRST_BYTE, or raise; say where it comes from."""
        token = await receive_exactly(sock, TOKEN_BYTES)
        peer, number, _ = self._tokens.pop(token, (b"", 0, 0.0))
        if not peer:
            raise RemoteProtocolError("a connection to be observed that nobody has announced")
        ip, port = sock.getpeername()[:2]
        self._port.send(peer, Observed(number, plain_ip(str(ip)), int(port)))
        task = self._loop.create_task(_hold(sock))
        self._held[task] = peer
        task.add_done_callback(lambda done: self._held.pop(done, None))

    # ------------------------------------------------------------ as the end that asks

    async def open(self, peer: bytes) -> PunchedSocket:
        """Return a connection to a peer that both have dialled; the other end waits for our word.

        Raises ConnectError and OSError.
        """
        course, began_s = PunchCourse(), self._loop.time()
        link = self._port.punch_link(peer)
        if link is None:
            raise ConnectError(f"no connection to {short(peer)} over which to agree on another")
        try:
            sock = await self._open(course, link)
        except (OSError, AtollError) as error:
            if isinstance(error, _Symmetric) and course.state is PunchState.LEARNING:  # our own
                denied = PunchDenied(next(self._numbers), ITS_ROUTER, hopeless=True)
                self._port.send_on(link, denied)  # or nobody there learns why it stays as it is
            self._failed(course, peer, error, over=link)
            raise
        self._made(peer, self._loop.time() - began_s)
        return sock

    async def _open(self, course: PunchCourse, link: ControlLink) -> PunchedSocket:
        peer, nonce = link.peer_id, secrets.token_bytes(NONCE_BYTES)
        async with self._mapped_port(course) as port:
            with self._question(peer) as (number, answered):
                if not self._port.send_on(link, PunchAsked(number, nonce, *port.mapped)):
                    raise _Unanswered(f"the control link to {short(peer)} is ending")
                try:
                    async with asyncio.timeout(ANSWER_S):
                        answer = await answered
                except TimeoutError as error:
                    what = f"{short(peer)} has not answered in {ANSWER_S:g} s"
                    raise _Unanswered(what) from error
            if isinstance(answer, PunchDenied):
                raise _Symmetric(answer.what) if answer.hopeless else ConnectError(answer.what)
            if not isinstance(answer, PunchReady):
                raise RemoteProtocolError("an answer to something else")
            theirs = Mapped(answer.ip, answer.port)
            self._check(link, theirs)
            course.go(PunchTrigger.AGREED)
            preamble = Preamble("asker", (nonce, answer.nonce), (self._port.peer_id, peer))
            return await self._meet(course, port, theirs, preamble, link.rtt_s)

    @contextlib.contextmanager
    def _question(self, peer: bytes) -> Iterator[tuple[int, asyncio.Future[_PunchAnswer]]]:
        """Give a number to ask with, and what ``peer`` will have answered to it."""
        number = next(self._numbers)
        question = self._questions[number] = _PunchQuestion(peer, self._loop.create_future())
        try:
            yield number, question.answer
        finally:
            del self._questions[number]

    # ------------------------------------------------------------ as the end that is asked

    def _on_punch_asked(self, link: ControlLink, asked: PunchAsked) -> None:
        of_peer = sum(peer == link.peer_id for peer in self._answering.values())
        if len(self._answering) >= ANSWERING_MAX or of_peer >= ANSWERING_PER_PEER_MAX:
            what = f"{len(self._answering)} connections are being made already"
            self._port.send_on(link, PunchDenied(asked.number, what))
            return
        task = self._loop.create_task(self._answer(link, asked))
        self._answering[task] = link.peer_id
        task.add_done_callback(lambda done: self._answering.pop(done, None))

    async def _answer(self, link: ControlLink, asked: PunchAsked) -> None:
        course, began_s = PunchCourse(), self._loop.time()
        try:
            sock = await self._meet_asker(course, link, asked)
        except (OSError, AtollError) as error:
            hopeless = isinstance(error, _Symmetric)
            what = ITS_ROUTER if hopeless else _what(error)
            what = what[:WHAT_CHARACTERS_MAX]
            self._port.send_on(link, PunchDenied(asked.number, what, hopeless))
            self._failed(course, link.peer_id, error, over=link)
            return
        self._made(link.peer_id, self._loop.time() - began_s)
        self._port.adopt(sock, link.peer_id)

    async def _meet_asker(
        self, course: PunchCourse, link: ControlLink, asked: PunchAsked
    ) -> PunchedSocket:
        theirs, nonce = Mapped(asked.ip, asked.port), secrets.token_bytes(NONCE_BYTES)
        self._check(link, theirs)
        async with self._mapped_port(course) as port:
            if not self._port.send_on(link, PunchReady(asked.number, nonce, *port.mapped)):
                raise _Unanswered("the control link is ending")
            await asyncio.sleep(link.rtt_s / 2)
            course.go(PunchTrigger.AGREED)
            peers = link.peer_id, self._port.peer_id
            preamble = Preamble("answerer", (asked.nonce, nonce), peers)
            return await self._meet(course, port, theirs, preamble, link.rtt_s)

    # ------------------------------------------------------------ what both ends do

    def _check(self, link: ControlLink, theirs: Mapped) -> None:
        """Raise ConnectError where the other end's address is not one to dial for it."""
        stated_ip = link.met_ip or link.remote_ip
        requester_ip = link.met_ip or self._port.requester_ip(link)
        if why_not := why_not_meet(theirs, stated_ip, requester_ip):
            raise ConnectError(f"the address of {short(link.peer_id)} is not dialled: {why_not}")

    @contextlib.asynccontextmanager
    async def _mapped_port(self, course: PunchCourse) -> AsyncIterator[_MappedPort]:
        """Open a port, learn where it appears to others, and keep it so meanwhile.

        Raises ConnectError where nobody can observe it, or not everybody sees it at one address.
        """
        observers = choose_observers(self._port.observers())
        if not observers:
            raise ConnectError("nobody that can be dialled is there, who could observe this peer")
        with contextlib.ExitStack() as opened:
            first = opened.enter_context(_bound(observers[0].local_ip, 0))
            local = str(first.getsockname()[0]), int(first.getsockname()[1])
            listener = opened.enter_context(_bound(*local))
            listener.listen(BACKLOG)
            others = [opened.enter_context(_bound(*local)) for _ in observers[1:]]
            seen = await asyncio.gather(
                *map(self._observed, (first, *others), observers), return_exceptions=True
            )
            found = [one for one in seen if isinstance(one, Mapped)]
            if not found:
                what = _what(next(one for one in seen if isinstance(one, BaseException)))
                raise _Unanswered(f"nobody has observed this peer: {what}")
            mapped = judge_mappings(found)
            if mapped is None:
                self._say_symmetric(found, observers)
                raise _Symmetric("the router of this peer gives each connection another port")
            course.go(PunchTrigger.LEARNT)
            yield _MappedPort(local, listener, mapped)

    async def _observed(self, sock: socket.socket, observer: Observer) -> Mapped:
        """Have an observer say where this socket comes from; it stays connected."""
        token = secrets.token_bytes(TOKEN_BYTES)
        with self._question(observer.peer) as (number, answered):
            if not self._port.send(observer.peer, ObserveAsked(number, token)):
                raise ConnectError(f"the control link to {short(observer.peer)} is ending")
            async with asyncio.timeout(OBSERVE_S):
                await self._loop.sock_connect(sock, (observer.ip, observer.port))
                await self._loop.sock_sendall(sock, bytes((OBSERVE_FIRST_BYTE,)) + token)
                answer = await answered
        self._port.counts.add_sent(CONTROL, 1 + TOKEN_BYTES)
        if not isinstance(answer, Observed):
            raise RemoteProtocolError("an answer to something else")
        try:
            return Mapped(plain_ip(answer.ip), answer.port)
        except ValueError as error:
            raise RemoteProtocolError(f"{short(observer.peer)} has seen no address") from error

    async def _meet(
        self,
        course: PunchCourse,
        port: _MappedPort,
        theirs: Mapped,
        preamble: Preamble,
        round_trip_s: float,
    ) -> PunchedSocket:
        """Dial and accept until the other end has proved itself. Raises ConnectError."""
        dialling = self._dial(port.local, theirs, preamble, try_s(round_trip_s))
        limit_s = meet_s(round_trip_s)
        found = await _first_of((dialling, self._accept(port, preamble)), limit_s)
        if found is None:
            raise ConnectError(
                f"both dialled for {limit_s:.1f} s and nothing came through: a router of the two"
                " gives each connection another port, or lets nothing in"
            )
        course.go(PunchTrigger.MET)
        self._port.counts.add_sent(CONTROL, PREAMBLE_BYTES)
        self._port.counts.add_received(CONTROL, PREAMBLE_BYTES)
        return punched(found, theirs.ip)

    async def _dial(
        self, local: tuple[str, int], theirs: Mapped, preamble: Preamble, each_s: float
    ) -> socket.socket:
        """Dial again and again; return when the other end has proved itself."""
        while True:
            sock = _bound(*local)
            try:
                async with asyncio.timeout(each_s):
                    await self._loop.sock_connect(sock, theirs)
                await _prove(sock, preamble)
                return sock
            except (OSError, RemoteProtocolError) as error:
                sock.close()
                if not isinstance(error, TimeoutError):
                    await asyncio.sleep(REFUSED_S)
            except BaseException:
                sock.close()
                raise

    async def _accept(self, port: _MappedPort, preamble: Preamble) -> socket.socket:
        """Take a connection whose SYN came before this side had dialled, or between two tries."""
        while True:
            sock, _ = await self._loop.sock_accept(port.listener)
            try:
                await _prove(sock, preamble)
                return sock
            except (OSError, RemoteProtocolError):
                sock.close()
            except BaseException:
                sock.close()
                raise

    # ------------------------------------------------------------ what is remembered and said

    def _made(self, peer: bytes, took_s: float) -> None:
        if self._pairs.take(peer, PairTrigger.MADE, self._loop.time()):
            self._port.log(
                f"{short(peer)} and this peer have made a direct connection through the routers of"
                f" both, in {took_s:.1f} s"
            )

    def _failed(
        self, course: PunchCourse, peer: bytes, error: OSError | AtollError, over: ControlLink
    ) -> None:
        hopeless = isinstance(error, _Symmetric)
        trigger = PairTrigger.HOPELESS if hopeless else PairTrigger.FAILED
        if isinstance(error, _Unanswered):
            trigger = PairTrigger.UNMET
        course.go(PunchTrigger.FAILED)
        now_s = self._loop.time()
        if not self._pairs.take(peer, trigger, now_s):
            return
        stays = f"relay {short(over.relay)}" if over.relay else "the connection that there is"
        again_s = self._pairs.pause_s(peer, now_s)
        seldom = "" if hopeless else ", and then more seldom"
        self._port.log(
            f"no direct connection to {short(peer)}, which stays on {stays}: {_what(error)}; it is"
            f" tried again in {again_s:.0f} s{seldom}"
        )

    def _say_symmetric(self, seen: Sequence[Mapped], observers: Sequence[Observer]) -> None:
        if self._said_symmetric:
            return
        self._said_symmetric = True
        ports = " and ".join(
            f"{format_address(*one)} for {short(by.peer)}"
            for one, by in zip(seen, observers, strict=False)
        )
        self._port.log(
            f"the router of this peer gives each connection another port (it has {ports}): nobody"
            " that can only dial out can meet it directly, so that it stays on relays with them"
        )


def choose_observers(found: Sequence[Observer]) -> list[Observer]:
    """Return whom to ask: OBSERVERS_MAX, all of one address family, those elsewhere first.

    Whoever is in the same network sees this peer without a router between.
    """

    def is_near(one: Observer) -> bool:
        return origin_of(one.ip).network == origin_of(one.local_ip).network

    able = [one for one in found if not is_near(one)] or list(found)
    first = able[:1]
    same = [one for one in able[1:] if (":" in one.ip) == (":" in first[0].ip)]
    different = [one for one in same if one.ip != first[0].ip and one.local_ip == first[0].local_ip]
    return [*first, *different][:OBSERVERS_MAX]


def _bound(host: str, port: int) -> socket.socket:
    """Return a socket that may share its port with others of the same punch. Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        if is_scarce(sock):
            raise OSError("too many file descriptors are in use")
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind((host, port))
    except BaseException:
        sock.close()
        raise
    return sock


async def _first_of(
    ways: Sequence[Coroutine[Any, Any, socket.socket]], timeout_s: float
) -> socket.socket | None:
    """Return what the first of these brings, None if nothing does in time; the rest is given up."""
    tasks = [asyncio.ensure_future(way) for way in ways]
    found: list[socket.socket] = []
    try:
        await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        found = [task.result() for task in tasks if task.done()][:1]
    finally:
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        for other in ended:
            if isinstance(other, socket.socket) and other not in found:
                other.close()
    return found[0] if found else None


async def _prove(sock: socket.socket, preamble: Preamble) -> None:
    """Exchange the first bytes with the other end. Raises OSError and RemoteProtocolError."""
    sock.setblocking(False)
    async with asyncio.timeout(PROOF_S):
        await asyncio.get_running_loop().sock_sendall(sock, preamble.own)
        preamble.check(await receive_exactly(sock, PREAMBLE_BYTES))


async def _hold(sock: socket.socket) -> None:
    """Keep a connection until the other end closes it, or HOLD_S have passed."""
    try:
        async with asyncio.timeout(HOLD_S):
            await asyncio.get_running_loop().sock_recv(sock, 1)
    except OSError:
        pass
    finally:
        sock.close()


def _what(error: BaseException) -> str:
    return error.what if isinstance(error, AtollError) else reason_of(error)
