"""A run in one process some of whose workers attack it.

Everything else is as it is: workers train and submit what they have; when all submissions of a
round are there, those of the attackers are replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from atoll.collectives.codecs import F32
from atoll.optim import Swarm
from atoll.optim.manifest import Manifest
from atoll.optim.pseudo_gradient import delta_source
from atoll.optim.run_spec import RunSpec, round_key
from atoll.optim.swarm_state import SwarmState, SwarmSubmission
from attacks.base import Attack, Seen

__all__ = ["AttackedState", "AttackedSwarm"]


class AttackedSwarm(Swarm):
    """``attackers``, the numbers of workers, attack in all rounds but the first ``after``."""

    def __init__(
        self, workers: int, attack: Attack, attackers: Sequence[int], after: int = 0, seed: int = 0
    ) -> None:
        super().__init__(workers)
        self._attack, self._attackers, self._after = attack, frozenset(attackers), after
        self._random = np.random.default_rng(seed)

    def new_state(
        self, spec: RunSpec, manifest: Manifest, initial: Callable[[F32], None]
    ) -> SwarmState:
        state = AttackedState(spec, manifest, initial)
        state.attack, state.attackers = self._attack, self._attackers
        state.after, state.random = self._after, self._random
        return state


class AttackedState(SwarmState):
    """Of runs whose rounds are of the whole vector."""

    attack: Attack
    attackers: frozenset[int]
    after: int
    random: np.random.Generator

    def commit(self, submitted: Sequence[SwarmSubmission], fragment: int = 0) -> tuple[int, int]:
        assert self.spec.fragments == 1
        mine = [n for n, one in enumerate(submitted) if one.worker in self.attackers]
        deltas = np.stack([self._delta(one.values) for one in submitted])
        seen = Seen(
            honest=np.delete(deltas, mine, axis=0),
            own=deltas[mine],
            rule=self.spec.rule,
            random=self.random,
            key=round_key(b"swarm", self.round + 1),
            places=tuple(mine),
        )
        sent = list(submitted)
        if self.round <= self.after:  # the first one gave the run its parameters
            self.attack.watch(seen)
        elif mine:
            for n, delta in zip(mine, self.attack.send(seen), strict=True):
                one = submitted[n]
                values = delta
                if self.spec.submits == "parameters":
                    values = one.values + (deltas[n] - delta)
                sent[n] = SwarmSubmission(one.worker, values, one.weight)
        return super().commit(sent, fragment)

    def _delta(self, values: F32) -> F32:
        fill = delta_source(self.spec, self.manifest, self.theta, values, 0)
        out: F32 = np.empty_like(values)
        for chunk in range(self.grid.count):
            fill(chunk, out[slice(*self.grid.bounds(chunk))])
        return out
