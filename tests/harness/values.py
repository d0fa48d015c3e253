"""What the simulated data plane holds instead of tensors: who is in which chunk, with what weight.

A chunk of a result is a ``Mean``: its contributors (peer, life, submission number) and their
weights. A chunk of the state is the hash of all means that were applied to it, in order.
"""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass, field

from atoll.peer.membership.messages import Begin

__all__ = [
    "Contribution",
    "Entry",
    "Job",
    "Mean",
    "State",
    "chunk_after",
    "giver_of",
    "object_of",
]

Contribution = tuple[bytes, int, int]  # peer, life of its process, number of the submission


def object_of(giver: Contribution) -> bytes:
    """What a trainer gives to a GATHER: it says whose it is."""
    peer, life, number = giver
    return peer + life.to_bytes(4, "big") + number.to_bytes(4, "big")


def giver_of(data: bytes) -> Contribution:
    return data[:-8], int.from_bytes(data[-8:-4], "big"), int.from_bytes(data[-4:], "big")


@dataclass(frozen=True)
class Mean:
    """One chunk of R. ``garbled`` marks bytes that came out wrong on some peer."""

    parts: tuple[Contribution, ...]
    weights: tuple[float, ...]
    chunk: int
    garbled: bytes = b""

    @functools.cached_property
    def digest(self) -> bytes:
        text = repr((self.parts, self.weights, self.chunk, self.garbled))
        return hashlib.sha256(text.encode()).digest()


@dataclass(eq=False)
class Job:
    """A round on one peer: its latest attempt, and the chunks that are final here."""

    begin: Begin
    contribution: Contribution | None
    finals: dict[int, Mean] = field(default_factory=dict)
    active: bool = True  # takes part in the attempt; else ended, its finals may be asked for
    complete: bool = False
    root: bytes = b""


@dataclass(frozen=True, eq=False)
class Entry:
    """A committed round, with its bytes. An operation has none that the state is made of."""

    begin: Begin
    first: int  # the first chunk of its fragment
    means: tuple[Mean, ...]
    before: bytes  # chain
    chain: bytes
    origin_of: bytes = b""  # which of BEGIN's origins each chunk has

    @property
    def round(self) -> int:
        return self.begin.round

    @property
    def origins(self) -> list[tuple[tuple[bytes, ...], tuple[float, ...]]]:
        """Contributors and weights that the log entry claims for each chunk."""
        begin = self.begin
        claimed = [(begin.participants, begin.weights)]
        claimed += [(origin.participants, origin.weights) for origin in begin.past]
        return [claimed[i] for i in self.origin_of or bytes(len(self.means))]


def chunk_after(value: bytes, mean: Mean) -> bytes:
    return hashlib.sha256(value + mean.digest).digest()


@dataclass(frozen=True, eq=False)
class State:
    """``values`` has one hash per chunk of the whole vector."""

    round: int = 0
    chain: bytes = b""
    values: tuple[bytes, ...] = ()

    @functools.cached_property
    def digest(self) -> bytes:
        return hashlib.sha256(b"".join(self.values)).digest()

    def after(self, entry: Entry, chunks: int) -> State:
        values = list(self.values) or [b""] * chunks
        for offset, mean in enumerate(entry.means):
            values[entry.first + offset] = chunk_after(values[entry.first + offset], mean)
        return State(entry.round, entry.chain, tuple(values))

    def renamed(self, number: int, chain: bytes) -> State:
        """After operations: they change nothing."""
        return State(number, chain, self.values)

    def flipped(self, mark: bytes) -> State:
        """A memory error in the first chunk."""
        wrong = hashlib.sha256(self.values[0] + mark).digest()
        return State(self.round, self.chain, (wrong, *self.values[1:]))
