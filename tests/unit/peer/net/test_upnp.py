"""Test odd routers that are asked by UPnP; they stand in place of the library.

How real ones answer is in tests/netlab/test_upnp.py.
"""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

from atoll.peer.net.upnp import PortMapping, RouterError, UpnpRouter

PORT = 29600
PUBLIC_IP = "203.0.113.7"


class Igd:
    """Hold what the library knows of a router."""

    lanaddr = "192.168.1.5"

    def __init__(self, outer_ip: str | Exception | None) -> None:
        self.outer_ip = outer_ip
        self.ports: list[int] = []

    def discover(self) -> int:
        return 1

    def selectigd(self) -> str:
        return "http://192.168.1.1:1900/igd.xml"

    def externalipaddress(self) -> str | None:
        if isinstance(self.outer_ip, Exception):
            raise self.outer_ip
        return self.outer_ip

    def getspecificportmapping(self, port: int, protocol: str) -> None:
        return None

    def addportmapping(self, port: int, *more: object) -> None:
        self.ports.append(port)


def router_of(igd: Igd, monkeypatch: pytest.MonkeyPatch) -> UpnpRouter:
    monkeypatch.setitem(sys.modules, "miniupnpc", SimpleNamespace(UPnP=lambda: igd))
    return UpnpRouter()


def test_a_router_forwards_the_port_at_its_own_address(monkeypatch: pytest.MonkeyPatch) -> None:
    igd = Igd(PUBLIC_IP)
    mapping = router_of(igd, monkeypatch).forward(PORT)
    assert mapping == PortMapping("192.168.1.1", PUBLIC_IP, PORT, PORT)
    assert igd.ports == [PORT]


@pytest.mark.parametrize("outer_ip", [None, "", "0.0.0.0", "::", "unknown"])
def test_a_router_without_an_outer_address_forwards_nothing(
    outer_ip: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    igd = Igd(outer_ip)
    with pytest.raises(RouterError, match=r"router at 192\.168\.1\.1 has no address of its own on"):
        router_of(igd, monkeypatch).forward(PORT)
    assert igd.ports == []


def test_a_router_that_does_not_say_its_address_keeps_no_mapping(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    igd = Igd(Exception("Action Failed"))
    with pytest.raises(RouterError, match="does not say which address it has: Action Failed"):
        router_of(igd, monkeypatch).forward(PORT)
    assert igd.ports == []


class Broken(ModuleType):
    """Load a library that was built for another system."""

    def __getattr__(self, name: str) -> object:
        raise ImportError("libminiupnpc.so.17: cannot open shared object file")


def refuses() -> None:
    raise OSError("no memory")


@pytest.mark.parametrize(
    ("library", "words"),
    [
        (None, "import of miniupnpc halted"),
        (Broken("miniupnpc"), "libminiupnpc"),
        (refuses, "no m"),
    ],
)
def test_a_library_that_does_not_load_is_no_more_than_no_router(
    library: object, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = SimpleNamespace(UPnP=library) if library is refuses else library
    monkeypatch.setitem(sys.modules, "miniupnpc", found)
    router = UpnpRouter()
    for ask in (router.forward, lambda port: router.stop(PortMapping("", PUBLIC_IP, port, port))):
        with pytest.raises(RouterError, match=f"miniupnpc does not load .*{words}"):
            ask(PORT)
