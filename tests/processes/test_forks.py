"""Histories that parted meet again: one goes on, and whoever made the other joins it."""

from __future__ import annotations

from pathlib import Path

from harness.netns import Net
from harness.processes import Fleet, fleet, until


def one_lineage(run: Fleet, names: str) -> str:
    """All are in one view; its lineage."""
    lineages = {run.sees(name, len(names))["lineage"] for name in names}
    assert len(lineages) == 1
    return lineages.pop()


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
        assert sum(status["fork"] for status in apart.values()) == 2
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


def test_two_that_resume_one_checkpoint_apart_become_one_run(tmp_path: Path) -> None:
    with fleet(tmp_path) as run:
        folder = tmp_path / "kept"
        run.up("a", "--checkpoint", str(folder), "--every", "2")
        run.join("b")
        run.sees("a", 2)
        run.train("a", inner_s=0.1)
        until(lambda: folder.is_dir() and len(list(folder.iterdir())) >= 2, "two are kept")
        ports = run.power_cut("ab")
        for name in "ab":  # each where the other can find it
            run.start(name, "up", "--run", "demo", "--resume", str(folder), port=ports[name])
        one_lineage(run, "ab")
        met = [name for name in "ab" if run.peers[name].said("fork")]
        gave_way = [name for name in "ab" if run.peers[name].said("yield")]
        assert met
        assert len(gave_way) == 1
        for name in "ab":
            run.train(name)
        for name in "ab":
            run.peers[name].reaches(run.peers[name].status()["round"] + 3)
        assert run.agree("ab") >= 1
