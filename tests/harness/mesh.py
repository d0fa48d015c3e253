"""Processes that reduce with atoll's engine and streams and without its daemons; for benchmarks."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import replace

from atoll.collectives import (
    ChunkGrid,
    Contribution,
    Frame,
    Reduction,
    RoundResult,
    butterfly_plan,
    get_codec,
    grid_for,
)
from atoll.collectives.codecs import F32
from atoll.collectives.digests import no_digest
from atoll.collectives.errors import ConnectError
from atoll.collectives.planning.choice import Choice
from atoll.collectives.robust import get_rule
from atoll.peer.streams.stream import DataStream, PlainStream, SealedStream

__all__ = ["PATIENCE_S", "Mesh", "all_reducer"]

HEADER = struct.Struct("<IBIII")  # attempt, kind, chunk, bytes, offset
SECRET = bytes(range(32))  # of these streams, which are nobody's
PATIENCE_S = 120.0  # for a result, and for the others' listeners


class Mesh:
    """TCP connections in each direction between any two processes: ``stripes`` of them."""

    def __init__(
        self,
        me: int,
        addresses: list[tuple[str, int]],
        listener: socket.socket,
        streams: str,
        stripes: int = 1,
    ) -> None:
        self.me, self.everyone = me, range(len(addresses))
        self.streams = streams
        self.out: dict[int, list[DataStream]] = {p: [] for p in self.everyone if p != me}
        self.into: dict[int, list[DataStream]] = {p: [] for p in self.everyone if p != me}
        count = stripes * (len(addresses) - 1)
        accepting = threading.Thread(target=self._accept, args=(listener, count))
        accepting.start()
        for peer in stripes * [*self.out]:
            sock = _connected(addresses[peer])
            sock.sendall(bytes([me]))
            self.out[peer].append(self._stream(sock, f"{peer}", dialled=True))
        accepting.join()
        self.reduction: Reduction | None = None
        self.attempt = 0
        self.changed = threading.Condition()
        for peer, found in self.into.items():
            for stripe, stream in enumerate(found, stripes > 1):
                reads = (peer, stream, stripe)
                threading.Thread(target=self._read, args=reads, daemon=True).start()

    def _accept(self, listener: socket.socket, count: int) -> None:
        for _ in range(count):
            sock, _ = listener.accept()
            peer = sock.recv(1)[0]
            self.into[peer].append(self._stream(sock, f"{peer}", dialled=False))

    def _stream(self, sock: socket.socket, peer: str, *, dialled: bool) -> DataStream:
        if self.streams == "plain":
            return PlainStream(sock, peer)
        return SealedStream(sock, peer, SECRET, dialled=dialled)

    def _read(self, peer: int, stream: DataStream, stripe: int) -> None:
        with contextlib.suppress(ConnectError):  # the other process has ended
            self._read_all(peer, stream, stripe)

    def _read_all(self, peer: int, stream: DataStream, stripe: int) -> None:
        head = memoryview(bytearray(HEADER.size))
        while True:
            stream.recv_into(head, idle=True)
            attempt, kind, chunk, length, offset = HEADER.unpack(head)
            with self.changed:
                self.changed.wait_for(lambda attempt=attempt: self.attempt >= attempt)
                reduction, is_old = self.reduction, attempt != self.attempt
            assert reduction is not None
            frame = Frame(peer, kind, chunk, stripe, offset)
            place = None if is_old else reduction.reserve(frame, length, PATIENCE_S)
            stream.recv_into(memoryview(bytearray(length)) if place is None else place)
            if place is not None:
                reduction.received(frame)

    def begin(self, reduction: Reduction) -> None:
        with self.changed:
            self.reduction = reduction
            self.attempt += 1
            self.changed.notify_all()
        for peer in reduction.destinations:
            for stream in self.out[peer]:
                reduction.start({peer: Outlet(stream, self.attempt)})


class Outlet:
    def __init__(self, stream: DataStream, attempt: int) -> None:
        self.stream, self.attempt = stream, attempt

    def send(self, kind: int, chunk: int, payload: memoryview, offset: int = 0) -> None:
        head = HEADER.pack(self.attempt, kind, chunk, payload.nbytes, offset)
        self.stream.sendall(head, payload)


def all_reducer(
    mesh: Mesh,
    codec_name: str,
    elements: int,
    choice: Choice | None = None,
    chunk_elements: int = 0,
    rule: str = "",
) -> Callable[[F32], None]:
    """What reduces float32[elements] with all others, each time that it is called: to the mean, or
    by a robust rule."""
    codec = get_codec(codec_name)
    grid = ChunkGrid(elements, chunk_elements) if chunk_elements else grid_for(elements)
    ids = [bytes([p]) * 32 for p in mesh.everyone]
    plan = butterfly_plan(ids, [1.0] * len(ids), grid)
    if choice is not None:
        grid = ChunkGrid(elements, choice.chunk_elements)
        plan = replace(plan, owners=choice.owners(), shape=choice.routes())
    plan = replace(plan, rule=get_rule(rule) if rule else None)
    result = RoundResult(codec, grid, digest=no_digest)

    def once(values: F32) -> None:
        result.digests = [b""] * grid.count
        done = threading.Event()

        def source(chunk: int, out: F32) -> None:
            lo, hi = grid.bounds(chunk)
            out[:] = values[lo:hi]

        def own(chunk: int) -> F32:
            return values[slice(*grid.bounds(chunk))]

        def failed(participant: int, why: str) -> None:
            raise SystemExit(f"{participant}: {why}")

        reduction = Reduction(
            plan=plan,
            me=mesh.me,
            contribution=Contribution(source, own),
            result=result,
            on_done=lambda digests: done.set(),
            on_failed=failed,
        )
        mesh.begin(reduction)
        assert done.wait(PATIENCE_S)
        assert reduction.join(PATIENCE_S)

    return once


def _connected(address: tuple[str, int]) -> socket.socket:
    """The other side may not listen yet."""
    until_s = time.monotonic() + PATIENCE_S
    while True:
        try:
            return socket.create_connection(address)
        except ConnectionRefusedError:
            if time.monotonic() > until_s:
                raise
            time.sleep(0.05)
