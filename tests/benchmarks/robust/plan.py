"""Which rows the benchmark has: every rule without an attack, then with each of the attacks.

What convergence calls a row's method is here the rule, how many of the workers attack, and how:
``nnm+trimmed(f=3):3x:ipm-0.5``, or ``mean:0x:none``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from attacks.catalogue import ATTACKS

from atoll.collectives.errors import ConfigError
from atoll.collectives.robust import get_rule
from benchmarks.convergence.results import Results
from benchmarks.convergence.row import SCRATCH, Line, Row
from benchmarks.convergence.sizes import SIZES

__all__ = ["BEST", "HONEST_SHARE", "MEAN", "NONE", "RULES", "Plan", "Setting", "quick_plan"]

MEAN, BEST, NONE = "mean", "nnm+trimmed", "none"
# Without f, which is the number of attackers.
RULES = (
    MEAN,
    BEST,
    "nnm+median",
    "trimmed",
    "median",
    "meamed",
    "multi_krum",
    "gm",
    "arc+gm",
    "centered_clip",
    "bucketing(s=2)+trimmed",
)
HONEST_SHARE = 3  # of the rounds the first one in so many have no attack
# Of each kind one, and two that search; a few rounds are enough for all of them.
QUICK_ATTACKS = ("sign-flip-10", "direction-1000", "ipm-3", "alie-1.5", "nan", "opt-ipm")
QUICK_STEPS, QUICK_SYNC_EVERY = 120, 5


class Setting(NamedTuple):
    rule: str  # with its f
    attackers: int
    attack: str

    @property
    def method(self) -> str:
        return f"{self.rule}:{self.attackers}x:{self.attack}"

    @classmethod
    def of(cls, method: str) -> Setting:
        """Inverse of ``method``. ValueError."""
        rule, attackers, attack = method.split(":")
        if attack not in (NONE, *ATTACKS):
            raise ValueError(f"there is no attack {attack[:40]!r}")
        return cls(rule, int(attackers.removesuffix("x")), attack)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """With these numbers a row takes some 10 s of CPU, and all of them less than an hour."""

    size: str = "68k"
    steps: int = 360  # of each worker
    sync_every: int = 10
    workers: int = 10
    attackers: int = 3
    seeds: int = 1
    rules: tuple[str, ...] = RULES
    attacks: tuple[str, ...] = tuple(ATTACKS)

    def text_of(self, rule: str) -> str:
        return rule if rule == MEAN else f"{rule}(f={self.attackers})"

    def why_not(self, rule: str) -> str:
        """Why it cannot bear so many attackers; empty if it can."""
        try:
            if rule != MEAN:
                get_rule(self.text_of(rule)).check(self.workers)
        except ConfigError as error:
            return error.what
        return ""

    @property
    def possible(self) -> tuple[str, ...]:
        return tuple(rule for rule in self.rules if not self.why_not(rule))

    def row(self, rule: str, attack: str = NONE, seed: int = 0) -> Row:
        attackers = 0 if attack == NONE else self.attackers
        method = Setting(self.text_of(rule), attackers, attack).method
        rates = SIZES[self.size].rates
        line = Line(self.size, SCRATCH, self.steps, self.workers, method, self.sync_every)
        return Row(line, rates[len(rates) // 2], seed)

    def rows(self) -> Iterator[Row]:
        for seed in range(self.seeds):
            yield from (self.row(rule, seed=seed) for rule in self.possible)
            for rule in self.possible:
                yield from (self.row(rule, attack, seed) for attack in self.attacks)

    @property
    def first_attacked_step(self) -> int:
        """Steps that have been taken when the attack begins."""
        return self.steps // self.sync_every // HONEST_SHARE * self.sync_every

    def pending(self, results: Results) -> list[Row]:
        return [row for row in self.rows() if results.get(row) is None]


def quick_plan() -> Plan:
    return Plan(
        steps=QUICK_STEPS,
        sync_every=QUICK_SYNC_EVERY,
        rules=(MEAN, BEST),
        attacks=QUICK_ATTACKS,
    )
