"""Real processes, killed in the middle of a reduce: the survivors complete the round."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness.processes import Fleet, fleet, until

from atoll.peer.daemon.status import render

# A reduce of this many parameters takes long enough to be caught in the middle.
LARGE = 8e6


def catch_reducing(run: Fleet, name: str) -> int:
    """The number of a round that this peer is reducing right now."""
    peer = run.peers[name]

    def reducing() -> int | None:
        status = peer.try_status()
        return status["round"] + 1 if status.get("attempt") and status["round"] >= 2 else None

    return until(reducing, f"{name} is in a reduce", peer)


def sent_again(run: Fleet, name: str) -> int:
    return int(run.peers[name].status()["bytes"]["sent_again"])


@pytest.mark.parametrize("victim", ["b", "a"], ids=["member", "coordinator"])
def test_survivors_complete_the_round_when_a_daemon_is_killed(tmp_path: Path, victim: str) -> None:
    with fleet(tmp_path) as run:
        run.form("abc")
        for name in "abc":
            run.train(name, LARGE)
        number = catch_reducing(run, victim)
        survivors = "abc".replace(victim, "")
        assert not any(sent_again(run, name) for name in survivors)
        run.peers[victim].kill()
        for name in survivors:
            run.peers[name].reaches(number + 2)
        assert run.agree(survivors) >= 2
        for name in survivors:
            shown = render(status := run.peers[name].status())
            assert (" of the rounds again" in shown) == (status["bytes"]["sent_again"] > 0)
        # The victim's trainer was told so, at once and with a reason.
        assert run.trainers[victim].ends(10) == 15
        assert run.trainers[victim].lines[-1]["error"] == "E82"


def test_a_killed_trainer_hurts_nobody_and_comes_back(tmp_path: Path) -> None:
    with fleet(tmp_path) as run:
        run.form("abc")
        for name in "abc":
            run.train(name, LARGE)
        number = catch_reducing(run, "b")
        run.trainers["b"].kill()
        until(lambda: run.peers["b"].status()["trainer"] is None, "b's trainer is missed")
        for name in "abc":
            run.peers[name].reaches(number + 2)
        back = run.train("b", LARGE)
        started = until(lambda: back.lines, "b's trainer is back", back)[0]["attached"]
        assert started >= number  # it took the run's parameters, not its own beginning
        until(
            lambda: any(line.get("kind") == "committed" for line in back.lines),
            "b's new trainer contributes",
            back,
        )
        assert run.agree("abc") >= 2


def test_two_peers_survive_each_other(tmp_path: Path) -> None:
    with fleet(tmp_path) as run:
        run.form("ab")
        for name in "ab":
            run.train(name)
        number = run.peers["b"].reaches(3)["round"]
        run.peers["a"].kill()
        status = run.peers["b"].reaches(number + 3)
        assert status["fork"]  # without a quorum, so in a lineage of its own, and it says so
        assert "FORK" in run.peers["b"].text
        # The flag is the view's and fades with it; what happened stays in the status.
        run.trainers["b"].kill()
        run.join("c", run.peers["b"].invite)
        until(lambda: not run.sees("b", 2)["fork"], "another view", run.peers["b"])
        shown = render(run.peers["b"].status())
        assert " goes on as " in shown
        assert ", a FORK without quorum" in shown
