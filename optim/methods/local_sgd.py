"""Run Local SGD: peers train alone for some steps, then each goes on from the mean of all.

With ``QSR`` the number of steps grows as the inner learning rate decays (arXiv 2310.14423).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Unpack

from torch import nn

from atoll.collectives.errors import ConfigError
from atoll.optim.inner import Inner, unwrapped
from atoll.optim.methods.synchronous import SynchronousMethod, segment_steps_of
from atoll.optim.options import ReplayOptions, specified, takes
from atoll.optim.run_spec import RunSpec, settings_text
from atoll.optim.sessions import TrainerSession


@dataclass(frozen=True, kw_only=True)
class QSR:
    """Choose the steps H of a round by ``H = max(base, floor((a / lr)^2))``.

    This is the quadratic synchronization rule (arXiv 2310.14423).

    ``a``: about the peak learning rate times the root of ``base``; 0 keeps H at ``base``. During
    ``warmup_steps``, when the rate is small as well, H is that of the ``peak_lr``. ``most`` caps H;
    ``total_steps``, if given, cuts the last round short. H changes only between two rounds.

    The paper's ViT-B: peak 0.008, base 4, a 0.0175 give 4, 19, 76 and 306 steps at the rates 0.008,
    0.004, 0.002 and 0.001. It was not tried there with an outer momentum.
    """

    wire: ClassVar[str] = "QSR"  # in the specification of a run
    a: float
    peak_lr: float
    base: int = 4
    warmup_steps: int = 0
    most: int = 500
    total_steps: int = 0

    def __str__(self) -> str:
        return settings_text(self.wire, self)

    def __post_init__(self) -> None:
        if not (self.a >= 0 and self.peak_lr > 0 and 0 < self.base <= self.most):
            raise ConfigError(
                f"{self}",
                fix="a is not negative, peak_lr positive, and base at least 1, at most `most`",
            )
        if self.warmup_steps < 0 or self.total_steps < 0:
            raise ConfigError(f"{self}", fix="warmup_steps and total_steps are not negative")

    def sync_every(self, step: int, lr: float) -> int:
        """Return the steps of the round whose first is number ``step``, from 0, at rate ``lr``."""
        lr = self.peak_lr if step < self.warmup_steps else lr
        if not self.a:
            grown = 0  # also where the rate is 0
        else:
            grown = self.most if self.a >= lr * self.most else int((self.a / lr) ** 2)
        steps = min(max(self.base, grown), self.most)
        left = self.total_steps - step
        return min(steps, left) if left > 0 else steps


class LocalSGD(SynchronousMethod):
    """Train in rounds of ``sync_every`` local steps, then take the mean of the peers' parameters.

    ``help("atoll.optim.options")`` says what the ``options`` mean, which other methods have too,
    ``help("atoll.optim.method")`` what the calls do. ``codec``: as for DiLoCo, but for
    the coarse ones ("int2", "sign"), which need ``error_feedback``.

    With a ``QSR``, which takes no ``round_s``, all peers should follow one schedule of the inner
    learning rate. It is read from the first group of the last inner optimizer, as it is in the
    first step of a round; ``follow(scheduler)`` brings that of a late joiner there. A peer that is
    out of step with the others still takes part in the same rounds: they wait for it, and its
    weight is the number of its steps.
    """

    @takes(ReplayOptions)
    def __init__(
        self,
        model: nn.Module,
        inner: Inner,
        sync_every: int | QSR,
        peer: TrainerSession,
        *,
        codec: str = "int8",
        **options: Unpack[ReplayOptions],
    ) -> None:
        round_s = options["round_s"]
        self._rule = sync_every if isinstance(sync_every, QSR) else None
        if self._rule is not None and round_s is not None:
            raise ConfigError(
                f"round_s={round_s} and {self._rule} both decide how many steps a round has",
                fix="give one of them",
            )
        if self._rule is not None and "lr" not in unwrapped(inner)[-1].param_groups[0]:
            raise ConfigError(
                "a QSR reads the learning rate of the last inner optimizer, which has none",
                fix="give sync_every a number of steps",
            )
        spec = RunSpec(
            method="local_sgd",
            sync_every=sync_every.base if isinstance(sync_every, QSR) else sync_every,
            schedule=str(self._rule) if self._rule else "",
            outer="sgd",
            outer_lr=1.0,
            outer_momentum=0.0,
            codec=codec,
            segment_steps=segment_steps_of(options),
            **specified(options),
        )
        super().__init__(model, inner, peer, spec, options, options["replay"])

    def _step_done(self) -> None:
        if self._rule is not None and self._local.taken == 0:
            # The paper's rate is that of the round's first step, which schedulers set after the
            # last step of the round before.
            lr = float(self._inners[-1].param_groups[0]["lr"])
            self._local.wanted = self._rule.sync_every(self.global_step - 1, lr)
        super()._step_done()

    @property
    def _round_steps(self) -> int:
        return self._local.wanted
