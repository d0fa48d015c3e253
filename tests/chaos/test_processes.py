"""Daemons and trainers that are killed, stopped, told to end, or hang."""

from __future__ import annotations

import signal
import time

import pytest
from harness.health import assert_healthy
from harness.processes import Fleet, until

from atoll.peer.client.ipc_client import PROGRESS_S

EVERYBODY = "abcd"


def others(name: str) -> str:
    return EVERYBODY.replace(name, "")


def victim_of(run: Fleet, who: str) -> str:
    """ "first": the peer that founded the run; "member": one that is neither."""
    leader = run.coordinator
    if who == "coordinator":
        return leader
    return "a" if who == "first" else next(n for n in "bcd" if n != leader)


@pytest.mark.parametrize("who", ["member", "coordinator", "first"])
def test_sigkill(four: Fleet, who: str) -> None:
    victim = victim_of(four, who)
    four.peers[victim].kill()
    number = max(four.peers[name].status()["round"] for name in others(victim))
    for name in others(victim):
        four.peers[name].reaches(number + 2)  # while the victim is still away
    assert four.trainers[victim].ends() == 15  # told at once, with a reason
    four.restart(victim)
    assert_healthy(four)


@pytest.mark.parametrize("who", ["member", "coordinator"])
@pytest.mark.parametrize(
    "stopped_s", [0.5, 2.0, pytest.param(30.0, marks=pytest.mark.slow)], ids="{:g}s".format
)
def test_sigstop(four: Fleet, stopped_s: float, who: str) -> None:
    victim = victim_of(four, who)
    four.peers[victim].kill(signal.SIGSTOP)
    until_s = time.monotonic() + stopped_s
    if stopped_s > 2.5:  # longer than any detection: the others go on
        number = max(four.peers[name].status()["round"] for name in others(victim))
        for name in others(victim):
            four.peers[name].reaches(number + 3)
    time.sleep(max(0.0, until_s - time.monotonic()))  # the fault's own duration
    daemon = four.peers[victim]
    daemon.kill(signal.SIGCONT)
    assert_healthy(four)  # its trainer has waited, and goes on
    assert four.peers[victim] is daemon  # the same process
    assert ("is it stopped?" in four.trainers[victim].text) == (stopped_s > PROGRESS_S)


def test_three_of_four_stop_and_nobody_goes_on_alone(four: Fleet) -> None:
    """The quorum is lost for a while, for good it is not: no fork, no rollback, the same run."""
    lineage = four.peers["a"].status()["lineage"]
    said = four.peers["d"].said("no-quorum")
    for name in "abc":
        four.peers[name].kill(signal.SIGSTOP)
    number = four.peers["d"].status()["round"]
    until(lambda: four.peers["d"].said("no-quorum") > said, "d says that it has no quorum")
    assert four.peers["d"].status()["round"] <= number + 1  # one may have been on its way
    for name in "abc":
        four.peers[name].kill(signal.SIGCONT)
    assert_healthy(four)
    assert four.peers["d"].status()["lineage"] == lineage


@pytest.mark.parametrize("who", ["member", "coordinator"])
def test_sigterm(four: Fleet, who: str) -> None:
    """It leaves: the others need no failure detector, and it ends by itself."""
    victim = victim_of(four, who)
    four.peers[victim].kill(signal.SIGTERM)
    assert four.peers[victim].ends() == 0
    four.trainers[victim].ends()
    for name in others(victim):
        four.sees(name, 3)
    four.restart(victim)
    assert_healthy(four)


def test_a_short_hang_of_a_trainer_makes_the_others_wait(four: Fleet) -> None:
    """The daemon lives: nobody is voted out, and its contribution is not lost."""
    four.trainers["c"].kill(signal.SIGSTOP)
    view = four.peers["a"].status()["view"]
    until(lambda: barrier_waits(four, "c"), "the barrier waits for c alone")
    four.trainers["c"].kill(signal.SIGCONT)
    assert_healthy(four)
    assert four.peers["a"].status()["view"] == view


def barrier_waits(run: Fleet, name: str) -> bool:
    """All have arrived but this one, which is stopped: so that is how it stays."""
    late = run.peers[name].status()["peer"]
    members = run.peers[run.coordinator].status()["members"]
    return all(bool(m.get("arrived")) == (m["peer"] != late) for m in members)


@pytest.mark.slow
def test_a_long_hang_of_a_trainer_does_not_stop_the_others(four: Fleet) -> None:
    """Beyond the barrier's patience (30 s) the others go on; its work comes with a later round."""
    four.trainers["c"].kill(signal.SIGSTOP)
    until(lambda: barrier_waits(four, "c"), "the barrier waits for c alone")
    number = four.peers["a"].status()["round"]
    for name in "abcd":  # also c's own daemon, which holds the state as everybody does
        four.peers[name].reaches(number + 1)
    four.trainers["c"].kill(signal.SIGCONT)
    assert_healthy(four)


def test_a_killed_trainer_is_replaced(four: Fleet) -> None:
    four.trainers["b"].kill()
    four.trainers["b"].ends()
    until(lambda: four.peers["b"].status()["trainer"] is None, "b misses its trainer")
    four.train("b")
    assert_healthy(four)
