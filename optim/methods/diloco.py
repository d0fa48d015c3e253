"""Run DiLoCo in an ordinary training loop: the trainer's side of a run (arXiv 2311.08105).

The wrapper hooks the inner optimizer's step, so the loop stays as it was. The life of a round here:

1. ``sync_every`` local steps move the model's parameters θ_m away from the run's θ.
2. θ_m is written to the daemon's shared memory as float32 and submitted with its weight.
3. The trainer waits. COMMITTED: θ_m is overwritten by the run's new θ, gradients are zeroed.
   MISSED (the round closed before the submission came): θ_m and its weight are kept and the
   next round carries both. RELOAD: the daemon got newer state another way; local work is dropped.

Arithmetic on θ, momentum and the network are the daemon's business (optim/outer_step.py, peer/).
"""

from __future__ import annotations

from typing import Unpack

from torch import nn

from atoll.collectives.errors import ConfigError
from atoll.optim.inner import Inner
from atoll.optim.methods.synchronous import SynchronousMethod, segment_steps_of
from atoll.optim.muon import outer_momentum_of
from atoll.optim.options import ReplayOptions, specified, takes
from atoll.optim.outer_step import OuterRate, factor_of
from atoll.optim.run_spec import MOMENTUM_CODECS, RunSpec, feedback_of
from atoll.optim.sessions import TrainerSession


class DiLoCo(SynchronousMethod):
    """Train with DiLoCo: local steps, then Nesterov on the peers' mean pseudo-gradient.

    A round has ``sync_every`` local steps.

    ``help("atoll.optim.options")`` says what the ``options`` mean, which other methods have too,
    ``help("atoll.optim.method")`` what the calls do.

    ``outer_momentum``: 0.9 as published; 0.6, as in MuLoCo (2505.23725), where an inner optimizer
    is ``torch.optim.Muon``, as of those that ``muon_and_adamw`` makes.

    ``outer_lr``: a number; or "by_peers", 0.4 where one peer is in a round, 0.6 for two to four,
    0.8 from eight on, and in between by the logarithm of their number (``outer_rate``), so that it
    changes as peers come and go.

    ``codec``: how pseudo-gradients travel: "int8" (a quarter of float32), "int4" (an eighth),
    "fp4_e3m0", "bfloat16", "float32" and others (docs/limits.md). Of coarser ones, "int2" and
    "sign", the mean comes back in "int4".

    ``error_feedback``: how much of what the codec leaves out goes with the next round, in [0, 1];
    None: all of it where the codec is coarse, and else nothing. A daemon holds 7 bytes more for
    each parameter then (what is kept and what was submitted, as float32), and rounds are
    butterflies.

    ``momentum_codec``: "dynamic8" keeps the momentum in 8 bits, a byte for each parameter and a
    scale for each 256 (arXiv 2110.02861); so a daemon holds 3 bytes less for each parameter.
    What it costs in loss was not measured yet.

    ``warm_start``: begin the run with so many steps in rounds of ``warm_every`` steps, each of
    which gives it the mean of the peers, without outer rate and momentum. It is for models that
    begin at random. It ends at the same round for all peers, whenever they have come: collectives
    count as rounds of it, so with ``Shards``, which deals after each round, give twice the steps.
    It takes neither ``round_s`` nor ``replay``.

    Tuning: raise ``sync_every`` if ``metrics()["waited_s"]`` is a large part of the run's time;
    lower ``outer_lr`` towards 0.4 for two peers, keep 0.7 for eight or many steps per round.
    """

    @takes(ReplayOptions)
    def __init__(
        self,
        model: nn.Module,
        inner: Inner,
        sync_every: int,
        peer: TrainerSession,
        *,
        outer_lr: OuterRate = 0.7,
        outer_momentum: float | None = None,
        momentum_codec: str = MOMENTUM_CODECS[0],
        codec: str = "int8",
        error_feedback: float | None = None,
        warm_start: int = 0,
        warm_every: int = 2,
        **options: Unpack[ReplayOptions],
    ) -> None:
        if warm_start and (options["round_s"] is not None or options["replay"] is not None):
            raise ConfigError(
                f"warm_start={warm_start} with round_s or replay: both need rounds of one length",
                fix="give one of them",
            )
        if outer_momentum is None:
            outer_momentum = outer_momentum_of(inner)
        rate, by_peers = factor_of(outer_lr)
        spec = RunSpec(
            sync_every=sync_every,
            outer_lr=rate,
            outer_lr_by_peers=by_peers,
            outer_momentum=outer_momentum,
            momentum_codec=momentum_codec,
            codec=codec,
            error_feedback=feedback_of(codec, error_feedback),
            segment_steps=segment_steps_of(options),
            warm_rounds=-(-warm_start // max(1, warm_every)),
            warm_every=warm_every if warm_start else 1,
            **specified(options),
        )
        super().__init__(model, inner, peer, spec, options, options["replay"])

    def _step_done(self) -> None:
        if self.spec.warm_rounds and self._local.taken == 0:
            # The channel stays where it is when a round is missed, and the clock goes on.
            number = max(self._channel.round, self._clock.number)
            self._local.wanted = self.spec.steps_of(number + 1)
        super()._step_done()
