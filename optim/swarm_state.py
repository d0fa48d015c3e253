"""The state of a run in one process, as each daemon holds it, and the step of a round on it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from atoll.collectives.codecs import F32
from atoll.collectives.together import reduce_together
from atoll.optim.contribution import delta_source
from atoll.optim.fragments import fragment_grid
from atoll.optim.manifest import Manifest
from atoll.optim.outer import OuterStep
from atoll.optim.spec import RunSpec

__all__ = ["SwarmState"]


class SwarmState:
    """The parameters and momentum of a run, float32[elements] each. ``initial`` writes the first
    parameters."""

    def __init__(self, spec: RunSpec, manifest: Manifest, initial: Callable[[F32], None]) -> None:
        self.spec, self.manifest = spec, manifest
        self.grid = manifest.grid
        self.theta: F32 = np.zeros(manifest.elements, np.float32)
        self.momentum: F32 = np.zeros_like(self.theta)
        self.round = 1  # the first one gives a run its parameters
        self._step = OuterStep(spec, self.grid.chunk_elements)
        initial(self.theta)

    def commit(self, submitted: list[tuple[F32, float]], fragment: int = 0) -> int:
        """The round of these parameters (whole vectors, of which the fragment's part counts) and
        weights; how many bytes its encoded result has."""
        first, end = self.manifest.chunks_of(fragment, self.spec.fragments)
        grid = fragment_grid(self.grid, first, end)
        weights = [weight for _, weight in submitted]
        sources = [
            delta_source(self.spec, self.manifest, self.theta, values, fragment)
            for values, _ in submitted
        ]
        result = reduce_together(self._step.codec, grid, weights, sources)
        for chunk in range(grid.count):
            lo, hi = self.grid.bounds(first + chunk)
            pair = self.theta[lo:hi], self.momentum[lo:hi]
            self._step(result.view(chunk), pair, pair)
        self.round += 1
        return result.array.nbytes
