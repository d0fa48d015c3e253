"""Name ways through a relay, and mark the sockets that lead there. No decision, no thread.

A relay splices the bytes of two connections that were made to it (peer/relay/), and a SOCKS5 proxy
does so too (proxy.py). What the kernel says of such a socket is true of the way to the relay or the
proxy: the address of the other end, its round trip, what was acknowledged. Whoever judges a peer by
these asks here first.
"""

from __future__ import annotations

import re
import socket
from typing import Final, NamedTuple

from atoll.collectives.errors import RemoteProtocolError
from atoll.peer.membership.view import short
from atoll.peer.net.connection_limits import plain_ip
from atoll.peer.net.punched import parse_meeting

_ROUTE: Final = re.compile(r"relay:([0-9a-f]{64})/([0-9a-f]{64})")


class Route(NamedTuple):
    """Name the way to ``peer`` through ``relay``. Its text stands where an address would."""

    relay: bytes
    peer: bytes

    def __str__(self) -> str:
        return f"relay:{self.relay.hex()}/{self.peer.hex()}"

    def describe(self) -> str:
        return f"{short(self.peer)} through relay {short(self.relay)}"


def parse_route(address: str) -> Route | None:
    """Return the route that an address is, or None if it is a host and a port."""
    found = _ROUTE.fullmatch(address)
    return Route(bytes.fromhex(found[1]), bytes.fromhex(found[2])) if found else None


class IndirectSocket(socket.socket):
    """Lead to a peer through somebody else; by all that is known the peer has ``stated_ip``."""

    stated_ip: str


def shown(address: str) -> str:
    """Return an address as people read it: a route or a meeting names the peers."""
    route, met = parse_route(address), parse_meeting(address)
    if met is not None:
        return f"{short(met)} from both sides at once"
    return route.describe() if route is not None else address


class RelayedSocket(IndirectSocket):
    """Lead to a peer through ``relay``, which says that the peer comes from ``stated_ip``."""

    relay: bytes


class ProxiedSocket(IndirectSocket):
    """Lead to a peer through the SOCKS5 proxy of this machine; it was dialled at ``stated_ip``."""


def relayed(sock: socket.socket, relay: bytes, stated_ip: str) -> RelayedSocket:
    """Return the same connection, marked as one through ``relay``; ``sock`` is used up.

    Raises RemoteProtocolError, and leaves ``sock`` alone, if what the relay states is no address.
    """
    try:
        plain = plain_ip(stated_ip)
    except ValueError as error:
        raise RemoteProtocolError(f"relay {short(relay)} states no address of the peer") from error
    marked = RelayedSocket(fileno=sock.detach())
    marked.setblocking(False)
    marked.relay, marked.stated_ip = relay, plain
    return marked


def relay_of(sock: socket.socket) -> bytes:
    """Return through which relay a socket leads; b"" if it leads to the peer itself."""
    return sock.relay if isinstance(sock, RelayedSocket) else b""


def is_indirect(sock: socket.socket) -> bool:
    """Return whether a socket leads to a relay or a proxy: the kernel knows no more than that."""
    return isinstance(sock, IndirectSocket)


def is_proxied(sock: socket.socket) -> bool:
    return isinstance(sock, ProxiedSocket)


def remote_ip_of(sock: socket.socket) -> str:
    """Return where the peer at the other end comes from, as limits by address count it.

    Raises OSError if the connection was reset meanwhile.
    """
    if isinstance(sock, IndirectSocket):
        return sock.stated_ip
    return plain_ip(str(sock.getpeername()[0]))


def proved_ip_of(sock: socket.socket) -> str:
    """Return the address of the other end if the kernel vouches for it; "" through another.

    A relay could state a private address, where bytes may go without a cipher, and read them; and a
    proxy reads them whatever address they go to.
    """
    return "" if isinstance(sock, IndirectSocket) else str(sock.getpeername()[0])
