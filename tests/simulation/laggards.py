"""Participants that say nothing wrong, but late or again: nobody can call that a lie."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import TYPE_CHECKING

from atoll.peer.verify.attempt_audit import SILENCE_S
from atoll.peer.verify.statement import StatementPhase
from atoll.peer.verify.terms import AuditTerms
from simulation.liar import Lies

if TYPE_CHECKING:
    from simulation.audits import World

__all__ = ["Replayer", "Slow", "SlowReader"]

# What is left of the others' patience when it answers: the way there and back, and their ticks.
ANSWER_S = 2.5
AGAIN = 3  # old words of each message, and as many new ones


class Slow(Lies):
    """Says everything late, but not so late that it counts as silent."""

    kind = "slow"

    def tell(self, message: object, dest: bytes) -> Iterator[tuple[float, object]]:
        yield self.rng.uniform(0, 3), message


class SlowReader(Lies):
    """Takes everything at the last moment at which an answer is still no silence: every message,
    statements as well as parts and results."""

    kind = "slow reading"
    reads_after_s = SILENCE_S - ANSWER_S


class Replayer(Lies):
    """Repeats what it and others have said, in this attempt and in all earlier ones."""

    kind = "replay"

    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng)
        self.past: dict[object, None] = {}  # in order, each once
        self._now: dict[object, None] = {}
        self.repeated = 0  # of earlier attempts

    def begin(self, terms: AuditTerms, index: int, world: World) -> None:
        super().begin(terms, index, world)
        self.past |= self._now
        self._now = {}

    def tell(self, message: object, dest: bytes) -> Iterator[tuple[float, object]]:
        audit = self.world.peers[self.me].audit
        assert audit is not None
        for phase in StatementPhase:
            self._now |= dict.fromkeys(audit.inbox.of(phase).values())
        self._now[message] = None
        for said in (self.past, self._now):
            for old in self.rng.choices(list(said), k=AGAIN) if said else ():
                yield 0.0, old
        self.repeated += AGAIN if self.past else 0
        yield 0.0, message
