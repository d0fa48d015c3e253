"""Say which address of this machine others see, by the routes that the kernel has."""

from __future__ import annotations

import socket
from typing import Final

NOWHERE: Final = ("192.0.2.1", "2001:db8::1")  # RFC 5737, RFC 3849: only a route is looked up


def own_address(*targets: str, only_ipv4: bool = False) -> str:
    """Return the address that packets to the first of these hosts with a route come from; or "".

    Without any it is the internet: IPv4 if there is a route, else IPv6.
    """
    family = socket.AF_INET if only_ipv4 else socket.AF_UNSPEC
    for target in targets or NOWHERE:
        try:
            found = socket.getaddrinfo(target, 9, family, socket.SOCK_DGRAM)[0]
            with socket.socket(found[0], socket.SOCK_DGRAM) as probe:
                probe.connect(found[4])  # a datagram socket sends nothing by this
                return str(probe.getsockname()[0])
        except (OSError, UnicodeError):  # UnicodeError: a label that no DNS name may have
            continue
    return ""
