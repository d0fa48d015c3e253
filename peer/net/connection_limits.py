"""Limit connections that have not yet proved anything. Sans-I/O.

A stranger costs a descriptor, some kilobytes and a millisecond of signatures. These limits keep a
flood of strangers from taking what the members need (reliability_and_security.md 3.2).

Theory. A connection waits twice: *silent*, until its first byte, which costs almost nothing; and in
its *handshake*, which costs memory and time. A peer speaks as soon as it is connected, so it waits
silently for milliseconds only. Where silent places are full, the one that has been silent for
longest gives its own to the one that comes: so silence keeps nobody out, however many are silent.
That is so for an address, for the network that it is in, and for all; and whoever was silent for
too long, or gave its place, counts as a failure of its address, which is soon turned away unheard.
Handshakes are not ended for others: who comes when all places are taken has to come again.

Members have places of their own, in which strangers do not count. A *member's* address is one from
or to which a peer of the run has had a link since this daemon began, so that a member that was
restarted finds its place. Who shares a member's address shares its places, and no more than those.
"""

from __future__ import annotations

import functools
import ipaddress
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from atoll.collectives.errors import AddressFullError
from atoll.peer.streams.keys import is_trusted_network


class PlaceLimits(NamedTuple):
    """Hold how many places there are: in all, for one network, and for one address."""

    total: int
    per_network: int
    per_address: int


# A handshake: 8 KiB read + TLS state of about 100 KiB, so all of them are under 14 MiB. One network
# cannot take all places, nor one address those of its network.
STRANGERS_SPEAKING = PlaceLimits(64, 32, 8)
MEMBERS_SPEAKING = PlaceLimits(64, 64, 16)
# A silent connection: a descriptor and some 4 KiB. An address may begin 10 a second (below), so 64
# addresses of one network leave 0.1 s for the first byte of another peer there; who has just
# connected takes milliseconds.
STRANGERS_SILENT = PlaceLimits(256, 64, 8)
MEMBERS_SILENT = PlaceLimits(64, 64, 16)
# Handshakes begun by one address in a second; about 490 per second fill a core.
STARTS_PER_ADDRESS_MAX = 10
# An address all of whose connections come to nothing is turned away unheard, for 1 s and then twice
# as long each time. The first few are free: somebody mistypes an invite.
FAILURES_FREE = 10
PAUSE_S = 1.0
PAUSE_S_MAX = 60.0
# Addresses whose failures are remembered, the latest: 100 KiB.
PAUSED_MAX = 1024
# What one customer of a provider gets of IPv6, at least: 2^64 addresses are one stranger; and what
# counts as one network beside that: the smallest that is routed on the internet.
IPV6_PREFIX_BITS = 64
NETWORK_BITS = {4: 24, 6: 48}
ORIGINS_CACHED = 4096  # floods come from the same addresses again and again: 1 MiB


# Peers of one address that are in a run with probation at a time: one household's machines.
# Identities cost nothing, addresses a little: who wants many votes, or many who will count, needs
# many of them.
MEMBERS_PER_ADDRESS_MAX = 4


class ConnectionOrigin(NamedTuple):
    """Describe where a connection comes from, as limits count it."""

    ip: str
    address: str  # an IPv4 address, or of IPv6 the network of one customer
    network: str
    is_loopback: bool


class _Failures(NamedTuple):
    in_a_row: int
    not_before_s: float


@dataclass(eq=False, slots=True)
class PendingConnection:
    """Describe what one connection holds until it has proved itself. ``give_up`` ends it."""

    origin: ConnectionOrigin
    of_member: bool
    give_up: Callable[[], None] = field(default=lambda: None)


class _PendingQueue:
    """Keep the places of one kind, the oldest first."""

    def __init__(self, limits: PlaceLimits) -> None:
        self._limits = limits
        self._held: dict[PendingConnection, None] = {}
        self._of: Counter[str] = Counter()  # by address and by network

    def __len__(self) -> int:
        return len(self._held)

    def add(self, place: PendingConnection) -> None:
        self._held[place] = None
        self._of.update((place.origin.address, place.origin.network))

    def remove(self, place: PendingConnection) -> bool:
        if place not in self._held:
            return False
        del self._held[place]
        for key in (place.origin.address, place.origin.network):
            self._of[key] -= 1
            if not self._of[key]:
                del self._of[key]
        return True

    def full(self, origin: ConnectionOrigin) -> str:
        """Return which limit leaves no room for one more connection from there, or "".

        All programs of a machine share loopback, so it counts towards the total only.
        """
        total, per_network, per_address = self._limits
        if len(self._held) >= total:
            return f"{total} connections"
        if not origin.is_loopback and self._of[origin.address] >= per_address:
            return f"{per_address} connections of {origin.address}"
        if not origin.is_loopback and self._of[origin.network] >= per_network:
            return f"{per_network} connections of {origin.network}"
        return ""

    def oldest(self, origin: ConnectionOrigin) -> PendingConnection:
        """Return the place that has to go first, so that there is room for one from there."""
        _, per_network, per_address = self._limits
        held: Iterable[PendingConnection] = self._held
        if not origin.is_loopback and self._of[origin.address] >= per_address:
            held = (place for place in held if place.origin.address == origin.address)
        elif not origin.is_loopback and self._of[origin.network] >= per_network:
            held = (place for place in held if place.origin.network == origin.network)
        return next(iter(held))


