"""Who may begin a handshake: limits on connections that have not yet proved anything. Sans-I/O.

A stranger costs a descriptor, some kilobytes and a millisecond of signatures. These limits keep a
flood of strangers from taking what the members need (reliability_and_security.md 3.2).
"""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from atoll.collectives.errors import AddressFullError
from atoll.peer.net.streamkeys import is_trusted_network

__all__ = [
    "FAILURES_FREE",
    "MEMBERS_PER_ADDRESS_MAX",
    "PAUSED_MAX",
    "PENDING_MAX",
    "PENDING_PER_ADDRESS_MAX",
    "STARTS_PER_ADDRESS_MAX",
    "Gate",
    "check_members",
    "counted_as",
    "plain_ip",
]

# All handshakes in progress: 64 x (8 KiB read + TLS state of about 100 KiB) is under 8 MiB.
PENDING_MAX = 64
# One address, so that it cannot take all of them.
PENDING_PER_ADDRESS_MAX = 8
# Handshakes begun by one address in a second; about 490 per second fill a core.
STARTS_PER_ADDRESS_MAX = 10
# An address all of whose connections come to nothing is turned away unheard, for 1 s and then twice
# as long each time. The first few are free: somebody mistypes an invite.
FAILURES_FREE = 10
PAUSE_S = 1.0
PAUSE_S_MAX = 60.0
# Addresses whose failures are remembered, the latest: 100 KiB.
PAUSED_MAX = 1024
# What one customer of a provider gets of IPv6, at least: 2^64 addresses are one stranger.
IPV6_PREFIX_BITS = 64


# Peers of one address that are in a run with probation at a time: one household's machines.
# Identities cost nothing, addresses a little: who wants many votes, or many who will count, needs
# many of them.
MEMBERS_PER_ADDRESS_MAX = 4


class _Failures(NamedTuple):
    in_a_row: int
    not_before_s: float


class Gate:
    """Counts unproved connections; :meth:`enter` and :meth:`leave` go in pairs.

    Addresses are as :func:`counted_as` gives them.
    """

    def __init__(self) -> None:
        self._failures: dict[str, _Failures] = {}  # since the last success, the latest last
        self._pending: Counter[str] = Counter()
        self._starts: Counter[str] = Counter()
        self._second = 0

    def enter(self, address: str, now_s: float, *, exempt: bool) -> str | None:
        """None if a connection from the IP ``address`` may begin, else the reason why not.

        ``exempt`` (loopback, current members) lifts the limits per address, not the total.
        """
        if self._pending.total() >= PENDING_MAX:
            return f"{PENDING_MAX} connections are already waiting to be admitted"
        if not exempt and (reason := self._over_limit(address, now_s)):
            return reason
        self._pending[address] += 1
        return None

    def leave(self, address: str) -> None:
        """A connection that entered is closed, or has proved itself."""
        self._pending[address] -= 1
        if self._pending[address] <= 0:
            del self._pending[address]

    def failed(self, address: str, now_s: float) -> None:
        """What entered has proved nothing, or was not admitted."""
        count = self._failures.pop(address, _Failures(0, 0.0)).in_a_row + 1
        pause_s = min(PAUSE_S * 2.0 ** min(count - FAILURES_FREE, 10), PAUSE_S_MAX)
        if len(self._failures) >= PAUSED_MAX:
            del self._failures[next(iter(self._failures))]
        self._failures[address] = _Failures(
            count, now_s + (pause_s if count >= FAILURES_FREE else 0)
        )

    def succeeded(self, address: str) -> None:
        """What entered is a peer of the run: whoever shares its address may begin anew."""
        self._failures.pop(address, None)

    def _over_limit(self, address: str, now_s: float) -> str | None:
        if address in self._failures and now_s < self._failures[address].not_before_s:
            return f"its last {self._failures[address].in_a_row} connections came to nothing"
        # Counting by whole seconds keeps no more than one second of addresses. It lets twice the
        # rate pass across a boundary, which is harmless.
        if int(now_s) != self._second:
            self._second = int(now_s)
            self._starts.clear()
        if self._pending[address] >= PENDING_PER_ADDRESS_MAX:
            return f"{PENDING_PER_ADDRESS_MAX} connections of this address wait to be admitted"
        if self._starts[address] >= STARTS_PER_ADDRESS_MAX:
            return f"more than {STARTS_PER_ADDRESS_MAX} connections of this address in a second"
        self._starts[address] += 1
        return None


def check_members(ip: str, others: Sequence[str], most: int | None) -> None:
    """AddressFullError if as many peers as may come from one address have a link: ``most``, or
    MEMBERS_PER_ADDRESS_MAX if that is None, of which private networks are exempt. 0: any number."""
    if most is None:
        most = 0 if is_trusted_network(ip) else MEMBERS_PER_ADDRESS_MAX
    mine = counted_as(ip)
    count = sum(counted_as(other) == mine for other in others)
    if most and count >= most:
        raise AddressFullError(
            f"{count} of the {most} peers that may come from the address {mine} have a link"
        )


def plain_ip(ip: str) -> str:
    """An IPv4 address that arrived on a dual socket, as IPv4, so that it counts as one address."""
    address = ipaddress.ip_address(ip.partition("%")[0])
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)


def counted_as(ip: str) -> str:
    """What limits per address count a plain ip as: of IPv6, the network that it is in."""
    if isinstance(ipaddress.ip_address(ip), ipaddress.IPv6Address):
        return str(ipaddress.ip_network((ip, IPV6_PREFIX_BITS), strict=False))
    return ip
