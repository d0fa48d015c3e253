"""Find out whether this peer can be dialled and tell everybody: what acts of reachability.py.

It lives in the event loop of the daemon. What it decides and remembers is in reachability.py, what
it says in reach_lines.py.
"""

from __future__ import annotations

import asyncio
from typing import Any

from atoll.collectives.errors import AtollError, ConfigError
from atoll.peer.daemon.port_mapper import PortMapper
from atoll.peer.daemon.ports import ReachPort
from atoll.peer.daemon.reach_lines import (
    PAGE,
    alone,
    another_router,
    describe_reach,
    founders_silent,
    relay_wanted,
)
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
from atoll.peer.net.address_kind import LOOPBACK, NAME, PRIVATE, PUBLIC, address_kind
from atoll.peer.net.connection_limits import plain_ip
from atoll.peer.net.connections import ConnectionManager
from atoll.peer.net.dial import resolve
from atoll.peer.net.invite import format_address, is_address, parse_address
from atoll.peer.net.reach_messages import ReachTold
from atoll.peer.punch.service import Observer
from atoll.peer.relay.choice import FAULT_S, RelayChoice

# A run lacks a relay if it has lacked one for so long: peers come one by one.
WANTING_S = 10.0
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

    def __init__(
        self,
        node: Node,
        host: ConnectionManager,
        daemon: ReachPort,
        *,
        advertises: bool = False,
        mapper: PortMapper | None = None,
    ) -> None:
        """Begin to watch. ``advertises``: the user has said where this peer can be dialled.

        ``mapper``: who has a router forward the port, if anybody does.
        """
        self._mapper = mapper
        self._said_routers = ""
        self._node, self._host, self._daemon = node, host, daemon
        # Behind a proxy an address of this machine leads nowhere, public as it may be: where others
        # see it, at the proxy's address, is all that there is to try.
        self._guessed = host.proxy is not None and not advertises
        host.outbound = host.known_relays = self
        self._choice = RelayChoice(host.peer_id)
        self._loop = asyncio.get_running_loop()
        self.own = OwnReach()
        self._others = OthersReach()
        self._wake = asyncio.Event()
        self._fed = False  # what the machine was told
        self._relayed = ev.Relayed()  # ... of links through relays
        self._relay = int(host.relay_bytes_per_s)
        self._told = ReachTold(False, relay=self._relay)  # ... and the others
        self._said: object = None  # what was news last ...
        self._said_text = ""  # ... and in which words
        self._wanting_since_s: float | None = None
        self._wanted = ""  # what was said last of relays that the run lacks
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

    def relays_to(self, peer: bytes, *, bulk: bool) -> list[bytes]:
        """Return through whom ``peer`` may be reached, the best first.

        ``bulk``: with data. Those are peers that this one has a connection of its own to; whether
        they have one to ``peer`` they say when they are asked.
        """
        links = [self._host.link_of(one) for one in self._host.link_peers()]
        direct = [x.peer_id for x in links if x is not None and not (x.relay or x.is_punched)]
        able = [one for one in direct if not bulk or self._others.relay_bytes_per_s(one)]
        return self._choice.rank(peer, able, self._loop.time())

    def relays(self) -> dict[bytes, float]:
        """Return who relays data, as far as this peer knows, and how much, in bytes per second."""
        rates = {one: self._others.relay_bytes_per_s(one) for one in self._host.link_peers()}
        rates[self._host.peer_id] = self._relay
        return {one: float(rate) for one, rate in rates.items() if rate}

    def blame_relay(self, relay: bytes, why: str, peer: bytes) -> None:
        """Avoid a relay for a while, and say so once: it has damaged what it carries.

        ``peer``: on the way to whom, which may have done so itself.
        """
        if self._choice.blame(relay, self._loop.time(), peer):
            to, minutes = short(peer), FAULT_S / 60
            what = f"relay {short(relay)} is avoided to {to} for {minutes:.0f} min: {why}"
            self._daemon.note("relay", what, peer=short(relay))

    def _works_at(self) -> str:
        """Return where others have dialled this peer, if it advertises an address of no use there.

        Its router's address, that is, where the port is forwarded; else "".
        """
        host, _ = parse_address(self._node.me.address)
        private = address_kind(host) not in (PUBLIC, NAME)
        reached = self.own.state is ReachState.REACHABLE and self.own.at not in ("", host)
        return format_address(self.own.at, self._dialled_port()) if private and reached else ""

    def _dialled_port(self) -> int:
        """Return the port at which others try this peer: its own, or one that a router forwards."""
        mapping = self._mapper.mapping if self._mapper is not None else None
        port = parse_address(self._node.me.address)[1]
        return mapping.outer_port if mapping is not None else port

    def _mapped_at(self) -> str:
        """Return the address that a router forwards to this peer; "" if none does."""
        mapping = self._mapper.mapping if self._mapper is not None else None
        return format_address(mapping.outer_ip, mapping.outer_port) if mapping is not None else ""

    def is_mapped(self, peer: bytes) -> bool:
        """Return whether a router forwards what is dialled of ``peer``, and may forget it."""
        return self._others.is_mapped(peer)

    # ------------------------------------------------------------ what the daemon reports

    def linked(self, peer: bytes) -> None:
        """Hear of a new control link: tell its peer about us, and learn from who dialled it."""
        self._daemon.send(peer, self._told)
        link = self._host.link_of(peer)
        now_s = self._loop.time()
        is_apart = link is not None and (link.relay or link.is_punched)
        if link is not None and (is_apart or (link.is_proxied and link.dialled_by == peer)):
            pass  # whoever has come through a relay or so has not dialled this peer's port; nor is
            # it known from where somebody has come whom a proxy brings
        elif link is not None and link.dialled_by == peer:
            self.own.dialled(peer, link.remote_ip, link.local_ip, now_s)
        elif link is not None:
            self.own.came_from(link.local_ip, now_s)
        self._feed_relayed()  # before the machine hears of the link: nothing is planned over it
        self._wake.set()

    def unlinked(self, peer: bytes) -> None:
        self._others.unlinked(peer)
        self.own.link_lost(self._loop.time())

    def on_message(self, peer: bytes, message: ReachTold) -> None:
        self._others.told(peer, message)
        self._feed_relayed()

    # ------------------------------------------------------------ its own course

    async def run(self) -> None:
        """Ask, say and tell, until cancelled."""
        host, port = parse_address(self._node.me.address)
        if self._mapper is not None and address_kind(host) == PRIVATE:
            self._daemon.spawn(self._mapper.run(port, self._on_mapping))
            await asyncio.sleep(0)  # it has begun
        while True:
            self._wake.clear()
            self._step()
            try:
                async with asyncio.timeout(STEP_S):
                    await self._wake.wait()
            except TimeoutError:
                continue

    def _on_mapping(self) -> None:
        self.own.mapping_changed(self._loop.time())
        self._wake.set()

    async def close(self) -> None:
        """Have the router forward nothing to this peer any more."""
        if self._mapper is not None:
            await self._mapper.close()

    def _step(self) -> None:
        now_s = self._loop.time()
        if self._node.known_view is not None:
            self._others.coordinator = self._node.known_view.coordinator
        self.own.tick(now_s)
        waits = self._mapper is not None and self._mapper.holds(now_s)
        member = self.own.next_asked(self._askable(), self._own_ip(), now_s)
        if member is not None and not waits:
            self.own.asked(member.peer, now_s)
            self._daemon.spawn(self._ask(member))
        self._say()
        self._tell()
        self._feed_relayed()
        self._say_alone(now_s)
        self._say_founders_silent(now_s)
        self._say_relay_wanted(now_s)

    def _askable(self) -> list[AskableMember]:
        """Return the linked peers that can be dialled: first where we have dialled them before."""
        found = []
        for peer in self._host.link_peers():
            link = self._host.link_of(peer)
            if link is None or link.relay or link.is_punched:
                continue
            is_outbound = not link.dialled_address and self._others.is_outbound(peer)
            address = "" if is_outbound else link.address
            if is_address(address):
                found.append(AskableMember(peer, address, link.remote_ip))
        return found

    def observers(self) -> list[Observer]:
        """Return who can say where this peer comes from: linked peers that can be dialled."""
        found = []
        for member in self._askable():
            link = self._host.link_of(member.peer)
            _, port = parse_address(member.address)
            if link is not None and link.local_ip and port and not link.is_proxied:
                found.append(Observer(member.peer, member.ip, port, link.local_ip))
        return found

    def _own_ip(self) -> str:
        links = [self._host.link_of(peer) for peer in self._host.link_peers()]
        return next((x.local_ip for x in links if x is not None and not x.relay), "")

    async def _ask(self, member: AskableMember) -> None:
        host, port = parse_address(self._node.me.address)[0], self._dialled_port()
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
            leads = self._guessed or leads_here(advertised, reached.observed, own_ip)
            self.own.heard(found, leads_here=leads)
            self._say_routers(reached.observed)
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
        text = self.describe()
        is_same, self._said, self._said_text = text == self._said_text, news, text
        if is_same:
            return
        # On one machine all can dial each other: nobody asks for more than a change.
        here = address_kind(parse_address(self._node.me.address)[0]) == LOOPBACK
        if not here or own.outbound or self._has_said:
            self._has_said = True
            for line in text.split("\n"):
                self._daemon.note("reach", line, state=own.state.value)

    def describe(self) -> str:
        """Say whether others can dial this peer, how that is known, and what to do, in lines."""
        address = self._node.me.address
        mapped = bool(self._mapped_at())
        port, relays = self._dialled_port(), bool(self._relay)
        proxied = self._host.proxy is not None
        return describe_reach(
            self.own, address, port, mapped=mapped, relays=relays, proxied=proxied
        )

    def _tell(self) -> None:
        """Tell the machine and all linked peers whether this peer is outbound, where that is news.

        The coordinator hands on what others have said of themselves.
        """
        outbound = self.own.outbound
        if outbound != self._fed:
            self._fed = outbound
            self._daemon.feed(ev.Reach(outbound))
            if outbound and self._mapper is not None:
                self._mapper.renew()
        view = self._node.view
        leads = view is not None and self._node.coordinator is not None
        handed_on = self._others.hand_on(view.peers) if leads and view is not None else ((), ())
        at = self._works_at()
        is_mapped = bool(at and self._mapped_at())
        told = ReachTold(outbound, handed_on[0], at, handed_on[1], self._relay, is_mapped)
        if told != self._told:
            self._told = told
            for peer in self._host.link_peers():
                self._daemon.send(peer, told)

    def _say_routers(self, observed: str) -> None:
        """Say once that a port is forwarded in vain, where there is another router."""
        mapping = self._mapper.mapping if self._mapper is not None else None
        in_vain = mapping is not None and self.own.outbound and mapping.outer_ip != observed
        line = another_router(mapping.outer_ip, observed) if mapping and in_vain else ""
        if line and line != self._said_routers:
            self._daemon.note("reach", line)
        self._said_routers = line or self._said_routers

    def _feed_relayed(self) -> None:
        """Tell the machine to whom links lead through a relay, and data or not, when that is news.

        A direct link may have taken the place of a relayed one, without a new link.
        """
        links = [self._host.link_of(peer) for peer in self._host.link_peers()]
        peers = [link.peer_id for link in links if link is not None and link.relay]
        data = frozenset(peer for peer in peers if self._host.bulk_routes(peer))
        relayed = ev.Relayed(frozenset(peers) - data, data)
        if relayed != self._relayed:
            self._relayed = relayed
            self._daemon.feed(relayed)

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

    def _say_relay_wanted(self, now_s: float) -> None:
        """Say once what relay the run lacks, when that has been so for a while."""
        view = self._node.view
        voters = view.peers if view is not None else ()
        outbound = [peer for peer in voters if self.is_outbound(peer)]
        relays = [peer for peer in voters if peer not in outbound]
        bulk = sum(self._relays_data(peer) for peer in relays)
        text = relay_wanted(len(outbound), len(voters), list(map(short, relays)), bulk)
        if self.own.outbound and not any(map(self._needs_relay, outbound)):
            text = ""  # they have met directly, as far as this peer is concerned
        if not text:
            self._wanting_since_s = None
        elif self._wanting_since_s is None:
            self._wanting_since_s = now_s
        elif now_s - self._wanting_since_s >= WANTING_S and text != self._wanted:
            self._wanted = text
            self._daemon.note("reach", text)

    def _needs_relay(self, peer: bytes) -> bool:
        """Return whether this peer has no way to ``peer``, or one through a relay."""
        link = self._host.link_of(peer)
        return peer != self._node.me.peer and (link is None or bool(link.relay))

    def _relays_data(self, peer: bytes) -> bool:
        own = peer == self._node.me.peer
        return bool(self._relay if own else self._others.relay_bytes_per_s(peer))

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

    def _mapped_in_public(self) -> str:
        """Return what a router forwards, if others may see it: perhaps nobody has tried it yet."""
        at = self._mapped_at()
        return at if at and address_kind(at.rpartition(":")[0]) == PUBLIC else ""

    def invited_to(self) -> tuple[str, bytes]:
        """Return the address to put into an invite, and who is there.

        It is ours where that works; else that of a member that can be dialled. Raises ConfigError
        if there is none.
        """
        me = self._node.me
        if not self.own.outbound:
            return self._works_at() or self._mapped_in_public() or me.address, me.peer
        view = self._node.known_view
        for member in view.members if view is not None else ():
            link = self._host.link_of(member.peer)
            is_direct = link is not None and not (link.relay or link.is_punched)
            if link is None or not is_direct or member.role == ARCHIVE:
                continue
            if self.is_outbound(member.peer):
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
    try:
        async with asyncio.timeout(RESOLVE_S):
            found = await resolve(host, 0)
    except OSError:
        return (host,)
    return tuple(str(where[0]) for _, where in found)
