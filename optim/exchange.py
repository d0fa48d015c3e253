"""What the trainers of a run exchange in one step: sums of vectors, and bytes of each of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from atoll.collectives.codecs import F32

__all__ = ["Attempt", "Exchange", "Exchanged", "Given"]


@dataclass(frozen=True, slots=True)
class Exchanged:
    """The sum of what ``count`` trainers gave, float32[n]; it may be overwritten. ``mine``: this
    trainer's part is in it."""

    total: F32
    count: int
    mine: bool = True


@dataclass(frozen=True, slots=True)
class Given:
    """What one trainer gave. ``counts``: it has a gradient of this step."""

    name: str
    data: bytes
    counts: bool


class Exchange(Protocol):
    """Of one step, which may take several calls. All trainers make the same ones in the same order.

    Any call may end the attempt by an exception; then the whole step is done again. So nothing that
    outlives the step may change before its last call has returned. The first call of a step must
    look alike in all steps, for newcomers do not know yet which step it is: a gather, or a sum over
    a vector whose length and codec never change.
    """

    @property
    def counts(self) -> bool:
        """Whether this trainer has something to give: a newcomer has not, nor one whose gradient
        has overflowed. Its vectors are taken as zeros and are not counted."""

    def total(self, vector: F32, codec: str = "float32") -> Exchanged:
        """The sum over all trainers that count, the same bits at all of them. CodecError for NaN
        or infinity."""

    def gather(self, data: bytes) -> list[Given]:
        """What each trainer gave, in the same order at all of them. ConfigError if it is too
        long."""


@dataclass(slots=True)
class Attempt:
    """The ``Exchange`` of one attempt at a step."""

    sum_up: Callable[[F32, str, bool, int], Exchanged]
    gather_all: Callable[[bytes, bool], list[Given]]
    counts: bool
    calls: int = 0

    def total(self, vector: F32, codec: str = "float32") -> Exchanged:
        self.calls += 1
        return self.sum_up(vector, codec, self.counts, self.calls - 1)

    def gather(self, data: bytes) -> list[Given]:
        return self.gather_all(data, self.counts)
