"""Tell what kind of address a host has: from where it can be dialled at all. Sans-I/O."""

from __future__ import annotations

import ipaddress
from typing import Final, Literal, TypeAlias

LOOPBACK: Final = "loopback"
LINK_LOCAL: Final = "link-local"
PRIVATE: Final = "private"
CARRIER: Final = "carrier"  # 100.64/10: a provider shares its public addresses among customers
PUBLIC: Final = "public"
NAME: Final = "name"  # of a host, for a resolver
AddressKind: TypeAlias = Literal["loopback", "link-local", "private", "carrier", "public", "name"]

# What people are told of an address that not everybody can dial.
WORDS: Final[dict[AddressKind, str]] = {
    LOOPBACK: "an address of this machine alone",
    LINK_LOCAL: "an address of one cable or one Wi-Fi",
    PRIVATE: "a private address, behind a router",
    CARRIER: "a private address of the provider (carrier-grade NAT), behind the provider's router",
}
_PRIVATE = [
    ipaddress.ip_network(text)
    for text in ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "fc00::/7")
]
_CARRIER = ipaddress.ip_network("100.64.0.0/10")


def address_kind(host: str) -> AddressKind:
    """Return the kind of a host: of an IP address in any form, or of a name."""
    try:
        address = ipaddress.ip_address(host.strip("[]").partition("%")[0])
    except ValueError:
        return NAME
    if isinstance(address, ipaddress.IPv6Address):
        address = address.ipv4_mapped or address
    if address.is_loopback:
        return LOOPBACK
    if address.is_link_local:
        return LINK_LOCAL
    if address in _CARRIER:
        return CARRIER
    return PRIVATE if any(address in network for network in _PRIVATE) else PUBLIC
