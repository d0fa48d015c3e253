"""Run DiLoCo in an ordinary training loop: the trainer's side of a run (arXiv 2311.08105).

The wrapper hooks the inner optimizer's step, so the loop stays as it was. The life of a round here:

1. ``sync_every`` inner steps move the model's parameters θ_m away from the run's θ.
2. θ_m is written to the daemon's shared memory as float32 and submitted with its weight.
3. The trainer waits. COMMITTED: θ_m is overwritten by the run's new θ, gradients are zeroed.
   MISSED (the round closed before the submission came): θ_m and its weight are kept and the
   next round carries both. RELOAD: the daemon got newer state another way; local work is dropped.

Arithmetic on θ, momentum and the network are the daemon's business (``optim.outer``, ``peer``).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
from torch import Tensor, nn

from atoll.collectives.codecs import F32
from atoll.collectives.errors import ConfigError
from atoll.optim.inner_steps import Inner
from atoll.optim.local_steps import LocalSteps
from atoll.optim.memory import say_of_replay
from atoll.optim.method import Method
from atoll.optim.model_vector import ModelVector
from atoll.optim.muon import outer_momentum_of
from atoll.optim.rates import OuterRate, factor_of
from atoll.optim.replay.recorder import Recorder, Replay
from atoll.optim.replay.replaying import TrainingState
from atoll.optim.replay.validating import Validator
from atoll.optim.sessions import LeadingRank, TrainerSession, ValidatingSession
from atoll.optim.spec import RunSpec
from atoll.peer.client.session import Outcome


def segment_steps_of(replay: Replay | None, validators: int) -> int:
    """Return the steps of a segment for the specification of a run; 0 without validators.

    Raise ConfigError for validators without a replay that has a task.
    """
    if not validators:
        return 0
    if replay is None or replay.task is None:
        raise ConfigError(
            f"validators={validators} without a replay that has a task",
            fix="give replay=Replay(task=...): docs/replay.md says how a task is written",
        )
    return replay.segment_steps


class SynchronousMethod(Method):
    """Train with local steps, and wait for each round.

    ``round_s``: each peer takes as many local steps as it gets done in so many seconds, by its own
    speed in the last rounds, and ``sync_every`` in the first (``StepsBySpeed``, where ``clock`` is
    explained). So peers of different speed come at the same time. It need not be equal on all; what
    each has done weighs by its steps or tokens, as ever.

    ``replay``: keep what others need to take local steps of a round again (docs/replay.md); then
    ``note_batch`` says which samples they are of, and ``recorder`` keeps it. It need not be equal
    on all. A round that was under way when a state is loaded then begins anew.

    ``validators`` (with ``audit=True``): so many peers, drawn anew in each round, take a segment of
    the local steps of as many others again; a peer that did other steps than it says is banned.
    This needs a ``replay`` with a ``task``. Steps of a round that went on without a trainer are
    dropped then.
    """

    _waits = True

    def __init__(
        self,
        model: nn.Module,
        inner: Inner,
        peer: TrainerSession,
        spec: RunSpec,
        buffers: bool = True,
        round_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        replay: Replay | None = None,
        frozen: str = "refuse",
    ) -> None:
        self._local = LocalSteps(spec.sync_every, round_s, clock)
        self.recorder: Recorder | None = None
        vector = ModelVector(model)
        if replay is not None:
            if isinstance(peer, LeadingRank):
                raise ConfigError(
                    "steps of a trainer with several processes cannot be replayed",
                    fix="leave replay out, or train in one process",
                )
            state = TrainingState(model, inner, replay.stateful)
            self.recorder = Recorder(replay, state, spec.sync_every)
            say_of_replay(vector.manifest, self.recorder.planned, replay.folder)
        super().__init__(vector, inner, peer, spec, buffers, frozen)
        self._validator = self._validator_of(replay)
        self._begin_round()
        self._begin_work()

    def _validator_of(self, replay: Replay | None) -> Validator | None:
        """Return what validates this trainer's rounds, or None.

        In a swarm nobody lies, so nothing is drawn there.
        """
        session: Any = self.peer
        if not self.spec.validators or replay is None or not isinstance(session, ValidatingSession):
            return None
        assert self.recorder is not None
        steady = self._local.is_steady
        return Validator(session, self.recorder, replay, self.manifest, steady)

    def _hand_over(self, fill: Callable[[F32], None], weight: float, fragment: int) -> None:
        if self._validator is None:
            super()._hand_over(fill, weight, fragment)
        else:
            self._validator.submit(fill, weight)

    def note_batch(self, indices: Iterable[int] | np.ndarray | Tensor) -> None:
        """Note the samples of the batch whose forward pass comes next.

        ``indices``: integers from which the loop of another trainer makes the same batch, at most
        8,192 for a local step. Call it once for each batch, also where gradients are accumulated.
        Nothing happens without ``replay``.
        """
        if self.recorder is not None:
            self.recorder.note(indices)

    def close(self) -> None:
        super().close()
        if self.recorder is not None:
            self.recorder.close()

    def _begin_work(self) -> None:
        """Begin to record a round from the run's parameters, where there is a recorder."""
        if self.recorder is not None:
            self.recorder.begin(self.peer.round, self.global_step)

    def _begin_round(self) -> None:
        self._local.begin(self.peer.first_rank)

    def _step_done(self) -> None:
        is_last = self._local.step(self.peer.check)
        if self.recorder is not None:
            self.recorder.stepped(is_last)
        if not is_last:
            return
        self._submit()
        self._local.end()
        outcome = self._outcome()
        self._round_over(outcome)

    def _round_over(self, outcome: Outcome) -> None:
        if outcome.kind == "missed" and self._validator is None:
            if self.recorder is not None:
                self.recorder.missed()
            self._stand_at(self._clock.steps)
            self._begin_round()
        else:
            if self.recorder is not None and outcome.kind == "committed":
                self.recorder.committed(outcome.round)
            self._take_run()
        if self._validator is not None:
            self._validator.round_over(outcome)

    def _take_run(self) -> None:
        if self.recorder is not None and self._validator is not None:
            self.recorder.rewind()
        super()._take_run()
        self._begin_round()
        self._begin_work()

    def _is_where(self, state: Mapping[str, Any]) -> bool:
        """Return whether run and model are as saved, and nothing is recorded.

        Where steps are recorded, a round whose first ones were not kept begins anew.
        """
        if self.recorder is not None:
            self.recorder.forget()
        return super()._is_where(state) and self.recorder is None

    def _place(self) -> dict[str, Any]:
        return {"local_steps": self._local.place, "speeds": self._local.known}

    def _recall(self, place: Mapping[str, Any]) -> None:
        self._local.recall(place["speeds"])

    def _return_to(self, place: Mapping[str, Any]) -> None:
        self._local.return_to(place["local_steps"])


