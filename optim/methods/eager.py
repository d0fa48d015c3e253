"""Apply eager updates: nobody waits, and a peer's own part counts at once (2502.12996).

At the end of a round a trainer knows its own pseudo-gradient, and the mean of the round before::

    D~_m = mean_prev + s_m (D_m - D_m_prev)      s_m: its share in the mean, 1/M of equal peers
    theta_m, b_m <- Nesterov(theta_m, b_m, D~_m)

so the θ_m of peers differ. Nesterov is linear, hence θ_m = θ + c_m: θ is the run's, to which
daemons apply every mean when it comes, one round late, and c_m is what a second Nesterov step, from
zero, makes of ``s_m (D_m - D_m_prev)``. So the run's state is the same on all peers, a joiner
begins with c = 0, and only the correction is a trainer's own. ``D_m_prev`` is what the others have
decoded of it.
"""

from __future__ import annotations

import numpy as np

from atoll.collectives.codecs import F32, get_codec
from atoll.collectives.errors import ConfigError
from atoll.optim.manifest import Manifest
from atoll.optim.outer_step import outer_step
from atoll.optim.run_spec import RunSpec


class EagerUpdates:
    """Keep a trainer's correction; it costs 16 bytes of host memory for each parameter.

    ``anchor``, float32[elements]: θ_m after its last step, from which it trains. Where a round goes
    on without a submission, that submission is not taken back: it stays in the correction alone.
    """

    def __init__(self, spec: RunSpec, manifest: Manifest) -> None:
        self._spec, self._manifest = spec, manifest
        self._codec = get_codec(spec.codec)
        if self._codec.contract.keyed:
            raise ConfigError(
                f"eager updates with codec {spec.codec!r}: a trainer encodes its part again, and"
                " this codec draws at random",
                fix="use int8 or int4",
            )
        if spec.error_feedback:
            raise ConfigError(
                "eager updates with error feedback: a trainer counts its own part as it is sent,"
                " and its daemon alone knows what it has left out before",
                fix="use int8 or int4 without error feedback",
            )
        self.anchor: F32 = np.zeros(manifest.elements, np.float32)
        self._correction: F32 = np.zeros_like(self.anchor)
        self._momentum: F32 = np.zeros_like(self.anchor)
        self._counted: F32 = np.zeros_like(self.anchor)  # s_m D_m_prev

    @property
    def arrays(self) -> dict[str, F32]:
        """Return all arrays that it keeps, by name; they are not copies."""
        return {
            "anchor": self.anchor,
            "correction": self._correction,
            "momentum": self._momentum,
            "counted": self._counted,
        }

    def begin(self, theta: F32) -> None:
        """Begin anew from the run's parameters, as the model has rounded them."""
        np.copyto(self.anchor, theta)
        for array in (self._correction, self._momentum, self._counted):
            array.fill(0.0)

    def missed(self, fragment: int) -> None:
        """Note that the last round of ``fragment`` went on without this trainer."""
        self._counted[self.part(fragment)] = 0.0

    def step(self, fragment: int, local: F32, theta: F32, share: float) -> F32:
        """Return D_m of a fragment, to be submitted, and set ``anchor`` to its new θ_m.

        ``local``, ``theta``: float32[elements], of which the fragment counts: the model after its
        local steps, and the run's parameters now. Raise CodecError for a model that is not finite.
        """
        where, spec = self.part(fragment), self._spec
        delta: F32 = self.anchor[where] - local[where]
        eager: F32 = np.float32(share) * delta
        eager -= self._counted[where]
        correction, momentum = self._correction[where], self._momentum[where]
        outer_step(
            "nesterov",
            correction,
            momentum,
            eager,
            lr=spec.outer_lr,
            mu=spec.outer_momentum,
            out_theta=correction,
            out_momentum=momentum,
            scratch=np.empty_like(delta),
        )
        np.add(theta[where], correction, out=self.anchor[where])
        self._decode(fragment, delta)
        self._counted[where] *= np.float32(share)
        return delta

    def _decode(self, fragment: int, delta: F32) -> None:
        """Write what the others decode of ``delta`` into ``_counted``."""
        grid = self._manifest.grid
        first, end = self._manifest.chunks_of(fragment, self._spec.fragments)
        start = grid.bounds(first)[0]
        encoded = np.empty(self._codec.encoded_bytes(grid.chunk_elements), np.uint8)
        for chunk in range(first, end):
            lo, hi = grid.bounds(chunk)
            data = encoded[: self._codec.encoded_bytes(hi - lo)]
            self._codec.encode(delta[lo - start : hi - start], data)
            self._codec.decode(data, self._counted[lo:hi])

    def part(self, fragment: int) -> slice:
        """Return the slice of the vector where a fragment lies."""
        return self._manifest.part_of(fragment, self._spec.fragments)
