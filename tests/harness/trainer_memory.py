"""How much host memory a trainer takes beside its model: what numpy has allocated, at most, while
some steps are taken.

The session is that of a run of one. As with a daemon, what passes between both lies in memory that
is not the trainer's.
"""

from __future__ import annotations

import mmap
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np

from atoll.collectives.codecs import F32
from atoll.optim.manifest import Manifest
from atoll.optim.pseudo_gradient import Writer
from atoll.optim.run_spec import RunSpec
from atoll.peer.client.flat_vectors import vector_of
from atoll.peer.client.session import Reduced
from atoll.peer.client.trainer_channel import Members, Outcome

__all__ = ["OutsideSession", "most_of"]

NAMES = ("peer-0",)


def outside(elements: int) -> F32:
    """Zeros that are not counted."""
    return np.frombuffer(mmap.mmap(-1, max(1, 4 * elements)), np.float32)[:elements]


def most_of(work: Callable[[], object]) -> int:
    """Bytes that were allocated when this began, or came then, and were there at one time. Tracing
    has begun before."""
    tracemalloc.reset_peak()
    work()
    return tracemalloc.get_traced_memory()[1]


class OutsideSession:
    """``atoll.peer.client.session.Session`` says what each of these does."""

    number = 0
    peer_name = NAMES[0]
    round = epoch = operations = connection = 0
    is_stale = False

    @property
    def channel(self) -> OutsideSession:
        """It is its own."""
        return self

    def observe(self, **figures: object) -> None:
        """Forget them."""

    def attach(
        self,
        spec: RunSpec,
        manifest: Manifest,
        initial: Callable[[F32], None],
        frozen: str = "refuse",
    ) -> None:
        self._fragments = spec.fragments
        count = spec.fragments
        self._parts = [manifest.part_of(number, count) for number in range(count)]
        self._region, self._theta = outside(manifest.elements), outside(manifest.elements)
        self._published: dict[str, tuple[int, F32]] = {}
        self._submitted = 0
        initial(self._theta)
        self.round = 1

    def submit(self, write: Writer, weight: float, fragment: int = 0) -> None:
        write(self._region[self._parts[fragment]], self._parts[fragment].start)
        self._submitted += 1

    def wait(self, fragment: int = 0) -> Outcome:
        self.round += 1
        return Outcome("committed", self.round, 0.0, 1 / len(NAMES), NAMES)

    def pull(self, read: Callable[[F32], None]) -> int:
        shown = self._theta.view()
        shown.flags.writeable = False
        read(shown)
        return self.round

    def next_fragment(self) -> int:
        return self._submitted % self._fragments

    def replicas(self) -> int:
        return len(NAMES)

    def first_rank(self, value: float) -> float:
        return value

    def members(self) -> Members:
        return Members(1, NAMES)

    def publish(self, name: str, number: int, values: F32, codec: str = "float32") -> None:
        kept = self._published[name][1] if name in self._published else outside(values.size)
        np.copyto(kept, values)
        self._published[name] = number, kept

    def newest(self, peer: str, name: str) -> int:
        return self._published[name][0] if name in self._published else 0

    def ask_vector(
        self, peer: str, name: str, number: int, elements: int, codec: str = "float32"
    ) -> Asked:
        return Asked(self, name)

    def all_reduce(self, tensor: Any, op: str = "mean", *, codec: str = "float32") -> Reduced:
        vector = vector_of(tensor)
        flat = outside(vector.elements)
        vector.write(flat)
        self.round += 1
        self.operations += 1
        return Reduced(vector.read(flat), NAMES, self.round)

    def all_gather(self, data: bytes) -> list[tuple[str, bytes]]:
        self.round += 1
        self.operations += 1
        return [(name, bytes(bytearray(data))) for name in NAMES]

    def check(self) -> None:
        """Nothing dies."""

    def close(self) -> None:
        """Nothing is open."""


class Asked:
    """What this trainer has published, as if it came from another one."""

    def __init__(self, session: OutsideSession, name: str) -> None:
        self._session, self._name = session, name

    def wait(self, timeout_s: float) -> None:
        """It is there."""

    def read(self) -> F32:
        return self._session._published[self._name][1]

    def drop(self) -> None:
        """It costs nothing."""
