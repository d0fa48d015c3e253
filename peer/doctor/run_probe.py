"""Go the way into a run as far as it leads, without joining, and ask its member. Decides nothing.

An identity is made for this and thrown away, so a home is neither needed nor changed, and no member
takes this machine for the peer that may run on it.
"""

from __future__ import annotations

import socket
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Final, NamedTuple

from atoll.collectives.errors import (
    AtollError,
    ConfigError,
    ConnectError,
    RemoteProtocolError,
    VersionError,
)
from atoll.collectives.units import duration
from atoll.collectives.version import VERSION
from atoll.peer.cli.admission import entry_of_join
from atoll.peer.daemon.reachability import DialledBy
from atoll.peer.doctor.facts import MemberAnswer, ProxyFacts, RateFacts, RunFacts, Trouble
from atoll.peer.doctor.run_checks import REFUSED
from atoll.peer.net.byte_counts import ByteCounts
from atoll.peer.net.certs import RunTls, run_tls
from atoll.peer.net.dial import ADMISSION, DIAL_TIMEOUT_S, Dial, greet_proxy
from atoll.peer.net.examination import ClockReading, measure, read_clock
from atoll.peer.net.hello import (
    EXAMINE,
    PROBE,
    PROTOCOL_MAX,
    PROTOCOL_MIN,
    REACH,
    Hello,
    Refused,
    refusal_error,
)
from atoll.peer.net.identity import Home, load_key
from atoll.peer.net.invite import Invite
from atoll.peer.net.listener import Listener
from atoll.peer.net.proxy import Proxy
from atoll.peer.net.reach import ask_reach
from atoll.peer.net.reach_messages import AskReach
from atoll.peer.net.tls import TlsChannel

# Of each direction, with the dial: a member ends an examination after five seconds anyway.
RATE_TIMEOUT_S: Final = 2 * DIAL_TIMEOUT_S


class _Way(NamedTuple):
    """Name the member to be asked, who asks, and the proxy that leads there, if any."""

    invite: Invite
    tls: RunTls
    proxy: Proxy | None

    def dial(self) -> Dial:
        invite = self.invite
        return Dial(invite.address, invite.run, self.tls.tag, proxy=self.proxy)


async def ask_proxy(proxy: Proxy) -> ProxyFacts:
    """Return whether a proxy lets this machine in; nothing is connected through it."""
    began_s, name = time.monotonic(), str(proxy)
    try:
        await greet_proxy(proxy)
    except ConnectError as error:
        return ProxyFacts(name, problem=error.what, fix=error.fix)
    return ProxyFacts(name, time.monotonic() - began_s)


async def ask_run(
    invite: Invite,
    home: Path,
    listen: tuple[str, int],
    with_rates: bool,
    proxy: Proxy | None = None,
) -> RunFacts:
    """Return what is found on the way into the run of an invite, through a proxy if there is one.

    ``listen``: where a daemon of this machine would; it is listened there while members dial back.
    """
    with tempfile.TemporaryDirectory(prefix="atoll-doctor-") as folder:
        with Home.open(Path(folder) / "home") as me:
            tls = run_tls(me, invite.secret)
            problem, fix = invite_trouble(invite, home, me)
            facts = RunFacts(
                run=invite.run,
                host=invite.host,
                address=invite.address,
                tag=tls.tag,
                names_peer=bool(invite.fingerprint),
                proxy=str(proxy) if proxy is not None else "",
                invite_problem=problem,
                invite_fix=fix,
            )
            way = _Way(invite, tls, proxy)
            facts, member = await _ask_member(facts, way)
            if facts.answer is not None:
                dialled, why_not = await _dialled_back(way, listen, member)
                facts = replace(facts, dialled=dialled, not_dialled=why_not)
            if facts.answer is not None and with_rates:
                up = await _rate(way, up=True)
                facts = replace(facts, up=up, down=await _rate(way, up=False))
            return facts


def invite_trouble(invite: Invite, home: Path, other: Home) -> tuple[str, str]:
    """Return why `atoll join` would refuse this invite, and what to do; ("", "") if it would not.

    ``other`` is an identity for a home that has none yet.
    """
    try:
        if (home / "identity.key").exists():  # a daemon may hold it: it is read, not locked
            own = Home(home, -1, load_key(home / "identity.key"))
            record = own.load_run()
            entry_of_join(invite, own, record)
        else:
            record = None
            entry_of_join(invite, other, None)
        if record is None and invite.authority:
            return _expired(invite)
    except (ConfigError, ConnectError) as error:
        return error.what, error.fix
    except OSError:
        return "", ""  # the line of the home says so
    return "", ""


def _expired(invite: Invite) -> tuple[str, str]:
    """Return whether the time of an authority's invite is over, by this machine's clock."""
    from atoll.peer.authority.grants import Grant

    over_s = Grant.parse(invite.grant, invite.authority).not_after_s
    late_s = time.time() - over_s
    if not over_s or late_s <= 0:
        return "", ""
    fix = "ask whoever runs the authority for a new one, and compare the clocks"
    return f"this invite has expired {duration(late_s)} ago, by this machine's clock", fix


