"""Train with local steps, and wait for each round."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from torch import Tensor, nn

from atoll.collectives.errors import ConfigError
from atoll.collectives.units import count
from atoll.optim.footprint import memory_of_replay
from atoll.optim.inner import Inner
from atoll.optim.local_steps import LocalSteps
from atoll.optim.methods.round_method import RoundMethod
from atoll.optim.model_io import ModelVector
from atoll.optim.options import ReplayOptions, SpeedOptions
from atoll.optim.pseudo_gradient import Writer
from atoll.optim.replay.recorder import Recorder, Replay
from atoll.optim.replay.replaying import TrainingState
from atoll.optim.replay.validating import Validator
from atoll.optim.run_spec import RunSpec
from atoll.optim.sessions import LeadingRank, TrainerSession, ValidationChannel
from atoll.peer.client.console import say
from atoll.peer.client.trainer_channel import Outcome

HAND_IN_TRIES = 3  # a submission that misses a round is in the next, unless its daemon is lost


class SynchronousMethod(RoundMethod):
    """Train with local steps, and wait for each round.

    The life of a round here: ``_step_done`` counts its steps, ``_end_round`` submits what they have
    led to and waits, and ``_round_over`` goes on from the run's parameters, or, where the round has
    gone on without this trainer, from its own.
    """

    _waits = True

    def __init__(
        self,
        model: nn.Module,
        inner: Inner,
        peer: TrainerSession,
        spec: RunSpec,
        options: SpeedOptions,
        replay: Replay | None = None,
    ) -> None:
        round_s, clock = options["round_s"], options["clock"]
        self._local = LocalSteps(spec.sync_every, round_s, clock)
        self.recorder: Recorder | None = None
        vector = ModelVector(model)
        if replay is not None:
            if isinstance(peer.channel, LeadingRank):
                raise ConfigError(
                    "steps of a trainer with several processes cannot be replayed",
                    fix="leave replay out, or train in one process",
                )
            state = TrainingState(model, inner, replay.stateful)
            self.recorder = Recorder(replay, state, spec.sync_every)
            say(memory_of_replay(vector.manifest, self.recorder.planned, replay.folder))
        super().__init__(vector, inner, peer, spec, options)
        self._validator = self._validator_of(replay)
        self._begin_round()
        self._begin_work()

    def _validator_of(self, replay: Replay | None) -> Validator | None:
        """Return what validates this trainer's rounds, or None.

        In a swarm nobody lies, so nothing is drawn there.
        """
        channel: Any = self._channel
        if not self.spec.validators or replay is None or not isinstance(channel, ValidationChannel):
            return None
        assert self.recorder is not None
        steady = self._local.is_steady
        return Validator(channel, self.recorder, replay, self.manifest, steady)

    def _hand_over(self, write: Writer, weight: float, fragment: int) -> None:
        if self._validator is None:
            super()._hand_over(write, weight, fragment)
        else:
            self._validator.submit(write, weight)

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
            self.recorder.begin(self._channel.round, self.global_step)

    def _begin_round(self) -> None:
        self._local.begin(self._channel.first_rank)

    def _step_done(self) -> None:
        is_last = self._local.step(self._channel.check)
        if self._begun_anew():
            return
        if self._is_leaving and self._validator is None:
            is_last = True  # a short round, which ``_hand_in`` ends
        if self.recorder is not None:
            self.recorder.stepped(is_last)
        if is_last and not self._is_leaving:
            self._end_round()

    def _hand_in(self) -> str:
        """Submit the steps of a round that is not over; those that miss one go with the next."""
        steps, committed = self._uncounted(), self._rounds
        if self._validator is not None:
            self._take_run()
            return f"{steps} local steps do not count: others could not validate them"
        if not steps:
            return "it had nothing to hand in"
        for _ in range(HAND_IN_TRIES):
            if self._uncounted():
                self._end_round()
        if self._rounds > committed:
            return f"its last {count(steps, 'local step')} counted in round {self._clock.number}"
        why = "missed" if self._uncounted() else "the run's state was replaced"
        self._take_run()
        return f"its last {count(steps, 'local step')} did not count ({why})"

    def _end_round(self) -> None:
        self._submit()
        self._local.end()
        self._round_over(self._outcome())

    def _round_over(self, outcome: Outcome) -> None:
        if outcome.kind == "missed" and self._validator is None:
            if self.recorder is not None:
                self.recorder.missed()
            self._set_step(self._clock.steps)
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

    def _position(self) -> dict[str, Any]:
        return {"local_steps": self._local.position, "speeds": self._local.speeds}

    def _restore_anywhere(self, position: Mapping[str, Any]) -> None:
        self._local.restore_speeds(position["speeds"])

    def _restore_position(self, position: Mapping[str, Any]) -> None:
        self._local.restore_position(position["local_steps"])


def segment_steps_of(options: ReplayOptions) -> int:
    """Return the steps of a segment for the specification of a run; 0 without validators.

    Raise ConfigError for validators without a replay that has a task.
    """
    replay, validators = options["replay"], options["validators"]
    if not validators:
        return 0
    if replay is None or replay.task is None:
        raise ConfigError(
            f"validators={validators} without a replay that has a task",
            fix="give replay=Replay(task=...): docs/replay.md says how a task is written",
        )
    return replay.segment_steps
