"""Test where a daemon listens, and which address of its machine it tells others."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from atoll.collectives.errors import ConfigError
from atoll.peer.net import listener, own_address
from atoll.peer.net.listener import check_port

_socket = socket.socket


def reaches(family: socket.AddressFamily, host: str, port: int) -> bool:
    with socket.socket(family, socket.SOCK_STREAM) as caller:
        return caller.connect_ex((host, port)) == 0


def test_without_a_host_all_addresses_of_both_families_are_taken() -> None:
    with listener._bound("", 0) as listening:
        port = listening.getsockname()[1]
        assert reaches(socket.AF_INET, "127.0.0.1", port)
        assert reaches(socket.AF_INET6, "::1", port)


def test_a_port_that_one_family_has_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"port {port} is in use by another program"):
            check_port("", port)


def test_a_machine_without_ipv6_listens_on_ipv4(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuse sockets as a kernel with ipv6.disable=1 does."""

    def only_ipv4(family: int = socket.AF_INET, *rest: Any, **more: Any) -> socket.socket:
        if family == socket.AF_INET6:
            raise OSError(97, "Address family not supported by protocol")
        return _socket(family, *rest, **more)

    monkeypatch.setattr(listener.socket, "socket", only_ipv4)
    with listener._bound("", 0) as listening:
        monkeypatch.undo()
        assert reaches(socket.AF_INET, "127.0.0.1", listening.getsockname()[1])


def test_the_own_address_is_of_the_first_host_with_a_route() -> None:
    assert own_address.own_address("a..b", "127.0.0.1") == "127.0.0.1"
    assert own_address.own_address("::1", "127.0.0.1") == "::1"
    assert own_address.own_address("::1", "127.0.0.1", only_ipv4=True) == "127.0.0.1"
    assert own_address.own_address("a..b") == ""  # no host can have that name
