"""Compute what one peer contributes to a round: the pseudo-gradient of its submission."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from atoll.collectives.codecs import F32
from atoll.optim.manifest import Manifest, pseudo_gradient
from atoll.optim.run_spec import RunSpec


def delta_source(
    spec: RunSpec, manifest: Manifest, theta: F32, submission: F32, fragment: int
) -> Callable[[int, F32], None]:
    """Return a function that fills in the pseudo-gradient Δ of one chunk of ``fragment``.

    Chunks are counted from the fragment's first; Δ is old minus new.

    ``theta`` and ``submission`` are float32[manifest.elements]: the run's parameters as they are
    when the round begins, and what was submitted, which is θ_m (Δ = cast(θ) - θ_m), or Δ itself.
    """
    first, _ = manifest.chunks_of(fragment, spec.fragments)
    grid, submits_deltas = manifest.grid, spec.submits == "deltas"

    def fill(chunk: int, out: F32) -> None:
        lo, hi = grid.bounds(first + chunk)
        if submits_deltas:
            np.copyto(out, submission[lo:hi])
        else:
            pseudo_gradient(theta[lo:hi], submission[lo:hi], out, manifest, lo, hi)

    return fill
