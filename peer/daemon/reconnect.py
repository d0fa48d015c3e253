"""Keep links: dial members without one, outside a view any address of the run; probe the silent.

A router that has forgotten a connection, or has got another address, drops what comes on it and
tells nobody. Such a link is replaced by a new one, which only who has dialled it can do, long
before TCP gives it up; so is a data stream on which nothing gets through while the link does.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from atoll.collectives.errors import (
    AddressFullError,
    AdmissionError,
    ConnectError,
    IdentityInUseError,
)
from atoll.peer.daemon.options import DaemonOptions
from atoll.peer.daemon.ports import Log, ReconnectPort
from atoll.peer.links.tcp_info import silence_s
from atoll.peer.membership.node import Node
from atoll.peer.membership.view import View, is_quorum, short
from atoll.peer.net.connections import ConnectionManager
from atoll.peer.net.dial import ADMISSION, IDENTITY, SECRET, UNREACHED
from atoll.peer.net.identity import Home
from atoll.peer.net.link import ControlLink
from atoll.peer.net.punched import meeting, parse_meeting
from atoll.peer.net.relayed import Route, parse_route
from atoll.peer.streams.manager import Streams

REDIAL_S = 0.5  # members without a control link are dialled this often at first ...
REDIAL_MAX_S = 8.0  # ... and this seldom when they do not answer
# Members of the last view are dialled more often: after a power cut, in which only one of two can
# dial, the run waits for it.
REDIAL_MEMBER_MAX_S = 1.0
ADDRESSES_MAX = 8192  # remembered pauses: two for each peer that a run may have
FIRST_DIALS = 8  # at once, to get into the run: a home remembers up to 64 addresses
# Dials under way at a time: as many at first as a machine has time for in a second; at least two,
# so that one which hangs stops nothing; at most one to each member of a large run.
DIALS_FIRST, DIALS_MIN, DIALS_MAX = 16, 2, 128
DIALS_MORE, DIALS_FEWER = 0.5, 0.7  # what is added for an answer, and what is left for none
# Nothing of a link has been acknowledged for so long: it is dialled again. The kernel has then sent
# it three times or more, while members answer each other's heartbeats four times a second.
SILENT_S = 1.5
# Two that cannot dial each other, as far as is known, meet at a relay when they have been without a
# link for so long; who does not know that tries to dial first.
RELAY_SOON_S, RELAY_LATE_S = 0.5, 1.0
# The peer with the smaller id asks the relay; the other one only if it has not.
RELAY_TURN_S = 1.5
# Whoever is not reached directly is dialled again so often: a port may have been opened.
DIRECT_AGAIN_S = 60.0
# ... of a data stream, which a round may use: later, as losses of a busy path may look like this.
STREAM_SILENT_S = 3.0
PROBE_TRIES = 4
PROBE_PAUSE_S = 0.01  # and twice as long each time: 70 ms in all between the tries
PROBE_MIN_S = 0.05  # the shortest time that a living peer gets to answer


def is_refusal(error: BaseException | None, *, returns: bool = False) -> bool:
    """Return whether a run will not have this peer, however often it asks.

    An address from which no more peers may come has room again when one of them is gone. To who
    ``returns``, another secret says nothing of its run: the address is somebody else's by now.
    """
    if not isinstance(error, AdmissionError) or isinstance(error, AddressFullError):
        return False
    return not (returns and error.stage == SECRET)


def went_unheard(error: ConnectError) -> bool:
    """Return whether somebody took the connection, and had no time for it, or no place.

    Whoever has as many newcomers as it admits at once closes the connections of others unheard.
    """
    is_unheard = isinstance(error.__cause__, TimeoutError | ConnectionError | ssl.SSLEOFError)
    return is_unheard and error.stage != "" and error.stage not in UNREACHED


class KnownAddresses:
    """Keep whom to ask for the run, outside a view and after a restart: the home remembers them."""

    def __init__(self, home: Home, options: DaemonOptions, node: Node, log: Log) -> None:
        self._home, self._options, self._node, self._log = home, options, node, log
        self._known: tuple[str, ...] = ()  # as the home has them
        self._saving = asyncio.Lock()

    def contacts(self) -> tuple[str, ...]:
        """Return the addresses of the run to try outside a view, our own left out."""
        known = self._known or self._options.contacts
        if self.seeks():
            known = (*known, *self._options.contacts)
        own = self._node.me.address
        return tuple(address for address in dict.fromkeys(known) if address != own)

    def given(self) -> tuple[str, ...]:
        """Return where the run is now, as whoever has started this peer again says."""
        return self._options.contacts if self._options.returns else ()

    def seeks(self) -> bool:
        """Return whether there may be others of the run that no view names."""
        return self._node.bootstrap.waiting or self._options.resume is not None

    async def save_view(self, view: View) -> None:
        """Save whom to ask after a restart. Our own address stands for "this run exists"."""
        me = self._node.me
        others = [m.address for m in view.members if m.peer != me.peer and m.address]
        await self.save((*others, me.address))

    async def save(self, known: tuple[str, ...]) -> None:
        if known == self._known:
            return
        self._known = known
        async with self._saving:  # one at a time: the last one that is asked for stays
            try:
                await asyncio.to_thread(self._home.save_run, self._options.record(self._known))
            except OSError as error:  # a full disk must not end the training
                where = self._home.path
                self._log.note("disk", f"cannot save the run's addresses in {where}: {error}")


class DialWindow:
    """Limit how many dials are under way, by what came of the last ones, as TCP limits packets.

    Each handshake takes both ends some milliseconds of a processor. A hundred daemons that all dial
    each other at once on one machine need longer for that than anybody waits for an answer: then
    every dial comes to nothing, and all begin anew.
    """

    def __init__(self) -> None:
        self._size, self._under_way = float(DIALS_FIRST), 0

    @property
    def has_room(self) -> bool:
        return self._under_way < int(self._size)

    def begin(self) -> None:
        self._under_way += 1

    def ended(self, *, is_linked: bool, unheard: bool) -> None:
        """Take in what came of a dial; ``unheard``: somebody was there and had no time for it."""
        self._under_way -= 1
        if is_linked:
            self._size = min(self._size + DIALS_MORE, DIALS_MAX)
        elif unheard:
            self._size = max(self._size * DIALS_FEWER, DIALS_MIN)


class KnownReach(Protocol):
    """Know which peers cannot be dialled, and where the others can."""

    def __contains__(self, peer: object, /) -> bool:
        """Return whether a peer is outbound: nobody can dial it."""

    def is_outbound(self, peer: bytes, /) -> bool:
        """Return whether nobody can dial a peer; this one too."""

    def is_mapped(self, peer: bytes, /) -> bool:
        """Return whether a router forwards what is dialled of a peer, and may forget it."""

    def address_of(self, peer: bytes, advertised: str, /) -> str:
        """Return where to dial a peer, which advertises an address."""

    def relays_to(self, peer: bytes, /, *, bulk: bool) -> Sequence[bytes]:
        """Return through whom a peer may be reached, the best first."""

    def blame_relay(self, relay: bytes, why: str, peer: bytes, /) -> None:
        """Hear that what came through a relay was not what the other end, a peer, had sent."""


class Reconnector:
    """Keep this peer linked to the members of its run, in the event loop of the daemon."""

    def __init__(
        self,
        host: ConnectionManager,
        streams: Streams,
        reach: KnownReach,
        daemon: ReconnectPort,
    ) -> None:
        self._host = host
        self._streams = streams
        self._reach = reach
        self._daemon = daemon
        self._pauses: dict[str, tuple[float, float]] = {}  # address -> dialled when, delay
        self._answered: dict[str, bytes] = {}  # address -> who was there last
        self._failed: dict[str, ConnectError] = {}  # address -> why nobody was
        self._window = DialWindow()
        self._waiting: dict[str, tuple[bytes | None, bool]] = {}  # dials for which it had no room
        self._apart_since_s: dict[bytes, float] = {}  # members without a link
        self._direct_again_s: dict[bytes, float] = {}  # members linked through a relay
        self._silent_since_s = float("inf")  # since when a link is silent
        self._probes: dict[bytes, asyncio.Task[str]] = {}  # that are under way

    def reach_any(
        self, addresses: Sequence[str], fingerprint: bytes | None
    ) -> asyncio.Future[None]:
        """Return a future that is done with the first control link to any of these addresses.

        FIRST_DIALS of them are tried at once. If there is no link it fails as the first address
        did, whose peer must have ``fingerprint``, or as one did where somebody is too busy to
        answer; with IdentityInUseError it fails at once. Dials that are under way then go on.
        """
        waiting = deque(dict.fromkeys(addresses))
        first, count = addresses[0], len(waiting)
        errors: dict[str, ConnectError] = {}
        reached: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def fail(error: ConnectError | IdentityInUseError) -> None:
            if not reached.done():
                reached.set_exception(error)

        async def dial_in_turn() -> None:
            while waiting and not reached.done():
                address = waiting.popleft()
                expected = fingerprint if address == first else None
                try:
                    await self._host.dial(address, expect_fingerprint=expected)
                except ConnectError as error:
                    errors[address] = error
                    if len(errors) == count:
                        busy = [each for each in errors.values() if went_unheard(each)]
                        fail(errors[first] if is_refusal(errors[first]) or not busy else busy[0])
                except IdentityInUseError as error:
                    fail(error)
                else:
                    if not reached.done():
                        reached.set_result(None)

        for _ in range(min(FIRST_DIALS, count)):
            self._daemon.spawn(dial_in_turn())
        return reached

    async def run(self, node: Node, addresses: KnownAddresses) -> None:
        """Keep a control link to every member, or outside a view to known addresses.

        Outside a view one to any of them is enough; while this peer seeks others to found a run
        with or to meet again, it keeps one to all of them.
        """
        while True:
            view, last = node.view, node.known_view
            self._replace_silent()
            self._meet_directly()
            linked = self._host.link_peers()
            if view is not None:
                self._dial_members(view, addresses.given())
                self._meet_at_relays(view)
                if not linked and (refusal := self._refused_by_run(view)) is not None:
                    self._daemon.stop(refusal)
            if addresses.seeks() or (view is None and not linked):
                members = {member.address for member in last.members} if last else set[str]()
                for address in self.unanswered(addresses.contacts()):
                    most_s = REDIAL_MEMBER_MAX_S if address in members else REDIAL_MAX_S
                    self.dial(None, address, most_s=most_s)
            await asyncio.sleep(REDIAL_S)

    def _dial_members(self, view: View, given: Sequence[str]) -> None:
        """Dial the members without a link; those that have moved, at addresses that are ``given``.

        Whoever answers there says who it is. So does another peer at the old address of a member:
        machines that were started again together may have each other's.
        """
        linked, most_s = self._host.link_peers(), REDIAL_MEMBER_MAX_S
        missing = [m for m in view.members if m.peer not in {*linked, self._host.peer_id}]
        for member in missing:
            failed = self._failed.get(member.address)
            if failed is None or failed.stage != IDENTITY:
                self.dial(member.peer, member.address, most_s=most_s)
            elif self.unanswered([member.address]):
                self.dial(None, member.address, most_s=most_s)
        former = {member.address for member in view.members}
        for address in self.unanswered(given) if missing else ():
            if address not in former:
                self.dial(None, address, most_s=most_s)

    def _meet_at_relays(self, view: View) -> None:
        """Reach members without a link through relays, and keep a second relay for each.

        Who is reached so is dialled now and then: a direct link takes the place of any other.
        """
        now_s, me = asyncio.get_running_loop().time(), self._host.peer_id
        linked = self._host.link_peers()
        others = [member for member in view.members if member.peer != me]
        apart = [member.peer for member in others if member.peer not in linked]
        self._apart_since_s = {peer: self._apart_since_s.get(peer, now_s) for peer in apart}
        for peer, since_s in self._apart_since_s.items():
            if now_s - since_s >= self._relay_wait_s(peer):
                self._dial_through(peer, self._reach.relays_to(peer, bulk=False), anew=False)
        for member in others:
            link = self._host.link_of(member.peer)
            if link is None or not (link.relay or link.is_punched):
                self._direct_again_s.pop(member.peer, None)
                continue
            if me < member.peer:
                self._keep_second(link)
            self._dial_directly(member.peer, member.address, link, now_s)

    def _dial_directly(self, peer: bytes, advertised: str, link: ControlLink, now_s: float) -> None:
        """Dial who is reached in another way: at once where nobody knows better, then seldom.

        Who joins through a relay has perhaps not been dialled by anybody yet. A peer that has been
        met through its router, and that others cannot dial, is left alone.
        """
        is_outbound = self._reach.is_outbound(peer)
        if link.is_punched and is_outbound:
            return
        address = self._reach.address_of(peer, advertised)
        at_once = not is_outbound and address not in self._pauses
        first_s = now_s if at_once else now_s + DIRECT_AGAIN_S
        if now_s >= self._direct_again_s.setdefault(peer, first_s):
            self._direct_again_s[peer] = now_s + DIRECT_AGAIN_S
            self.dial(peer, address, anew=True)

    def _keep_second(self, link: ControlLink) -> None:
        """Keep a relay as the second way to a peer that cannot be dialled."""
        peer = link.peer_id
        if self._host.standby_of(peer) is None:
            relays = self._reach.relays_to(peer, bulk=False)
            second = [relay for relay in relays if relay != link.relay]
            self._dial_through(peer, second, anew=True)

    def _meet_directly(self) -> None:
        """Meet peers without the relays that they are linked through, and move data over.

        Members and whoever joins: it has the whole state to load. The smaller id asks. A punched
        link that is silent is made anew, as others are.
        """
        for peer in self._host.link_peers():
            link = self._host.link_of(peer)
            if link is None or not (link.relay or link.is_punched):
                continue
            if not self._host.punch.may_try(peer):
                continue
            if link.is_punched:
                self._streams.renew(peer)
            is_wanted = link.relay or silence_s(link.tcp_info()) >= SILENT_S
            if is_wanted and self._host.peer_id < peer:
                self.dial(peer, meeting(peer), anew=True)

    def _relay_wait_s(self, peer: bytes) -> float:
        """Return for how long a member may be without a link before a relay is asked."""
        both = self._reach.is_outbound(self._host.peer_id) and self._reach.is_outbound(peer)
        wait_s = RELAY_SOON_S if both else RELAY_LATE_S
        return wait_s if self._host.peer_id < peer else wait_s + RELAY_TURN_S

    def _dial_through(self, peer: bytes, relays: Sequence[bytes], *, anew: bool) -> None:
        """Dial a peer through the first of these relays whose pause is over."""
        now_s = asyncio.get_running_loop().time()
        for route in (str(Route(relay, peer)) for relay in relays):
            last_s, delay_s = self._pauses.get(route, (float("-inf"), 0.0))
            if now_s >= last_s + delay_s:
                self.dial(peer, route, anew=anew)
                return

    def _replace_silent(self) -> None:
        """Dial again, and end data streams, where nothing gets through any more.

        What a router has forgotten of one link it has forgotten of all that were dialled from here,
        and on most of them nothing is said that would show it. So the others are dialled again too,
        once for each time that some are silent: it may be only the other side that is gone.
        """
        peers = self._host.link_peers()
        silent = {p for p in peers if silence_s(self._host.tcp_info(p)) >= SILENT_S}
        if not silent:
            self._silent_since_s = float("inf")
        else:
            now_s = asyncio.get_running_loop().time()
            self._silent_since_s = min(self._silent_since_s, now_s)
        for peer in peers if silent else ():
            link = self._host.link_of(peer)
            if link is not None and (link.relay or link.is_punched):
                self._redial_relays(link)
                continue
            if link is None or not link.dialled_address:
                continue
            if peer in silent or link.since_s < self._silent_since_s:
                self.dial(peer, link.dialled_address, anew=True)
        for peer, stream in self._streams.outgoing():
            if peer not in silent and silence_s(stream.tcp_info()) >= STREAM_SILENT_S:
                self._host.log(f"a data stream to {short(peer)} is silent and will be opened anew")
                stream.close()

    def _redial_relays(self, link: ControlLink) -> None:
        """Make the ways to a peer through relays anew: the router may have forgotten them too."""
        for each in (link, self._host.standby_of(link.peer_id)):
            if each is not None and each.relay and each.since_s < self._silent_since_s:
                self.dial(link.peer_id, str(Route(each.relay, link.peer_id)), anew=True)

    def answered(self, address: str, peer: bytes) -> None:
        if len(self._answered) >= ADDRESSES_MAX:
            self._answered.clear()
        self._answered[address] = peer

    def unanswered(self, contacts: Sequence[str]) -> list[str]:
        """Return those addresses at which nobody that we have a link to has answered."""
        linked = self._host.link_peers()
        return [address for address in contacts if self._answered.get(address) not in linked]

    def _refused_by_run(self, view: View) -> AdmissionError | None:
        """Return why this peer is out of its run, if the other members say so; else None.

        It may have been revoked or banned while it was down, which its own memory does not know.
        One member alone is not believed in a run of more than two.
        """
        refusals: dict[bytes, AdmissionError] = {}
        for member in view.members:
            error = self._failed.get(self._reach.address_of(member.peer, member.address))
            if isinstance(error, AdmissionError) and is_refusal(error, returns=True):
                refusals[member.peer] = error
        alone = len(refusals) < min(2, len(view.members) - 1)
        if not refusals or alone or not is_quorum(view, {*refusals, self._host.peer_id}):
            return None
        return next(iter(refusals.values()))

    def why_not(self, address: str) -> str:
        """Return why this address gives no connection; "" if nobody answers there."""
        error = self._failed.get(address)
        if error is None or error.stage in UNREACHED:
            return ""
        return f"{address} has another secret" if error.stage == SECRET else error.what

    def dial(
        self,
        peer: bytes | None,
        address: str,
        *,
        anew: bool = False,
        most_s: float = REDIAL_MAX_S,
    ) -> None:
        """Dial in the background, with a pause while nobody answers that grows up to ``most_s``.

        ``anew``: also if there is a link to ``peer``, to replace it.
        """
        now_s = asyncio.get_running_loop().time()
        if peer is not None and not anew and parse_route(address) is None:
            address = self._reach.address_of(peer, address)
        last_s, delay_s = self._pauses.get(address, (float("-inf"), REDIAL_S / 2))
        is_early = now_s < last_s + min(delay_s, most_s)
        if not address or address in self._waiting or is_early:
            return
        if len(self._pauses) >= ADDRESSES_MAX:
            self._pauses.clear()
        delay_s = min(2 * delay_s, REDIAL_MAX_S)
        self._pauses[address] = (now_s, delay_s)
        self._waiting[address] = (peer, anew)
        self._begin_dials()

    def _begin_dials(self) -> None:
        """Begin as many of the waiting dials as there is room for, in their order.

        Where nobody answered last time there is no handshake: such dials keep no others waiting.
        """
        for address, (peer, anew) in list(self._waiting.items()):
            failed = self._failed.get(address)
            counts = failed is None or failed.stage not in UNREACHED
            if counts and not self._window.has_room:
                continue
            del self._waiting[address]
            if anew or peer is None or peer not in self._host.link_peers():
                if counts:
                    self._window.begin()
                self._daemon.spawn(self._dial_in_window(peer, address, anew=anew, counts=counts))

    async def _dial_in_window(
        self, peer: bytes | None, address: str, *, anew: bool, counts: bool
    ) -> None:
        is_linked = unheard = False
        try:
            error = await self._dial(peer, address, anew=anew)
            is_linked = error is None
            unheard = isinstance(error, ConnectError) and went_unheard(error)
        finally:
            if counts:
                self._window.ended(is_linked=is_linked, unheard=unheard)
        self._begin_dials()

    async def _dial(
        self, peer: bytes | None, address: str, *, anew: bool
    ) -> ConnectError | IdentityInUseError | None:
        """Dial now; return why there is no link."""
        old = self._host.link_of(peer) if peer is not None and anew else None
        try:
            found = await self._host.dial(address, expect_peer=peer, anew=anew)
        except (ConnectError, IdentityInUseError) as error:
            if isinstance(error, ConnectError):
                self._failed[address] = error
                if len(self._failed) > ADDRESSES_MAX:
                    del self._failed[next(iter(self._failed))]
            # Whoever is outbound may be near, behind the same router; that it is not is no error.
            route = parse_route(address)
            if route is not None:
                self._not_through(route, error)
            elif parse_meeting(address) is not None:
                pass  # it is said where that is remembered (peer/punch/)
            elif isinstance(error, IdentityInUseError) or not (peer and peer in self._reach):
                self._daemon.dial_failed(error)
            if route is None and peer is not None and peer not in self._host.link_peers():
                # Who joins is told of a coordinator, which may be one that nobody can dial.
                self._dial_through(peer, self._reach.relays_to(peer, bulk=False), anew=False)
            return error
        self._say_replaced(found, address, old)
        self._failed.pop(address, None)
        self.answered(address, found)
        self._pauses.pop(address, None)
        if peer is not None:
            self._streams.warm(peer)
        return None

    def _not_through(self, route: Route, error: ConnectError | IdentityInUseError) -> None:
        """Avoid a relay that somebody else answers at; that a relay refuses is no news."""
        if isinstance(error, ConnectError) and error.stage not in (*UNREACHED, ADMISSION, ""):
            self._reach.blame_relay(route.relay, error.what, route.peer)

    def _say_replaced(self, peer: bytes, address: str, old: ControlLink | None) -> None:
        """Say that a link has been made that is no first one, or through whom it leads.

        ``old``: the link that there was to a peer that was dialled anew.
        """
        route, link, who = parse_route(address), self._host.link_of(peer), short(peer)
        if route is not None:
            by = f"relay {short(route.relay)}"
            is_second = link is not None and link.relay != route.relay
            what = f"{by} stands by for the connection to {who}" if is_second else ""
            self._host.log(what or f"{by} carries the connection to {who}")
        elif old is None or parse_meeting(address) is not None:
            return
        elif old.relay:
            by = f"relay {short(old.relay)}"
            self._host.log(
                f"{who} can be dialled at {address}, and is linked no longer through {by}"
            )
        elif old.is_punched:
            self._host.log(f"{who} can be dialled at {address}: no punched connection is needed")
        else:
            self._host.log(f"a new connection to {who} has replaced one, for silence")

    async def probe(self, peer: bytes, address: str) -> str:
        """Find out whether the peer's process is gone: "up", "refused" or "silent".

        "refused" proves a death only for an address that has accepted us before, by our own dial,
        and of a peer that is not outbound: a router that has forgotten a mapping refuses too, in
        the name of a peer that lives. While there is a link there is nothing to find out: its end
        is reported. One probe of a peer is under way at a time, whoever asks: on a starved machine
        everybody asks for everybody, and the probes would take what processor there is.
        """
        if peer in self._host.link_peers():
            return "up"
        under_way = self._probes.get(peer)
        if under_way is None:
            under_way = asyncio.get_running_loop().create_task(self._probe(peer, address))
            self._probes[peer] = under_way
            under_way.add_done_callback(lambda _: self._probes.pop(peer, None))
        return await asyncio.shield(under_way)

    async def _probe(self, peer: bytes, address: str) -> str:
        address = self._reach.address_of(peer, address)
        reached = peer in self._streams.reached and peer not in self._reach
        # A router that has forgotten a mapping refuses in the name of a peer that lives.
        reached = reached and not self._reach.is_mapped(peer)
        timeout_s = max(PROBE_MIN_S, 2 * self._host.srtt_s(peer))
        answer: str = "silent"
        for attempt in range(PROBE_TRIES if address else 0):
            answer = await self._host.probe(address, timeout_s)
            if answer != "up" or peer in self._host.link_peers():
                break
            # A process that is being killed closes its links before its listening port.
            await asyncio.sleep(PROBE_PAUSE_S * 2**attempt)
        if peer in self._host.link_peers():
            return "up"
        if answer == "refused" and not reached:
            return "silent"
        if answer == "refused":
            self._streams.forget(peer)
        return answer
