"""Round runners over real TLS links in one process, driven like the membership machine does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from atoll.collectives import get_codec
from atoll.optim.manifest import Manifest, Parameter
from atoll.optim.run_spec import RunSpec, blob
from atoll.peer.daemon.wiring import HomeSigner
from atoll.peer.membership import events as ev
from atoll.peer.membership.messages import STEP, Begin
from atoll.peer.membership.view import Member, View
from atoll.peer.net.identity import Home
from atoll.peer.rounds.executor import RoundExecutor
from atoll.peer.rounds.salvage import FetchKept
from atoll.peer.rounds.state import ReplicatedState
from atoll.peer.state_sync.messages import FetchResult
from atoll.peer.verify.manager import AuditManager
from atoll.peer.verify.statement import AuditMessage
from harness.linkhost import link_host
from harness.plainstate import initialise

LINEAGE = b"L" * 32
PATIENCE_S = 30.0


class Site:
    """A link host with a runner, and the events that the runner fed."""

    def __init__(self, home: Home) -> None:
        self.fed: list[ev.Event] = []
        self.logs: list[str] = []
        self.host = link_host(
            home,
            address=lambda: self.address,
            streams=lambda: self.executor.streams,
            on_message=self._on_message,
            log=self.logs.append,
        )
        self.address = ""
        self.me = home.peer_id
        self.audits = AuditManager(
            home.peer_id,
            HomeSigner(home),
            SimpleNamespace(
                send=self.host.send,
                convict=lambda evidence: None,
                note=self._note,
                life=lambda: 0,
                linked_life=lambda peer: 0,
                is_relayed=lambda peer: False,
            ),
        )
        self.executor = RoundExecutor(
            me=home.peer_id,
            host=self.host,
            audits=self.audits,
            daemon=SimpleNamespace(
                feed=self.fed.append,
                awaited_call=lambda fragment: None,
                tell_trainer=lambda effect, call: None,
                note=self._note,
                round_committed=lambda begin, took_s, tries: None,
            ),
            received=home.path / "received",
        )
        self._handlers = self.executor.handlers()
        self.task = asyncio.get_running_loop().create_task(self.executor.run())

    def _note(self, kind: str, text: str) -> None:
        self.logs.append(text)

    def carry_out(self, effect: ev.Effect) -> None:
        self._handlers[type(effect)](effect)

    def _on_message(self, peer: bytes, message: object) -> None:
        if isinstance(message, AuditMessage):
            self.audits.on_message(peer, message)
        elif isinstance(message, FetchResult):
            self.executor.donor.on_message(peer, message)
        elif isinstance(message, FetchKept):
            self.executor.kept_server.on_fetch_kept(peer, message)
        else:
            self.executor.fetcher.on_head(peer, message)  # type: ignore[arg-type]  # as the daemon

    async def close(self) -> None:
        self.task.cancel()
        self.audits.close()
        self.executor.close()
        await self.host.close()

    def reduced(self, attempt: int, number: int | None = None) -> bytes | None:
        found = (e for e in self.fed if isinstance(e, ev.AttemptReduced) and e.attempt == attempt)
        return next((e.root for e in found if number in (None, e.round)), None)

    def applied(self, number: int) -> bool:
        return any(isinstance(e, ev.Applied) and e.round == number for e in self.fed)

    def finals(self, attempt: int) -> bytes | None:
        found = (e for e in self.fed if isinstance(e, ev.FinalChunks) and e.attempt == attempt)
        return next((e.digests for e in found), None)

    @property
    def state(self) -> ReplicatedState:
        assert self.executor.state is not None
        return self.executor.state

    @property
    def inputs(self) -> np.ndarray:
        assert self.executor.replica.inputs is not None
        return self.executor.replica.inputs


async def eventually(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110  # what is waited for comes from threads
            await asyncio.sleep(0.002)


def scenario(folder: Path, names: str, play: Callable[[list[Site]], object]) -> None:
    """Linked sites, in order of peer id."""

    async def whole() -> None:
        homes = [Home.open(folder / name) for name in names]
        sites = sorted((Site(home) for home in homes), key=lambda site: site.me)
        try:
            for site in sites:
                host, port = await site.host.listen("127.0.0.1", 0)
                site.address = f"{host}:{port}"
            for i, site in enumerate(sites):
                for other in sites[:i]:
                    await site.host.dial(other.address)
            members = tuple(Member(site.me, 1, address=site.address) for site in sites)
            for site in sites:
                site.executor.installed(view_of(members))
            await play(sites)  # type: ignore[misc]  # a coroutine function
        finally:
            for site in sites:
                await site.close()
            for home in homes:
                home.close()

    asyncio.run(whole())


def view_of(members: tuple[Member, ...]) -> View:
    return View(LINEAGE, 1, members, members[0].peer, 1, b"c" * 32)


def run_blob(elements: int, codec: str = "int8", fragments: int = 1, **more: str | float) -> bytes:
    spec = RunSpec(
        sync_every=1,
        codec=codec,
        outer_lr=1.0,
        outer_momentum=0.0,
        fragments=fragments,
        rounds_in_flight=fragments,
        **more,  # type: ignore[arg-type]  # which RunSpec checks
    )
    return blob(spec, Manifest.of([Parameter("w", (elements,))]))


def begin_of(sites: list[Site], attempt: int, number: int = 2) -> Begin:
    peers = tuple(site.me for site in sites)
    return Begin(LINEAGE, 1, number, attempt, STEP, peers, (1.0,) * len(peers))


def prepare(
    sites: list[Site],
    elements: int,
    codec: str = "int8",
    fragments: int = 1,
    **more: str | float,
) -> None:
    """State of round 1 on all, and a submission of its own on each."""
    packed = run_blob(elements, codec, fragments, **more)
    theta = np.linspace(-1, 1, elements, dtype=np.float32)
    for i, site in enumerate(sites):
        state = ReplicatedState(packed)
        initialise(state, theta)
        site.executor.state = state
        site.executor.replica.inputs = theta + np.float32(i + 1)


def by_hand(sites: list[Site], begin: Begin, state: ReplicatedState) -> np.ndarray:
    expected = state.theta.copy()
    for chunk in range(state.grid.count):
        lo, hi = state.grid.bounds(chunk)
        expected[lo:hi] -= mean_by_hand(sites, begin.weights, chunk)[1]
    return expected


def mean_by_hand(
    sites: list[Site], weights: tuple[float, ...], chunk: int
) -> tuple[bytes, np.ndarray]:
    """The mean of a chunk of the whole vector, encoded and decoded again. ``sites`` by peer id."""
    state, codec = sites[0].state, get_codec("int8")
    lo, hi = state.grid.bounds(chunk)
    total = np.zeros(hi - lo, np.float32)
    data = np.empty(codec.encoded_bytes(hi - lo), np.uint8)
    for site, weight in zip(sites, weights, strict=True):
        if weight > 0:
            codec.encode(state.theta[lo:hi] - site.inputs[lo:hi], data)
            codec.decode_add(data, float(np.float32(weight / sum(weights))), total)
    codec.encode(total, data)
    codec.decode(data, total)
    return data.tobytes(), total
