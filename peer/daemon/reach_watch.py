"""Find out whether this peer can be dialled and tell everybody: what acts of reachability.py.

It lives in the event loop of the daemon. What it decides and remembers is in reachability.py, what
it says in reach_lines.py.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Any

from atoll.collectives.errors import AtollError, ConfigError
from atoll.peer.daemon.ports import ReachPort
from atoll.peer.daemon.reach_lines import PAGE, alone, describe_reach, founders_silent
from atoll.peer.daemon.reachability import (
    AskableMember,
    DialledBy,
    OthersReach,
    OwnReach,
    ReachState,
    leads_here,
)
from atoll.peer.membership import events as ev
from atoll.peer.membership.node import Node
from atoll.peer.membership.view import ARCHIVE, short
from atoll.peer.net.address_kind import LOOPBACK, NAME, PUBLIC, address_kind
from atoll.peer.net.connection_limits import plain_ip
from atoll.peer.net.connections import ConnectionManager
from atoll.peer.net.invite import format_address, parse_address
from atoll.peer.net.reach_messages import ReachTold

STEP_S = 0.25  # between two looks at what is to be done
# A founder that waits for others says what may be wrong when nobody has answered for so long: a
# dial to another continent, and two lost packets of it, take less.
FOUNDERS_SILENT_S = 4.0
# Whoever lost its links dials again first; then it is said that two outbound peers cannot meet.
ALONE_S = 3.0
RESOLVE_S = 2.0  # to look up what this peer advertises; a resolver may be slow or absent


class ReachWatch:
    """Ask members to dial this peer back, tell all others what came of it, and hear the same.

    It contains the peers that are known to be outbound.
    """

    def __init__(self, node: Node, host: ConnectionManager, daemon: ReachPort) -> None:
        self._node, self._host, self._daemon = node, host, daemon
        host.outbound = self
        self._loop = asyncio.get_running_loop()
        self.own = OwnReach()
        self._others = OthersReach()
        self._wake = asyncio.Event()
        self._fed = False  # what the machine was told
        self._told = ReachTold(False)  # ... and the others
        self._said: object = None  # what was news last
        self._has_said = False
        self._began_s = self._loop.time()
        self._said_founders = False
        self._apart_since_s: float | None = None
        self._alone = ""  # why this peer reaches nobody, as it was said

    def __contains__(self, peer: object) -> bool:
        return isinstance(peer, bytes) and self.is_outbound(peer)

    def is_outbound(self, peer: bytes) -> bool:
        """Return whether ``peer`` is known to be one that nobody can dial; this one too."""
        return self.own.outbound if peer == self._host.peer_id else self._others.is_outbound(peer)

    def address_of(self, peer: bytes, advertised: str) -> str:
        """Return where to dial ``peer``, which advertises an address.

        That is where others have dialled it; but what it advertises where its router is ours too:
        few routers let their own machines in by that way.
        """
        told = self._others.address_of(peer)
        if not told or self.own.found is None:
            return told or advertised
        same_router = told.rpartition(":")[0].strip("[]") == self.own.found.observed
        return advertised if same_router else told

    def _works_at(self) -> str:
        """Return where others have dialled this peer, if it advertises an address of no use there.

        Its router's address, that is, where the port is forwarded; else "".
        """
        host, port = parse_address(self._node.me.address)
        private = address_kind(host) not in (PUBLIC, NAME)
        reached = self.own.state is ReachState.REACHABLE and self.own.at not in ("", host)
        return format_address(self.own.at, port) if private and reached else ""

    # ------------------------------------------------------------ what the daemon reports

    def linked(self, peer: bytes) -> None:
        """Hear of a new control link: tell its peer about us, and learn from who dialled it."""
        self._daemon.send(peer, self._told)
        link = self._host.link_of(peer)
        now_s = self._loop.time()
        if link is not None and link.dialled_by == peer:
            self.own.dialled(peer, link.remote_ip, link.local_ip, now_s)
        elif link is not None:
            self.own.came_from(link.local_ip, now_s)
        self._wake.set()

    def unlinked(self, peer: bytes) -> None:
        self._others.unlinked(peer)
        self.own.link_lost(self._loop.time())

    def on_message(self, peer: bytes, message: ReachTold) -> None:
        self._others.told(peer, message)

    # ------------------------------------------------------------ its own course

    async def run(self) -> None:
        """Ask, say and tell, until cancelled."""
        while True:
            self._wake.clear()
            self._step()
            try:
                async with asyncio.timeout(STEP_S):
                    await self._wake.wait()
            except TimeoutError:
                continue

    def _step(self) -> None:
        now_s = self._loop.time()
        if self._node.known_view is not None:
            self._others.coordinator = self._node.known_view.coordinator
        self.own.tick(now_s)
        member = self.own.next_asked(self._askable(), self._own_ip(), now_s)
        if member is not None:
            self.own.asked(member.peer, now_s)
            self._daemon.spawn(self._ask(member))
        self._say()
        self._tell()
        self._say_alone(now_s)
        self._say_founders_silent(now_s)

    def _askable(self) -> list[AskableMember]:
        """Return the linked peers that can be dialled: first where we have dialled them before."""
        found = []
        for peer in self._host.link_peers():
            link = self._host.link_of(peer)
            if link is None:
                continue
            address = link.dialled_address
            if not address and not self._others.is_outbound(peer):
                address = link.hello.address
            if address:
                found.append(AskableMember(peer, address, link.remote_ip))
        return found

    def _own_ip(self) -> str:
        links = [self._host.link_of(peer) for peer in self._host.link_peers()]
        return next((link.local_ip for link in links if link is not None), "")

    async def _ask(self, member: AskableMember) -> None:
        host, port = parse_address(self._node.me.address)
        try:
            reached = await self._host.ask_reach(member.peer, member.address, port)
        except AtollError as error:
            why = f"{short(member.peer)} could not be asked: {error.what}"
            if self._others.is_outbound(member.peer):  # it has said so meanwhile
                why = "the others can only dial out, so that nobody can be asked"
            self.own.unanswered(why)
            self._wake.set()
            return
        if reached.wait_s:
            name = short(member.peer)
            self.own.unanswered(f"{name} was asked already and tries again in a minute")
        else:
            found = DialledBy(reached.asked, reached.observed, reached.answers)
            advertised, link = await _resolved(host), self._host.link_of(member.peer)
            own_ip = link.local_ip if link is not None else self._own_ip()
            leads = leads_here(advertised, reached.observed, own_ip)
            self.own.heard(found, leads_here=leads)
        self._wake.set()

    # ------------------------------------------------------------ saying and telling

    def _say(self) -> None:
        """Say what is known of this peer, once for each change."""
        own, found = self.own, self.own.found
        if own.state in (ReachState.UNKNOWN, ReachState.ASKED):
            return
        got = tuple(one.outcome for one in found.answers) if found is not None else ()
        news = own.state, own.at, own.why, got if own.state is ReachState.UNCONFIRMED else ()
        if news == self._said:
            return
        self._said = news
        # On one machine all can dial each other: nobody asks for more than a change.
        here = address_kind(parse_address(self._node.me.address)[0]) == LOOPBACK
        if not here or own.outbound or self._has_said:
            self._has_said = True
            for line in self.describe().split("\n"):
                self._daemon.note("reach", line, state=own.state.value)

    def describe(self) -> str:
        """Say whether others can dial this peer, how that is known, and what to do, in lines."""
        address = self._node.me.address
        return describe_reach(self.own, address, parse_address(address)[1])

    def _tell(self) -> None:
        """Tell the machine and all linked peers whether this peer is outbound, where that is news.

        The coordinator hands on what others have said of themselves.
        """
        outbound = self.own.outbound
        if outbound != self._fed:
            self._fed = outbound
            self._daemon.feed(ev.Reach(outbound))
        view = self._node.view
        leads = view is not None and self._node.coordinator is not None
        handed_on = self._others.hand_on(view.peers) if leads and view is not None else ((), ())
        told = ReachTold(outbound, handed_on[0], self._works_at(), handed_on[1])
        if told != self._told:
            self._told = told
            for peer in self._host.link_peers():
                self._daemon.send(peer, told)

    def _say_alone(self, now_s: float) -> None:
        """Say once that outbound peers cannot reach each other, when nobody is there between."""
        view, linked = self._node.known_view, set(self._host.link_peers())
        others = [p for p in view.peers if p != self._node.me.peer] if view is not None else []
        apart = [peer for peer in others if peer not in linked]
        between = [peer for peer in linked if not self._others.is_outbound(peer)]
        if not (self.own.outbound and apart) or between:
            self._apart_since_s, self._alone = None, ""
            return
        if self._apart_since_s is None:
            self._apart_since_s = now_s
        if now_s - self._apart_since_s >= ALONE_S and not self._alone:
            port = parse_address(self._node.me.address)[1]
            outbound = [short(peer) for peer in apart if self._others.is_outbound(peer)]
            silent = [short(peer) for peer in apart if not self._others.is_outbound(peer)]
            self._alone = alone(outbound, silent, port)
            self._daemon.note("reach", self._alone)

    def _say_founders_silent(self, now_s: float) -> None:
        """Say once what may be wrong where no other founder of the run has answered."""
        waits = self._node.bootstrap.waiting and not self._host.link_peers()
        if waits and not self._said_founders and now_s - self._began_s >= FOUNDERS_SILENT_S:
            self._said_founders = True
            port = parse_address(self._node.me.address)[1]
            self._daemon.note("reach", founders_silent(port))

    # ------------------------------------------------------------ what others ask

    def status(self) -> dict[str, Any]:
        """Return what is known of this peer, in plain types, for `atoll status`."""
        has_address = bool(self._node.me.address)
        return {
            "state": self.own.state.value,
            "outbound": self.own.outbound,
            "text": self._alone or self.describe().replace("\n", ". ") if has_address else "",
        }

    def invited_to(self) -> tuple[str, bytes]:
        """Return the address to put into an invite, and who is there.

        It is ours where that works; else that of a member that can be dialled. Raises ConfigError
        if there is none.
        """
        me = self._node.me
        if not self.own.outbound:
            return self._works_at() or me.address, me.peer
        view = self._node.known_view
        for member in view.members if view is not None else ():
            link = self._host.link_of(member.peer)
            if link is None or member.role == ARCHIVE or self.is_outbound(member.peer):
                continue
            address = link.dialled_address or member.address
            if address:
                return address, member.peer
        raise ConfigError(
            "nobody can join through this peer: it is outbound, and has no link to a member that"
            " can be dialled",
            fix=f"open its port or take the invite of another member; see {PAGE}",
        )


async def _resolved(host: str) -> tuple[str, ...]:
    """Return the IP addresses of a host, or its name if they cannot be found out in time."""
    if address_kind(host) != NAME:
        return (plain_ip(host),)
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(RESOLVE_S):
            found = await loop.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return (host,)
    return tuple(str(where[0]) for *_, where in found)
