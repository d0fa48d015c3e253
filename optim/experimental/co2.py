"""Run CO2: the outer step comes one round late, so a round travels while the next is trained.

After ``sync_every`` local steps from the anchor a_t a trainer has x_t. Theory (2401.16265)::

    wait for round t-1, submit (a_t - x_t) / L_t, go on from a_(t+1) = theta      nobody waits long
    daemons:  m <- clip(mu m + mean);  theta <- theta - lr m                         one round late

Here the pseudo-gradient of a round is taken against that round's own anchor, as in the paper. The
paper's penalty L is built of iterates in a way that was not available; the authors' code has the
constant 1, and ``GapAware`` is the nearest that is published (1909.10802). The authors' code
discards what it clips, and reduces live parameters while they are trained; this does neither.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, Protocol, TypeAlias, Unpack, runtime_checkable

import numpy as np
import torch
from torch import nn

from atoll.collectives.codecs import F32
from atoll.collectives.errors import ConfigError
from atoll.optim.inner import Inner
from atoll.optim.local_steps import LocalSteps
from atoll.optim.methods.round_method import RoundMethod
from atoll.optim.model_io import ModelVector
from atoll.optim.options import AllRoundOptions, specified, takes
from atoll.optim.run_spec import MOMENTUM_CODECS, RunSpec
from atoll.optim.sessions import TrainerSession

# (how far θ has moved since the anchor, how far the trainer has from it) -> L, 1 or more
Penalty: TypeAlias = Callable[[float, float], float]
NORMS_KEPT = 0.9  # of the running mean, at each round


class GapAware:
    """Compute the penalty ``L = 1 + |theta - anchor| / C`` of a pseudo-gradient that comes late.

    C is the running mean of the trainers' own movement.
    """

    def __init__(self) -> None:
        self.moved = 0.0  # C

    def __call__(self, gap: float, moved: float) -> float:
        self.moved = NORMS_KEPT * self.moved + (1 - NORMS_KEPT) * moved if self.moved else moved
        return 1.0 + gap / self.moved if self.moved else 1.0

    def state_dict(self) -> dict[str, Any]:
        return {"moved": self.moved}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.moved = float(state["moved"])


@runtime_checkable
class _Stateful(Protocol):
    """Describe a penalty that remembers something."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any], /) -> None: ...


