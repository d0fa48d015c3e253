"""Peers that are no ordinary members: witnesses only vote, archives only follow."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from harness.processes import Fleet, Process, fleet, until

from atoll.peer.checkpoint.reader import candidates, load_checkpoint


def two_and_a_witness(run: Fleet, order: str) -> None:
    """Peers a and b train, w votes; the first of ``order`` founds the run."""
    for count, name in enumerate(order, 1):
        role = ("--witness",) if name == "w" else ()
        if count == 1:
            run.up(name, "--policy", "majority", *role)
        else:
            run.start(name, "join", run.invite, *role)
        run.sees(name, count)
    for name in "ab":
        run.train(name)
    for name in "ab":
        run.peers[name].reaches(5)


@pytest.mark.parametrize(
    ("order", "victim"),
    [
        pytest.param("abw", "a", id="tie-breaker"),
        pytest.param("wab", "b", id="other", marks=pytest.mark.slow),
    ],
)
def test_with_a_witness_either_of_two_trainers_may_die(
    tmp_path: Path, order: str, victim: str
) -> None:
    with fleet(tmp_path) as run:
        two_and_a_witness(run, order)
        survivor = "ab".replace(victim, "")
        number = run.peers[survivor].status()["round"]
        run.peers[victim].kill()
        status = run.peers[survivor].reaches(number + 4)
        assert not status["fork"]
        voters = {m["role"] for m in status["members"] if m["state"] == "connected"}
        assert voters == {"replica", "witness"}
        run.start(victim, "up", "--run", "demo")
        run.peers[victim].reaches(number + 6)
        assert run.agree("ab") >= 1


def test_a_witness_coordinates_and_takes_no_trainer(tmp_path: Path) -> None:
    with fleet(tmp_path) as run:
        two_and_a_witness(run, "wab")
        assert run.coordinator == "w"
        status = run.peers["w"].status()
        assert status["role"] == "witness"
        assert not status["digest"]  # it holds no state
        trainer = run.train("w")
        assert trainer.ends() == 16
        assert trainer.lines[-1]["error"] == "E83"
        assert "witness" in trainer.lines[-1]["what"]
        # While it lives the others do not need each other; when it dies they do not need it.
        number = run.peers["a"].status()["round"]
        run.peers["w"].kill()
        for name in "ab":
            assert not run.peers[name].reaches(number + 3)["fork"]


def test_an_archive_follows_keeps_checkpoints_and_outlives_the_others(tmp_path: Path) -> None:
    with fleet(tmp_path) as run:
        run.form("ab")
        folder = tmp_path / "kept"
        archive = run.start("f", "follow", run.invite, "--checkpoint", str(folder), "--every", "4")
        for name in "ab":
            run.train(name, inner_s=0.2)
        number = archive.reaches(3)["round"]
        status = run.peers["a"].status()
        (learner,) = status["learners"]
        assert (learner["role"], len(status["members"])) == ("archive", 2)
        assert "following run demo as an archive, round" in archive.status()["waiting"]
        until(lambda: folder.is_dir() and candidates(folder), "it keeps a checkpoint", archive)

        # The coordinator dies: another one tells the archive, and it serves who comes next.
        run.peers["a"].kill()
        run.sees("b", 1)
        archive.reaches(max(number, run.peers["b"].status()["round"]) + 2)
        (learner,) = run.peers["b"].status()["learners"]
        assert learner["role"] == "archive"
        run.start("a", "up", "--run", "demo")
        run.sees("a", 2)
        archive.reaches(run.peers["a"].status()["round"] + 1)
        assert run.agree("bf") >= 1

        # Everybody else dies: what the archive has is enough.
        run.power_cut("ab")
        (newest, *_) = candidates(folder)
        loaded = load_checkpoint(newest, run="demo", secret=None)
        loaded.state.close()
        run.start("n", "up", "--run", "demo", "--resume", str(newest))
        assert run.peers["n"].reaches(loaded.round)["digest"] == loaded.manifest.digest.hex()


def test_the_office_is_handed_over_while_rounds_go_on(tmp_path: Path) -> None:
    with fleet(tmp_path) as run:
        run.form("abc")
        for name in "abc":
            run.train(name)
        number = run.peers["a"].reaches(3)["round"]
        leader = run.coordinator
        successor, other = "abc".replace(leader, "")
        names = {name: run.peers[name].status()["peer"] for name in "abc"}

        def hand_over(asked: str, *to: str) -> Process:
            home = str(run.peers[asked].home)
            command = [sys.executable, "-m", "atoll.peer.cli", "handover", "--home", home, *to]
            return Process(command, tmp_path / "handover.log")

        refused = hand_over(successor, names[successor])
        assert refused.ends() == 2
        assert f"not the coordinator of a view: {names[leader]} is" in refused.text
        refused = hand_over(leader, "nobody")
        assert refused.ends() == 2
        assert names[successor] in refused.text
        assert names[other] in refused.text
        assert "fix:" in refused.text

        done = hand_over(leader, names[successor])
        assert done.ends() == 0
        assert f"handing over to {names[successor]}" in done.text
        peer = run.peers[successor]
        until(lambda: peer.status()["phase"] == "coordinator", f"{successor} leads", peer)
        for name in "abc":
            status = run.peers[name].reaches(number + 5)
            assert (status["coordinator"], len(status["members"])) == (names[successor], 3)
        # Nobody had to notice that a coordinator was gone.
        assert not any(run.peers[name].said("coordinator-lost") for name in "abc")
        assert run.agree("abc") >= 1
