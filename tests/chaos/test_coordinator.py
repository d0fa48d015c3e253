"""The coordinator is killed in every phase of a round: by what it shows, and at random moments."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path

import pytest
from harness.health import assert_healthy
from harness.processes import Fleet, fleet, until

EVERYBODY = "abcd"
LARGE = 2e6
FAST_KILLS = 5
SLOW_KILLS = 20


def kill_and_recover(run: Fleet, leader: str, *, resume: str = "") -> None:
    """Survivors commit while it is away, then it is back; ``resume`` had been stopped before."""
    run.peers[leader].kill()
    if resume:
        run.peers[resume].kill(signal.SIGCONT)
    survivors = EVERYBODY.replace(leader, "")
    number = max(run.peers[name].try_status().get("round", 0) for name in survivors)
    for name in survivors:
        run.peers[name].reaches(number + 2)
    run.trainers[leader].ends()
    run.restart(leader)
    assert_healthy(run)


def test_at_the_barrier(four: Fleet) -> None:
    leader = four.coordinator
    late = EVERYBODY.replace(leader, "")[0]
    four.trainers[late].kill(signal.SIGSTOP)

    def waits() -> bool:
        members = four.peers[leader].status()["members"]
        return sum(bool(m.get("arrived")) for m in members) == len(members) - 1

    until(waits, "the barrier waits for one")
    number = four.peers[leader].status()["round"]
    four.peers[leader].kill()
    four.trainers[late].kill(signal.SIGCONT)
    for name in EVERYBODY.replace(leader, ""):
        four.peers[name].reaches(number + 2)
    four.trainers[leader].ends()
    four.restart(leader)
    assert_healthy(four)


def test_while_they_reduce(tmp_path: Path) -> None:
    """A stopped member keeps the reduction from ending: so the coordinator dies inside it."""
    with fleet(tmp_path) as run:
        run.form(EVERYBODY)
        for name in EVERYBODY:
            run.train(name, LARGE)
        assert_healthy(run)
        for _ in range(2):
            leader = run.coordinator
            stopped = EVERYBODY.replace(leader, "")[-1]
            peer = run.peers[leader]
            until(lambda p=peer: p.try_status().get("attempt"), "a reduction", peer)
            run.peers[stopped].kill(signal.SIGSTOP)
            kill_and_recover(run, leader, resume=stopped)


def test_while_a_joiner_gets_the_state(tmp_path: Path) -> None:
    """At the boundary, which it holds for a learner: another coordinator lets the joiner in."""
    with fleet(tmp_path) as run:
        run.form("abc")
        for name in "abc":
            run.train(name, 2 * LARGE)
        assert_healthy(run)
        leader = run.coordinator
        joiner = run.join("d", run.peers[next(n for n in "abc" if n != leader)].invite)
        until(lambda: joiner.try_status().get("phase") == "learner", "d is a learner", joiner)
        run.train("d", 2 * LARGE)
        kill_and_recover(run, leader)


@pytest.mark.parametrize(
    "kills", [FAST_KILLS, pytest.param(SLOW_KILLS, marks=pytest.mark.slow)], ids="{}_kills".format
)
def test_at_random_moments_of_a_round(four: Fleet, kills: int) -> None:
    """READY and COMMIT last for milliseconds: only chance meets them. The seed is the test's."""
    dice = random.Random(kills)
    for _ in range(kills):
        leader = four.coordinator
        peer = four.peers[leader]
        number = peer.reaches(1)["round"]
        status = peer.reaches(number + 1)
        time.sleep(dice.uniform(0, 2 * max(0.03, status["last_round_s"])))  # the moment
        kill_and_recover(four, leader)
