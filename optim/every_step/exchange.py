"""Describe what trainers exchange in one step: sums of vectors, and bytes of each of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from atoll.collectives.codecs import F32
from atoll.collectives.errors import ConfigError

# The most that a trainer may give to a gather of a step: 256 calls. With more, it takes minutes.
PART_BYTES_MAX = 16 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Exchanged:
    """Hold the sum of what ``count`` trainers gave, float32[n]; it may be overwritten."""

    total: F32
    count: int


@dataclass(frozen=True, slots=True)
class Given:
    """Hold what one trainer gave; ``counts``: whether it has a gradient of this step."""

    name: str
    data: bytes
    counts: bool


class Exchange(Protocol):
    """Describe the exchange of one step, which may take several calls.

    All trainers make the same calls in the same order.

    Any call may end the attempt by an exception; then the whole step is done again. So nothing that
    outlives the step may change before its last call has returned. The first call of a step must
    look alike in all steps, for newcomers do not know yet which step it is: a gather, or a sum over
    a vector whose length and codec never change.
    """

    @property
    def counts(self) -> bool:
        """Return whether this trainer has something to give.

        A newcomer has not, nor a trainer whose gradient has overflowed. Its vectors are taken as
        zeros and are not counted.
        """

    def total(self, vector: F32, codec: str = "float32") -> Exchanged:
        """Return the sum over all trainers that count, the same bits at all of them.

        Raise CodecError for NaN or infinity.
        """

    def gather(self, data: bytes) -> list[Given]:
        """Return what each trainer gave, in the same order at all of them.

        Raise ConfigError if it is too long. What is longer than 64 KiB, or 512 KiB of all together,
        takes several calls: who is not there in all of them has given nothing.
        """


@dataclass(slots=True)
class ExchangeAttempt:
    """Carry out the ``Exchange`` of one attempt at a step."""

    sum_up: Callable[[F32, str, bool, int], Exchanged]
    gather_all: Callable[[bytes, bool], list[Given]]
    counts: bool
    calls: int = 0

    def total(self, vector: F32, codec: str = "float32") -> Exchanged:
        self.calls += 1
        return self.sum_up(vector, codec, self.counts, self.calls - 1)

    def gather(self, data: bytes) -> list[Given]:
        return self.gather_all(data, self.counts)


def check_part(nbytes: int) -> None:
    """Raise ConfigError if a trainer may not give so many bytes at a step."""
    if nbytes > PART_BYTES_MAX:
        raise ConfigError(
            f"{nbytes:,} bytes from each trainer at every step; {PART_BYTES_MAX:,} fit",
            fix="send less of the gradient, use a compressor whose parts are summed up, or train "
            "a smaller model",
        )
