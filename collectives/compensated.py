"""Add error feedback to one peer's part of one round: a source for the engine, then its commit."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from atoll.collectives.chunks import ChunkGrid
from atoll.collectives.codecs import F32, U8
from atoll.collectives.engine.result import RoundResult
from atoll.collectives.feedback import ErrorFeedback


class Compensated:
    """Fill in one peer's part plus what error feedback has kept of earlier rounds.

    A call gives ``source(chunk, out)`` plus what ``feedback`` has kept. Chunk 0 of ``grid`` begins
    at element ``first`` of what the feedback is over.
    """

    def __init__(
        self,
        source: Callable[[int, F32], None],
        feedback: ErrorFeedback,
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
