"""Feed errors back: what a lossy codec left out of one round is sent with the next.

One peer's memory is one or two float32 vectors over all elements, and moves only when a round
commits. ``encode`` does not change it, so an attempt that breaks costs nothing and the next one
encodes the same message. ``commit`` takes what was encoded and the bytes that came of it; both are
still there when the round commits, or the caller encodes once more, which gives the same bytes. It
is called for a chunk only if this peer's contribution to it is in the result.

x is what a peer contributes, C the codec::

    plain      m = e + x              send C(m)    e = m - C(m)
    decayed    m = decay * e + x      send C(m)    e = m - C(m)
    EF21       m = x - g              send C(m)    g = g + C(m)
    EControl   m = eta * e + x - h    send C(m)    e = e + x - h - C(m);  h = h + C(m)

With the first two the result of a round is the mean of what was sent, as without feedback. With the
others it is the change of the mean of all g (or h), so every replica adds results to a
``RunningMean``, and that is what takes the place of the mean. That holds as long as the same peers
contribute with the same weights to every chunk: reset the memory of all when this changes.

Sources: 1-bit SGD (Seide 2014; Stich 1809.07599), SparseLoCo (2508.15706) for the decay, EF21
(2106.05203), EControl (2311.05645). C must be contractive: E|C(m) - m|^2 <= (1 - alpha) |m|^2 with
alpha > 0. Every operation is rounded to float32, in the order written, from left to right.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable

import numpy as np

from atoll.collectives.chunks import ChunkGrid
from atoll.collectives.codecs import F32, U8, Codec
from atoll.collectives.codecs.base import scratch
from atoll.collectives.engine.result import RoundResult
from atoll.collectives.errors import ConfigError


class Feedback(ABC):
    """Keep the error feedback of one peer over vectors of ``elements``, zero at first.

    ``lo`` is where a part begins within the vector. Different threads may work on different parts.
    Parts are chunks: each thread keeps scratch of the size of the largest.
    ``arrays`` are the memory, by name, for checkpoints; they may be written into. ConfigError for a
    codec that is not contractive.
    """

    def __init__(self, codec: Codec, elements: int, *names: str) -> None:
        if codec.contract.alpha <= 0:
            raise ConfigError(
                f"error feedback needs a contractive codec, and {codec.name} is none",
                fix="use topk, sign or a codec that rounds",
            )
        self.codec = codec
        self.arrays: dict[str, F32] = {name: np.zeros(elements, np.float32) for name in names}

    def encode(self, lo: int, values: F32, out: U8, key: int = 0) -> None:
        """Encode the message for ``values``, float32[n], into uint8[encoded_bytes(n)].

        CodecError if the message is not finite.
        """
        self.codec.encode(self.message(lo, values), out, key)

    def commit(self, lo: int, values: F32, data: U8) -> None:
        """Move the memory, as the round that contains ``data`` is committed.

        ``data`` is what ``encode`` made of ``values``. Raises CodecError on malformed bytes; then
        nothing has moved.
        """
        sent: F32 = scratch("sent", np.float32, values.size)
        self.codec.decode(data, sent)
        self._move(lo, values, sent)

    def reset(self, lo: int = 0, hi: int | None = None) -> None:
        """Forget elements [lo, hi): on rejoining a run, or when a shard gets another owner."""
        for array in self.arrays.values():
            array[lo:hi] = 0

    def _part(self, name: str, lo: int, like: F32) -> F32:
        return self.arrays[name][lo : lo + like.size]

    @abstractmethod
    def message(self, lo: int, values: F32) -> F32:
        """Return m, in scratch: what is to be encoded instead of ``values``."""

    @abstractmethod
    def _move(self, lo: int, values: F32, sent: F32) -> None:
        """Move the memory after ``sent``, which is C(m), has been counted."""


class ResidualFeedback(Feedback):
    """Keep plain feedback, with ``decay`` 1, or that of SparseLoCo, with 0.95.

    The memory is ``residual``. What is sent plus what is kept equals what came in, but for
    float32's rounding. What is kept is finite, whatever came in. An owner of shards may have one
    too, for the results that it encodes. Raises ConfigError for a decay outside [0, 1].
    """

    def __init__(self, codec: Codec, elements: int, decay: float = 1.0) -> None:
        if not 0 <= decay <= 1:
            raise ConfigError(f"the decay of error feedback lies in [0, 1], not {decay}")
        super().__init__(codec, elements, "residual")
        self.decay = np.float32(decay)

    def message(self, lo: int, values: F32) -> F32:
        message: F32 = scratch("message", np.float32, values.size)
        np.multiply(self._part("residual", lo, values), self.decay, out=message)
        with np.errstate(over="ignore", invalid="ignore"):  # ``encode`` refuses what comes of it
            return np.add(message, values, out=message)

    def _move(self, lo: int, values: F32, sent: F32) -> None:
        message, residual = self.message(lo, values), self._part("residual", lo, values)
        with np.errstate(over="ignore", invalid="ignore"):
            np.subtract(message, sent, out=residual)
        if not (np.isfinite(residual.min()) and np.isfinite(residual.max())):
            residual.fill(0)  # next to float32's limits; it would spoil every later message


class EF21Feedback(Feedback):
    """Send how x differs from the ``estimate`` that everybody has of it."""

    def __init__(self, codec: Codec, elements: int) -> None:
        super().__init__(codec, elements, "estimate")

    def message(self, lo: int, values: F32) -> F32:
        message: F32 = scratch("message", np.float32, values.size)
        return np.subtract(values, self._part("estimate", lo, values), out=message)

    def _move(self, lo: int, values: F32, sent: F32) -> None:
        estimate = self._part("estimate", lo, values)
        np.add(estimate, sent, out=estimate)


class EControlFeedback(Feedback):
    """Keep feedback between plain and EF21, by ``eta``.

    With ``eta`` 0 it is EF21; theory wants it near alpha, practice 0.001 to 0.1. Raises ConfigError
    for one outside [0, 1].
    """

    def __init__(self, codec: Codec, elements: int, eta: float) -> None:
        if not 0 <= eta <= 1:
            raise ConfigError(f"EControl's eta lies in [0, 1], not {eta}")
        super().__init__(codec, elements, "residual", "estimate")
        self.eta = np.float32(eta)

    def message(self, lo: int, values: F32) -> F32:
        message: F32 = scratch("message", np.float32, values.size)
        np.multiply(self._part("residual", lo, values), self.eta, out=message)
        np.add(message, values, out=message)
        return np.subtract(message, self._part("estimate", lo, values), out=message)

    def _move(self, lo: int, values: F32, sent: F32) -> None:
        residual = self._part("residual", lo, values)
        estimate = self._part("estimate", lo, values)
        np.add(residual, values, out=residual)
        np.subtract(residual, estimate, out=residual)
        np.subtract(residual, sent, out=residual)
        np.add(estimate, sent, out=estimate)


class Compensated:
    """Fill in one peer's part of a round plus what feedback has kept, and commit it afterwards.

    A call gives ``source(chunk, out)`` plus what ``feedback`` has kept. Chunk 0 of ``grid`` begins
    at element ``first`` of what the feedback is over.
    """

    def __init__(
        self,
        source: Callable[[int, F32], None],
        feedback: ResidualFeedback,
        grid: ChunkGrid,
        first: int = 0,
    ) -> None:
        self._source, self._feedback = source, feedback
        self._grid, self._first = grid, first

    def __call__(self, chunk: int, out: F32) -> None:
        self._source(chunk, out)
        np.copyto(out, self._feedback.message(self._lo(chunk), out))

    def commit(self, result: RoundResult, participant: int, chunks: Iterable[int]) -> None:
        """Move the feedback, as a result that contains this peer's part is committed.

        ``result`` is committed, and these chunks of it contain the part of ``participant``, who is
        the peer of the feedback. What ``source`` reads has not changed since it was encoded.

        What was sent is read where the result has it, and else encoded once more. Raises
        CodecError.
        """
        values: F32 = np.empty(self._grid.size(0), np.float32)
        codec = self._feedback.codec
        again: U8 = np.empty(codec.encoded_bytes(values.size), np.uint8)
        for chunk in chunks:
            part, lo = values[: self._grid.size(chunk)], self._lo(chunk)
            self._source(chunk, part)
            sent = result.codec.part(result.view(chunk), participant)
            if sent is None:
                sent = again[: codec.encoded_bytes(part.size)]
                self._feedback.encode(lo, part, sent)
            self._feedback.commit(lo, part, sent)

    def _lo(self, chunk: int) -> int:
        return self._first + self._grid.bounds(chunk)[0]


class RunningMean:
    """Hold the mean of all peers' estimates.

    It is part of the replicated state, equal on all replicas.
    """

    def __init__(self, elements: int) -> None:
        self.mean: F32 = np.zeros(elements, np.float32)

    def commit(self, lo: int, result: F32) -> None:
        """Add ``result``, which the committed bytes decode to, float32[n], to the mean."""
        part = self.mean[lo : lo + result.size]
        np.add(part, result, out=part)


def residual_bound(alpha: float, norm: float) -> float:
    """Return what |residual| of plain feedback can reach: ``2 sqrt(1 - alpha) / alpha * norm``.

    That holds if no |x| is larger than ``norm``, and C is contractive with ``alpha`` in (0, 1].
    """
    return 2 * math.sqrt(1 - alpha) / alpha * norm
