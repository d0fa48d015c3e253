"""Fetch vectors that trainers of other peers have published, and wait until they have.

The answers are bounded by what was asked for: sizes and codec are known before, every chunk is
checked, and what is not expected is dropped. Whatever goes wrong is kept as an error that names the
peer.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

from atoll.collectives import RoundResult
from atoll.collectives.errors import (
    AtollError,
    ConfigError,
    ConnectError,
    RemoteProtocolError,
    RoundTimeoutError,
    StateError,
)
from atoll.peer.membership.view import short
from atoll.peer.net.connections import ConnectionManager
from atoll.peer.streams.opener import NO_RELAY_FIX
from atoll.peer.streams.transfers import EncodedTransfer, TransferKind, Transfers, receive
from atoll.peer.vectors.messages import TICKETS_MAX, AskVector, DropVector, VectorIs
from atoll.peer.vectors.store import VectorStore, encoded_vector

ANSWER_S = 5.0  # for the number of the newest: it is there, or not
FETCHES_MAX = 64  # at a time: two from each of the largest group


@dataclass(eq=False, slots=True)
class VectorFetch:
    """Track a vector on its way here; at the end it has ``encoded``, or ``error``."""

    peer: bytes
    name: str
    number: int
    elements: int
    codec: str
    ticket: int
    head: asyncio.Future[VectorIs | ConnectError]
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    encoded: RoundResult | None = None
    error: AtollError | None = None
    task: asyncio.Task[None] | None = None
    fail: Callable[[str], None] | None = None  # while its bytes arrive

    @property
    def state(self) -> str:
        """Return how far it is: "here", "coming" or "asked".

        here: it can be read, or has failed; coming: its bytes arrive; asked: it may not be
        published yet.
        """
        return "here" if self.ended.is_set() else "coming" if self.fail is not None else "asked"

    def __str__(self) -> str:
        return f"{self.name} {self.number} of {short(self.peer)}"


class VectorClient:
    """Keep the fetches of the own trainer.

    Lives in the event loop of the daemon; ``store``: of this peer's own trainer.
    """

    def __init__(
        self, me: bytes, host: ConnectionManager, transfers: Transfers, store: VectorStore
    ) -> None:
        self._me, self._host, self._transfers, self._store = me, host, transfers, store
        self._loop = asyncio.get_running_loop()
        self._tickets = itertools.count(1)
        self._fetches: dict[int, VectorFetch] = {}  # by ticket
        # Questions for the newest. An error is set as a result as well, because an exception
        # that nobody retrieves would end the daemon.
        self._asked: dict[tuple[bytes, int], asyncio.Future[int | ConnectError]] = {}

    def start(self, peer: bytes, name: str, number: int, elements: int, codec: str) -> VectorFetch:
        """Ask for a vector; whoever waits for it looks at ``ended``.

        ConfigError for more than FETCHES_MAX.
        """
        if len(self._fetches) >= FETCHES_MAX:
            raise ConfigError(
                f"{len(self._fetches)} vectors are being fetched, or are here to be read",
                fix="drop those that are read: asked.drop()",
            )
        head = self._loop.create_future()
        fetch = VectorFetch(peer, name, number, elements, codec, self._ticket(), head)
        self._fetches[fetch.ticket] = fetch
        fetch.task = self._loop.create_task(self._run(fetch))
        return fetch

    def find(self, ticket: int) -> VectorFetch | None:
        return self._fetches.get(ticket)

    def drop(self, fetch: VectorFetch) -> None:
        """Drop a fetch that is read, or not wanted any more.

        Its memory is given up, and what comes of it later is dropped.
        """
        self._fetches.pop(fetch.ticket, None)
        if fetch.task is not None:
            fetch.task.cancel()

    def drop_all(self) -> None:
        for fetch in list(self._fetches.values()):
            self.drop(fetch)

    async def newest(self, peer: bytes, name: str) -> int:
        """Return the number of the newest vector of this name that a peer's trainer has published.

        0 for none. ConnectError, RoundTimeoutError.
        """
        key = peer, self._ticket()
        waiting: asyncio.Future[int | ConnectError] = self._loop.create_future()
        self._asked[key] = waiting
        try:
            if not self._host.send(peer, AskVector(key[1], name)):
                raise ConnectError(f"no control link to {short(peer)}")
            async with asyncio.timeout(ANSWER_S):
                answer = await waiting
        except TimeoutError:
            raise RoundTimeoutError(
                f"{short(peer)} has not said for {ANSWER_S:.0f} s which {name} is its newest"
            ) from None
        finally:
            del self._asked[key]
        if isinstance(answer, ConnectError):
            raise answer
        return answer

    def on_head(self, source: bytes, head: VectorIs) -> None:
        asked = self._asked.get((source, head.ticket))
        if asked is not None and not asked.done():
            asked.set_result(head.newest)
        fetch = self._fetches.get(head.ticket)
        if fetch is None or fetch.peer != source:
            return  # it was given up
        if not fetch.head.done():
            fetch.head.set_result(head)
        elif not head.elements and fetch.fail is not None:
            fetch.fail(head.why)

    def lost(self, peer: bytes, why: str) -> None:
        """Fail what is asked of this peer: there is no link to it any more."""
        error = ConnectError(f"the link to {short(peer)} ended: {why}")
        for fetch in self._fetches.values():
            if fetch.peer == peer and not fetch.head.done():
                fetch.head.set_result(error)
            elif fetch.peer == peer and fetch.fail is not None:
                fetch.fail(f"the link ended: {why}")
        for key, asked in self._asked.items():
            if key[0] == peer and not asked.done():
                asked.set_result(error)

    # ------------------------------------------------------------ inside

    def _ticket(self) -> int:
        """Return a ticket that is not in use: there are far fewer at a time than numbers."""
        return next(self._tickets) % TICKETS_MAX + 1

    async def _run(self, fetch: VectorFetch) -> None:
        """Carry out a fetch; never raises, because nobody may be waiting for it yet."""
        try:
            if fetch.peer == self._me:
                fetch.encoded = await asyncio.to_thread(self._own, fetch)
            else:
                fetch.encoded = await self._fetch(fetch)
        except AtollError as error:
            fetch.error = error
        except MemoryError:
            fetch.error = ConfigError(f"no memory for {fetch}", fix="free memory on this machine")
        finally:
            fetch.fail = None
            fetch.ended.set()
            if fetch.encoded is None and fetch.peer != self._me:
                self._host.send(fetch.peer, DropVector(fetch.ticket))

    def _own(self, fetch: VectorFetch) -> RoundResult:
        """Return a copy of what this peer's own trainer has published. Runs in a thread."""
        stored = self._store.open(fetch.name, fetch.number)
        try:
            encoded = stored.encoded.copy()
            self._store.read(stored, 0)  # else something else was written over it meanwhile
        finally:
            self._store.close(fetch.name, stored)
        _check(fetch, encoded.grid.total, encoded.codec.name)
        return encoded

    async def _fetch(self, fetch: VectorFetch) -> RoundResult:
        key = (fetch.peer, int(TransferKind.VECTOR), fetch.number, fetch.ticket)
        self._check_way(fetch.peer)
        with self._transfers.asking(key):
            if not self._host.send(fetch.peer, AskVector(fetch.ticket, fetch.name, fetch.number)):
                raise ConnectError(f"no control link to {short(fetch.peer)}")
            head = await fetch.head
            if isinstance(head, ConnectError):
                raise head
            if not head.elements:
                raise StateError(f"{fetch} cannot be had: {head.why}")
            _check(fetch, head.elements, head.codec)
            encoded = encoded_vector(fetch.elements, fetch.codec)
            transfer = EncodedTransfer(key, encoded)
            fetch.fail = transfer.broken
            await receive(self._transfers, transfer)
        return encoded

    def _check_way(self, peer: bytes) -> None:
        """Raise ConnectError if a control link alone leads to a peer, and no data can come.

        The other end would notice when it is to send, and nobody would hear of it here.
        """
        link = self._host.link_of(peer)
        if link is not None and link.relay and not self._host.bulk_routes(peer):
            raise ConnectError(
                f"no vector of {short(peer)} can come here: neither can dial the other, and relay"
                f" {short(link.relay)} carries no data",
                fix=NO_RELAY_FIX,
            )


def _check(fetch: VectorFetch, elements: int, codec: str) -> None:
    """Raise RemoteProtocolError for another vector than was asked for."""
    if (elements, codec) != (fetch.elements, fetch.codec):
        raise RemoteProtocolError(
            f"{fetch} has {elements:,} elements in {codec!r}, not {fetch.elements:,} in "
            f"{fetch.codec!r}",
            fix="give all trainers the same method, numbers and model",
        )
