"""Several LinkHosts in one event loop over loopback, with what they reported on record."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from atoll.peer.cli import daemon
from atoll.peer.daemon.options import DaemonOptions
from atoll.peer.net.certs import RunTls, run_tls
from atoll.peer.net.connections import ConnectionManager
from atoll.peer.net.identity import Home
from atoll.peer.streams.keys import CIPHERS
from atoll.peer.streams.stream import DataStream

RUN, SECRET = "demo", bytes(range(32))
# Only a hang ever takes this long.
PATIENCE_S = 30.0


class Node:
    """A ConnectionManager and the record of its callbacks."""

    def __init__(
        self,
        home: Home,
        tls: RunTls,
        run: str,
        life: int,
        ciphers: tuple[str, ...],
        relay_bytes_per_s: float = 0.0,
    ) -> None:
        self.home, self.tls = home, tls
        self.messages: list[tuple[bytes, object]] = []
        self.ups: list[tuple[bytes, str, int]] = []
        self.downs: list[tuple[bytes, str]] = []
        self.streams: list[DataStream] = []
        self.conflicts: list[int] = []
        self.members: set[bytes] = set()  # of the view that it is in
        self.logs: list[str] = []
        self.address = ""
        self.on_up: Callable[[bytes], None] = lambda peer_id: None
        self._changed = asyncio.Event()
        self.host = ConnectionManager(
            peer_id=home.peer_id,
            tls=tls,
            run=run,
            daemon=SimpleNamespace(
                life=lambda: life,
                incarnation=lambda: life,
                advertised=lambda: self.address,
                on_message=lambda peer, msg: self._note(self.messages, (peer, msg)),
                on_up=self._up,
                on_down=lambda peer, why: self._note(self.downs, (peer, why)),
                on_data=lambda peer, stream: self._note(self.streams, stream),
                note=lambda kind, line: self._note(self.logs, line),
                on_conflict=lambda life: self._note(self.conflicts, life),
                member_peers=lambda: self.members,
            ),
            ciphers=ciphers,
            relay_bytes_per_s=relay_bytes_per_s,
        )

    @property
    def id(self) -> bytes:
        return self.host.peer_id

    async def listen(self, ip: str = "127.0.0.1") -> str:
        host, port = await self.host.listen(ip, 0)
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        return self.address

    async def until(self, condition: Callable[[], object]) -> None:
        """Wait until what the callbacks recorded satisfies ``condition``."""
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    def _up(self, peer_id: bytes, address: str, inc: int) -> None:
        self._note(self.ups, (peer_id, address, inc))
        self.on_up(peer_id)

    def _note(self, record: list[Any], item: object) -> None:
        record.append(item)
        self._changed.set()


class Net:
    """Makes nodes; ends them all, and checks that nothing of them is left."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._homes: dict[str, Home] = {}
        self._nodes: list[Node] = []

    def node(
        self,
        name: str,
        *,
        run: str = RUN,
        secret: bytes = SECRET,
        life: int = 1,
        ciphers: tuple[str, ...] = CIPHERS,
        relay_bytes_per_s: float = 0.0,
    ) -> Node:
        """A node with the identity ``name``, which several nodes may share."""
        if name not in self._homes:
            self._homes[name] = Home.open(self._folder / name)
        home = self._homes[name]
        self._nodes.append(Node(home, run_tls(home, secret), run, life, ciphers, relay_bytes_per_s))
        return self._nodes[-1]

    async def linked(
        self,
        ours: tuple[str, ...] = CIPHERS,
        theirs: tuple[str, ...] = CIPHERS,
        ip: str = "127.0.0.1",
    ) -> tuple[Node, Node]:
        """Two nodes with a control link that the second one dialled, and their ciphers."""
        a, b = self.node("a", ciphers=ours), self.node("b", ciphers=theirs)
        await b.host.dial(await a.listen(ip))
        return a, b

    def run(self, scenario: Coroutine[None, None, None]) -> None:
        """Run ``scenario`` to its end, then close every node."""

        defects: list[dict[str, Any]] = []  # exceptions that nobody awaited

        async def whole() -> None:
            asyncio.get_running_loop().set_exception_handler(lambda _, what: defects.append(what))
            try:
                await scenario
            finally:
                await asyncio.gather(*(node.host.close() for node in self._nodes))
            assert asyncio.all_tasks() == {asyncio.current_task()}

        asyncio.run(whole())
        assert not defects

    def close(self) -> None:
        for home in self._homes.values():
            home.close()


@pytest.fixture
def net(tmp_path: Path) -> Iterator[Net]:
    made = Net(tmp_path)
    yield made
    made.close()


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[DaemonOptions]:
    """Return what the daemons would have been started with."""
    found: list[DaemonOptions] = []

    async def serve(home: Home, options: DaemonOptions, _: Any, log: Any) -> int:
        found.append(options)
        home.save_run(options.record(()))
        return 0

    monkeypatch.setattr(daemon, "_serve", serve)
    return found
