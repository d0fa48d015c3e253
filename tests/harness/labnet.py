"""A lab as the network of a fleet: peers a, b, c, ... on hosts 0, 1, 2, ..."""

from __future__ import annotations

from atoll.peer.lab.lab import Lab
from atoll.peer.lab.nat import NatRouter

__all__ = ["NAMES", "LabNet", "router_before"]

NAMES = "abcdefgh"


class LabNet:
    """As much of a net as a fleet needs."""

    def __init__(self, lab: Lab) -> None:
        self._lab = lab

    def address(self, name: str) -> str:
        address = self._lab.address(NAMES.index(name))
        return f"[{address}]" if ":" in address else address

    def command(self, name: str, arguments: tuple[str, ...]) -> list[str]:
        return self._lab.command(NAMES.index(name), *arguments)

    def close(self) -> None:
        """The lab belongs to the test."""


def router_before(lab: Lab, host: int) -> tuple[NatRouter, str]:
    """The router next to a host, and the name of its namespace."""
    router = next(one for one in lab.routers if host in one.hosts)
    return router, lab.space(host).replace(f"-h{host}", f"-{router.home}")
