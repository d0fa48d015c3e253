"""What systemd is told, over the socket that it listens on."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from atoll.peer.cli.service_manager import ServiceManager


@pytest.fixture
def manager_at(tmp_path: Path) -> Iterator[tuple[socket.socket, str]]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(str(tmp_path / "notify"))
        listening.settimeout(30)
        yield listening, str(tmp_path / "notify")


def test_it_is_told_ready_alive_and_stopping(manager_at: tuple[socket.socket, str]) -> None:
    listening, address = manager_at
    said: list[str] = []

    async def live() -> None:
        environ = {"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "30000"}
        manager = ServiceManager(environ | {"WATCHDOG_PID": str(os.getpid())}, said.append)
        manager.ready()
        for expected in (b"READY=1", b"WATCHDOG=1", b"WATCHDOG=1", b"WATCHDOG=1"):
            assert await asyncio.to_thread(listening.recv, 100) == expected
        manager.stopping()
        while await asyncio.to_thread(listening.recv, 100) != b"STOPPING=1":
            pass

    asyncio.run(live())
    assert not said


def test_what_is_said_once_waits_for_a_manager_that_is_busy(
    manager_at: tuple[socket.socket, str],
) -> None:
    listening, address = manager_at
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
        other.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                other.sendto(b"X", address)
    late = threading.Timer(0.1, listening.recv, (100,))
    late.start()
    ServiceManager({"NOTIFY_SOCKET": address}, print).stopping()
    late.join()
    heard = b"X"
    while heard == b"X":
        heard = listening.recv(100)
    assert heard == b"STOPPING=1"


def test_an_abstract_address_begins_with_an_at() -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(f"\0atoll-test-{os.getpid()}")
        listening.settimeout(30)
        ServiceManager({"NOTIFY_SOCKET": f"@atoll-test-{os.getpid()}"}, print).stopping()
        assert listening.recv(100) == b"STOPPING=1"


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"WATCHDOG_USEC": "30000"},
        {"NOTIFY_SOCKET": "{address}", "WATCHDOG_USEC": "30000", "WATCHDOG_PID": "1"},
        {"NOTIFY_SOCKET": "{address}", "WATCHDOG_USEC": "soon"},
    ],
)
def test_without_a_watchdog_there_are_no_signs_of_life(
    environ: dict[str, str], manager_at: tuple[socket.socket, str]
) -> None:
    listening, address = manager_at
    environ = {name: value.format(address=address) for name, value in environ.items()}
    manager = ServiceManager(environ, print)
    manager.ready()  # without a running loop: a sign of life would be an error
    listening.setblocking(False)
    if "NOTIFY_SOCKET" in environ:
        assert listening.recv(100) == b"READY=1"
    with pytest.raises(BlockingIOError):
        listening.recv(100)


def test_a_manager_that_is_gone_is_said_once(tmp_path: Path) -> None:
    said: list[str] = []
    manager = ServiceManager({"NOTIFY_SOCKET": str(tmp_path / "nobody")}, said.append)
    for _ in range(3):
        manager.stopping()
    assert said == ["systemd is not told STOPPING=1: NOTIFY_SOCKET: No such file or directory"]
