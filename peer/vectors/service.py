"""Do a daemon's part in vectors that its trainer publishes and fetches: commands, memory, ends.

One piece of shared memory carries what is published and what was fetched, one after the other. What
waits to be read is kept as it came, encoded.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atoll.collectives.errors import ConfigError, ConnectError, SessionError
from atoll.optim.manifest import ELEMENTS_MAX
from atoll.peer.client.shared_memory import Region, send_region
from atoll.peer.daemon.ipc_server import Handler
from atoll.peer.daemon.trainer_service import AttachedTrainer, TrainerService
from atoll.peer.membership.messages import NO_TERMS
from atoll.peer.membership.node import Node
from atoll.peer.membership.participation import trainers_needed
from atoll.peer.membership.view import short
from atoll.peer.net.connections import ConnectionManager
from atoll.peer.state_sync.incoming import Copies
from atoll.peer.streams.manager import Streams
from atoll.peer.vectors.client import Fetches, VectorFetch
from atoll.peer.vectors.messages import AboutVectors, VectorIs, is_name
from atoll.peer.vectors.server import VectorServer

F32 = NDArray[np.float32]
LOOK_S_MAX = 5.0  # that a question whether a vector is here may wait for it
NUMBER_MAX = 1 << 61  # of what a trainer publishes


class VectorService:
    """Answer the trainer's commands and the other daemons' messages. Lives in the event loop."""

    def __init__(
        self,
        *,
        node: Node,
        trainers: TrainerService,
        host: ConnectionManager,
        streams: Streams,
        copies: Copies,
        log: Callable[[str], None],
    ) -> None:
        self._me, self._node, self._trainers = node.me.peer, node, trainers
        self._server = VectorServer(host, streams, lambda: trainers.trainer is not None, log)
        self._fetches = Fetches(self._me, host, copies, self._server.store)
        self._trainer: AttachedTrainer | None = None  # whose memory this is
        self._region: Region | None = None

    def handlers(self) -> dict[str, Handler]:
        return {
            "members": self._members,
            "vector_memory": self._memory,
            "publish": self._publish,
            "newest": self._newest,
            "ask_vector": self._ask,
            "look_for_vector": self._look,
            "read_vector": self._read,
            "drop_vector": self._drop,
        }

    def on_message(self, source: bytes, message: AboutVectors) -> None:
        if isinstance(message, VectorIs):
            self._fetches.on_head(source, message)
        else:
            self._server.on_message(source, message)

    def link_down(self, peer: bytes, why: str) -> None:
        self._server.lost(peer)
        self._fetches.lost(peer, why)

    def gone(self, client: bytes) -> None:
        """Note that a client of the daemon has ended, perhaps its trainer."""
        self._trainers.gone(client)
        if self._trainer is not None and self._trainer.client == client:
            self._forget()
        if self._trainers.trainer is None:
            self._server.trainer_ended()

    def close(self) -> None:
        self._fetches.drop_all()
        self._server.close()

    def _forget(self) -> None:
        self._fetches.drop_all()
        if self._region is not None:
            self._region.close()
        self._trainer = self._region = None

    # ------------------------------------------------------------ commands

    async def _members(self, client: bytes, _: dict[str, Any]) -> dict[str, Any]:
        view = self._node.view
        peers = sorted(view.replicas) if view is not None else [self._me]
        terms = self._node.follower.terms or NO_TERMS
        return {
            "view": view.number if view else 0,
            "names": [short(peer) for peer in peers],
            "min_trainers": trainers_needed(view, terms) if view else terms.min_trainers,
        }

    async def _memory(self, client: bytes, arguments: dict[str, Any]) -> None:
        """Give memory for vectors of so many elements, instead of what was given out before.

        ConfigError for no such number; SessionError if the trainer has ended meanwhile.
        """
        trainer, elements = self._known(client), int(arguments["elements"])
        if not 0 < elements <= ELEMENTS_MAX:
            raise ConfigError(f"a vector of {elements} elements")
        region = await asyncio.to_thread(Region, "vector", elements)
        if self._trainers.trainer is not trainer:
            region.close()
            raise SessionError("this trainer has ended meanwhile")
        if self._region is not None:
            self._region.close()
        self._trainer, self._region = trainer, region
        assert self._trainers.ipc_server is not None
        send_region(self._trainers.ipc_server.lifeline(client), region, writable=True)

    async def _publish(self, client: bytes, arguments: dict[str, Any]) -> None:
        name, number = self._place(arguments)
        values = self._values(client, int(arguments["elements"]))
        self._trainers.note_figures(self._known(client), arguments.get("figures", {}))
        try:
            await self._server.publish(name, number, values, str(arguments["codec"]))
        except MemoryError:
            raise ConfigError(
                f"no memory to publish {name} {number}", fix="free memory on this machine"
            ) from None

    async def _newest(self, client: bytes, arguments: dict[str, Any]) -> int:
        self._known(client)
        peer = self._peer(str(arguments["peer"]))
        name, _ = self._place(arguments | {"number": 1})
        if peer == self._me:
            return self._server.newest(name)
        return await self._fetches.newest(peer, name)

    async def _ask(self, client: bytes, arguments: dict[str, Any]) -> int:
        """Begin to fetch a vector; return the ticket with which it is called from now on."""
        trainer = self._known(client)
        name, number = self._place(arguments)
        elements, codec = int(arguments["elements"]), str(arguments["codec"])
        peer = self._peer(str(arguments["peer"]))
        if self._trainer is not trainer:
            raise SessionError("no memory was asked for", fix="call session.ask_vector()")
        return self._fetches.start(peer, name, number, elements, codec).ticket

    async def _look(self, client: bytes, arguments: dict[str, Any]) -> str:
        """Return how far a fetch is, after a moment; raise the error that it has ended with.

        ConnectError if its peer has left the view.
        """
        fetch = self._found(client, arguments)
        timeout_s = min(float(arguments["timeout_s"]), LOOK_S_MAX)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await fetch.ended.wait()
        view = self._node.view
        if fetch.error is not None:
            self._fetches.drop(fetch)
            raise fetch.error
        if not fetch.ended.is_set() and view is not None and fetch.peer not in view.peers:
            self._fetches.drop(fetch)
            raise ConnectError(f"{short(fetch.peer)} has left the view")
        return fetch.state

    async def _read(self, client: bytes, arguments: dict[str, Any]) -> None:
        """Decode a fetched vector into the shared memory; it can be read again."""
        fetch = self._found(client, arguments)
        encoded = fetch.encoded
        if encoded is None:
            raise SessionError(f"{fetch} is not here yet", fix="wait for it first")
        values = self._values(client, encoded.grid.total)

        def decode() -> None:
            for chunk in range(encoded.grid.count):
                lo, hi = encoded.grid.bounds(chunk)
                encoded.codec.decode(encoded.view(chunk), values[lo:hi])

        await asyncio.to_thread(decode)

    async def _drop(self, client: bytes, arguments: dict[str, Any]) -> None:
        self._known(client)
        fetch = self._fetches.find(int(arguments["ticket"]))
        if fetch is not None:
            self._fetches.drop(fetch)

    # ------------------------------------------------------------ what commands name

    def _known(self, client: bytes) -> AttachedTrainer:
        trainer = self._trainers.known(client)
        if not trainer.in_step:
            raise SessionError("vectors before attach", fix="call attach first")
        return trainer

    def _values(self, client: bytes, elements: int) -> F32:
        self._known(client)
        region = self._region
        if region is None or not 0 < elements <= region.count:
            raise SessionError(f"no memory was asked for {elements:,} elements")
        return region.floats[:elements]

    def _place(self, arguments: dict[str, Any]) -> tuple[str, int]:
        name, number = str(arguments["name"]), int(arguments["number"])
        if not is_name(name) or not 0 < number <= NUMBER_MAX:
            raise ConfigError(
                f"vector {name[:40]!r} number {number}",
                fix="a name of up to 32 letters, and a positive number",
            )
        return name, number

    def _peer(self, name: str) -> bytes:
        """Return the peer of this name or id; ConnectError if the view has nobody of this name."""
        view = self._node.view
        for peer in (self._me, *(view.replicas if view is not None else ())):
            if name in (short(peer), peer.hex()):  # short ones can be made on purpose
                return peer
        raise ConnectError(f"{name[:40]} is not in the view")

    def _found(self, client: bytes, arguments: dict[str, Any]) -> VectorFetch:
        self._known(client)
        fetch = self._fetches.find(int(arguments["ticket"]))
        if fetch is None:
            raise SessionError("there is no such fetch (any more)")
        return fetch
