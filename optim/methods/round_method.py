"""Be the base of the methods with rounds: local steps, then daemons step the run's parameters.

``_submit`` and ``_outcome`` are the two halves of a round, ``_take_run`` begins anew from the run's
parameters.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Protocol

from atoll.collectives.codecs import F32
from atoll.collectives.errors import ConfigError
from atoll.collectives.units import count
from atoll.optim.buffer_sync import SharedBuffers
from atoll.optim.footprint import memory_of_rounds
from atoll.optim.inner import Inner, inners_of
from atoll.optim.method import Method
from atoll.optim.model_io import ModelVector
from atoll.optim.options import BufferOptions
from atoll.optim.pseudo_gradient import Writer
from atoll.optim.run_clock import RunClock
from atoll.optim.run_spec import RunSpec
from atoll.optim.sessions import (
    LeadingRank,
    RoundChannel,
    TrainerSession,
    check_ranks,
    every_rank,
    whole,
)
from atoll.peer.client.console import say
from atoll.peer.client.trainer_channel import Outcome

STATE_VERSION = 2


class RoundWatcher(Protocol):
    """Describe who is told of a trainer's rounds, as a dealer of samples is (shards.py)."""

    def submitted(self) -> None:
        """Note that all local steps so far are in the submission that is made now."""
        ...

    def round_over(self, kind: str, *, counted: bool, leaves: bool) -> None:
        """Hear what became of the last submission, as ``Outcome.kind`` says.

        After "committed" all trainers are here, between two rounds: they may make a collective.
        ``counted``: it weighs something. ``leaves``: this trainer takes no further step.
        """
        ...

    def dropped(self) -> None:
        """Note that local steps that are in no round are given up."""
        ...


