"""Hold the state of a run in one process, as each daemon holds it, and step it by rounds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from atoll.collectives.chunks import ChunkGrid, encoded_layout
from atoll.collectives.codecs import F32, U8, get_codec
from atoll.collectives.engine.parts import PartError
from atoll.collectives.engine.reference import reduce_together
from atoll.collectives.engine.result import RoundResult
from atoll.collectives.feedback import Compensated, ResidualFeedback
from atoll.optim.manifest import Manifest, fragment_grid
from atoll.optim.outer_step import OuterStep, momentum_layout
from atoll.optim.pseudo_gradient import delta_source
from atoll.optim.run_spec import RunSpec, round_key

Source = Callable[[int, F32], None]


@dataclass(frozen=True, slots=True)
class SwarmSubmission:
    """Hold a worker's parameters, whole, and their weight in the mean."""

    worker: int
    values: F32
    weight: float


class SwarmState:
    """Hold the parameters of a run, float32[elements], and its momentum as daemons keep it.

    ``initial`` writes the first parameters.
    """

    def __init__(self, spec: RunSpec, manifest: Manifest, initial: Callable[[F32], None]) -> None:
        self.spec, self.manifest = spec, manifest
        self.grid = manifest.grid
        self.theta: F32 = np.zeros(manifest.elements, np.float32)
        self._kept = momentum_layout(spec, self.grid)
        self.momentum: U8 = np.zeros(self._kept.total_bytes, np.uint8)
        self.round = 1  # the first one gives a run its parameters
        self._step = OuterStep(spec, self.grid.chunk_elements)
        self._feedback: dict[int, ResidualFeedback] = {}  # of each worker
        self.excluded: list[tuple[int, int, str]] = []  # round, worker, why
        initial(self.theta)
        for chunk in range(self.grid.count):
            self._step.begin(self._momentum(chunk), self.grid.size(chunk))

    def _momentum(self, chunk: int) -> U8:
        start, end = self._kept.slice(chunk)
        return self.momentum[start:end]

    def commit(self, submitted: Sequence[SwarmSubmission], fragment: int = 0) -> tuple[int, int]:
        """Carry out a round of what was submitted, of which the fragment's part counts.

        Return how many bytes one peer's encoded part of it has, and how many its result.
        """
        self.round += 1
        first, end = self.manifest.chunks_of(fragment, self.spec.fragments)
        grid = fragment_grid(self.grid, first, end)
        sources = [self._source(one, grid, fragment) for one in submitted]
        result, weights = self._reduced(submitted, grid, sources)
        codec = result.codec
        for index, source in enumerate(sources):
            if isinstance(source, Compensated) and weights[index] > 0:
                source.commit(result, index, range(grid.count))
        contributors = sum(weight > 0 for weight in weights)
        for chunk in range(grid.count):
            lo, hi = self.grid.bounds(first + chunk)
            self._step(
                codec,
                result.view(chunk),
                self.theta[lo:hi],
                self._momentum(first + chunk),
                round_number=self.round,
                contributors=contributors,
            )
        return encoded_layout(grid, codec.part_codec).total_bytes, result.array.nbytes

    def _reduced(
        self, submitted: Sequence[SwarmSubmission], grid: ChunkGrid, sources: Sequence[Source]
    ) -> tuple[RoundResult, list[float]]:
        """Return the result of a round, and the weights that count.

        With a robust rule, as among peers, nobody counts whose part cannot be used. ConfigError if
        too few are left.
        """
        weights = [one.weight for one in submitted]
        key = round_key(b"swarm", self.round)
        while True:
            codec = self.spec.result_codec(weights)
            try:
                rule = self.spec.rule
                return reduce_together(codec, grid, weights, sources, rule=rule, key=key), weights
            except PartError as error:
                weights[error.participant] = 0.0
                self.excluded.append((self.round, submitted[error.participant].worker, error.why))

    def _source(self, one: SwarmSubmission, grid: ChunkGrid, fragment: int) -> Source:
        """Return a worker's part, as a daemon computes it (peer/rounds/error_feedback.py)."""
        delta = delta_source(self.spec, self.manifest, self.theta, one.values, fragment)
        if not self.spec.error_feedback:
            return delta
        if one.worker not in self._feedback:
            codec, elements = get_codec(self.spec.codec), self.grid.total
            feedback = ResidualFeedback(codec, elements, self.spec.error_feedback)
            self._feedback[one.worker] = feedback
        first, _ = self.manifest.chunks_of(fragment, self.spec.fragments)
        return Compensated(delta, self._feedback[one.worker], grid, self.grid.bounds(first)[0])
