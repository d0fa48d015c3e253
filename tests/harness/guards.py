"""The links and the guards of several daemons in one event loop, without the daemons."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from atoll.collectives.errors import AtollError
from atoll.peer.authority.grants import Credential
from atoll.peer.authority.ledger import AboutPasses, Ledger
from atoll.peer.authority.policy import AuthorityAdmission
from atoll.peer.membership.view import REPLICA
from atoll.peer.net.admission_policy import AdmissionPolicy
from atoll.peer.net.certs import run_tls
from atoll.peer.net.connections import ConnectionManager
from atoll.peer.net.identity import Home
from atoll.peer.streams.stream import DataStream
from harness.passes import PUBLIC, RUN, key_of, passed

__all__ = ["Site", "Sites", "sites"]

SECRET = bytes(range(32))
PATIENCE_S = 30.0  # only a hang ever takes this long


class Site:
    """A daemon's links and its guard, without the daemon."""

    def __init__(
        self,
        home: Home,
        shown: Credential | None,
        role: str,
        founds: bool,
        changed: Callable[[], None],
    ) -> None:
        self.home, self._changed = home, changed
        self.address = ""
        self.outside = False
        self.notes: list[tuple[str, str]] = []
        self.heard: list[tuple[bytes, object]] = []
        self.stopped: list[AtollError] = []
        self.downs: list[tuple[bytes, str]] = []
        self.streams: list[DataStream] = []
        self.tasks: set[asyncio.Task[None]] = set()
        self.admission = (
            self._admission(shown, role, founds) if shown is not None else AdmissionPolicy()
        )
        self.host = ConnectionManager(
            peer_id=home.peer_id,
            tls=run_tls(home, SECRET),
            run=RUN,
            daemon=SimpleNamespace(
                life=lambda: 1,
                incarnation=lambda: 1,
                advertised=lambda: self.address,
                on_message=self._hear,
                on_up=lambda peer, address, inc: self.admission.linked(peer),
                on_down=self._down,
                on_data=lambda peer, stream: self._record(self.streams, stream),
                note=lambda kind, text: self.notes.append((kind, text)),
                on_conflict=lambda inc: None,
            ),
            policy=self.admission,
        )

    def _admission(self, shown: Credential, role: str, founds: bool) -> AuthorityAdmission:
        return AuthorityAdmission(
            self.home,
            Ledger(PUBLIC, RUN),
            shown.encode(),
            role,
            founds=founds,
            daemon=SimpleNamespace(
                send=lambda peer, message: self.host.send(peer, message),
                link_peers=lambda: self.host.link_peers(),
                expel=lambda peer, why: self.host.drop(peer, why, expelled=True),
                is_outside=lambda: self.outside,
                note=lambda kind, text: self.notes.append((kind, text)),
                stop=lambda error: self._record(self.stopped, error),
                spawn=lambda work: self.tasks.add(asyncio.get_running_loop().create_task(work)),
            ),
        )

    @property
    def id(self) -> bytes:
        return self.home.peer_id

    @property
    def ledger(self) -> Ledger:
        assert isinstance(self.admission, AuthorityAdmission)
        return self.admission.ledger

    def knows(self) -> set[bytes]:
        return {found.peer for found in self.ledger.records()}

    def said(self, kind: str) -> list[str]:
        return [text for noted, text in self.notes if noted == kind]

    def _hear(self, peer: bytes, message: object) -> None:
        if self.admission.check_message(peer, message) and isinstance(message, AboutPasses):
            self.admission.on_message(peer, message)
        self._record(self.heard, (peer, message))

    def _record(self, record: list[Any], item: object) -> None:
        record.append(item)
        self._changed()

    def _down(self, peer: bytes, why: str) -> None:
        self.admission.unlinked(peer)
        self._record(self.downs, (peer, why))

    async def listen(self) -> str:
        host, port = await self.host.listen("127.0.0.1", 0)
        self.address = f"{host}:{port}"
        return self.address

    async def saved(self) -> None:
        """What was to be written is in the home."""
        await asyncio.gather(*self.tasks)


class Sites:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._homes: dict[str, Home] = {}
        self._sites: list[Site] = []
        self._changed = asyncio.Event()

    def make(
        self,
        name: str,
        shown: Credential | None = None,
        role: str = REPLICA,
        *,
        founds: bool = False,
        without: bool = False,
    ) -> Site:
        """With a pass unless it is to show something else, or is to be ``without`` anything."""
        if name not in self._homes:
            folder = self._folder / name
            folder.mkdir(mode=0o700)
            (folder / "identity.key").write_bytes(key_of(name).private_bytes_raw())
            (folder / "identity.key").chmod(0o600)
            self._homes[name] = Home.open(folder)
        shown = None if without else shown or passed(name)
        self._sites.append(Site(self._homes[name], shown, role, founds, self._changed.set))
        return self._sites[-1]

    async def members(self, names: str) -> list[Site]:
        """Listening, each with a link to the one before."""
        made = [self.make(name) for name in names]
        for site in made:
            await site.listen()
        for site, before in zip(made[1:], made, strict=False):
            await site.host.dial(before.address)
        return made

    async def until(self, condition: Callable[[], object]) -> None:
        """Wait until what any of them has heard of satisfies ``condition``."""
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    async def close(self) -> None:
        await asyncio.gather(*(site.saved() for site in self._sites))
        await asyncio.gather(*(site.host.close() for site in self._sites))
        for home in self._homes.values():
            home.close()


@contextlib.asynccontextmanager
async def sites(folder: Path) -> AsyncIterator[Sites]:
    made = Sites(folder)
    try:
        yield made
    finally:
        await made.close()
