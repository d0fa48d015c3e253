"""Find out whether a peer can be dialled: members dial it back, at the address it comes from.

A peer that dials out learns nothing about the other direction. So it asks a member, on a connection
of its own (a hello of kind REACH), and that one dials back: to the *observed* IP address, the one
that the question came from, and the port that the asker names. No other address is ever dialled, or
anybody could have members knock at doors of third parties. Whoever dials does TCP and TLS and wants
the asker's identity to be proved there. Whoever asks through a relay or a proxy is told that nobody
has dialled: where it comes from is then the relay's word, which could name any machine.

The asked member dials itself, and lets up to HELPERS_MAX other members that are linked to it dial.
Theirs is the answer that counts: neighbours in one network pass whatever keeps others out, and so
may whoever the asker has dialled itself. A refusal or silence proves something whoever met it; a
success of the asked member alone does not. Members elsewhere are preferred, then those that the
asker has not dialled. With TCP the latter is caution only: the asker's own dials come from other
ports than it listens on, and open no way through a router to that one. So whoever it has dialled
is evidence too where there is nobody else.

The asker need be no member: `atoll doctor` asks in the same way.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import random
import ssl
import time
from collections import Counter, OrderedDict
from collections.abc import Collection, Sequence
from ipaddress import ip_address
from typing import Final, NamedTuple, Protocol

from atoll.collectives.errors import AtollError, RemoteProtocolError
from atoll.collectives.version import VERSION
from atoll.peer.net.address_kind import LOOPBACK, NAME, PUBLIC, address_kind
from atoll.peer.net.connection_limits import counted_as, origin_of, plain_ip
from atoll.peer.net.dial import Dial
from atoll.peer.net.hello import Hello, Refused, refusal_error
from atoll.peer.net.invite import format_address
from atoll.peer.net.link import ControlLink
from atoll.peer.net.reach_messages import (
    HELPERS_MAX,
    OK,
    OTHER,
    REFUSED,
    SILENT,
    UNABLE,
    AskReach,
    DialBack,
    DialledBack,
    ReachAnswer,
    ReachReport,
)
from atoll.peer.net.tls import TlsChannel

# Of a dial-back: a packet that was lost on the way is repeated after one second and counts still. A
# router that drops them says nothing, and the whole answer is wanted within eight seconds.
DIAL_BACK_S = 2.5
# ... and as much longer the asked member waits for those it has asked: two ways of a slow link.
HELPER_S = DIAL_BACK_S + 0.8
# Of the asker, all together: three round trips, and what the member waits.
ASK_TIMEOUT_S = 6.0
# An asker, which is one life of a peer, may have members dial once in this time ...
PAUSE_S = 60.0
ASKERS_MAX = 1024  # ... and so many are remembered: 200 KiB
# Identities cost nothing, so addresses count too: machines of one household that start together.
PER_ADDRESS_MAX = 10
# ... and what one member may have another dial in that time, or a liar could have it scan networks.
PER_MEMBER_MAX = 60
AT_ONCE_MAX = 8  # dial-backs under way, each a descriptor
# A dial's end that tells of the machine that dials: no route, no such protocol, its own firewall,
# a link-local address of which it does not know the zone (EINVAL).
_OWN_TROUBLE: Final = frozenset(
    {
        errno.ENETUNREACH,
        errno.EADDRNOTAVAIL,
        errno.EAFNOSUPPORT,
        errno.EACCES,
        errno.EINVAL,
        errno.EPERM,
        errno.EMFILE,
    }
)


BROADCAST: Final = "255.255.255.255"


class Candidate(NamedTuple):
    """Name a peer that could dial, and where it is as seen from here."""

    peer: bytes
    ip: str


class DialBackLimits:
    """Limit how often is dialled for others. Sans-I/O, in bounded memory."""

    def __init__(self) -> None:
        self._asked_s: OrderedDict[tuple[bytes | int, ...], float] = OrderedDict()
        self._minute = 0
        self._of_address: Counter[tuple[bytes, str]] = Counter()  # in this minute, by member ...
        self._of_member: Counter[bytes] = Counter()

    def take(
        self, asker: tuple[bytes | int, ...], ip: str, now_s: float, member: bytes = b""
    ) -> float:
        """Return 0 if this asker may have its address dialled now, else how many seconds to wait.

        ``member``: who asks for it in its place, if anybody. What is granted counts, for each
        member by itself: one that asks for what it was not asked takes nothing from the others.
        """
        wait_s = self._asked_s.get(asker, now_s - PAUSE_S) + PAUSE_S - now_s
        if wait_s > 0:
            return wait_s
        if int(now_s / PAUSE_S) != self._minute:
            self._minute = int(now_s / PAUSE_S)
            self._of_address.clear()
            self._of_member.clear()
        if address_kind(ip) != LOOPBACK:  # all programs of a machine share that
            address = member, counted_as(ip)
            most = PER_MEMBER_MAX if member else ASKERS_MAX
            if self._of_address[address] >= PER_ADDRESS_MAX or self._of_member[member] >= most:
                return PAUSE_S - now_s % PAUSE_S
            self._of_address[address] += 1
            self._of_member[member] += 1
        self._asked_s[asker] = now_s
        self._asked_s.move_to_end(asker)
        if len(self._asked_s) > ASKERS_MAX:
            self._asked_s.popitem(last=False)
        return 0.0


def choose_helpers(
    linked: Sequence[Candidate], observed: str, dialled: Collection[bytes]
) -> list[bytes]:
    """Return who is to dial an asker that comes from ``observed``: HELPERS_MAX, the best first.

    ``linked`` is in an order of chance. Nobody is chosen that has the asker's own address: behind
    the same router a dial to that router proves nothing. On one machine all have the same.
    """
    network = origin_of(observed).network
    is_loopback = address_kind(observed) == LOOPBACK
    others = [one for one in linked if one.ip != observed or is_loopback]
    others.sort(key=lambda one: (origin_of(one.ip).network == network, one.peer in dialled))
    return [one.peer for one in others[:HELPERS_MAX]]


def may_dial(ip: str, requester_ip: str) -> bool:
    """Return whether an address may be dialled because the peer at ``requester_ip`` asks for it.

    A private address means another machine here than there, unless both are in private networks;
    so nobody outside can have the machines around this one tried. The same holds for this machine.
    """
    kind, theirs = address_kind(ip), address_kind(requester_ip)
    if kind == NAME or not _is_of_one(ip):  # nobody has this machine ask a resolver either
        return False
    if kind == PUBLIC or theirs == LOOPBACK:
        return True
    return kind != LOOPBACK and theirs != PUBLIC


def _is_of_one(ip: str) -> bool:
    """Return whether this is the IP address of one machine; "any" would be this machine itself.

    Others may say anything: brackets, or a zone, which means something on their machine alone.
    """
    try:
        address = ip_address(plain_ip(ip))
    except ValueError:
        return False
    is_of_all = address.is_unspecified or address.is_multicast or str(address) == BROADCAST
    return "%" not in ip and not is_of_all


class ReachLinks(Protocol):
    """Serve whoever dials back with the connections of a daemon."""

    @property
    def peer_id(self) -> bytes: ...

    def link_peers(self) -> Collection[bytes]: ...

    def link_of(self, peer_id: bytes, /) -> ControlLink | None: ...

    def send(self, peer_id: bytes, msg: object, /) -> bool: ...

    def attempt(self, address: str, /) -> Dial: ...

    async def prove(self, attempt: Dial, peer_id: bytes, /) -> None:
        """Dial, and return when ``peer_id`` has proved itself there; else raise."""


class ReachService:
    """Answer whoever asks whether it can be dialled, and dial back for other members."""

    def __init__(self, links: ReachLinks) -> None:
        self._links = links
        self._limits = DialBackLimits()
        self._numbers = itertools.count(1)
        self._questions: dict[int, tuple[bytes, asyncio.Future[DialledBack]]] = {}
        self._helping: set[asyncio.Task[None]] = set()
        self._dialling = 0

    async def close(self) -> None:
        """Stop dialling for others."""
        for task in self._helping:
            task.cancel()
        await asyncio.gather(*self._helping, return_exceptions=True)

    # ------------------------------------------------------------ as the asked member

    async def serve(self, channel: TlsChannel, asker: bytes, theirs: Hello) -> None:
        """Answer on a connection of kind REACH, behind the hello."""
        asked = await channel.receive_of(AskReach)
        assert isinstance(asked, AskReach)
        observed, wait_s = channel.remote_ip, 0.0
        answers: tuple[ReachAnswer, ...] = ()
        if asked.port and not channel.is_indirect:
            now_s = asyncio.get_running_loop().time()
            wait_s = self._limits.take((asker, theirs.life), observed, now_s)
            if not wait_s:
                dial = DialBack(0, asker, theirs.life, observed, asked.port)
                answers = await self._answers(dial, asked.dialled)
        await channel.send(ReachReport(observed, answers, time.time(), VERSION, wait_s))

    async def _answers(self, dial: DialBack, dialled: Collection[bytes]) -> tuple[ReachAnswer, ...]:
        """Dial, and let others dial, all at once; return what came back, ours first."""
        links = [self._links.link_of(peer) for peer in self._links.link_peers()]
        linked = [Candidate(x.peer_id, x.remote_ip) for x in links if x is not None and not x.relay]
        linked = [one for one in linked if one.peer != dial.asker]
        random.shuffle(linked)  # so that not the same ones are asked all the time
        ips = dict(linked)
        chosen = choose_helpers(linked, dial.ip, dialled)
        helped = (self._ask(peer, dial) for peer in chosen)
        own, *theirs = await asyncio.gather(self._dial(dial), *helped)
        answers = [ReachAnswer(self._links.peer_id, own.outcome, own.took_s)]
        for peer, found in zip(chosen, theirs, strict=True):
            answers.append(ReachAnswer(peer, found.outcome, found.took_s, ips[peer]))
        return tuple(answer for answer in answers if answer.outcome != UNABLE)

    async def _ask(self, peer: bytes, dial: DialBack) -> DialledBack:
        """Let a linked member dial. Whoever does not answer could not dial, as far as we know."""
        number = next(self._numbers)
        answer: asyncio.Future[DialledBack] = asyncio.get_running_loop().create_future()
        self._questions[number] = peer, answer
        asked = DialBack(number, dial.asker, dial.life, dial.ip, dial.port)
        try:
            if self._links.send(peer, asked):
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(HELPER_S):
                        return await answer
        finally:
            del self._questions[number]
        return DialledBack(number, UNABLE, 0.0)

    # ------------------------------------------------------------ as one that dials for others

    def on_message(self, link: ControlLink, msg: object) -> bool:
        """Take what has arrived on a control link if it is about dial-backs; return whether so."""
        if isinstance(msg, DialledBack):
            peer, answer = self._questions.get(msg.number, (b"", None))
            if answer is not None and peer == link.peer_id and not answer.done():
                answer.set_result(msg)
        elif isinstance(msg, DialBack):
            self._help(link, msg)
        else:
            return False
        return True

    def _help(self, link: ControlLink, dial: DialBack) -> None:
        loop = asyncio.get_running_loop()
        member, now_s = link.peer_id, loop.time()
        asker = member, dial.asker, dial.life
        # Through a relay nobody knows where it is: the relay could state an address near us.
        may = not link.relay and may_dial(dial.ip, link.remote_ip)
        if not may or self._limits.take(asker, dial.ip, now_s, member):
            self._links.send(link.peer_id, DialledBack(dial.number, UNABLE, 0.0))
            return

        async def help_out() -> None:
            self._links.send(link.peer_id, await self._dial(dial))

        task = loop.create_task(help_out())
        self._helping.add(task)
        task.add_done_callback(self._helping.discard)

    async def _dial(self, dial: DialBack) -> DialledBack:
        if self._dialling >= AT_ONCE_MAX:
            return DialledBack(dial.number, UNABLE, 0.0)
        began_s = time.monotonic()
        self._dialling += 1
        try:
            outcome = await self._outcome(dial)
        finally:
            self._dialling -= 1
        return DialledBack(dial.number, outcome, time.monotonic() - began_s)

    async def _outcome(self, dial: DialBack) -> str:
        try:
            attempt = self._links.attempt(format_address(dial.ip, dial.port))
        except AtollError:  # what was named is no address
            return UNABLE
        try:
            async with asyncio.timeout(DIAL_BACK_S):
                await self._links.prove(attempt, dial.asker)
        except (OSError, AtollError) as error:
            # What fails behind a proxy proves nothing: it may be the proxy's doing.
            return UNABLE if attempt.proxy is not None else _outcome_of(error, attempt)
        return OK


def _outcome_of(error: OSError | AtollError, attempt: Dial) -> str:
    """Return what a failed dial says of the address."""
    if isinstance(error, TimeoutError):
        return SILENT
    if isinstance(error, (ssl.SSLError, AtollError)):
        return OTHER
    if isinstance(error, ConnectionRefusedError):
        return REFUSED
    if error.errno in _OWN_TROUBLE:
        return UNABLE
    return OTHER if attempt.is_connected else SILENT


# ------------------------------------------------------------ as the asker


class Reached(NamedTuple):
    """Hold what a member has found out, and about it.

    ``ip``: its address. ``offset_s``: how far its clock is ahead of ours, good to half a
    round trip, ``rtt_s``.
    """

    asked: bytes
    ip: str
    observed: str
    answers: tuple[ReachAnswer, ...]
    wait_s: float = 0.0
    program: str = ""
    rtt_s: float = 0.0
    offset_s: float = 0.0


async def ask_reach(
    attempt: Dial,
    context: ssl.SSLContext,
    mine: Hello,
    asked: AskReach,
    expect_peer: bytes | None = None,
) -> Reached:
    """Ask the member at the address of ``attempt`` whether we can be dialled at ``asked.port``.

    ``context``: for TLS with the identity that is to be found at that port; ``mine``: a hello of
    kind REACH. Takes at most ASK_TIMEOUT_S. Raises ConnectErrors as a dial does, and the error of a
    refusal.
    """
    async with attempt.limited(ASK_TIMEOUT_S):
        channel, peer = await attempt.reach(context, expect_peer)
        try:
            report = await attempt.ask(channel, mine, asked, ReachReport)
        finally:
            channel.close()
    if isinstance(report, Refused):
        raise refusal_error(report, attempt.address)
    if not isinstance(report, ReachReport):
        raise RemoteProtocolError(f"{attempt.address} answered something else")
    try:
        observed = plain_ip(report.observed)
    except ValueError as error:
        what = f"{attempt.address} says that this peer comes from what is no IP address"
        raise RemoteProtocolError(what) from error
    answers = tuple(
        ReachAnswer(peer, one.outcome, one.took_s, channel.remote_ip) if one.by == peer else one
        for one in report.answers
    )
    offset_s = report.unix_s + channel.rtt_s / 2 - time.time()
    return Reached(
        peer,
        channel.remote_ip,
        observed,
        answers,
        report.wait_s,
        report.program,
        channel.rtt_s,
        offset_s,
    )
