"""Count the local steps that a run has behind it: the same number for all of its trainers.

Where each round has as many steps, or the first ones have fewer, it follows from the number of the
round. Two things are not to
be seen in that: which of the rounds were collectives of the trainers' own, and how many steps a
round had whose length changes. So trainers publish what they have counted, and who comes later, or
has been away, takes it over. Where nobody has it, every round counts as one of ``sync_every``.

In an asynchronous run a round is of a few peers, as a rule of one, and each of ``outer_delay`` of
them is ``1 / outer_delay`` of a round of all. So the run's steps are those of a peer of mean speed,
if ``outer_delay`` is the number of peers as it should be.
"""

from __future__ import annotations

import math

import numpy as np

from atoll.collectives.codecs import F32
from atoll.optim.run_spec import RunSpec
from atoll.optim.sessions import RoundChannel
from atoll.optim.side_channel import SideChannel

NAME = "clock"
ELEMENTS = 4  # rounds and steps, each in two parts that float32 holds exactly
PART = 1 << 20
FIRST = 1  # the round that gives a run its parameters, without a step


class RunClock:
    """Count the rounds and local steps that a run has behind it.

    ``number``: the last round that is counted; ``rounds``: how many up to it had steps; ``steps``:
    those of them all, as one peer takes them. ``varies``: rounds may have other lengths than
    ``sync_every``.
    """

    def __init__(self, channel: RoundChannel, spec: RunSpec, *, varies: bool = False) -> None:
        self._channel, self._spec, self._varies = channel, spec, varies
        self._side = SideChannel(channel, NAME)
        self._operations = 0
        self.number = self.rounds = self.steps = 0
        self.is_estimate = False  # nobody could tell

    def find(self) -> None:
        """Find out where the run is, whose parameters have just been pulled."""
        self.number, self._operations = self._channel.round, self._channel.operations
        found = None
        if self.number > FIRST:
            found = self._side.any(self.number, ELEMENTS, most=True)
        told = _parse(found[1]) if found is not None else None
        self.is_estimate = self.number > FIRST and told is None
        self.rounds = self.steps = 0
        if found is None or told is None:
            self._count(self.number - FIRST)
        else:
            (self.rounds, self.steps), at = told, found[0]
            self._count(self.number - at)
        self._publish()

    def passed(self, number: int, steps_each: int = 0) -> None:
        """Count the rounds up to ``number``, to which the run has come.

        Its own rounds since the last count had ``steps_each`` steps each.
        """
        if number <= self.number:
            return
        operations = self._channel.operations
        rounds = number - self.number - (operations - self._operations)
        self.number, self._operations = number, operations
        if rounds > 0:
            self._count(rounds, steps_each)
            self._publish()

    @property
    def counted(self) -> list[int]:
        """Return number, rounds and steps, for ``correct``."""
        return [self.number, self.rounds, self.steps]

    def correct(self, number: int, rounds: int, steps: int) -> None:
        """Take over what the saved state of a trainer had counted up to a round.

        This happens only where nobody could tell, for want of better.
        """
        if self.is_estimate and FIRST <= number <= self.number:
            later = self.number - number
            self.rounds, self.steps, self.is_estimate = rounds, steps, False
            self._count(later)
            self._publish()

    def _count(self, rounds: int, steps_each: int = 0) -> None:
        """Add rounds and their steps to the count; a negative number takes some away."""
        spec = self._spec
        self.rounds = max(0, self.rounds + rounds)
        if self._varies:
            self.steps = max(0, self.steps + rounds * (steps_each or spec.sync_every))
        elif spec.warm_rounds:
            before = spec.steps_until(self.number - rounds)
            self.steps = max(0, self.steps + spec.steps_until(self.number) - before)
        else:
            in_a_turn = spec.outer_delay if spec.is_asynchronous else spec.fragments
            self.steps = self.rounds * spec.sync_every // in_a_turn

    def _publish(self) -> None:
        if self.number > FIRST:
            parts = [*divmod(self.rounds, PART), *divmod(self.steps, PART)]
            self._side.publish(self.number, np.array(parts, np.float32))


def _parse(values: F32) -> tuple[int, int] | None:
    """Return rounds and steps; None for values that no trainer publishes."""
    parts = values.tolist()
    if not all(math.isfinite(v) and v == int(v) and 0 <= v < PART for v in parts):
        return None
    rounds_high, rounds, steps_high, steps = map(int, parts)
    return rounds_high * PART + rounds, steps_high * PART + steps