class DiLoCo(SynchronousMethod):
    """Train with DiLoCo: local steps, then Nesterov on the peers' mean pseudo-gradient.

    A round has ``sync_every`` local steps.

    ``Method`` says what the arguments and calls of all methods mean, ``SynchronousMethod`` what
    ``round_s``, ``replay`` and ``validators`` do.

    ``outer_momentum``: 0.9 as published; 0.6, as in MuLoCo (2505.23725), where an inner optimizer
    is ``torch.optim.Muon``, as of those that ``muon_and_adamw`` makes.

    ``outer_lr``: a number; or "by_peers", 0.4 where one peer is in a round, 0.6 for two to four and
    0.8 from eight on (rates.py), so that it changes as peers come and go.

    Tuning: raise ``sync_every`` if ``metrics()["waited_s"]`` is a large part of the run's time;
    lower ``outer_lr`` towards 0.4 for two peers, keep 0.7 for eight or many steps per round.
    """

    def __init__(
        self,
        model: nn.Module,
        inner: Inner,
        sync_every: int,
        peer: TrainerSession,
        *,
        outer_lr: OuterRate = 0.7,
        outer_momentum: float | None = None,
        codec: str = "int8",
        aggregate: str = "mean",
        audit: bool = False,
        probation: int = 0,
        min_trainers: int = 1,
        round_deadline_s: float = 600.0,
        buffers: bool = True,
        round_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        replay: Replay | None = None,
        validators: int = 0,
        frozen: str = "refuse",
    ) -> None:
        if outer_momentum is None:
            outer_momentum = outer_momentum_of(inner)
        rate, by_peers = factor_of(outer_lr)
        spec = RunSpec(
            sync_every=sync_every,
            outer_lr=rate,
            outer_lr_by_peers=by_peers,
            outer_momentum=outer_momentum,
            codec=codec,
            aggregate=aggregate,
            audit=audit,
            probation=probation,
            validators=validators,
            segment_steps=segment_steps_of(replay, validators),
            min_trainers=min_trainers,
            round_deadline_s=round_deadline_s,
        )
        super().__init__(model, inner, peer, spec, buffers, round_s, clock, replay, frozen)
