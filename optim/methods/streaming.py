"""Train by Streaming DiLoCo: fragments take turns, and nobody waits (arXiv 2501.18512).

Of P fragments, p is sent at the steps t with ``t mod H = floor((p + 1) H / P) mod H``; its round
travels while training goes on, and ``delay`` steps later its result is merged into the model::

    theta_m  <-  local * theta_m + (1 - local) * theta        theta: the run's, after the round

As in DiLoCo a daemon forms the pseudo-gradient against the run's θ, never against a merged value.
The paper's text and its Algorithm 2 disagree on the sign of the offset; this is Algorithm 2. A
fragment's first round has less than H steps behind it, on all peers alike.

With ``eager`` a fragment is merged when it is next sent, a whole round later, but its own part
counts at once (eager.py).
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from typing import Any, Unpack

import numpy as np
import torch
from torch import nn

from atoll.collectives.codecs import F32
from atoll.collectives.errors import ConfigError
from atoll.collectives.units import duration
from atoll.optim.inner import Inner
from atoll.optim.methods.eager import EagerUpdates
from atoll.optim.methods.fragment_patterns import BLOCKS_PER_FRAGMENT, Pattern, fragmented
from atoll.optim.methods.round_method import RoundMethod
from atoll.optim.model_io import ModelVector
from atoll.optim.muon import outer_momentum_of
from atoll.optim.options import TrustOptions, specified, takes
from atoll.optim.outer_step import OuterRate, factor_of
from atoll.optim.run_spec import (
    MOMENTUM_CODECS,
    ROUNDS_IN_FLIGHT_MAX,
    RunSpec,
    feedback_of,
)
from atoll.optim.sessions import TrainerSession
from atoll.peer.client.console import say
from atoll.peer.client.trainer_channel import Outcome

DELAY_MAX = 10  # steps: up to there the paper finds less than 0.2 % of loss
WAIT_SHARE_MAX = 0.01  # of the time between merges; a delay that is found may be a step longer


class StreamingDiLoCo(RoundMethod):
    """Train while rounds of fragments of the model are under way.

    ``help("atoll.optim.options")`` says what the ``options`` mean, which other methods have too,
    ``help("atoll.optim.method")`` what the calls do.

    ``fragments``: which ``blocks_per_fragment`` blocks make up a fragment: "strided", "sequential"
    or "balanced" (fragment_patterns.py); embeddings, head and norms are one more. ``delay``: after
    so many steps a result is merged; None: as many as it takes not to wait, at most 10, found while
    training (in a ``Swarm``, where nothing takes time, none: give a number there to see what a
    delay does). ``local``: how much of its own parameters a trainer keeps then; 0 drops what it did
    in the delay, 1 would ignore the others. ``eager``: eager updates instead, for which delay and
    local mean nothing, and which cost 25 bytes of the trainer's host memory for each parameter
    (with 16 fragments). ``outer_momentum``, ``outer_lr``, ``codec``, ``momentum_codec``,
    ``error_feedback``: as for DiLoCo; eager updates need a number for ``outer_lr``, and take no
    error feedback. Delay and local are each trainer's own,
    the other arguments are the run's.

    There is no ``round_s``: fragments are sent at the same steps on all peers, which take turns by
    it. Give slower peers smaller batches, and ``count()`` them.
    """

    meets = False  # fragments are under way

    @takes(TrustOptions)
    def __init__(
        self,
        model: nn.Module,
        inner: Inner,
        sync_every: int,
        peer: TrainerSession,
        *,
        fragments: Pattern = "strided",
        blocks_per_fragment: int = BLOCKS_PER_FRAGMENT,
        delay: int | None = None,
        local: float = 0.5,
        eager: bool = False,
        outer_lr: OuterRate = 0.4,
        outer_momentum: float | None = None,
        momentum_codec: str = MOMENTUM_CODECS[0],
        codec: str = "fp4_e3m0",
        error_feedback: float | None = None,
        **options: Unpack[TrustOptions],
    ) -> None:
        vector = ModelVector(
            model, partial(fragmented, pattern=fragments, blocks_per_fragment=blocks_per_fragment)
        )
        count = vector.manifest.fragments
        if outer_momentum is None:
            outer_momentum = outer_momentum_of(inner)
        rate, by_peers = factor_of(outer_lr)
        if by_peers and eager:
            raise ConfigError(
                'outer_lr="by_peers" with eager updates: a trainer takes its part of a step before '
                "it is known who else is in the round",
                fix="give outer_lr a number",
            )
        spec = RunSpec(
            method="streaming_diloco",
            sync_every=sync_every,
            outer_lr=rate,
            outer_lr_by_peers=by_peers,
            outer_momentum=outer_momentum,
            submits="deltas" if eager else "parameters",
            momentum_codec=momentum_codec,
            codec=codec,
            error_feedback=feedback_of(codec, error_feedback),
            fragments=count,
            rounds_in_flight=min(count, ROUNDS_IN_FLIGHT_MAX),
            **specified(options),
        )
        _check_turns(count, sync_every, delay, local)
        self._local, self._delay, self._finds_delay = local, delay or 0, delay is None
        self._sent_at = [(p + 1) * sync_every // count for p in range(count)]
        self._merge_at: dict[int, int] = {}  # fragment -> at which of our steps
        self._under_way: set[int] = set()  # fragments of eager updates, which are not merged apart
        self._merged_s = time.monotonic()
        self._turn = 0  # steps since what was sent first was sent
        self._eager = EagerUpdates(spec, vector.manifest) if eager else None
        self._local_vector: F32 = np.zeros(vector.manifest.elements if eager else 0, np.float32)
        self._run_vector: F32 = np.zeros_like(self._local_vector)
        self._share = 0.0  # this trainer's, in the mean of a round
        super().__init__(vector, inner, peer, spec, options)
        self._begin()

    @property
    def trainer_bytes(self) -> float:
        """Return the bytes of host memory for each parameter; 0 without eager updates.

        They take four vectors, the model's and the run's; and four of a fragment.
        """
        return 24.0 + 16.0 / self.spec.fragments if self._eager is not None else 0.0

    def _step_done(self) -> None:
        self._turn += 1
        if self._turn in self._sent_at:
            self._send()
        due = [p for p, step in self._merge_at.items() if step <= self._steps]
        for fragment in due:
            if fragment in self._merge_at:  # else the run's state has been taken meanwhile
                self._merge(fragment)
        if not due:
            self._channel.check()  # a dead daemon is noticed between two merges
            self._begun_anew()

    def _hand_in(self) -> str:
        """Submit the fragment that the run wants next, and wait for all that are under way.

        Eager updates have taken their part of a step already when they send: they only wait.
        """
        if self._eager is None:
            fragment = self._channel.next_fragment()
            if fragment not in self._submitted and self._uncounted(fragment):
                self._submit(fragment)
        return super()._hand_in()

    def _send(self) -> None:
        fragment = self._channel.next_fragment()
        if self._sent_at[fragment] != self._turn:
            self._say(f"the run is at fragment {fragment}: going on from there")
            self._turn = self._sent_at[fragment]
            self._set_step_after(self.global_step)
        if self._turn == self.spec.sync_every:
            self._turn = 0
        if self._eager is not None:
            self._send_eagerly(fragment, self._eager)
            return
        if fragment in self._merge_at and not self._merge(fragment):  # all of them are under way
            return
        self._submit(fragment)
        self._merge_at[fragment] = self._steps + self._delay

    def _send_eagerly(self, fragment: int, eager: EagerUpdates) -> None:
        if fragment in self._under_way:
            self._under_way.remove(fragment)
            outcome = self._outcome(fragment)
            if outcome.kind == "reload":
                self._take_run()
                return
            if outcome.kind == "committed":
                self._share = outcome.share  # 0 on probation: nothing of it is in a mean
            if not outcome.share:
                eager.missed(fragment)
        self._channel.pull(lambda flat: np.copyto(self._run_vector, flat))
        write, part = partial(self._vector.write_fragment, fragment), eager.part(fragment)
        self._write_whole(write, self._local_vector, part)  # codecs see all rows of a chunk
        self._delta = eager.step(fragment, self._local_vector, self._run_vector, self._share)
        self._submit(fragment)
        self._under_way.add(fragment)
        self._vector.mix_fragment(fragment, eager.anchor, 0.0)
        self._write_whole(write, eager.anchor, part)  # as the model's dtypes have rounded it

    def _write_submission(self, fragment: int, out: F32, lo: int) -> None:
        if self._eager is None:
            super()._write_submission(fragment, out, lo)
        else:
            first = lo - self._eager.part(fragment).start
            np.copyto(out, self._delta[first : first + out.size])

    def _merge(self, fragment: int) -> bool:
        """Merge the result of a fragment's round.

        Return whether the trainer goes on where it was; else it has begun anew.
        """
        del self._merge_at[fragment]
        outcome = self._outcome(fragment)
        if outcome.kind == "reload":
            self._take_run()
        elif outcome.kind == "committed":
            self._channel.pull(lambda flat: self._vector.mix_fragment(fragment, flat, self._local))
        self._find_delay(fragment, outcome)
        return outcome.kind != "reload"

    def _find_delay(self, fragment: int, outcome: Outcome) -> None:
        now_s = time.monotonic()
        waited = outcome.waited_s / max(now_s - self._merged_s, 1e-9)
        self._merged_s = now_s
        if not self._finds_delay or self._delay >= self._delay_max:
            return
        if self._channel.first_rank(waited) > WAIT_SHARE_MAX:  # ranks have clocks of their own
            self._delay += 1
            self._say(
                f"waited {duration(outcome.waited_s)} for fragment {fragment}: from now on results"
                f" are merged {self._delay} steps after they are sent"
            )

    def _take_run(self) -> None:
        super()._take_run()
        self._begin()

    def _begin(self) -> None:
        """Begin from the run's parameters.

        The turn is right after the fragment before the one that the run wants next.
        """
        self._merge_at.clear()
        self._under_way.clear()
        if self._eager is not None:
            self._write_whole(self._vector.write, self._local_vector)
            self._eager.begin(self._local_vector)
            # Until the first outcome it is a guess; on probation it is none.
            self._share = 0.0 if self.spec.probation else 1.0 / self._channel.replicas()
        fragment = self._channel.next_fragment()
        self._turn = self._sent_at[fragment - 1] if fragment else 0
        self._set_step_after(self._clock.steps)

    def _set_step_after(self, step: int) -> None:
        """Stand at the run's next step, from this one on, that has this turn.

        Rounds that are under way are not counted yet.
        """
        step = max(step, self._clock.steps)
        self._set_step(step + (self._turn - step) % self.spec.sync_every)

    def _position(self) -> dict[str, Any]:
        arrays = self._eager.arrays if self._eager is not None else {}
        return {
            "turn": self._turn,
            "delay": self._delay,
            "merge_at": [[p, step] for p, step in self._merge_at.items()],
            "under_way": sorted(self._under_way),
            "share": self._share,
            "eager": {name: torch.from_numpy(array.copy()) for name, array in arrays.items()},
        }

    def _restore_position(self, position: Mapping[str, Any]) -> None:
        self._turn = int(position["turn"])
        self._merge_at = dict(position["merge_at"])
        self._under_way = set(position["under_way"])
        self._share = float(position["share"])
        if self._finds_delay:
            self._delay = min(int(position["delay"]), self._delay_max)
        if self._eager is not None:
            for name, array in self._eager.arrays.items():
                np.copyto(array, position["eager"][name].numpy())

    @property
    def _delay_max(self) -> int:
        return min(DELAY_MAX, self.spec.sync_every - 1)

    def _say(self, what: str) -> None:
        say(f"step {self._steps}: {what}")


def _check_turns(fragments: int, sync_every: int, delay: int | None, local: float) -> None:
    """Raise ConfigError unless the fragments fit into a round, and the others into their ranges."""
    if fragments > sync_every:
        raise ConfigError(
            f"{fragments} fragments take turns within {sync_every} steps",
            fix="give fragments more blocks, or let sync_every be larger",
        )
    if not (delay is None or 0 <= delay < sync_every) or not 0 <= local <= 1:
        raise ConfigError(
            f"delay={delay}, local={local}", fix="delay is below sync_every, local in [0, 1]"
        )
