"""Histories that parted meet again: one goes on, and whoever made the other joins it."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from harness.netns import Net
from harness.processes import Fleet, fleet, until


def one_lineage(run: Fleet, names: str) -> str:
    """All are in one view; its lineage."""
    lineages = {run.sees(name, len(names))["lineage"] for name in names}
    assert len(lineages) == 1
    return lineages.pop()


@pytest.mark.slow
def test_with_policy_any_both_sides_of_a_partition_go_on_and_one_wins(tmp_path: Path) -> None:
    with fleet(tmp_path, Net("abcd")) as run:
        assert run.net is not None
        run.up("a", "--policy", "any")
        for name in "bcd":
            run.join(name)
        before = one_lineage(run, "abcd")
        for name in "abcd":
            run.train(name, inner_s=0.1)
        for name in "abcd":
            run.peers[name].reaches(4)
        run.net.split("ab", "cd")
        sides = {one_lineage(run, "ab"), one_lineage(run, "cd")}
        # Two of four are a quorum where the tie-breaker is; the others are a flagged fork.
        assert len(sides) == 2
        assert before in sides
        apart = {name: run.peers[name].status() for name in "abcd"}
        forked = [name for name, status in apart.items() if status["lineage"] != before]
        assert len(forked) == 2
        # One of them may have gone on alone, and the other one, which was late, have joined it.
        assert any(run.peers[name].said("fork") for name in forked)
        for name, status in apart.items():
            run.peers[name].reaches(status["round"] + 3)
        run.net.heal()
        last = one_lineage(run, "abcd")
        assert last in sides
        number = max(run.peers[name].status()["round"] for name in "abcd")
        for name in "abcd":
            run.peers[name].reaches(number + 3)
        assert run.agree("abcd") >= 1
        losers = [name for name in "abcd" if apart[name]["lineage"] != last]
        assert len(losers) == 2
        for name in losers:
            assert run.peers[name].said("yield")
        assert any(run.peers[name].said("fork") for name in "abcd")


@pytest.mark.slow  # the seeds have it too
def test_two_that_resume_one_checkpoint_apart_become_one_run(tmp_path: Path) -> None:
    with fleet(tmp_path) as run:
        folder = tmp_path / "kept"
        ports = two_that_died(run, folder)
        resumes(run, "a", folder, ports["a"])  # each where the other can find it
        run.sees("a", 1)
        run.peers["a"].kill(signal.SIGSTOP)  # it cannot say that the run lives
        resumes(run, "b", folder, ports["b"])
        run.sees("b", 1)
        run.peers["a"].kill(signal.SIGCONT)
        one_lineage(run, "ab")
        assert "nobody goes on with run demo" in run.peers["b"].text
        met = [name for name in "ab" if run.peers[name].said("fork")]
        gave_way = [name for name in "ab" if run.peers[name].said("yield")]
        assert met
        assert len(gave_way) == 1
        for name in "ab":
            run.train(name)
        for name in "ab":
            run.peers[name].reaches(run.peers[name].status()["round"] + 3)
        assert run.agree("ab") >= 1


def two_that_died(run: Fleet, folder: Path) -> dict[str, int]:
    """Of a run of a and b two checkpoints of a are left, and the ports that they had."""
    run.up("a", "--checkpoint", str(folder), "--every", "2")
    run.join("b")
    run.sees("a", 2)
    run.train("a", inner_s=0.1)
    until(lambda: folder.is_dir() and len(list(folder.iterdir())) >= 2, "two are kept")
    return run.power_cut("ab")


def resumes(run: Fleet, name: str, folder: Path, port: int) -> None:
    run.start(name, "up", "--run", "demo", "--resume", str(folder), port=port)


@pytest.mark.slow
def test_a_run_that_was_resumed_is_joined_by_the_line_that_resumed_it(tmp_path: Path) -> None:
    """As a supervisor gives it: again, after each death of the daemon."""
    with fleet(tmp_path) as run:
        folder = tmp_path / "kept"
        ports = two_that_died(run, folder)
        resumes(run, "a", folder, ports["a"])
        first = run.sees("a", 1)
        run.start("b", "up", "--run", "demo", port=ports["b"])
        run.sees("a", 2)
        for name in "ab":
            run.train(name, inner_s=0.1)
        number = run.peers["b"].reaches(first["round"] + 3)["round"]
        run.power_cut("a")
        resumes(run, "a", folder, ports["a"])
        for name in "ab":
            run.sees(name, 2)
        run.train("a", inner_s=0.1)
        for name in "ab":
            run.peers[name].reaches(number + 3)
        a = run.peers["a"]
        assert "run demo lives: view" in a.text
        assert not a.said("yield")
        assert not a.said("fork")
        assert run.agree("ab") >= 1


@pytest.mark.slow
def test_who_lives_without_a_quorum_does_not_keep_a_run_from_being_resumed(tmp_path: Path) -> None:
    with fleet(tmp_path) as run:
        folder = tmp_path / "kept"
        run.up("a", "--checkpoint", str(folder), "--every", "2", "--policy", "majority")
        run.join("b")
        run.sees("a", 2)
        run.train("a", inner_s=0.1)
        until(lambda: folder.is_dir() and len(list(folder.iterdir())) >= 2, "two are kept")
        ports = run.power_cut("a")
        kept = run.peers["b"].status()["round"]
        until(lambda: run.peers["b"].said("no-quorum"), "b waits", run.peers["b"])
        resumes(run, "a", folder, ports["a"])
        alone = "nobody goes on with run demo (1 address asked"
        until(lambda: alone in run.peers["a"].text, "a says that nobody goes on", run.peers["a"])
        status = run.sees("a", 1)
        assert status["round"] <= kept
        run.train("a", inner_s=0.1)
        last = one_lineage(run, "ab")  # b drops what it had once the other is as far
        assert last == status["lineage"]
        assert run.peers["b"].said("yield")
