"""Run DiLoCo where no peer waits for another: Async Local-SGD, delayed Nesterov (2401.09135).

A round consists of those who have submitted when it begins, usually one trainer alone; whoever
submits meanwhile is in the next one. A trainer waits for its own round and no longer, then goes on
from the θ that the run has by then. So its pseudo-gradient is taken against the θ that it began
with, its anchor, and is applied to a newer one. No submission comes too late for that: trainers
hear of no round that has gone on without them, and of no catching up of their daemons.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Unpack

import numpy as np
import torch
from torch import nn

from atoll.collectives.codecs import F32
from atoll.optim.inner import Inner
from atoll.optim.methods.synchronous import SynchronousMethod
from atoll.optim.options import SpeedOptions, specified, takes
from atoll.optim.run_spec import MOMENTUM_CODECS, RunSpec
from atoll.optim.sessions import TrainerSession


class AsyncDiLoCo(SynchronousMethod):
    """Train in rounds of ``sync_every`` local steps that each peer begins and ends by itself.

    Theory, with g the mean pseudo-gradient of those who came together::

        every round:      theta = theta - lr g / N
        every N-th also:  m = mu m + (sum of g) / N        theta = theta - lr mu m

    ``help("atoll.optim.options")`` says what the ``options`` mean, which other methods have too,
    ``help("atoll.optim.method")`` what the calls do.

    ``outer_delay`` is N: about as many rounds as the peers complete in the time
    in which each has completed one, so the number of peers, if they are of similar speed. With a
    momentum in every round, peers that come one after the other would take much longer steps than
    with ``DiLoCo`` (in the paper a perplexity of 44.27 instead of 41.35). What is one arrival
    there is one round here, also if several peers are in it: with peers that always come together,
    N = 1 is ``DiLoCo``.

    ``outer_momentum``: where peers come in turn, none knows what the others have just submitted.
    Then 0.9, as in ``DiLoCo``, oscillates for long: of four peers, each half-way to the optimum in
    a round, an error shrinks by 7 % in N rounds, with 0.5 by 30 %.

    ``codec``, ``momentum_codec``: as for DiLoCo, but for the coarse codecs ("int2", "sign"), which
    need ``error_feedback``.

    A peer that is twice as slow is in half as many rounds, and its pseudo-gradients are of an older
    theta. ``round_s`` gives it half the steps instead. The larger N, the smaller is each step: if
    peers leave for good, a run of fewer is slower than it need be. ``global_step`` counts N rounds
    as ``sync_every`` steps: so a followed schedule runs as one peer's steps do, of mean speed where
    speeds differ, and also too slowly where N is more than the number of peers.

    Each round's result goes to all peers: n that come in turn get n times what they get with
    ``DiLoCo``. Costs 4 bytes of the trainer's host memory for each parameter. Sessions have no
    collectives in such a run, because nobody waits for the others' calls.
    """

    meets = False

    @takes(SpeedOptions)
    def __init__(
        self,
        model: nn.Module,
        inner: Inner,
        sync_every: int,
        peer: TrainerSession,
        *,
        outer_delay: int,
        outer_lr: float = 0.7,
        outer_momentum: float = 0.5,
        momentum_codec: str = MOMENTUM_CODECS[0],
        codec: str = "int8",
        **options: Unpack[SpeedOptions],
    ) -> None:
        spec = RunSpec(
            method="async_diloco",
            sync_every=sync_every,
            outer_lr=outer_lr,
            outer_momentum=outer_momentum,
            outer_delay=outer_delay,
            submits="deltas",
            momentum_codec=momentum_codec,
            codec=codec,
            **specified(options),
        )
        super().__init__(model, inner, peer, spec, options)
        self._anchor: F32 = np.zeros(self.manifest.elements, np.float32)
        self._vector.write(self._anchor)  # as the dtypes of the model have rounded it

    @property
    def trainer_bytes(self) -> float:
        return 4.0  # the anchor

    def _write_submission(self, fragment: int, out: F32, lo: int) -> None:
        self._vector.write_delta(self._anchor, out, lo)

    def _take_run(self) -> None:
        super()._take_run()
        self._vector.write(self._anchor)

    def _position(self) -> dict[str, Any]:
        return {**super()._position(), "anchor": torch.from_numpy(self._anchor.copy())}

    def _restore_position(self, position: Mapping[str, Any]) -> None:
        super()._restore_position(position)
        np.copyto(self._anchor, position["anchor"].numpy())
