"""Say which routers hide hosts of a lab behind their own addresses (NAT), and what TCP makes of it.

A router has one public address in the wide-area network, and private ones towards its hosts. What
its hosts send leaves with the public address; what comes in is let through only where the router
knows for whom it is. Hosts behind one router reach each other by their private addresses, without
the wide-area network between them. Pure functions: the routers are made in routers.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from atoll.collectives.errors import ConfigError
from atoll.peer.lab.settings import check_host

KINDS = ("full", "restricted", "symmetric")
LEVELS_MAX = 2  # the router at home and the one of the provider (RFC 6598): there is no third
EXPIRED = ("drop", "reset")
EXPIRES_S_MAX = (
    5 * 86_400
)  # what Linux itself gives a silent connection: no router remembers longer
OPTIONS = {
    **{"levels": "levels", "expires": "expires_s", "expired": "expired", "lan": "lan"},
    "hairpin": "hairpin",
}
LAN_BASE = 100  # 192.168.100.0/24 is behind the router of host 0
HOST_BASE = 2  # of the last byte of a host's private address: 1 is the router


@dataclass(frozen=True)
class Nat:
    """Describe a router.

    ``kind``: what it makes of TCP.

    - ``full``: all ports of the public address lead to the same ports of the (first) host behind
      it, whoever dials, as where the owner has forwarded them ("exposed host"). So the host can be
      dialled, at the router's address.
    - ``restricted``: only packets of connections that a host behind it began come in; an attempt to
      dial is dropped without an answer. A connection leaves from the port that the host has used,
      to whomever it goes. So do most routers at home. Both sides can still meet by dialling each
      other at the same moment.
    - ``symmetric``: as restricted, but each connection leaves from another port, drawn at random,
      which nobody can tell in advance.

    ``levels``: 2 puts the router behind another one of the same kind, its provider's, with
    100.64.0.0/10 between them (carrier-grade NAT).
    ``expires_s``: after so many seconds without a packet the (outermost) router forgets a
    connection; 0 is never. What comes after that, from either end, it drops without an answer, or
    resets the connection: ``expired``. Neither revives it.
    ``lan``: the private network is 192.168.LAN.0/24; -1 is a network of its own. Two routers may
    have the same one, as at home.
    ``hairpin``: 1 keeps the hosts behind it apart, as a wireless network does with its clients:
    they reach each other only by the router's public address, from inside. It has to lead to one
    of them, so the router is ``full``.
    """

    kind: str = "restricted"
    levels: int = 1
    expires_s: int = 0
    expired: str = "drop"
    lan: int = -1
    hairpin: int = 0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(
                f"a router is {', '.join(KINDS[:-1])} or {KINDS[-1]}, not {self.kind!r}"
            )
        if not 1 <= self.levels <= LEVELS_MAX:
            raise ConfigError(f"a host has 1 or {LEVELS_MAX} levels of routers, not {self.levels}")
        if not 0 <= self.expires_s <= EXPIRES_S_MAX:
            limits = f"0 (never) to {EXPIRES_S_MAX} seconds"
            raise ConfigError(f"a router forgets connections after {limits}, not {self.expires_s}")
        if self.expired not in EXPIRED:
            wanted = " or ".join(EXPIRED)
            raise ConfigError(
                f"what comes after a connection has expired: {wanted}, not {self.expired!r}"
            )
        if not -1 <= self.lan <= 255:
            raise ConfigError(
                f"a private network is 192.168.LAN.0, LAN from 0 to 255, not {self.lan}"
            )
        if self.hairpin not in (0, 1) or (self.hairpin and self.kind != "full"):
            raise ConfigError(
                f"hairpin is 0, or 1 for a full router, not {self.hairpin} for a {self.kind} one",
                fix="for example: --nat 2+3=full,hairpin=1",
            )


@dataclass(frozen=True)
class NatRouter:
    """Place a router, and the second one where there are two, before some hosts.

    Its line in the wide-area network is that of its first host, which has none of its own.
    """

    nat: Nat
    hosts: tuple[int, ...]

    @property
    def line(self) -> int:
        """Return the number of its line: rates, paths, cuts and counters are of lines."""
        return self.hosts[0]

    @property
    def home(self) -> str:
        """Return how the namespace of the router next to the hosts is called, without prefix."""
        return f"r{self.line}"

    @property
    def outermost(self) -> str:
        """Return how the namespace of the router with the public address is called."""
        return self.home if self.nat.levels == 1 else f"c{self.line}"

    @property
    def inside(self) -> tuple[str, ...]:
        """Return the names of all namespaces that have no line."""
        hosts = (f"h{host}" for host in self.hosts)
        return (*hosts, self.home) if self.nat.levels > 1 else tuple(hosts)

    def address(self, host: int) -> str:
        """Return the private address of one of its hosts."""
        return f"{self._lan}.{HOST_BASE + self.hosts.index(host)}"

    @property
    def gateway(self) -> str:
        """Return the address that its hosts know it by."""
        return f"{self._lan}.1"

    @property
    def carrier_side(self) -> tuple[str, str]:
        """Return (the provider's router's, this one's) address between the two of them."""
        return f"100.64.{self.line}.1", f"100.64.{self.line}.2"

    @property
    def _lan(self) -> str:
        return f"192.168.{self.nat.lan if self.nat.lan >= 0 else LAN_BASE + self.line}"


def routers_of(nat: Mapping[int | tuple[int, ...], str | Nat], hosts: int) -> tuple[NatRouter, ...]:
    """Return the routers of a lab: keys are a host, or those behind one router together.

    Raises ConfigError for a host that there is not, or that is behind two routers.
    """
    found = []
    seen: set[int] = set()
    for key, value in nat.items():
        group = key if isinstance(key, tuple) else (key,)
        for host in group:
            check_host(host, hosts)
            if host in seen:
                raise ConfigError(
                    f"host {host} is named twice among the hosts behind routers",
                    fix="write hosts behind one router together: --nat 2+3=restricted",
                )
            seen.add(host)
        described = value if isinstance(value, Nat) else read_nat(value)
        found.append(NatRouter(described, tuple(sorted(group))))
    return tuple(found)


def read_nat(text: str) -> Nat:
    """Read ``restricted`` or ``restricted,levels=2,expires=30,expired=reset,lan=1``.

    Raises ConfigError.
    """
    kind, *options = text.split(",")
    found: dict[str, Any] = {}
    for option in options:
        name, _, value = option.partition("=")
        if name not in OPTIONS:
            raise ConfigError(
                f"a router has no option {name!r}: {', '.join(OPTIONS)}",
                fix="for example: --nat 3=restricted,levels=2,expires=30",
            )
        if OPTIONS[name] in found:
            raise ConfigError(f"{name} is said twice in {text!r}")
        found[OPTIONS[name]] = value if name == "expired" else _whole_number(name, value)
    return Nat(kind, **found)


def _whole_number(name: str, value: str) -> int:
    if not (value.isascii() and value.isdecimal()):
        raise ConfigError(f"{name} is a whole number, not {value!r}")
    return int(value)


def read_hosts(text: str) -> tuple[int, ...]:
    """Read ``3`` or ``2+3``: the hosts behind one router. Raises ConfigError."""
    return tuple(_whole_number("a host", part) for part in text.split("+"))


def check_lines(routers: Iterable[NatRouter], families: Mapping[int, str]) -> None:
    """Raise ConfigError for a host with IPv6 behind a router: none here passes it on."""
    for router in routers:
        for host in router.hosts:
            if "6" in families.get(host, "4"):
                raise ConfigError(
                    f"host {host} is behind a router, and has only IPv4 there",
                    fix="give another host IPv6, or take the router away",
                )


def line_names(routers: Iterable[NatRouter], hosts: int) -> list[str]:
    """Return whose namespace has each host's line: its own, its router's, or ``-`` for none."""
    names = [f"h{host}" for host in range(hosts)]
    for router in routers:
        for host in router.hosts:
            names[host] = "-"
        names[router.line] = router.outermost
    return names