class CO2(RoundMethod):
    """Train with CO2: in rounds of local steps, whose outer step comes one round late.

    A round has ``sync_every`` local steps. ``help("atoll.optim.options")`` says what the
    ``options`` mean, which other methods have too, ``help("atoll.optim.method")`` what the calls
    do.

    ``outer_momentum``: the authors' code has 0 up to 16 workers, 0.2 up to 32, 0.5 up to 64, then
    0.6. ``codec``, ``momentum_codec``: as for DiLoCo, but for the coarse codecs ("int2", "sign"),
    which need ``error_feedback``. ``clip`` bounds every element of the momentum; None: nothing is
    clipped. ``penalty`` shrinks what comes late, and is saved too if it has a ``state_dict`` and
    ``load_state_dict`` of its own; None: nothing is shrunk. Costs 16 bytes of the trainer's host
    memory for each parameter, 8 of them at the end of a round only.

    It ended 18 % above data-parallel on the convergence bench, no better than one worker alone,
    where ``DiLoCo`` was 5 % above: what comes a round late is of little use to so few rounds.
    """

    @takes(AllRoundOptions)
    def __init__(
        self,
        model: nn.Module,
        inner: Inner,
        sync_every: int,
        peer: TrainerSession,
        *,
        outer_lr: float = 1.0,
        outer_momentum: float = 0.0,
        clip: float | None = None,
        penalty: Penalty | Literal["gap_aware"] | None = "gap_aware",
        momentum_codec: str = MOMENTUM_CODECS[0],
        codec: str = "int8",
        **options: Unpack[AllRoundOptions],
    ) -> None:
        if clip is not None and not clip > 0:
            raise ConfigError(f"clip={clip}", fix="give a positive bound, or None")
        spec = RunSpec(
            method="co2",
            sync_every=sync_every,
            outer="heavy_ball",
            outer_lr=outer_lr,
            outer_momentum=outer_momentum,
            outer_clip=clip or 0.0,
            submits="deltas",
            momentum_codec=momentum_codec,
            codec=codec,
            **specified(options),
        )
        vector = ModelVector(model)
        self._penalty: Penalty | None = GapAware() if penalty == "gap_aware" else penalty
        self._anchor: F32 = np.zeros(vector.manifest.elements, np.float32)
        self._delta: F32 = np.zeros_like(self._anchor)
        self._under_way = False
        self._local = LocalSteps(spec.sync_every, options["round_s"], options["clock"])
        super().__init__(vector, inner, peer, spec, options)
        self._begin()

    @property
    def trainer_bytes(self) -> float:
        return 16.0  # anchor and pseudo-gradient; at the end of a round a copy of each

    def _step_done(self) -> None:
        is_last = self._local.step(self._channel.check)
        if not self._begun_anew() and is_last and not self._is_leaving:
            self._end_round()

    def _hand_in(self) -> str:
        """Submit the steps of a round that is not over, and wait for its outer step as well."""
        if self._local.taken:
            self._end_round()
        return super()._hand_in()

    def _end_round(self) -> None:
        self._check_finite("round not submitted")  # also waits until a device has done its steps
        self._local.end()
        kind = self._outcome().kind if self._under_way else "committed"
        if kind == "reload":
            self._take_run()
            return
        if kind == "committed":
            self._delta.fill(0.0)  # else it is sent with the next
        self._form_delta()
        self._submit()
        self._under_way = True
        self._set_step(self._clock.steps + self.spec.sync_every)  # with what is under way
        self._vector.read(self._anchor)
        self._write_whole(
            self._vector.write, self._anchor
        )  # as the dtypes of the model have rounded it
        self._vector.zero_gradients()
        self._local.begin(self._channel.first_rank)

    def _form_delta(self) -> None:
        """Add the pseudo-gradient of this round to ``_delta``, and pull the anchor of the next.

        Both are whole in all ranks.
        """
        late: F32 = np.zeros_like(self._anchor)
        self._write_whole(lambda out: self._vector.write_delta(self._anchor, out, 0), late)
        moved = float(np.linalg.norm(late))
        before = self._anchor.copy() if self._penalty is not None else None
        self._channel.pull(lambda flat: np.copyto(self._anchor, flat))
        if self._penalty is not None and before is not None:
            np.subtract(before, self._anchor, out=before)
            penalty = self._penalty(float(np.linalg.norm(before)), moved)
            late /= np.float32(self._channel.first_rank(penalty))  # the same bits in all
        self._delta += late

    def _position(self) -> dict[str, Any]:
        remembers = _stateful(self._penalty)
        return {
            "local_steps": self._local.position,
            "speeds": self._local.speeds,
            "under_way": self._under_way,
            "anchor": torch.from_numpy(self._anchor.copy()),
            "delta": torch.from_numpy(self._delta.copy()),
            "penalty": remembers.state_dict() if remembers is not None else {},
        }

    def _restore_anywhere(self, position: Mapping[str, Any]) -> None:
        self._local.restore_speeds(position["speeds"])

    def _restore_position(self, position: Mapping[str, Any]) -> None:
        self._local.restore_position(position["local_steps"])
        self._under_way = bool(position["under_way"])
        np.copyto(self._anchor, position["anchor"].numpy())
        np.copyto(self._delta, position["delta"].numpy())
        if (remembers := _stateful(self._penalty)) is not None:
            remembers.load_state_dict(position["penalty"])

    def _write_submission(self, fragment: int, out: F32, lo: int) -> None:
        np.copyto(out, self._delta[lo : lo + out.size])

    def _take_run(self) -> None:
        super()._take_run()
        self._begin()

    def _begin(self) -> None:
        """Begin from the run's parameters.

        The others have a round under way, except at the beginning of a run.
        """
        if self._clock.steps:
            self._set_step(self._clock.steps + self.spec.sync_every)
        self._write_whole(self._vector.write, self._anchor)
        self._delta.fill(0.0)
        self._under_way = False
        self._local.begin(self._channel.first_rank)


def _stateful(penalty: object) -> _Stateful | None:
    return penalty if isinstance(penalty, _Stateful) else None
