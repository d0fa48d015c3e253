"""Donors and a learner over real TLS links in one process, with a real state and a real log."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

from atoll.optim.manifest import Parameter
from atoll.peer.membership.events import Goal
from atoll.peer.membership.view import Member
from atoll.peer.net.identity import Home
from atoll.peer.rounds.log import RoundLog
from atoll.peer.rounds.state import ReplicatedState
from atoll.peer.state_sync import messages as msg
from atoll.peer.state_sync.chunk_cache import ChunkCache
from atoll.peer.state_sync.client import SyncClient
from atoll.peer.state_sync.server import SyncServer
from atoll.peer.streams.manager import Streams
from atoll.peer.streams.router import Router
from harness.linkhost import link_host
from harness.tinyrun import TinyRun

__all__ = ["Site", "eventually", "goal_of", "run_of", "same", "scenario"]

PATIENCE_S = 30.0
LARGE = (Parameter("w", (700_000,), "float32"),)  # 64 chunks of 88 kB


class Site:
    """A donor, or with nothing to give a learner."""

    def __init__(self, home: Home, run: TinyRun | None) -> None:
        self.me, self.address, self.home = home.peer_id, "", home.path
        self.logs: list[str] = []
        self.failed: list[str] = []
        self.reached: list[tuple[int, bytes]] = []
        self.state: ReplicatedState | None = run.state if run else None
        self.rounds = run.log if run else RoundLog()
        self.host = link_host(
            home,
            address=lambda: self.address,
            streams=lambda: self.streams,
            on_message=self._on_message,
            log=self.logs.append,
        )
        self.router = Router(lambda peer, why: None)
        self.streams = Streams(self.host, self.router)
        self.donor = SyncServer(
            self.host, self.streams, lambda number, attempt: None, self.rounds, self.logs.append
        )
        self.donor.state = self.state
        self.sync = SyncClient(
            host=self.host,
            transfers=self.router.transfers,
            rounds=self.rounds,
            cache=ChunkCache(home.path / "received", self.logs.append),
            owner=self,
        )
        self.sync_failed, self.log = self.failed.append, self.logs.append
        self.pieces = 0

    def _on_message(self, peer: bytes, message: object) -> None:
        if isinstance(message, msg.ASKED_OF_DONORS):
            self.pieces += isinstance(message, msg.FetchPiece)
            self.donor.on_message(peer, message)
        else:
            self.sync.on_message(peer, message)

    def adopt(self, state: ReplicatedState, number: int, chain: bytes) -> None:
        self.state = self.donor.state = state
        self.reached.append((number, chain))

    async def die(self) -> None:
        self.streams.close()
        await self.host.close()

    async def close(self) -> None:
        self.sync.close()
        self.donor.close()
        self.streams.close()
        await self.host.close()


async def eventually(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110  # what is waited for comes from threads
            await asyncio.sleep(0.002)


def run_of(rounds: int, **options: object) -> TinyRun:
    run = TinyRun(b"p" * 32, parameters=LARGE, **options)  # type: ignore[arg-type]
    while run.state.round < rounds:
        run.commit()
    return run


def scenario(
    folder: Path, runs: list[TinyRun | None], play: Callable[[list[Site]], Awaitable[None]]
) -> None:
    async def whole() -> None:
        homes = [Home.open(folder / str(i)) for i in range(len(runs))]
        sites = [Site(home, run) for home, run in zip(homes, runs, strict=True)]
        try:
            for site in sites:
                host, port = await site.host.listen("127.0.0.1", 0)
                site.address = f"{host}:{port}"
            await play(sites)
        finally:
            for site in sites:
                await site.close()
            for home in homes:
                home.close()

    asyncio.run(whole())


def goal_of(run: TinyRun, donors: list[Site], *, suspect: bool = False) -> Goal:
    members = tuple(Member(site.me, 1, address=site.address) for site in donors)
    return Goal(run.state.round, run.chain, donors[0].me, members, suspect)


def same(one: ReplicatedState | None, other: ReplicatedState) -> bool:
    assert one is not None
    return (one.digest, one.theta.tobytes(), one.momentum.tobytes()) == (
        other.digest,
        other.theta.tobytes(),
        other.momentum.tobytes(),
    )
