"""Relay for others, and reach others through relays: what acts of circuits, in the event loop.

As a relay it answers who asks for a circuit, takes the connections that bring its tokens, and gives
both to the splicer. As an end it asks, or is told that somebody has asked, and dials the relay. The
messages and the order of things are in messages.py, what is decided in circuits.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
from collections import Counter
from collections.abc import Awaitable, Sequence
from typing import Any, Final, NamedTuple, Protocol

from atoll.collectives.errors import AtollError, ConnectError, RemoteProtocolError
from atoll.peer.membership.view import short
from atoll.peer.net.byte_counts import ByteCounts
from atoll.peer.net.dial import RELAY, Dial
from atoll.peer.net.link import ControlLink
from atoll.peer.net.relayed import RelayedSocket, Route, relayed
from atoll.peer.net.tls import receive_exactly, tune
from atoll.peer.net.wire import encode, frame
from atoll.peer.relay.circuits import Circuit, CircuitState, CircuitTable
from atoll.peer.relay.messages import (
    CIRCUIT_FIRST_BYTE,
    JOINED,
    TOKEN_BYTES,
    TOKEN_S,
    WHAT_CHARACTERS_MAX,
    CircuitAlive,
    CircuitAsked,
    CircuitDenied,
    CircuitFault,
    CircuitGranted,
    CircuitOffered,
)
from atoll.peer.relay.offers import Offers
from atoll.peer.relay.silences import ALIVE_S, SILENT_S, Silences
from atoll.peer.relay.splicer import Splicer, can_splice

# For the relay's answer on a control link that works.
ANSWER_TIMEOUT_S: Final = 2.0
# An end waits so long for the other: a dial, and two ways of a slow link.
JOIN_TIMEOUT_S: Final = 4.0
EXPIRE_S: Final = 1.0  # between two looks for tokens that nobody has used


class RelayPort(Protocol):
    """Serve whoever relays, or is relayed, with the connections of a daemon."""

    @property
    def counts(self) -> ByteCounts: ...

    @property
    def relay_bytes_per_s(self) -> float:
        """Return what bulk circuits may carry; 0: only control circuits are carried."""

    def link_of(self, peer: bytes, /) -> ControlLink | None: ...

    def send(self, peer: bytes, msg: object, /) -> bool: ...

    def attempt(self, address: str, /) -> Dial: ...

    def adopt(self, sock: RelayedSocket, peer: bytes, /) -> Awaitable[object] | None:
        """Take a connection as if its other end, said to be ``peer``, had dialled this peer's port.

        Return what is done when that has proved itself, or has not; None if there is no place.
        """

    def relayed_pairs(self) -> Sequence[tuple[ControlLink, ControlLink | None]]:
        """Return the links through relays or routers, each with the one that stands by for it."""

    def blame_relay(self, relay: bytes, why: str, peer: bytes, /) -> None:
        """Hear that a relay has changed or lost what it carries on the way to this peer."""

    def is_member(self, peer: bytes, /) -> bool:
        """Return whether ``peer`` is a member of the view that this peer is in."""

    def log(self, line: str, /) -> None: ...


class _Question(NamedTuple):
    relay: bytes
    answer: asyncio.Future[CircuitGranted | CircuitDenied]


class RelayService:
    """Carry circuits for others, and make those that lead from and to this peer."""

    def __init__(self, port: RelayPort) -> None:
        self._port = port
        self._table = CircuitTable()
        self._came: dict[int, dict[int, socket.socket]] = {}  # ends that wait for the other
        self._splicer: Splicer | None = None
        self._carried: Counter[int] = Counter()  # bytes, by circuit
        self._carried_before = 0  # of circuits that have ended
        self._numbers = itertools.count(1)
        self._questions: dict[int, _Question] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._expiry: asyncio.TimerHandle | None = None
        self._alive: asyncio.TimerHandle | None = None
        self._silences = Silences()
        self._offers = Offers()
        self._loop = asyncio.get_running_loop()

    def close(self) -> None:
        """End all circuits; takes as long as one turn of the splicer."""
        for task in self._tasks:
            task.cancel()
        for timer in (self._expiry, self._alive):
            if timer is not None:
                timer.cancel()
        for question in self._questions.values():
            if not question.answer.done():
                question.answer.set_result(CircuitDenied(0, "this daemon is closing"))
        for ends in self._came.values():
            for sock in ends.values():
                sock.close()
        self._came.clear()
        if self._splicer is not None:
            self._splicer.close()
            self._splicer = None

    def on_message(self, link: ControlLink, msg: object) -> bool:
        """Take what has arrived on a control link if it is about circuits; return whether so."""
        if isinstance(msg, CircuitAsked):
            self._on_asked(link, msg)
        elif isinstance(msg, CircuitOffered):
            self._on_offered(link, msg)
        elif isinstance(msg, CircuitGranted | CircuitDenied):
            self._on_answered(link, msg)
        elif isinstance(msg, CircuitFault):
            what = f"{short(link.peer_id)} says that {msg.what}"
            self._port.blame_relay(msg.relay, what, link.peer_id)
        else:
            return isinstance(msg, CircuitAlive)  # that it has come is all that it says
        return True

    def _on_answered(self, link: ControlLink, msg: CircuitGranted | CircuitDenied) -> None:
        question = self._questions.get(msg.number)
        if question is None or question.relay != link.peer_id or question.answer.done():
            return  # nobody waits for it any more, or it is not from whom we asked
        question.answer.set_result(msg)

    # ------------------------------------------------------------ as the relay

    def _on_asked(self, link: ControlLink, asked: CircuitAsked) -> None:
        asker = link.peer_id
        granted = self._grant(link, asked)
        if isinstance(granted, str):
            self._port.send(asker, CircuitDenied(asked.number, granted))

    def _grant(self, link: ControlLink, asked: CircuitAsked) -> str:
        """Give both ends their tokens; return "" or why not."""
        asker, peer = link.peer_id, asked.peer
        other = self._port.link_of(peer)
        if not can_splice():
            return "this relay's system cannot carry circuits"
        if asked.bulk and not self._port.relay_bytes_per_s:
            return "it carries no data for others: it was started without --relay"
        if other is None or not (_leads_here(link) and _leads_here(other)):
            return f"it has no connection of its own to {short(peer)}"
        ends = {asker, peer, *self._table.peers()}
        joiners = {end for end in ends if not self._port.is_member(end)}
        now_s = self._loop.time()
        circuit = self._table.ask(asker, peer, now_s, bulk=asked.bulk, joiners=joiners)
        if isinstance(circuit, str):
            return circuit
        first, second = circuit.tokens
        self._expire_later()
        offered = CircuitOffered(second, asker, link.remote_ip)
        granted = CircuitGranted(asked.number, first, other.remote_ip)
        if not (self._port.send(peer, offered) and self._port.send(asker, granted)):
            self._table.end(circuit)
            return f"its connection to {short(peer)} is ending"
        return ""

    async def take(self, sock: socket.socket) -> None:
        """Take the connection of an end, behind CIRCUIT_FIRST_BYTE, or raise."""
        token = await receive_exactly(sock, TOKEN_BYTES)
        found = self._table.come(token, self._loop.time())
        if found is None:
            raise RemoteProtocolError("a circuit whose token is not known, or not any more")
        # An end whose machine is gone says nothing: the kernel has to ask, or the circuit stays.
        tune(sock)
        circuit, end = found
        ends = self._came.setdefault(circuit.number, {})
        ends[end] = sock
        if circuit.state is CircuitState.JOINED:
            self._join(circuit, self._came.pop(circuit.number))

    def _join(self, circuit: Circuit, ends: dict[int, socket.socket]) -> None:
        try:
            if self._splicer is None:  # it takes descriptors, and there may be no more of them
                self._splicer = Splicer(self._port.relay_bytes_per_s, self)
            for sock in ends.values():
                sock.send(JOINED)
        except OSError:
            for sock in ends.values():
                sock.close()
            self._table.end(circuit)
            return
        pair = frozenset(circuit.ends)
        self._splicer.add(circuit.number, ends[0], ends[1], pair, bulk=circuit.bulk)

    def cut(self, peer: bytes) -> None:
        """End all circuits of a peer that is expelled from the run."""
        for circuit in self._table.of(peer):
            self._table.end(circuit)
            self._forget(circuit)
            if self._splicer is not None:
                self._splicer.cut(circuit.number)

    def _expire_later(self) -> None:
        if self._expiry is None:
            self._expiry = self._loop.call_later(EXPIRE_S, self._expire)

    def _expire(self) -> None:
        self._expiry = None
        for circuit in self._table.expire(self._loop.time()):
            self._forget(circuit)
        if any(circuit.state is not CircuitState.JOINED for circuit in self._table):
            self._expire_later()

    def _forget(self, circuit: Circuit) -> None:
        for sock in self._came.pop(circuit.number, {}).values():
            sock.close()

    # ... and what the splicer reports, in its thread

    def moved(self, number: int, count: int) -> None:
        self._carried[number] += count
        self._port.counts.add_relayed(count)

    def over(self, number: int, why: str) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
            self._loop.call_soon_threadsafe(self._over, number)

    def _over(self, number: int) -> None:
        for circuit in self._table:
            if circuit.number == number:
                self._table.end(circuit)
        self._carried_before += self._carried.pop(number, 0)

    def status(self) -> dict[str, Any]:
        """Return what this peer carries for others, in plain types, for `atoll status`."""
        pairs: Counter[tuple[str, str, bool]] = Counter()
        for circuit in self._table:
            if circuit.state is CircuitState.JOINED:
                one, two = sorted(map(short, circuit.ends))
                pairs[one, two, circuit.bulk] += 1
        return {
            "bytes_per_s": self._port.relay_bytes_per_s,
            "carried_bytes": self._carried_before + sum(self._carried.values()),
            "circuits": [
                {"between": [one, two], "bulk": bulk, "count": count}
                for (one, two, bulk), count in sorted(pairs.items())
            ],
        }

    # ------------------------------------------------------------ as an end

    async def open(self, route: Route, *, bulk: bool) -> RelayedSocket:
        """Return a connection to a peer through a relay; the other end does nothing before us.

        Raises ConnectError with the relay's words, and OSError.
        """
        number = next(self._numbers)
        question = _Question(route.relay, self._loop.create_future())
        self._questions[number] = question
        try:
            if not self._port.send(route.relay, CircuitAsked(number, route.peer, bulk)):
                raise ConnectError(f"there is no connection to relay {short(route.relay)}")
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                answer = await question.answer
        finally:
            del self._questions[number]
        if isinstance(answer, CircuitDenied):
            raise ConnectError(f"relay {short(route.relay)} does not carry it: {answer.what}")
        return await self._come(route.relay, answer.token, answer.ip)

    def _on_offered(self, link: ControlLink, offered: CircuitOffered) -> None:
        relay = link.peer_id
        if link.relay or not self._offers.begin(relay, self._loop.time()):
            return  # the relay forgets it after TOKEN_S
        task = self._loop.create_task(self._take_offer(relay, offered))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: self._offers.ended(relay))

    async def _take_offer(self, relay: bytes, offered: CircuitOffered) -> None:
        try:
            async with asyncio.timeout(TOKEN_S):
                sock = await self._come(relay, offered.token, offered.ip)
        except (OSError, AtollError) as error:
            led_there = isinstance(error, ConnectError) and error.stage == RELAY
            if self._offers.failed(relay, self._loop.time(), led_there=led_there):
                what = error.what if isinstance(error, AtollError) else str(error)
                who = f"{short(offered.peer)} through relay {short(relay)}"
                self._port.log(f"no circuit to {who}: {what}")
            return
        self._offers.joined(relay)
        admission = self._port.adopt(sock, offered.peer)
        if admission is not None:
            await asyncio.wait([asyncio.ensure_future(admission)])

    async def _joined(self, relay: bytes, sock: socket.socket) -> bytes:
        """Return what the relay says when both ends are there. Raises ConnectError and OSError."""
        try:
            async with asyncio.timeout(JOIN_TIMEOUT_S):
                return await receive_exactly(sock, len(JOINED))
        except TimeoutError as error:  # the other end's fault as likely as the relay's
            what = f"the other end has not come to relay {short(relay)} in {JOIN_TIMEOUT_S:g} s"
            raise ConnectError(what, stage=RELAY) from error

    # ... and whether the relays carry what they are given

    def watch(self) -> None:
        """Watch the links through relays from now on, as long as there are any."""
        if self._alive is None:
            self._alive = self._loop.call_later(ALIVE_S, self._look)

    def _look(self) -> None:
        self._alive = None
        pairs = self._port.relayed_pairs()
        if not pairs:
            return
        self.watch()
        links = [link for pair in pairs for link in pair if link is not None]
        alive = frame(encode(CircuitAlive()))
        for link in links:
            link.send(alive)
        self._silences.look({link: link.heard_s for link in links})
        for first, second in pairs:
            if second is not None:
                self._end_silent(first, second)

    def _end_silent(self, one: ControlLink, two: ControlLink) -> None:
        """End one of two links to a peer if nothing comes on it, though the other one works.

        If nothing comes on either it is the peer that says nothing, and not for us to judge.
        """
        is_silent, other_is = self._silences.is_silent(one), self._silences.is_silent(two)
        if is_silent == other_is:
            return
        link = one if is_silent else two
        what = f"nothing has come through it from {short(link.peer_id)} for {SILENT_S:.0f} s"
        if link.relay:
            self._port.blame_relay(link.relay, what, link.peer_id)
        link.end(what)

    def on_stream_fault(self, peer: bytes, relay: bytes, what: str, is_damage: bool) -> None:
        """Find out who is to blame for a data stream that broke, and tell the peer, who sends.

        ``is_damage``: what came was not what had been sent. Else nothing has moved for long: that
        is the relay's fault if the peer is heard through it meanwhile. If it is linked in another
        way by now, its sender may have left the stream in the middle of a frame.
        """
        link = self._port.link_of(peer)
        is_linked = link is not None and link.relay == relay
        is_heard = link is not None and self._loop.time() - link.heard_s < 2 * ALIVE_S
        if not (is_damage or (is_linked and is_heard)):
            return
        self._port.blame_relay(relay, f"a data stream of {short(peer)} broke: {what}", peer)
        told = f"a data stream broke at its end: {what}"[:WHAT_CHARACTERS_MAX]
        self._port.send(peer, CircuitFault(relay, told))

    async def _come(self, relay: bytes, token: bytes, ip: str) -> RelayedSocket:
        """Connect to the relay with a token, and return when the other end has done so too."""
        link = self._port.link_of(relay)
        address = link.address if link is not None else ""
        if not address:
            raise ConnectError(f"there is no connection to relay {short(relay)} any more")
        attempt = self._port.attempt(address)
        async with attempt.limited():
            sock = await attempt.bare()
            try:
                await self._loop.sock_sendall(sock, bytes((CIRCUIT_FIRST_BYTE,)) + token)
                joined = await self._joined(relay, sock)
                if joined != JOINED:
                    raise RemoteProtocolError(f"{short(relay)} does not relay as it says")
                return relayed(sock, relay, ip)
            except BaseException:
                sock.close()
                raise


def _leads_here(link: ControlLink) -> bool:
    """Return whether the other end of a link can dial this peer, which is what it has to do."""
    return not (link.relay or link.is_punched)
