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
    """Lead to a peer that has dialled at the same moment, through the routers of both."""


def punched(sock: socket.socket) -> PunchedSocket:
    """Return the same connection, marked as a punched one; ``sock`` is used up."""
    marked = PunchedSocket(fileno=sock.detach())
    marked.setblocking(False)
    return marked


def is_punched(sock: socket.socket | None) -> bool:
    return isinstance(sock, PunchedSocket)
