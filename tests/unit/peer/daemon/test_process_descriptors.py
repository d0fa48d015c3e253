"""Descriptors: how many are allowed, who is turned away, and life without any."""

from __future__ import annotations

import asyncio
import os
import resource
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from atoll.collectives.errors import LocalProtocolError
from atoll.peer.client.ipc_client import ask
from atoll.peer.daemon import process
from atoll.peer.daemon.ipc_server import CLIENT_ID_BYTES, LIFELINE, IpcServer
from atoll.peer.net.identity import Home

PATIENCE_S = 30.0


@pytest.fixture
def limits() -> Iterator[tuple[int, int]]:
    """The soft and the hard limit, restored afterwards."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield before
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


class Numbered(socket.socket):
    """A socket that says to have a certain descriptor."""

    number = 0

    def fileno(self) -> int:
        return self.number


@pytest.mark.parametrize(
    ("limit", "first_refused"),
    [(1024, 819), (100, 68), (10_000, 8000), (20, 0), (resource.RLIM_INFINITY, 1 << 30)],
)
def test_a_share_and_a_remainder_are_kept(
    monkeypatch: pytest.MonkeyPatch, limit: int, first_refused: int
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limit, limit))
    with Numbered() as accepted:
        accepted.number = first_refused
        assert process.is_scarce(accepted) == (limit != resource.RLIM_INFINITY)
        accepted.number = first_refused - 1
        assert process.is_scarce(accepted) == (first_refused == 0)


def test_dials_leave_the_last_to_local_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (100, 100))
    with Numbered() as opened:
        opened.number = 100 - process.KEPT_FOR_LOCAL
        assert process.is_last(opened)
        opened.number -= 1
        assert not process.is_last(opened)
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY,) * 2)
    with Numbered() as opened:
        opened.number = 1 << 30
        assert not process.is_last(opened)


def test_the_limit_is_raised_as_far_as_it_may(limits: tuple[int, int]) -> None:
    _, hard = limits
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, hard))
    assert process.raise_limit() == f"up to {hard:,} descriptors, raised from 200"
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    assert process.raise_limit() == f"up to {hard:,} descriptors"


def test_a_limit_that_cannot_be_raised_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(which: int, limits: tuple[int, int]) -> None:
        raise ValueError("current limit exceeds maximum limit")

    monkeypatch.setattr(resource, "getrlimit", lambda which: (256, 1 << 62))
    monkeypatch.setattr(resource, "setrlimit", refuse)
    assert process.raise_limit().startswith("up to 256 descriptors; more are not allowed: ")


def test_the_ipc_server_survives_a_process_without_descriptors(
    tmp_path: Path, limits: tuple[int, int]
) -> None:
    _, hard = limits

    async def scenario(home: Home) -> None:
        loop = asyncio.get_running_loop()
        server = IpcServer(home.socket_path)
        turned_away = asyncio.Event()
        accept = loop.sock_accept

        async def observed(listener: socket.socket) -> tuple[socket.socket, object]:
            try:
                return await accept(listener)
            except OSError:
                turned_away.set()
                raise

        loop.sock_accept = observed  # type: ignore[method-assign]  # to see that it has failed
        with socket.socket(socket.AF_UNIX) as client:
            client.setblocking(False)
            server.start({}, lambda client: None)
            try:
                free = os.dup(client.fileno())
                os.close(free)
                resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
                async with asyncio.timeout(PATIENCE_S):
                    await loop.sock_connect(client, os.fspath(home.socket_path(LIFELINE)))
                    await turned_away.wait()
                    resource.setrlimit(resource.RLIMIT_NOFILE, limits)
                    await loop.sock_sendall(client, b"c" * CLIENT_ID_BYTES)
                    assert await loop.sock_recv(client, 1) == b"!"
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, limits)
                server.close()

    with Home.open(tmp_path / "home") as home:
        asyncio.run(scenario(home))


def test_the_ipc_server_turns_lifelines_away_when_descriptors_are_scarce(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("atoll.peer.daemon.ipc_server.is_scarce", lambda accepted: True)

    async def scenario(home: Home) -> None:
        loop = asyncio.get_running_loop()
        server = IpcServer(home.socket_path)
        server.start({}, lambda client: None)
        try:
            with socket.socket(socket.AF_UNIX) as client:
                client.setblocking(False)
                async with asyncio.timeout(PATIENCE_S):
                    await loop.sock_connect(client, os.fspath(home.socket_path(LIFELINE)))
                    assert await loop.sock_recv(client, 1) == b""
        finally:
            server.close()

    with Home.open(tmp_path / "home") as home:
        asyncio.run(scenario(home))


def test_an_answer_that_cannot_be_packed_is_an_error_of_that_command(tmp_path: Path) -> None:
    """Others say what is in it: it must not end the daemon."""
    heard: list[dict[str, object]] = []

    async def huge(client: bytes, arguments: object) -> int:
        return 1 << 70

    async def scenario(home: Home) -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda loop, context: heard.append(context))
        server = IpcServer(home.socket_path)
        server.start({"status": huge}, lambda client: None)
        try:
            answer = asyncio.to_thread(ask, home.path, "status")
            with pytest.raises(LocalProtocolError, match="malformed command: OverflowError"):
                await asyncio.wait_for(answer, PATIENCE_S)
        finally:
            server.close()

    with Home.open(tmp_path / "home") as home:
        asyncio.run(scenario(home))
    assert not heard
