"""Random faults, then peace: no run may break an invariant, and every recoverable run goes on.

A small forerunner of the full simulator. Each seed draws its own kinds of faults (swarm testing):
kills, restarts, cuts, pauses, leaves and bursts of loss, duplication and lateness over three to
five hosts; then all faults stop, the dead are restarted, and everyone has to commit again.
A failure names its seed; ``run_seed(SEED)`` in a debugger is the whole reproduction.
"""

from __future__ import annotations

import random

import pytest
from harness.checks import can_recover
from harness.cluster import Cluster, Host

SEEDS = 300
SEEDS_PER_TEST = 25
SEEDS_SLOW = 5_000  # about two minutes: `make test-slow`
SEEDS_PER_SLOW_TEST = 250  # well within the time that a test may take
FAULTY_S = 12.0
# Design: a round commits within 10 s after faults stop (I7). Re-admission of everyone may take a
# second learner's turn, and a joiner that was silent pauses for a second.
PEACE_S = 10.0
NAMES = "abcde"
KINDS = ("kill", "restart", "cut", "mend", "pause", "resume", "leave", "burst", "calm")


class Chaos:
    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.names = NAMES[: self.dice.randint(3, 5)]
        self.kinds = [kind for kind in KINDS if self.dice.random() < 0.7] or ["kill"]
        self.cluster = Cluster(self.names, delay_s=self.dice.choice((0.001, 0.02, 0.1)))
        self.left: set[str] = set()
        for name in self.names:
            self.cluster.host(name).inner_s = self.dice.choice((0.3, 0.5))

    def run(self) -> bool:
        """Whether the run could recover (and then it did)."""
        cluster = self.cluster
        cluster.form(self.names)
        end_s = cluster.now_s + FAULTY_S
        while cluster.now_s < end_s:
            self._strike(self.dice.choice(self.kinds))
            cluster.run(self.dice.expovariate(1.5))
        cluster.heal()
        self._calm()
        nodes = {h.peer: h.node for h in cluster.living() if h.name not in self.left}
        recoverable = can_recover(cluster.checker.latest, nodes)
        for host in list(cluster.hosts.values()):
            if not host.alive and host.name not in self.left:
                cluster.restart(host.name)
        if recoverable:
            staying = [h.name for h in cluster.living() if h.name not in self.left]
            names = "".join(staying)
            goal = cluster.committed + 2
            back = [cluster.host(name) for name in staying]
            cluster.until(
                lambda: all(h.round >= goal for h in back) and cluster.in_one_view(names), PEACE_S
            )
        return recoverable

    def _strike(self, kind: str) -> None:
        cluster, dice = self.cluster, self.dice
        name = dice.choice(self.names)
        host = cluster.host(name)
        if kind == "kill" and host.alive and not self._alone(host):
            cluster.kill(name)
        elif kind == "restart" and not host.alive and name not in self.left:
            cluster.restart(name)
        elif kind == "cut":
            other = dice.choice([n for n in self.names if n != name])
            cluster.cut.add(frozenset((host.peer, cluster.host(other).peer)))
        elif kind == "mend":
            cluster.cut.clear()
        elif kind == "pause" and host.alive and not host.paused:
            cluster.pause(name)
        elif kind == "resume":
            for paused in [h for h in cluster.living() if h.paused]:
                cluster.resume(paused.name)
        elif kind == "leave" and dice.random() < 0.2 and host.alive and len(self.left) < 2:
            self.left.add(name)
            cluster.leave(name)
        elif kind == "burst":
            self._burst()
        elif kind == "calm":
            self._calm()

    def _alone(self, host: Host) -> bool:
        return len(self.cluster.living()) == 1 and self.cluster.living()[0] is host

    def _burst(self) -> None:
        dice, cluster = self.dice, self.cluster
        loss, double, late = (dice.choice((0.0, 0.05, 0.15)) for _ in range(3))
        cluster.hold = lambda source, peer, message: dice.random() < loss
        cluster.copies = lambda message: 1 + (dice.random() < double)
        cluster.late_s = lambda message: dice.random() if dice.random() < late else 0.0

    def _calm(self) -> None:
        cluster = self.cluster
        cluster.hold = lambda source, peer, message: False
        cluster.copies = lambda message: 1
        cluster.late_s = lambda message: 0.0


def run_seed(seed: int) -> bool:
    chaos = Chaos(seed)
    try:
        return chaos.run()
    except Exception as error:
        tail = chaos.cluster.tail()
        raise AssertionError(f"seed {seed}: {error}\n{tail}") from error


@pytest.mark.parametrize("first", range(0, SEEDS, SEEDS_PER_TEST))
def test_faults_break_no_invariant_and_end_in_commits(first: int) -> None:
    recovered = [run_seed(seed) for seed in range(first, first + SEEDS_PER_TEST)]
    assert sum(recovered) >= SEEDS_PER_TEST // 2  # else the faults are too wild to show anything


@pytest.mark.slow
@pytest.mark.parametrize("first", range(SEEDS, SEEDS + SEEDS_SLOW, SEEDS_PER_SLOW_TEST))
def test_many_more_seeds(first: int) -> None:
    recovered = [run_seed(seed) for seed in range(first, first + SEEDS_PER_SLOW_TEST)]
    assert sum(recovered) >= SEEDS_PER_SLOW_TEST // 2
