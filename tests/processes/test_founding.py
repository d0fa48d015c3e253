"""Machines that are started together, in any order, found one run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from harness.netns import Net
from harness.processes import NET_PORT, Fleet, fleet, until


def test_founders_wait_for_each_other_and_found_one_run(tmp_path: Path) -> None:
    with fleet(tmp_path, Net("abcd")) as run:
        assert run.net is not None
        secret = tmp_path / "secret"
        make = [sys.executable, "-m", "atoll.peer.cli", "secret"]
        secret.write_bytes(subprocess.check_output(make))
        where = {name: f"{run.net.address(name)}:{NET_PORT}" for name in "abcd"}
        peers = ",".join(where[name] for name in "abc")
        founding = ("--expect", "3", "--peers", peers, "--secret-file", str(secret))
        line = ("up", "--run", "demo", *founding, "--policy", "majority")

        for name in "ca":
            run.start(name, *line)
        for name in "ca":
            peer = run.peers[name]
            until(
                lambda p=peer: "2 of 3 founders" in p.try_status().get("waiting", ""),
                f"{name} waits",
                peer,
            )
            waiting = peer.status()["waiting"]
            assert where["b"] in waiting  # for whom
            assert where["a"] not in waiting
            assert where["c"] not in waiting
        run.start("b", *line)
        views = [in_a_view(run, name) for name in "abc"]
        assert len({view["lineage"] for view in views}) == 1
        assert all(view["policy"].startswith("majority") for view in views)

        # One that was not named cannot found it with them, but may join.
        late = run.start("d", *line)
        assert late.ends() == 2
        assert "--peers has" in late.text
        run.join("d", run.peers["b"].invite)
        for name in "abcd":
            run.sees(name, 4)
        for name in "bd":
            run.train(name)
        for name in "abcd":
            run.peers[name].reaches(4)
        assert run.agree("abcd") >= 1

        # The same line leads a founder that died back into the run.
        run.peers["c"].kill()
        run.peers["c"].ends()
        run.start("c", *line)
        assert run.sees("c", 4)["lineage"] == views[0]["lineage"]


def in_a_view(run: Fleet, name: str) -> dict[str, Any]:
    """Its status in the first view that was decided; before, in view 0, the founders elect it."""
    return until(
        lambda: run.sees(name, 3) if run.peers[name].status()["view"] else None,
        f"{name} is in a view",
        run.peers[name],
    )
