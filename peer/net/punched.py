"""Name ways through two routers, and mark the sockets that lead there. No decision, no thread.

Such a connection comes about when both ends dial at the same moment (peer/punch/). It is direct:
what the kernel says of it is true of the way to the peer. But neither end could dial the other, so
that its address says nothing about who can be dialled, and it is made anew in the same way only.
"""

from __future__ import annotations

import re
import socket
from typing import Final

_MEETING: Final = re.compile(r"punch:([0-9a-f]{64})")


def meeting(peer: bytes) -> str:
    """Return what stands where an address would: both dial, this side and ``peer``."""
    return f"punch:{peer.hex()}"


def parse_meeting(address: str) -> bytes | None:
    """Return whom an address means to meet, or None if it is another kind of address."""
    found = _MEETING.fullmatch(address)
    return bytes.fromhex(found[1]) if found else None


class PunchedSocket(socket.socket):
    """Lead to a peer that has dialled at the same moment, through the routers of both.

    ``met_ip``: the address of the other end, as it was checked before it was dialled. Of one that
    is behind the same router the kernel may know the router's inner address instead.
    """

    met_ip = ""


def punched(sock: socket.socket, met_ip: str) -> PunchedSocket:
    """Return the same connection, marked as a punched one; ``sock`` is used up."""
    marked = PunchedSocket(fileno=sock.detach())
    marked.met_ip = met_ip
    marked.setblocking(False)
    return marked


def met_ip_of(sock: socket.socket | None) -> str:
    """Return the address at which both ends have met; "" of a connection that one has dialled."""
    return sock.met_ip if isinstance(sock, PunchedSocket) else ""


def is_punched(sock: socket.socket | None) -> bool:
    return isinstance(sock, PunchedSocket)
