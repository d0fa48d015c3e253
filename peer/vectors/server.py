"""Send what this peer's trainer has published to those that ask for it.

A chunk is copied and sent at a time, in a few threads, behind the frames of rounds: a slow receiver
takes a thread, and no more memory than a chunk and, of each name, one vector.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import NDArray

from atoll.collectives.errors import AtollError, ConnectError
from atoll.collectives.threads import workers
from atoll.peer.membership.view import short
from atoll.peer.net.connections import ConnectionManager
from atoll.peer.state_sync.incoming import TransferKind
from atoll.peer.streams.frames import DataHeader
from atoll.peer.streams.manager import FrameOutlet, Streams, reason_of
from atoll.peer.vectors.messages import WHY_BYTES_MAX, AskVector, DropVector, VectorIs
from atoll.peer.vectors.published import Answer, Key, Published, Request
from atoll.peer.vectors.store import Stored, VectorStore

F32 = NDArray[np.float32]
SERVES_MAX = 8  # vectors that are being sent at a time: more would only share the same uplink


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
        self._published = Published(has_trainer)
        self.store = VectorStore()
        self._threads = workers(SERVES_MAX, "hand-out")
        self._tasks: set[asyncio.Task[None]] = set()
        self._publishing = asyncio.Lock()  # a trainer may end, and the next one begin, meanwhile

    async def publish(self, name: str, number: int, values: F32, codec: str) -> None:
        """Store a vector of the trainer (``VectorStore.put``) and send it to all who wait for it.

        ConfigError, CodecError, MemoryError.
        """
        async with self._publishing:
            self.store.drop(name, self._published.begin(name, number))
            await asyncio.to_thread(self.store.put, name, number, values, codec)
            self._carry_out(self._published.done(name, number))

    def newest(self, name: str) -> int:
        return self._published.newest(name)

    def trainer_ended(self) -> None:
        """Note that nothing more will come; what was published can still be had."""
        self._carry_out(self._published.ended())

    def on_message(self, source: bytes, message: AskVector | DropVector) -> None:
        key = Key(source, message.ticket)
        if isinstance(message, DropVector):
            self._published.over(key)
        elif not message.number:
            self._host.send(source, VectorIs(message.ticket, self.newest(message.name)))
        else:
            now_s = self._loop.time()
            self._carry_out(self._published.late(now_s))
            answer = self._published.ask(Request(key, message.name, message.number, now_s))
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

    def _carry_out(self, answers: Iterable[Answer]) -> None:
        for answer in answers:
            if answer.why:
                self._refuse(answer.request, answer.why)
                continue
            # Opened before anything else can happen: now it is here.
            stored = self.store.open(answer.request.name, answer.request.number)
            task = self._loop.create_task(self._serve(answer.request, stored))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _refuse(self, request: Request, why: str) -> None:
        newest = self.newest(request.name)
        told = VectorIs(request.key.ticket, newest, why=why[:WHY_BYTES_MAX])
        self._host.send(request.key.peer, told)

    async def _serve(self, request: Request, stored: Stored) -> None:
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

    def _push(self, request: Request, stored: Stored, outlet: FrameOutlet) -> None:
        """Send a vector, until all is sent or it is not wanted any more. Runs in a thread."""
        for chunk in range(stored.encoded.grid.count):
            if not self._published.wants(request.key):
                return
            data = self.store.read(stored, chunk)
            outlet.send(int(TransferKind.VECTOR), chunk, data.data)