class RoundMethod(Method):
    """Train in rounds whose mean the daemons of all peers apply to the run's parameters.

    When it is made, the run's parameters replace the model's.
    """

    peer: TrainerSession
    _channel: RoundChannel
    _waits: ClassVar[bool] = False  # for each round, so that it ends for all at about one time
    meets: ClassVar[bool] = True  # after each round it is between two of them, as all others are

    def __init__(
        self,
        vector: ModelVector,
        inner: Inner,
        peer: TrainerSession,
        spec: RunSpec,
        options: BufferOptions,
    ) -> None:
        check_ranks(peer, vector.ranks)
        super().__init__(vector, peer, inners_of(inner, vector.parameters))
        outline = vector.buffers.outline if options["buffers"] else ""
        self.spec, channel = replace(spec, buffers=outline), self._channel
        of_all = self.spec.is_asynchronous
        self._buffers = (
            SharedBuffers(channel, vector.buffers, waits=self._waits, of_all=of_all)
            if outline
            else None
        )
        self._tokens = self._rounds = self._missed = 0
        self._waited_s = 0.0
        self._peers = self._alone = 0  # in the last round; rounds in which there was no other
        # Steps and tokens by fragment, when it was submitted, and that are in committed rounds.
        self._submitted: dict[int, tuple[int, int]] = {}
        self._counted: dict[int, tuple[int, int]] = {}
        self._known: dict[int, Outcome] = {}  # of fragments that are not merged yet
        self._clock = RunClock(channel, self.spec, varies=bool(spec.schedule))
        self._is_lost = True  # where the run is has to be found out
        self._watchers: list[RoundWatcher] = []
        self._begun_at = 0  # its steps when this trainer had none

        say(
            memory_of_rounds(
                self.spec,
                self.manifest,
                self.trainer_bytes,
                has_ranks=isinstance(channel, LeadingRank),
                keeps_rounds=getattr(channel, "keeps_rounds", True),
            )
        )
        with self._watching():
            self._attach(self.spec, self.manifest, self._vector.write, options["frozen"])
            channel.pull(self._vector.read)
            self._find_step()

    @property
    def global_step(self) -> int:
        return self._begun_at + self._steps

    def watch_rounds(self, watcher: RoundWatcher) -> None:
        """Tell ``watcher`` of this trainer's rounds from now on."""
        self._watchers.append(watcher)

    def count(self, tokens: int) -> None:
        """Count tokens (or samples) of the coming step: they become the submission's weight.

        All peers of a run should count in one unit, or none should: then each step weighs one. In a
        run with a robust rule, or with probation, all peers weigh alike, whatever they count. Raise
        ConfigError for a negative number.
        """
        if tokens < 0:
            raise ConfigError(f"count({tokens}): a number of tokens is not negative")
        self._tokens += tokens

    @contextmanager
    def outer_parameters(self) -> Iterator[None]:
        """Put the run's parameters into the model, and the local ones back at the end.

        It is for evaluation or saving.

        Evaluate these: a replica in the middle of a round is worse than the run. Costs a second
        copy of the parameters on the device meanwhile.
        """
        epoch = self._channel.epoch
        with self._showing("outer_parameters()"):
            self._channel.pull(self._vector.read)
            yield
        # Rounds that the local work stands on were undone meanwhile; some work holds without them.
        if self._channel.epoch != epoch and not self.spec.is_asynchronous:
            self._is_lost = True
            self._take_run()

    def metrics(self) -> dict[str, float]:
        """Return totals of this trainer, for any logger.

        ``peers``: how many submissions were in its last round that was committed; ``rounds_alone``:
        such rounds with no other's.
        """
        return {**self._totals(), "peers": self._peers, "rounds_alone": self._alone}

    def _totals(self) -> dict[str, float]:
        """Return the totals that ``metrics`` and a saved state need."""
        return {
            "round": self._channel.round,
            "rounds": self._rounds,
            "missed": self._missed,
            "steps": self._steps,
            "tokens": self._tokens,
            "waited_s": self._waited_s,
        }

    def state_dict(self) -> dict[str, Any]:
        """Return where this trainer is, within a round too.

        Save it beside the model's and the inner optimizers' state. It waits for rounds that are
        under way.
        """
        self._check_own()
        for fragment in self._submitted:  # in the order in which they were sent
            if fragment not in self._known:
                self._known[fragment] = self._wait(fragment)
        return {
            "version": STATE_VERSION,
            **self._totals(),
            "global_step": self.global_step,
            "clock": self._clock.counted,
            "run": self._run_digest(),
            "model": self._vector.digest(),
            "counted": [[p, *pair] for p, pair in self._counted.items()],
            "submitted": [[p, *pair] for p, pair in self._submitted.items()],
            "known": [[p, o.kind, o.round, o.share, list(o.peers)] for p, o in self._known.items()],
            "place": self._position(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what ``state_dict`` gave; raise ConfigError for anything else.

        Make this object first, then load the model's state and those of the inner optimizers, then
        this one. If the run is where it was, training goes on with the same bits. If it has gone
        on, its parameters win, and a round that was under way begins anew.
        """
        expected = {"version", "global_step", "clock", "run", "model", "place", *self._totals()}
        expected |= {"counted", "submitted", "known"}
        position = state.get("place", {})
        if (
            state.get("version") != STATE_VERSION
            or state.keys() != expected
            or position.keys() != self._position().keys()
        ):
            name = type(self).__name__
            raise ConfigError(
                f"not a {name} state of version {STATE_VERSION}: it has {sorted(state)[:20]}",
                fix=f"load what {name}.state_dict() gave",
            )
        self._schedules.loaded()
        self._steps, self._tokens = int(state["steps"]), int(state["tokens"])
        self._rounds, self._missed = int(state["rounds"]), int(state["missed"])
        self._waited_s = float(state["waited_s"])
        self._clock.correct(*map(int, state["clock"]))
        self._restore_anywhere(position)
        if not self._is_where(state):
            self._take_run()
            self._take_buffers()
            self._came_back = (
                f"the run is at round {self._channel.round} by now, so its parameters are taken; "
                "the inner optimizers' moments are those that were saved"
            )
            return
        self._came_back = "the run is where it was, and this trainer goes on with the same bits"
        self._counted = {p: (steps, tokens) for p, steps, tokens in state["counted"]}
        self._submitted = {p: (steps, tokens) for p, steps, tokens in state["submitted"]}
        self._known = {
            p: Outcome(kind, n, 0.0, share, tuple(peers))
            for p, kind, n, share, peers in state["known"]
        }
        self._restore_position(position)
        self._set_step(int(state["global_step"]))

    def _is_where(self, state: Mapping[str, Any]) -> bool:
        """Return whether run and model are as they were when this was saved."""
        run_is, model_is = (
            self._run_digest() == state["run"],
            self._vector.digest() == state["model"],
        )
        all_are = every_rank(self._channel, run_is and model_is)
        if run_is and not all_are:
            say(
                "the model's parameters are not those that were saved with this state, so "
                "the round begins anew: load its state after the method is made, before this one"
            )
        return all_are

    def _run_digest(self) -> str:
        found: list[str] = []
        epoch = self._channel.epoch
        self._channel.pull(lambda flat: found.append(hashlib.sha256(flat.data).hexdigest()))
        if self._channel.epoch != epoch:
            self._is_lost = True
            self._take_run()
        return found[-1]

    def _position(self) -> dict[str, Any]:
        """Return where the method is within its rounds: numbers, texts, lists, tensors."""
        return {}

    def _restore_anywhere(self, position: Mapping[str, Any]) -> None:
        """Restore the part of a position that holds wherever the run is."""

    def _restore_position(self, position: Mapping[str, Any]) -> None:
        """Restore the position that ``_position`` gave, where the run is as it was."""

    # ------------------------------------------------------------ for the methods

    def _hand_in(self) -> str:
        """Wait for the rounds that are under way; go on with the run's parameters."""
        committed, fragments = self._rounds, list(self._submitted)
        for fragment in fragments:
            self._outcome(fragment)
        self._take_run()
        return f"{self._rounds - committed} of {count(len(fragments), 'submission')} counted"

    def _uncounted(self, fragment: int = 0) -> int:
        """Return the local steps of a fragment that are in no round yet."""
        return self._steps - self._counted.get(fragment, (0, 0))[0]

    def _submit(self, fragment: int = 0) -> None:
        """Submit the parameters as they are now; raise CodecError if a round cannot carry them."""
        self._check_finite("round not submitted", fragment)
        steps, tokens = self._counted.get(fragment, (0, 0))
        weight = float(self._tokens - tokens or self._steps - steps)
        counted = {"tokens": self._tokens} if self._tokens else {}
        self._channel.observe(steps=self._steps, **counted)
        for watcher in self._watchers:
            watcher.submitted()
        self._hand_over(partial(self._write_submission, fragment), weight, fragment)
        self._known.pop(fragment, None)  # of one that was given up
        self._submitted[fragment] = self._steps, self._tokens

    def _hand_over(self, write: Writer, weight: float, fragment: int) -> None:
        self._channel.submit(write, weight, fragment)

    def _write_whole(
        self, write: Callable[[F32], None], flat: F32, part: slice = slice(None)
    ) -> None:
        """Write to ``flat`` with ``write``; with several ranks, the rows of them all."""
        whole(self._channel, write, flat, part)

    def _write_submission(self, fragment: int, out: F32, lo: int) -> None:
        """Write the parameters from ``lo`` on, which are of the fragment, to float32[n].

        In runs that submit deltas it is the fragment's pseudo-gradient.
        """
        self._vector.write_piece(out, lo)

    def _outcome(self, fragment: int = 0) -> Outcome:
        """Wait for what became of a submission, and return it.

        After "missed" the next submission counts for both.
        """
        outcome = self._known.pop(fragment, None) or self._wait(fragment)
        if outcome.kind == "reload":
            self._is_lost = True
        else:
            self._clock.passed(outcome.round, self._round_steps)
        before = self._counted.get(fragment, (0, 0))
        counted = self._submitted.pop(fragment, before)
        if outcome.kind != "missed":
            self._counted[fragment] = counted
        if self._buffers is not None and fragment == 0 and outcome.share > 0:
            weight = float(counted[1] - before[1] or counted[0] - before[0])
            self._buffers.round_over(outcome.round, outcome.peers, weight)
        self._waited_s += outcome.waited_s
        self._rounds += outcome.kind == "committed"
        self._missed += outcome.kind == "missed"
        if outcome.kind == "committed" and outcome.count:
            self._peers = outcome.count
            self._alone += outcome.count == 1
        counts = outcome.share > 0 or not self.spec.probation
        for watcher in self._watchers:
            watcher.round_over(outcome.kind, counted=counts, leaves=self._is_leaving)
        return outcome

    def _wait(self, fragment: int) -> Outcome:
        """Wait for what became of a submission.

        Where that fails, as by Ctrl+C, it is given up: it counts as missed from then on.
        """
        try:
            return self._channel.wait(fragment)
        except BaseException:  # the channel has forgotten it, and cannot be asked again
            self._submitted.pop(fragment, None)
            self._known[fragment] = Outcome("missed", self._channel.round, 0.0)
            raise

    @property
    def _round_steps(self) -> int:
        """Return the steps of each peer in the round that was submitted last."""
        return self.spec.sync_every

    def _find_step(self) -> None:
        """Find how many steps are behind the run's parameters, which have been pulled."""
        if self._is_lost:
            self._clock.find()
            self._take_buffers()
            self._is_lost = False
        else:
            self._clock.passed(self._channel.round, self._round_steps)
        self._set_step(self._clock.steps)

    def _take_buffers(self) -> None:
        if self._buffers is not None and self._clock.rounds:
            self._buffers.take(self._channel.round)

    def _set_step(self, step: int) -> None:
        """Set ``global_step`` to ``step``."""
        self._begun_at = step - self._steps
        self._follow()

    def _begun_anew(self) -> bool:
        """Begin anew if local work holds no more, as the daemon was started again; return whether.

        Where the run has gone on too far without it. Ranks hear of that with their next submission.
        """
        if not self._channel.is_stale:
            return False
        self._is_lost = True
        self._take_run()
        return True

    def _take_run(self) -> None:
        """Begin a round from the run's parameters."""
        for watcher in self._watchers:
            watcher.dropped()
        self._channel.pull(self._vector.read)
        self._find_step()
        now = self._steps, self._tokens
        self._counted = dict.fromkeys(range(self.spec.fragments), now)
        self._submitted.clear()
        self._known.clear()
        self._vector.zero_gradients()