async def _ask_member(facts: RunFacts, way: _Way) -> tuple[RunFacts, bytes]:
    """Add how far the dial came, and what the member says; return its id, too."""
    dial = way.dial()
    answer, trouble, member = None, None, b""
    try:
        async with dial.limited():
            channel, member = await _introduced(dial, way, EXAMINE)
            try:
                answer = _answer_of(await read_clock(channel))
            finally:
                channel.close()
    except AtollError as error:
        silent = isinstance(error, ConnectError) and error.stage == ADMISSION
        trouble = (await _older(way) if silent else None) or _trouble_of(error)
    facts = replace(
        facts,
        found=dial.addresses,
        resolve_s=dial.resolve_s,
        connect_s=dial.connect_s,
        answer=answer,
        trouble=trouble,
    )
    return facts, member


async def _introduced(dial: Dial, way: _Way, kind: str) -> tuple[TlsChannel, bytes]:
    """Return a connection to the member on which our hello has been said, and the member's id."""
    expected = way.invite.fingerprint or None
    channel, member = await dial.reach(way.tls.client, expect_fingerprint=expected)
    await dial.say(channel, _hello(way.invite, kind))
    return channel, member


def _hello(invite: Invite, kind: str) -> Hello:
    life = time.time_ns()
    return Hello(PROTOCOL_MIN, PROTOCOL_MAX, invite.run, kind, 0, "", program=VERSION, life=life)


async def _older(way: _Way) -> Trouble | None:
    """Return what a member of an older version says, which does not know this kind of hello."""
    dial = way.dial()
    try:
        async with dial.limited():
            channel, _ = await _introduced(dial, way, PROBE)
            try:
                answer = await channel.receive()
            finally:
                channel.close()
    except AtollError:
        return None  # it has nothing against a hello that it knows
    return (
        _trouble_of(refusal_error(answer, way.invite.address))
        if isinstance(answer, Refused)
        else None
    )


def _trouble_of(error: AtollError) -> Trouble:
    stage = error.stage if isinstance(error, ConnectError) else ""
    stage = "version" if isinstance(error, VersionError) else stage or REFUSED
    return Trouble(stage, error.what, error.fix)


def _answer_of(reading: ClockReading) -> MemberAnswer:
    outline = reading.outline
    return MemberAnswer(
        program=outline.program,
        protocol=outline.protocol,
        observed=outline.observed,
        rtt_s=reading.rtt_s,
        clock_offset_s=reading.offset_s,
        clock_error_s=reading.rtt_s / 2,
        elements=outline.elements,
        state_bytes=outline.state_bytes,
        daemon_bytes=outline.daemon_bytes,
        method=outline.method,
        codec=outline.codec,
    )


async def _rate(way: _Way, *, up: bool) -> RateFacts:
    """Return how fast bytes go to the member, or come from it."""
    dial = way.dial()
    try:
        async with dial.limited(RATE_TIMEOUT_S):
            channel, _ = await _introduced(dial, way, EXAMINE)
            try:
                return RateFacts(*await measure(channel, up=up))
            finally:
                channel.close()
    except AtollError as error:
        return RateFacts(problem=error.what)


# ---------------------------------------------------------------- dial-back


class _Door:
    """Let members in who dial back: they want this identity to be proved, and say no more."""

    def __init__(self) -> None:
        self.counts = ByteCounts()

    async def greet(self, channel: TlsChannel, peer_id: bytes, theirs: Hello) -> Refused | None:
        return None

    async def accept_stream(self, sock: socket.socket) -> None:
        raise RemoteProtocolError("nobody streams to a doctor")

    async def accept_circuit(self, sock: socket.socket) -> None:
        raise RemoteProtocolError("a doctor relays for nobody")

    async def accept_observed(self, sock: socket.socket) -> None:
        raise RemoteProtocolError("a doctor observes nobody")

    def is_member_ip(self, ip: str) -> bool:
        return False

    def log(self, line: str) -> None:
        """Write nothing: what members met comes in their answer."""


async def _dialled_back(
    way: _Way, listen: tuple[str, int], member: bytes
) -> tuple[DialledBy | None, str]:
    """Return what members came to that dialled this machine, or None and why nobody did."""
    listener = Listener(way.tls.server, _Door())
    dial = way.dial()
    try:
        _, port = listener.open(*listen)
        asked = AskReach(port, (member,))
        mine = _hello(way.invite, REACH)
        found = await ask_reach(dial, way.tls.client, mine, asked, member)
    except ConfigError:
        return None, "the port is taken; if an atoll runs there, its `atoll status` knows"
    except AtollError as error:
        return None, error.what
    finally:
        await listener.close()
    if found.wait_s:
        return None, f"members have dialled for others here; ask again in {duration(found.wait_s)}"
    return DialledBy(member, found.observed, found.answers), ""