class ConnectionLimiter:
    """Count unproved connections; :meth:`enter` and :meth:`leave` go in pairs."""

    def __init__(self) -> None:
        self._failures: dict[str, _Failures] = {}  # since the last success, the latest last
        self._silent = {False: _PendingQueue(STRANGERS_SILENT), True: _PendingQueue(MEMBERS_SILENT)}
        self._speaking = {
            False: _PendingQueue(STRANGERS_SPEAKING),
            True: _PendingQueue(MEMBERS_SPEAKING),
        }
        self._starts: Counter[str] = Counter()
        self._second = 0

    @property
    def pending(self) -> int:
        """Return how many connections have entered and not left."""
        kinds = (*self._silent.values(), *self._speaking.values())
        return sum(len(places) for places in kinds)

    def enter(
        self, origin: ConnectionOrigin, now_s: float, *, of_member: bool
    ) -> PendingConnection | str:
        """Return a silent place, or the reason why the connection may not begin.

        Another silent connection may have to give up its place for it.
        """
        is_limited = not of_member and not origin.is_loopback
        if is_limited and (reason := self._over_rate(origin.address, now_s)):
            return reason
        silent = self._silent[of_member]
        if silent.full(origin):
            oldest = silent.oldest(origin)
            silent.remove(oldest)
            oldest.give_up()
        place = PendingConnection(origin, of_member)
        silent.add(place)
        return place

    def speaks(self, place: PendingConnection) -> str:
        """Note a connection's first byte; return why its handshake may not begin, or ""."""
        speaking = self._speaking[place.of_member]
        if full := speaking.full(place.origin):
            return f"{full} are already waiting to be admitted"
        if self._silent[place.of_member].remove(place):
            speaking.add(place)
        return ""

    def leave(self, place: PendingConnection) -> None:
        """Take back the place of a connection that is closed, or has proved itself."""
        for kind in (self._silent, self._speaking):
            kind[place.of_member].remove(place)

    def failed(self, address: str, now_s: float) -> None:
        """Note that a connection from this address has proved nothing, or was not admitted."""
        count = self._failures.pop(address, _Failures(0, 0.0)).in_a_row + 1
        pause_s = min(PAUSE_S * 2.0 ** min(count - FAILURES_FREE, 10), PAUSE_S_MAX)
        if len(self._failures) >= PAUSED_MAX:
            del self._failures[next(iter(self._failures))]
        self._failures[address] = _Failures(
            count, now_s + (pause_s if count >= FAILURES_FREE else 0)
        )

    def succeeded(self, address: str) -> None:
        """Note that a connection is a peer of the run: whoever shares its address begins anew."""
        self._failures.pop(address, None)

    def _over_rate(self, address: str, now_s: float) -> str:
        if address in self._failures and now_s < self._failures[address].not_before_s:
            return f"its last {self._failures[address].in_a_row} connections came to nothing"
        # Counting by whole seconds keeps no more than one second of addresses. It lets twice the
        # rate pass across a boundary, which is harmless.
        if int(now_s) != self._second:
            self._second = int(now_s)
            self._starts.clear()
        if self._starts[address] >= STARTS_PER_ADDRESS_MAX:
            return f"more than {STARTS_PER_ADDRESS_MAX} connections of this address in a second"
        self._starts[address] += 1
        return ""


def check_members(ip: str, others: Sequence[str], most: int | None) -> None:
    """Raise AddressFullError if as many peers as may come from one address have a link.

    ``ip``: of one that wants a link; ``others``: of the peers that have one. ``most``: how many may
    come from one address, 0 for any number; None for MEMBERS_PER_ADDRESS_MAX, of which private
    networks are exempt.
    """
    if most is None:
        most = 0 if is_trusted_network(ip) else MEMBERS_PER_ADDRESS_MAX
    mine = counted_as(ip)
    count = sum(counted_as(other) == mine for other in others)
    if most and count >= most:
        raise AddressFullError(
            f"{count} of the {most} peers that may come from the address {mine} have a link"
        )


def plain_ip(ip: str) -> str:
    """Return an IP address in its one plain form, so that it counts as one address.

    That is IPv4 for an IPv4 address that arrived on a dual socket, and no zone.
    """
    address = ipaddress.ip_address(ip.partition("%")[0])
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)


def counted_as(ip: str) -> str:
    """Return what limits per address count a plain IP as: of IPv6, the network that it is in."""
    if isinstance(ipaddress.ip_address(ip), ipaddress.IPv6Address):
        return str(ipaddress.ip_network((ip, IPV6_PREFIX_BITS), strict=False))
    return ip


@functools.lru_cache(ORIGINS_CACHED)
def origin_of(ip: str) -> ConnectionOrigin:
    """Return where a connection from ``ip``, as the socket has it, comes from."""
    plain = plain_ip(ip)
    parsed = ipaddress.ip_address(plain)
    network = ipaddress.ip_network((plain, NETWORK_BITS[parsed.version]), strict=False)
    return ConnectionOrigin(plain, counted_as(plain), str(network), parsed.is_loopback)
