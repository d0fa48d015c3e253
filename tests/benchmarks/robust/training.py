"""One row: DiLoCo with a rule, some of whose workers attack from a third of the way on.

The attackers are the first workers: of equal candidates a rule takes the first, so this is the
worst for those that choose. Everybody ends each round with the same parameters, so the loss of the
honest workers' run is that of any worker.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from attacks.base import Attack
from attacks.catalogue import ATTACKS
from attacks.labels import flipped
from attacks.swarm import AttackedSwarm
from torch import Tensor

from atoll.collectives.errors import ConfigError
from atoll.optim import DiLoCo, Swarm, TextBatches
from atoll.peer.demo.byte_lm import VOCABULARY
from atoll.peer.demo.text import Text
from benchmarks.convergence.methods import Entry
from benchmarks.convergence.row import Row
from benchmarks.convergence.training import Divergence, Run
from benchmarks.robust.plan import HONEST_SHARE, NONE, Setting

__all__ = ["AttackedRun"]


class AttackedRun(Run):
    def __init__(self, row: Row, text: Text, cache: Path, each_step: Callable[[], None]) -> None:
        self.setting = Setting.of(row.line.method)
        attack = self.setting.attack
        self.attack: Attack | None = None if attack == NONE else ATTACKS[attack]()
        super().__init__(row, text, cache, each_step)
        self.honest_rounds = self.line.steps // self.line.sync_every // HONEST_SHARE
        self.evaluated.add(self.honest_rounds * self.line.sync_every)

    def entry_of(self, method: str) -> Entry:
        def make(model: Any, inner: Any, session: Any, case: Any) -> DiLoCo:
            return DiLoCo(model, inner, case.sync_every, session, aggregate=self.setting.rule)

        return Entry(name=method, label=method, make=make)

    def swarm(self) -> Swarm:
        if self.attack is None:
            return super().swarm()
        attackers, seed = range(self.setting.attackers), self.row.seed
        return AttackedSwarm(self.line.workers, self.attack, attackers, self.honest_rounds, seed)

    def train(self) -> None:
        """Divergence, also where too few are left for the rule: then the run stands still."""
        try:
            super().train()
        except ConfigError as error:
            raise Divergence(error.what) from error

    def batches(self, worker: int, first_step: int) -> Any:
        given = super().batches(worker, first_step)
        flips = self.attack is not None and self.attack.flips_labels
        if not flips or worker >= self.setting.attackers:
            return given
        return FlippedBatches(given, self.honest_rounds * self.line.sync_every - first_step)


class FlippedBatches:
    """Whose labels are wrong after ``right`` steps."""

    def __init__(self, batches: TextBatches, right: int) -> None:
        self._batches, self._right = batches, right

    def next(self) -> tuple[Tensor, Tensor]:
        bytes_BT, next_BT = self._batches.next()
        self._right -= 1
        return bytes_BT, next_BT if self._right >= 0 else flipped(next_BT, VOCABULARY)
