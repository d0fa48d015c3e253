"""A group of reductions in one process, joined by streams in memory or by socket pairs."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from atoll.collectives import (
    ChunkGrid,
    Codec,
    Contribution,
    ReducePlan,
    Reduction,
    RoundResult,
    butterfly_plan,
    encoded_layout,
)
from atoll.collectives.codecs import F32, U8
from atoll.collectives.counter_rng import derive_key
from atoll.collectives.digests import strong_digest
from atoll.collectives.engine.parts import PART, WHOLE
from atoll.collectives.errors import ConnectError
from atoll.collectives.native import KERNELS, NUMPY_REASON
from atoll.collectives.robust import get_rule
from atoll.collectives.schedule.routes import Routes
from atoll.collectives.schedule.schedule import Frame

WAIT_S = 30.0  # how long a test waits for what must happen; never reached when all is well
HEADER = struct.Struct("<BII")


def all_reduce_in_process(
    vectors: list[F32],
    plan: ReducePlan,
    codec: Codec,
    grid: ChunkGrid,
    result_codec: Codec | None = None,
) -> bytes:
    """What every participant must end with, computed in one loop. ``codec`` is that of parts."""
    factors, result_codec = plan.factors(), result_codec or codec
    layout = encoded_layout(grid, result_codec)
    result = np.empty(layout.total_bytes, np.uint8)
    for chunk in range(grid.count):
        (lo, hi), (byte_lo, byte_hi) = grid.bounds(chunk), layout.slice(chunk)
        total = np.zeros(hi - lo, np.float32)
        data = np.empty(codec.encoded_bytes(hi - lo), np.uint8)
        for participant, vector in enumerate(vectors):
            if plan.weights[participant] > 0:
                key = derive_key(PART, plan.key, participant, chunk)
                codec.encode(vector[lo:hi], data, key)
                codec.decode_add(data, factors[participant], total)
        key = derive_key(WHOLE, plan.key, chunk)
        result_codec.encode(total, result[byte_lo:byte_hi], key)
    return result.tobytes()


class Group:
    """Reductions of all participants; ``gate`` is called before each frame of a stream.

    ``rounds`` are the results that an earlier attempt has left, ``kept`` the digests of those
    chunks that this one keeps. ``codec`` is that of parts, ``result_codec`` another for the result.
    """

    def __init__(
        self,
        vectors: list[F32],
        weights: list[float],
        codec: Codec,
        grid: ChunkGrid,
        rounds: list[RoundResult] | None = None,
        kept: dict[int, bytes] | None = None,
        shape: Routes | None = None,
        result_codec: Codec | None = None,
        planned: Callable[..., ReducePlan] = butterfly_plan,
        fold: str = "mean",
        rule: str = "",
    ) -> None:
        self.everyone = range(len(vectors))
        self.vectors, self.codec, self.grid = vectors, codec, grid
        self.kept = kept or {}
        ids = [bytes([p]) * 32 for p in self.everyone]
        self.plan = replace(
            planned(ids, weights, grid, self.kept),
            shape=shape,
            fold=fold,
            rule=get_rule(rule) if rule else None,
            key=7,
        )
        self.result_codec = result_codec or codec
        self.rounds = rounds or [RoundResult(self.result_codec, grid, zeros) for _ in self.everyone]
        self.sources_called = [[0] * grid.count for _ in self.everyone]
        self.results: list[U8] = [result.array for result in self.rounds]
        self.done: list[list[list[bytes]]] = [[] for _ in self.everyone]
        self.failed: list[list[tuple[int, str]]] = [[] for _ in self.everyone]
        self.done_events = [threading.Event() for _ in self.everyone]
        self.any_failed = threading.Event()
        self.gate: Callable[[int, int], None] = lambda src, dest: None
        self.reductions = [self._reduction(me) for me in self.everyone]
        self.sockets: list[socket.socket] = []
        self.receivers: list[threading.Thread] = []

    def _reduction(self, me: int) -> Reduction:
        def source(chunk: int, out: F32) -> None:
            lo, hi = self.grid.bounds(chunk)
            out[:] = self.vectors[me][lo:hi]
            self.sources_called[me][chunk] += 1

        def on_done(digests: list[bytes]) -> None:
            self.done[me].append(digests)
            self.done_events[me].set()

        def on_failed(participant: int, why: str) -> None:
            self.failed[me].append((participant, why))
            self.any_failed.set()

        return Reduction(
            plan=self.plan,
            me=me,
            contribution=Contribution(source),
            result=self.rounds[me],
            on_done=on_done,
            on_failed=on_failed,
            kept=self.kept,
            part_codec=self.codec,
        )

    def start(self, streams: str = "memory") -> None:
        outlet = {"memory": MemoryOutlet, "sockets": SocketOutlet}[streams]
        for src in self.everyone:
            needed = self.reductions[src].destinations
            self.reductions[src].start({dest: outlet(self, src, dest) for dest in needed})

    def encoded(self, participant: int, chunk: int) -> bytes:
        lo, hi = self.grid.bounds(chunk)
        data = np.empty(self.codec.encoded_bytes(hi - lo), np.uint8)
        key = derive_key(PART, self.plan.key, participant, chunk)
        self.codec.encode(self.vectors[participant][lo:hi], data, key)
        return data.tobytes()

    def deliver(self, src: int, dest: int, kind: int, chunk: int, payload: bytes) -> bool:
        """Hand one frame over, as the receiver thread of a daemon does; whether it was wanted."""
        buffer = self.reductions[dest].reserve(Frame(src, kind, chunk), len(payload), WAIT_S)
        if buffer is None:
            return False
        buffer[:] = payload
        self.reductions[dest].received(Frame(src, kind, chunk))
        return True

    def wait_done(self) -> None:
        for me, event in zip(self.everyone, self.done_events, strict=True):
            missing = self.reductions[me].missing()
            assert event.wait(WAIT_S), f"{me} misses {missing}; failed: {self.failed}"

    def close(self) -> None:
        for reduction in self.reductions:
            reduction.abort()
        for end in self.sockets:
            end.close()
        for reduction in self.reductions:
            assert reduction.join(WAIT_S)
        for receiver in self.receivers:
            receiver.join(WAIT_S)
            assert not receiver.is_alive()

    def reference(self) -> bytes:
        return all_reduce_in_process(
            self.vectors, self.plan, self.codec, self.grid, self.result_codec
        )

    def check_results(self) -> None:
        """Everyone has the bytes, digests and calls of the reference, exactly once."""
        want = self.reference()
        layout = encoded_layout(self.grid, self.result_codec)
        slices = (layout.slice(chunk) for chunk in range(self.grid.count))
        digests = [strong_digest(want[lo:hi]) for lo, hi in slices]
        for me in self.everyone:
            assert self.results[me].tobytes() == want
            assert self.rounds[me].digests == digests
            assert self.done[me] == [digests]
            assert self.failed[me] == []
            assert not self.reductions[me].missing()


def zeros(nbytes: int) -> U8:
    return np.zeros(nbytes, np.uint8)


class MemoryOutlet:
    """A stream without any buffer: ``send`` returns when the other side has taken the frame."""

    def __init__(self, group: Group, src: int, dest: int) -> None:
        self.group, self.src, self.dest = group, src, dest

    def send(self, kind: int, chunk: int, payload: memoryview, offset: int = 0) -> None:
        self.group.gate(self.src, self.dest)
        self.group.deliver(self.src, self.dest, kind, chunk, payload.tobytes())


class SocketOutlet:
    """A stream through a socket pair, with a receiver thread at its other end."""

    def __init__(self, group: Group, src: int, dest: int) -> None:
        self.group, self.src, self.dest = group, src, dest
        self.out, self.into = socket.socketpair()
        group.sockets += (self.out, self.into)
        receiver = threading.Thread(target=self.receive, name=f"receive-{src}-{dest}")
        group.receivers.append(receiver)
        receiver.start()

    def send(self, kind: int, chunk: int, payload: memoryview, offset: int = 0) -> None:
        try:
            self.group.gate(self.src, self.dest)
            self.out.sendall(HEADER.pack(kind, chunk, len(payload)))
            self.out.sendall(payload)
        except OSError as error:
            raise ConnectError(f"the stream to {self.dest} broke: {error}") from error

    def receive(self) -> None:
        with self.into.makefile("rb") as stream:
            while len(header := stream.read(HEADER.size)) == HEADER.size:
                kind, chunk, length = HEADER.unpack(header)
                payload = stream.read(length)
                if len(payload) == length:
                    self.group.deliver(self.src, self.dest, kind, chunk, payload)


@pytest.fixture
def make_group() -> Iterator[Callable[..., Group]]:
    """Builds groups, and ends them when the test ends."""
    groups: list[Group] = []

    def make(
        codec: Codec,
        *,
        weights: list[float],
        total: int = 5000,
        chunk_elements: int = 256,
        vectors: list[F32] | None = None,
        **retry: Any,
    ) -> Group:
        rng = np.random.default_rng(total + len(weights))
        vectors = vectors or [rng.standard_normal(total).astype(np.float32) for _ in weights]
        groups.append(Group(vectors, weights, codec, ChunkGrid(total, chunk_elements), **retry))
        return groups[-1]

    yield make
    for group in groups:
        group.close()
    assert not [t.name for t in threading.enumerate() if t.name.startswith("reduce-")]


@pytest.fixture(params=("base", "avx2", "avx512"))
def kernels(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Each instruction set in turn. Without a type: many calls are wrong on purpose."""
    if KERNELS is None:
        pytest.skip(f"no kernels: {NUMPY_REASON}")
    if request.param not in KERNELS.levels():
        pytest.skip(f"this processor has no {request.param}")
    before = KERNELS.level()
    KERNELS.use(request.param)
    yield KERNELS
    KERNELS.use(before)
