"""Do a daemon's part in vectors: its trainer's commands, and questions for what that has published.

One piece of shared memory carries what is published and what was fetched, one after the other. What
waits to be read is kept as it came, encoded. What others ask for is copied and sent a chunk at a
time, in a few threads, behind the frames of rounds: a slow receiver takes a thread, and no more
memory than a chunk and, of each name, one vector.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atoll.collectives.errors import AtollError, ConfigError, ConnectError, SessionError
from atoll.collectives.threads import workers
from atoll.optim.manifest import ELEMENTS_MAX
from atoll.peer.client.shared_memory import Region, send_region
from atoll.peer.daemon.ipc_server import Handler
from atoll.peer.daemon.trainer_service import AttachedTrainer, TrainerService
from atoll.peer.membership.messages import NO_TERMS
from atoll.peer.membership.node import Node
from atoll.peer.membership.participation import trainers_needed
from atoll.peer.membership.view import short
from atoll.peer.net.connections import ConnectionManager
from atoll.peer.streams.frames import DataHeader
from atoll.peer.streams.manager import FrameOutlet, Streams, reason_of
from atoll.peer.streams.transfers import TransferKind, Transfers
from atoll.peer.vectors.client import VectorClient, VectorFetch
from atoll.peer.vectors.messages import (
    WHY_BYTES_MAX,
    AboutVectors,
    AskVector,
    DropVector,
    VectorIs,
    is_name,
)
from atoll.peer.vectors.store import (
    PublishedVectors,
    RequestKey,
    StoredVector,
    VectorAnswer,
    VectorRequest,
    VectorStore,
)

F32 = NDArray[np.float32]
LOOK_S_MAX = 5.0  # that a question whether a vector is here may wait for it
NUMBER_MAX = 1 << 61  # of what a trainer publishes
SERVES_MAX = 8  # vectors that are being sent at a time: more would only share the same uplink


class VectorService:
    """Answer the trainer's commands and the other daemons' messages. Lives in the event loop."""

    def __init__(
        self,
        *,
        node: Node,
        trainers: TrainerService,
        host: ConnectionManager,
        streams: Streams,
        transfers: Transfers,
        log: Callable[[str], None],
    ) -> None:
        self._me, self._node, self._trainers = node.me.peer, node, trainers
        self._host = host
        self._server = VectorServer(host, streams, lambda: trainers.trainer is not None, log)
        self._fetches = VectorClient(self._me, host, transfers, self._server.store)
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
            "outbound": [short(peer) for peer in self._apart(peers)],
            "min_trainers": trainers_needed(view, terms) if view else terms.min_trainers,
        }

    def _apart(self, peers: Sequence[bytes]) -> list[bytes]:
        """Return those of whom no two can exchange anything: all draw partners by that alike.

        They are who can only dial out, unless a relay carries data: all who can be dialled have a
        link to it, and who cannot to it and to them.
        """
        view = self._node.view
        outbound = [peer for peer in peers if view is not None and peer in view.outbound]
        relays = self._host.relay_bytes_per_s or any(map(self._host.bulk_routes, outbound))
        return [] if relays else outbound

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
            raise SessionError(
                "vectors before attach", fix="make the optimizer first, or call a collective"
            )
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


class VectorServer:
    """Store what the trainer publishes, and answer who asks. Lives in the daemon's event loop."""

    def __init__(
        self,
        host: ConnectionManager,
        streams: Streams,
        has_trainer: Callable[[], bool],
        log: Callable[[str], None],
    ) -> None:
        self._host, self._streams, self._log = host, streams, log
        self._loop = asyncio.get_running_loop()
        self._published = PublishedVectors(has_trainer)
        self.store = VectorStore()
        self._threads = workers(SERVES_MAX, "hand-out")
        self._tasks: set[asyncio.Task[None]] = set()
        self._publishing = asyncio.Lock()  # a trainer may end, and the next one begin, meanwhile

    async def publish(self, name: str, number: int, values: F32, codec: str) -> None:
        """Store a vector of the trainer (``VectorStore.put``) and send it to all who wait for it.

        ConfigError; CodecError, and then what was published can still be had; MemoryError.
        """
        async with self._publishing:
            await asyncio.to_thread(self.store.check, name, number, values, codec)
            self.store.drop(name, self._published.begin(name, number))
            await asyncio.to_thread(self.store.put, name, number, values, codec)
            self._carry_out(self._published.done(name, number))

    def newest(self, name: str) -> int:
        return self._published.newest(name)

    def trainer_ended(self) -> None:
        """Note that nothing more will come; what was published can still be had."""
        self._carry_out(self._published.ended())

    def on_message(self, source: bytes, message: AskVector | DropVector) -> None:
        key = RequestKey(source, message.ticket)
        if isinstance(message, DropVector):
            self._published.over(key)
        elif not message.number:
            self._host.send(source, VectorIs(message.ticket, self.newest(message.name)))
        else:
            now_s = self._loop.time()
            self._carry_out(self._published.late(now_s))
            answer = self._published.ask(VectorRequest(key, message.name, message.number, now_s))
            if answer is not None:
                self._carry_out([answer])

    def lost(self, peer: bytes) -> None:
        """Forget the questions of ``peer``: there is no link to it any more."""
        self._published.lost(peer)

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        self._threads.shutdown(wait=False, cancel_futures=True)

    # ------------------------------------------------------------ inside

    def _carry_out(self, answers: Iterable[VectorAnswer]) -> None:
        for answer in answers:
            if answer.why:
                self._refuse(answer.request, answer.why)
                continue
            # Opened before anything else can happen: now it is here.
            stored = self.store.open(answer.request.name, answer.request.number)
            task = self._loop.create_task(self._serve(answer.request, stored))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _refuse(self, request: VectorRequest, why: str) -> None:
        newest = self.newest(request.name)
        told = VectorIs(request.key.ticket, newest, why=why[:WHY_BYTES_MAX])
        self._host.send(request.key.peer, told)

    async def _serve(self, request: VectorRequest, stored: StoredVector) -> None:
        peer, ticket = request.key
        encoded = stored.encoded
        head = VectorIs(ticket, self.newest(request.name), encoded.grid.total, encoded.codec.name)
        header = DataHeader(
            int(TransferKind.VECTOR), 0, 0, 0, bytes(8), 0, request.number, ticket, 0
        )
        try:
            outlet = FrameOutlet(await self._streams.to(peer), header, aside=True)
            self._host.send(peer, head)
            try:
                await self._loop.run_in_executor(self._threads, self._push, request, stored, outlet)
            except ConnectError:
                # A stream that nothing went over for minutes may have broken without a sign.
                outlet = FrameOutlet(await self._streams.to(peer), header, aside=True)
                await self._loop.run_in_executor(self._threads, self._push, request, stored, outlet)
        except (AtollError, MemoryError) as error:
            why = reason_of(error)
            self._refuse(request, why)
            self._log(f"{request.name} {request.number} for {short(peer)} ends early: {why}")
        finally:
            self.store.close(request.name, stored)
            self._published.over(request.key)

    def _push(self, request: VectorRequest, stored: StoredVector, outlet: FrameOutlet) -> None:
        """Send a vector, until all is sent or it is not wanted any more. Runs in a thread."""
        for chunk in range(stored.encoded.grid.count):
            if not self._published.wants(request.key):
                return
            data = self.store.read(stored, chunk)
            outlet.send(int(TransferKind.VECTOR), chunk, data.data)
