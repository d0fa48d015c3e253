"""Ask the router at home to forward a port (UPnP IGD), with miniupnpc. It blocks: use a thread.

The library is an extra, ``pip install 'atoll[upnp]'``, and written in C; this is the only module
that loads it. What it raises is a bare Exception with the router's words.
"""

from __future__ import annotations

import importlib.util
import ipaddress
import random
from typing import Any, Final, NamedTuple

# A router may take a second to answer. The library asks for four kinds of it, one after the other,
# so that four seconds pass where there is none, and one where there is one.
DISCOVER_MS: Final = 1000
# A peer that is killed leaves its mapping behind for so long.
LEASE_S: Final = 3600
# Where another machine has our port: so many others are tried.
OTHER_PORTS_MAX: Final = 3
PORTS: Final = (20_000, 60_000)  # of which one is drawn
REASON_CHARACTERS_MAX: Final = 120  # of what a router answers
_TCP: Final = "TCP"
_TITLE: Final = "atoll"  # what people see in the router's own list


class PortMapping(NamedTuple):
    """Describe what a router forwards: what comes to ``outer_ip`` at ``outer_port``."""

    router: str
    outer_ip: str
    outer_port: int
    port: int


class RouterError(Exception):
    """Report that no router forwards the port, and why, in words for people."""


def is_installed() -> bool:
    """Return whether the extra is installed."""
    return importlib.util.find_spec("miniupnpc") is not None


class UpnpRouter:
    """Ask one router, found with the first question. Every method may take seconds."""

    def __init__(self) -> None:
        self._igd: Any = None
        self._url = ""

    def forward(self, port: int, outer_port: int = 0) -> PortMapping:
        """Have what comes to the router's ``outer_port``, else to any, forwarded to our port.

        Do it again to renew. Raises RouterError.
        """
        self._find()
        outer_ip = self._outer_ip()  # first: what is forwarded from nowhere would stay there
        wanted = [outer_port or port]
        wanted += [random.randint(*PORTS) for _ in range(OTHER_PORTS_MAX)] * (not outer_port)
        why = ""
        for outer in wanted:
            try:
                if self._is_ours_to_take(outer, port):
                    self._add(outer, port)
                    return PortMapping(self._name(), outer_ip, outer, port)
                why = f"another machine has port {outer}"
            except Exception as error:
                why = _words(error)
        raise RouterError(f"the router at {self._name()} does not forward port {port}: {why}")

    def stop(self, mapping: PortMapping) -> None:
        """Have the router forget a mapping. Raises RouterError."""
        try:
            self._find().deleteportmapping(mapping.outer_port, _TCP)
        except RouterError:
            raise
        except Exception as error:
            raise RouterError(_words(error)) from error

    def _find(self) -> Any:
        if self._igd is not None:
            return self._igd
        try:
            import miniupnpc

            igd = miniupnpc.UPnP()
        except Exception as error:  # it is there, and built for another Python or system
            raise RouterError(
                f"no router can be asked, because miniupnpc does not load ({_words(error)}):"
                " pip install --force-reinstall miniupnpc"
            ) from error
        igd.discoverdelay = DISCOVER_MS
        try:
            igd.discover()
            self._url = igd.selectigd()
        except Exception as error:
            raise RouterError("no router here answers UPnP, so none forwards a port") from error
        self._igd = igd
        return igd

    def _outer_ip(self) -> str:
        """Return the address that the router has outside. Raises RouterError if it has none."""
        try:
            outer_ip = str(self._igd.externalipaddress() or "")
        except Exception as error:
            what = f"does not say which address it has: {_words(error)}"
            raise RouterError(f"the router at {self._name()} {what}") from error
        if not _is_address(outer_ip):
            what = "has no address of its own on the internet: nobody could dial what it forwards"
            raise RouterError(f"the router at {self._name()} {what}")
        return outer_ip

    def _is_ours_to_take(self, outer_port: int, port: int) -> bool:
        """Return whether nobody else has the port: some routers would take it away from them."""
        there = self._igd.getspecificportmapping(outer_port, _TCP)
        return there is None or (there[0], int(there[1])) == (self._igd.lanaddr, port)

    def _add(self, outer_port: int, port: int) -> None:
        arguments = outer_port, _TCP, self._igd.lanaddr, port, _TITLE, ""
        try:
            self._igd.addportmapping(*arguments, LEASE_S)
        except Exception as error:
            if "OnlyPermanentLeasesSupported" not in str(error):
                raise
            self._igd.addportmapping(*arguments, 0)

    def _name(self) -> str:
        return self._url.partition("://")[2].partition("/")[0].rpartition(":")[0] or "?"


def _is_address(text: str) -> bool:
    try:
        return not ipaddress.ip_address(text).is_unspecified
    except ValueError:
        return False


def _words(error: Exception) -> str:
    return str(error)[:REASON_CHARACTERS_MAX] or type(error).__name__
