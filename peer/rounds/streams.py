"""Data streams to and from the other peers, and the routing of frames that arrive.

One stream per direction and pair: the dialler sends. An outgoing stream is opened when a view
names the peer, so that a round does not wait for it, and again after it broke. Each incoming
stream has a thread that reads a header, asks the router where the payload belongs, and receives it
straight into the preallocated memory that it is given; what nobody wants is drained into a scratch
buffer and dropped.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from typing import Protocol

from atoll.collectives.errors import AtollError, ConnectError
from atoll.peer.group.views import short
from atoll.peer.net.links import LinkHost
from atoll.peer.rounds.dataframes import (
    DATA_HEADER_BYTES,
    DataHeader,
    pack_header,
    unpack_header,
)
from atoll.peer.rounds.datastream import DataStream
from atoll.peer.rounds.sealing import RECORD_BYTES_MAX

__all__ = ["DRAIN_BYTES", "FrameOutlet", "FrameSink", "Streams", "reason_of"]

# Scratch of a reader thread for frames that nobody wants: no record of a stream is taken in pieces.
DRAIN_BYTES = RECORD_BYTES_MAX
ADDRESSES_MAX = 8192  # remembered addresses; twice the peers that a run may have
OPEN_TRIES = 3  # a member that cannot be dialled so often is reported to the round


class FrameSink(Protocol):
    """Where the payload of an incoming frame goes. Called in the reader thread of the source."""

    def reserve(self, source: bytes, header: DataHeader) -> memoryview | None:
        """A buffer of ``header.length`` bytes, or None to drop the frame. May wait, bounded."""

    def received(self, source: bytes, header: DataHeader) -> None:
        """The reserved buffer is full."""

    def broken(self, source: bytes, why: str) -> None:
        """No more frames from this stream."""


class FrameOutlet:
    """The sending end of one attempt's frames to one peer (collectives.engine.Outlet).

    ``aside``: of frames that are no part of a round.
    """

    def __init__(self, stream: DataStream, header: DataHeader, *, aside: bool = False) -> None:
        self._stream = stream
        self._header = header
        self._aside = aside

    def send(self, kind: int, chunk: int, payload: memoryview) -> None:
        self.send_parts(kind, chunk, payload)

    def send_parts(self, kind: int, chunk: int, *parts: memoryview) -> None:
        length = sum(part.nbytes for part in parts)
        header = self._header._replace(kind=kind, chunk=chunk, length=length)
        self._stream.sendall(pack_header(header), *parts, aside=self._aside)


class Streams:
    """Lives in the event loop; only reader threads and senders run elsewhere."""

    def __init__(self, host: LinkHost, sink: FrameSink) -> None:
        self._host = host
        self._sink = sink
        self._addresses: dict[bytes, str] = {}
        self._opening: dict[bytes, asyncio.Task[DataStream]] = {}
        self._outgoing: dict[bytes, DataStream] = {}
        self._incoming: dict[DataStream, bytes] = {}  # with the peer that opened it
        self._sent_before = 0  # bytes of streams that are gone
        self._received_before = 0
        self._moved_before = 0
        # Reader threads end while the loop adds up, and the loop opens streams while a donor does.
        self._counting = threading.Lock()
        self.reached: set[bytes] = set()  # peers whose advertised address has accepted us

    @property
    def sent_bytes(self) -> int:
        with self._counting:
            return self._sent_before + sum(s.sent_bytes for s in self._outgoing.values())

    @property
    def received_bytes(self) -> int:
        with self._counting:
            return self._received_before + sum(s.received_bytes for s in self._incoming)

    @property
    def moved_bytes(self) -> int:
        """Only ever grows; a stall detector looks whether it does. Without pieces for learners."""
        with self._counting:
            streams = [*self._outgoing.values(), *self._incoming]
            return self._moved_before + sum(stream.moved_bytes for stream in streams)

    def ciphers(self) -> dict[str, int]:
        """How many streams go with which cipher, both ways."""
        with self._counting:
            streams = [*self._outgoing.values(), *self._incoming]
        return dict(Counter(stream.cipher for stream in streams if not stream.closed))

    def outgoing(self) -> list[tuple[bytes, DataStream]]:
        """All streams on which this side sends, with their peers."""
        with self._counting:
            return list(self._outgoing.items())

    def incoming(self) -> list[tuple[bytes, DataStream]]:
        with self._counting:
            return [(peer, stream) for stream, peer in self._incoming.items()]

    def know(self, peer: bytes, address: str) -> None:
        if not address:
            return
        if len(self._addresses) >= ADDRESSES_MAX:
            linked = self._host.link_peers()
            self._addresses = {p: a for p, a in self._addresses.items() if p in linked}
        self._addresses[peer] = address

    def address(self, peer: bytes) -> str:
        return self._addresses.get(peer, "")

    def warm(self, peer: bytes) -> None:
        """Have a stream to this peer soon; failures show when a round needs it."""
        stream = self._outgoing.get(peer)
        if stream is None or stream.closed:
            self._open(peer).add_done_callback(_retrieve)

    async def to(self, peer: bytes) -> DataStream:
        """The stream to this peer. ConnectError after OPEN_TRIES."""
        stream = self._outgoing.get(peer)
        if stream is not None and not stream.closed and not stream.worn:
            return stream
        return await asyncio.shield(self._open(peer))

    def _open(self, peer: bytes) -> asyncio.Task[DataStream]:
        task = self._opening.get(peer)
        if task is None or task.done():
            task = asyncio.get_running_loop().create_task(self._dial(peer))
            self._opening[peer] = task
            task.add_done_callback(lambda _: self._opening.pop(peer, None))
        return task

    async def _dial(self, peer: bytes) -> DataStream:
        for attempt in range(OPEN_TRIES):
            address = self.address(peer)
            if not address:
                raise ConnectError(f"peer {short(peer)} advertises no address to send data to")
            try:
                stream = await self._host.open_data(peer, address)
            except ConnectError as error:
                if attempt + 1 == OPEN_TRIES or peer not in self._host.link_peers():
                    raise ConnectError(f"data stream to {short(peer)}: {error.what}") from error
                await asyncio.sleep(0.05 * 4**attempt)
                continue
            self.close_to(peer)
            with self._counting:
                self._outgoing[peer] = stream
            self.reached.add(peer)
            return stream
        raise AssertionError("unreachable: the last try returns or raises")

    def close_to(self, peer: bytes) -> None:
        with self._counting:
            stream = self._outgoing.pop(peer, None)
            if stream is not None:
                self._sent_before += stream.sent_bytes
                self._moved_before += stream.moved_bytes
        if stream is not None:
            stream.close()

    def forget(self, peer: bytes) -> None:
        """The peer's process is gone."""
        self.close_to(peer)
        self.reached.discard(peer)

    def close(self) -> None:
        for task in list(self._opening.values()):
            task.cancel()
        for peer in list(self._outgoing):
            self.close_to(peer)
        with self._counting:
            incoming = list(self._incoming)
        for stream in incoming:
            stream.close()

    # ------------------------------------------------------------ incoming

    def accept(self, peer: bytes, stream: DataStream) -> None:
        """A peer opened a stream to us: read it in a thread of its own until it ends."""
        with self._counting:
            self._incoming[stream] = peer
        name = f"read-from-{short(peer)}"
        threading.Thread(target=self._read, args=(peer, stream), name=name, daemon=True).start()

    def _read(self, peer: bytes, stream: DataStream) -> None:
        head = memoryview(bytearray(DATA_HEADER_BYTES))
        scratch = memoryview(b"")  # most streams never need it
        try:
            while True:
                stream.recv_into(head, idle=True)
                header = unpack_header(head)
                target = self._sink.reserve(peer, header)
                if target is not None:
                    stream.recv_into(target)
                    self._sink.received(peer, header)
                else:
                    if len(scratch) < (size := min(header.length, DRAIN_BYTES)):
                        scratch = memoryview(bytearray(size))  # of probes alone it stays small
                    _drain(stream, header.length, scratch)
        except AtollError as error:
            self._sink.broken(peer, error.what)
        except Exception as error:  # a reader that dies in silence is a hang for the others
            self._sink.broken(peer, f"{type(error).__name__}: {error}")
        finally:
            stream.close()
            with self._counting:
                self._received_before += stream.received_bytes
                self._moved_before += stream.moved_bytes
                self._incoming.pop(stream, None)


def reason_of(error: AtollError | MemoryError) -> str:
    return error.what if isinstance(error, AtollError) else "no memory for it"


def _drain(stream: DataStream, length: int, scratch: memoryview) -> None:
    while length > 0:
        part = scratch[: min(length, len(scratch))]
        stream.recv_into(part)
        length -= len(part)


def _retrieve(task: asyncio.Task[DataStream]) -> None:
    """A warm-up may fail in silence: the round that needs the stream asks again and reports."""
    if not task.cancelled():
        task.exception()
