"""Many at once: sixteen joins, and most of them leave together."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from harness.health import assert_healthy
from harness.processes import WAIT_S, fleet, until

NAMES = "abcdefghijklmnopq"


@pytest.mark.parametrize("crowd", [5, pytest.param(16, marks=pytest.mark.slow)])
def test_joins_and_leaves_at_once(tmp_path: Path, crowd: int) -> None:
    names = NAMES[: crowd + 1]
    with fleet(tmp_path) as run:
        peer = run.up("a")
        run.train("a")
        peer.reaches(3)
        for name in names[1:]:
            run.join(name)
        for name in names[1:4]:
            run.train(name)
        assert_healthy(run)  # all in one view, with the state
        for name in names[4:]:
            run.peers[name].kill(signal.SIGTERM)
        for name in names[4:]:
            assert run.peers[name].ends() == 0
        until(lambda: len(peer.status()["members"]) == 4, "four are left", peer, timeout_s=WAIT_S)
        assert_healthy(run, "abcd")


def test_three_of_seven_die_at_once(tmp_path: Path) -> None:
    """As many as a quorum can lose. The others vote them out, and they come back together."""
    with fleet(tmp_path) as run:
        run.form(NAMES[:7])
        for name in "abcd":
            run.train(name)
        assert_healthy(run)
        for name in "efg":
            run.peers[name].kill()
        for name in "abcd":
            run.sees(name, 4)
        assert_healthy(run, "abcd")
        for name in "efg":
            run.restart(name)
        assert_healthy(run)
