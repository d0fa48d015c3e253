"""Share the buffers of a model where trainers exchange something at every step anyway."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from atoll.collectives.codecs import F32
from atoll.optim.buffers import PIECES, join, split
from atoll.optim.every_step.exchange import Exchanged
from atoll.optim.model_buffers import ModelBuffers

INTEGERS_MAX = 4096  # 32 KiB of what a trainer gathers at a step; BatchNorm has one for each layer


class StepBuffers:
    """Bring the buffers of all trainers together now and then.

    Float ones become the mean of all trainers', integers their maximum; of more than INTEGERS_MAX
    integers each trainer keeps its own.
    """

    def __init__(self, buffers: ModelBuffers) -> None:
        self._buffers = buffers
        self._whole_at = 1 + buffers.floats
        count = (buffers.elements - self._whole_at) // PIECES
        self._shares_integers = 0 < count <= INTEGERS_MAX

    def integers(self) -> bytes:
        """Return the integers as bytes to be gathered; none if they are not shared."""
        if not self._shares_integers:
            return b""
        return join(self._buffers.vector()[self._whole_at :]).astype("<i8").tobytes()

    def share(self, total: Callable[[F32, bool], Exchanged], gathered: Sequence[bytes]) -> None:
        """Replace the buffers by the mean of all trainers' float ones, and the maximum of integers.

        ``total``: a sum over all trainers, of those whose flag is true. ``gathered``: what
        ``integers`` has given at each of them; what has another length is of a newcomer.
        """
        mine = self._buffers.vector()
        floats = mine[1 : self._whole_at]
        is_finite = bool(np.isfinite(floats).all())
        found = total(floats if is_finite else np.zeros_like(floats), is_finite)
        if found.count:
            np.divide(found.total, np.float32(found.count), out=floats)
        if self._shares_integers:
            own = join(mine[self._whole_at :])
            alike = [np.frombuffer(g, "<i8") for g in gathered if len(g) == own.nbytes]
            mine[self._whole_at :] = split(np.max([own, *alike], axis=0))
        if np.isfinite(mine).all():
            self._buffers.read(mine)
