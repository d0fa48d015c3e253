"""Tell what kind of address a host has: from where it can be dialled at all. Sans-I/O."""

from __future__ import annotations

import ipaddress
from typing import Final, Literal, TypeAlias

LOOPBACK: Final = "loopback"
LINK_LOCAL: Final = "link-local"
PRIVATE: Final = "private"
CARRIER: Final = "carrier"  # of a provider, which shares its public addresses among customers
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
    for text in ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "fc00::/7", "fec0::/10")
]
# The second is of those that have IPv4 over the provider's IPv6 only (DS-Lite, 464XLAT).
_CARRIER = [ipaddress.ip_network(text) for text in ("100.64.0.0/10", "192.0.0.0/24")]
# IPv6 addresses of what has IPv4 only, anywhere: Python says that they are reserved.
_NAT64 = ipaddress.ip_network("64:ff9b::/32")


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
    if address.is_unspecified:
        return PUBLIC  # private to nobody, as proxy.py has it of whom it knows the name only
    if address.is_link_local or address.is_multicast:  # a group has members on one cable, too
        return LINK_LOCAL
    if any(address in network for network in _CARRIER):
        return CARRIER
    is_reserved = address.is_reserved and address not in _NAT64  # nobody on the internet has it
    is_private = is_reserved or any(address in network for network in _PRIVATE)
    return PRIVATE if is_private else PUBLIC
