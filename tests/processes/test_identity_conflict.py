"""A home folder that was copied and started a second time: exactly one of the two stays."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from harness.processes import Fleet, Peer, fleet, until

COPY = "x"
E12_S = 10.0


def start_copy(run: Fleet, name: str, *arguments: str) -> Peer:
    """A second daemon with the identity of a running one, as after copying its folder elsewhere."""
    skipped = shutil.ignore_patterns("lock", "*.sock", "*.ipc")
    shutil.copytree(run.peers[name].home, run.folder / COPY, ignore=skipped)
    return run.start(COPY, *arguments)


def ended(*pair: Peer) -> Peer | None:
    return next((peer for peer in pair if peer.popen.poll() is not None), None)


@pytest.mark.parametrize(
    ("names", "name"),
    [
        ("ab", "b"),
        ("abc", "a"),
        pytest.param("ab", "a", marks=pytest.mark.slow),
        pytest.param("abc", "b", marks=pytest.mark.slow),
    ],
)
def test_of_two_daemons_with_one_identity_the_older_ends(
    tmp_path: Path, names: str, name: str
) -> None:
    with fleet(tmp_path) as run:
        run.form(names)
        others = names.replace(name, "")
        for each in names:
            run.train(each)
        original = run.peers[name]
        original.reaches(3)
        copy = start_copy(run, name, "up", "--run", "demo")
        gone = until(lambda: ended(original, copy), "one of the two ends", copy, timeout_s=E12_S)
        assert gone is original
        assert original.popen.returncode == 2
        assert "ATOLL-E12" in original.text
        number = max(run.peers[other].status()["round"] for other in others)
        for other in others:
            run.peers[other].reaches(number + 3)
        copy.reaches(number)
        run.sees(COPY, len(names))
        assert run.agree(others + COPY) >= 1
        assert ended(*(run.peers[each] for each in others + COPY)) is None


def test_a_copy_that_finds_only_the_original_ends(tmp_path: Path) -> None:
    """The original may hold all that there is of the run."""
    with fleet(tmp_path) as run:
        original = run.up("a")
        run.train("a")
        original.reaches(2)
        copy = start_copy(run, "a", "join", run.invite)
        assert copy.ends(E12_S) == 2
        assert "ATOLL-E12" in copy.text
        original.reaches(original.status()["round"] + 2)
