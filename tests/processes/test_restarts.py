"""Daemons that are killed, any number of them at once, and started again with their own lines."""

from __future__ import annotations

import random
import shutil
import time
from pathlib import Path

import pytest
from harness.grids import rest_is_slow
from harness.power_cut import PoweredFleet
from harness.processes import fleet, until
from harness.restarts import ROUNDS, begin_training, kill_and_restart

FIVE = "abcde"


@pytest.mark.parametrize("wait_s", rest_is_slow([0.0, 3.0], 1))
def test_any_of_five_come_back_and_nothing_is_lost(wait_s: float, tmp_path: Path) -> None:
    """These are a few of the 31 subsets: most of them, all of them, and one; `make restarts`."""
    draw = random.Random(5)
    few = ["abc", "bcde", FIVE, "a"]
    with fleet(tmp_path) as run:
        begin_training(run, FIVE)
        for killed in few:
            found = kill_and_restart(run, FIVE, killed, wait_s, draw)
            assert found.redone == 0, found
            assert found.agreed >= 1, found


@pytest.mark.slow
def test_joiners_go_on_without_their_founder(tmp_path: Path) -> None:
    """The founder never comes back, and all others are killed at once."""
    draw = random.Random(7)
    with fleet(tmp_path) as run:
        begin_training(run, FIVE)
        for process in (run.peers["a"], run.trainers["a"]):
            process.kill()
            process.ends()
        for name in "bcde":
            run.sees(name, 4)
        assert kill_and_restart(run, "bcde", "bcde", 0.0, draw).redone == 0


@pytest.mark.parametrize("cuts", rest_is_slow([2, 10], 1))
def test_power_cuts_of_all_lose_no_round(cuts: int, tmp_path: Path) -> None:
    """SIGKILL leaves what was written in the kernel's memory; here what was not synced is lost.

    Every third one comes while the one before is being replayed. `make power-cuts`.
    """
    draw = random.Random(cuts)
    run = PoweredFleet(tmp_path)
    try:
        begin_training(run, FIVE)
        for number in range(cuts):
            time.sleep(draw.random())  # anywhere in a round
            again_s = draw.uniform(0.0, 3.0) if number % 3 == 1 else None
            found = kill_and_restart(run, FIVE, FIVE, 0.0, draw, again_s=again_s)
            assert found.redone == 0, found
    finally:
        run.close()


def test_who_comes_back_at_another_address_is_found_there_afterwards(tmp_path: Path) -> None:
    with fleet(tmp_path) as run:
        begin_training(run, "abc")
        for moved in ("ab", "c"):
            last = max(run.peers[name].status()["round"] for name in "abc")
            run.power_cut(moved)
            for name in moved:
                run.again(name)  # at any free port
            for name in "abc":
                run.peers[name].reaches(last + 2)
                run.sees(name, 3)
        assert run.agree("abc") >= 1
        there = {run.peers[name].status()["address"] for name in "abc"}
        until(
            lambda: {m["address"] for m in run.peers["a"].status()["members"]} == there,
            "the view has the new addresses",
            run.peers["a"],
        )


def test_a_majority_goes_on_and_who_lost_its_disk_comes_in_anew(tmp_path: Path) -> None:
    with fleet(tmp_path) as run:
        begin_training(run, "abc")
        lineage = run.peers["a"].status()["lineage"]
        last = max(run.peers[name].status()["round"] for name in "abc")
        ports = run.power_cut("abc")
        alone = run.start("b", "up", "--run", "demo", port=ports["b"])
        until(lambda: "no quorum" in alone.text, "b says that there is no quorum", alone)
        assert "1 of 3 voters answer" in alone.text
        run.start("c", "up", "--run", "demo", port=ports["c"])
        for name in "bc":
            run.train(name, inner_s=0.1)
        for name in "bc":
            assert run.peers[name].reaches(last + 2)["lineage"] == lineage

        home = run.peers["a"].home
        for path in ("ledger", "ledger.spare", "rounds", "checkpoint"):
            target = home / path
            shutil.rmtree(target) if target.is_dir() else target.unlink()
        run.start("a", "up", "--run", "demo", port=ports["a"])
        for name in "abc":
            run.sees(name, 3)
        run.peers["a"].reaches(run.peers["b"].status()["round"] + 2)
        assert run.agree("abc") >= 1


def test_whoever_is_killed_fetches_no_state_when_it_comes_back(tmp_path: Path) -> None:
    """The rounds that it has missed are enough, in words and in bytes."""
    elements = 1e6
    with fleet(tmp_path) as run:
        run.form("abc")
        for name in "abc":
            run.train(name, elements, inner_s=1.5)  # few are missed: the bound is far below a state
        at = run.peers["b"].reaches(ROUNDS)["round"]
        run.peers["b"].kill()
        run.peers["b"].ends()
        run.peers["a"].reaches(run.peers["a"].status()["round"] + 2)
        run.again("b")
        run.sees("b", 3)
        peer = run.peers["b"]
        status = peer.reaches(run.peers["a"].status()["round"] + 2)
        missed_bytes = 1.1 * elements * (status["round"] - at)  # the state has 8 of each parameter
        assert status["bytes"]["received"]["state"] <= missed_bytes
        until(
            lambda: peer.status()["durable"].startswith("votes and rounds; record "),
            "a checkpoint stands for the rounds that it has missed",
            peer,
        )
        assert "downloading the state" not in run.peers["b"].text
