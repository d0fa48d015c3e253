"""What is predicted of a run that there is: by `atoll status` of every peer, and `atoll plan`."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from harness.processes import Fleet, fleet, until

PARAMETERS, TRAINING_S = 1e5, 0.5


def atoll(home: Path, *arguments: str) -> str:
    command = [sys.executable, "-m", "atoll.peer.cli", *arguments, "--home", str(home)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def round_times(run: Fleet) -> list[dict[str, Any]]:
    """Return what each peer says of a round, once all of them know."""
    found = [peer.status()["round_time"] for peer in run.peers.values()]
    return found if all(found) else []


def test_a_run_says_what_its_rounds_should_take_and_what_would_suit_it(tmp_path: Path) -> None:
    with fleet(tmp_path) as run:
        run.form("abc")
        for name in "abc":
            run.train(name, PARAMETERS, inner_s=TRAINING_S)
        for peer in run.peers.values():
            peer.reaches(8)
        found = until(lambda: round_times(run), "rounds are predicted", *run.peers.values())
        predicted = [each["predicted_s"] for each in found]
        assert min(predicted) > TRAINING_S
        assert max(predicted) == pytest.approx(min(predicted), rel=0.2)  # the same rows, later
        home = run.peers["b"].home
        shown = re.search(
            r"^round +predicted \S+ m?s, measured \S+ m?s \([+-]\d+%\)$",
            atoll(home, "status"),
            re.MULTILINE,
        )
        assert shown is not None
        plan = json.loads(atoll(home, "plan", "--json", "--candidates", "diloco:1:int8"))
        assert plan["hosts"] == sorted(peer.status()["peer"] for peer in run.peers.values())
        assert plan["parameters"] == PARAMETERS
        (training,) = (p for p in plan["best"]["parts"] if p["name"] == "training")
        assert training["seconds"] > TRAINING_S
        assert "would help" in atoll(home, "plan", "--tokens-per-step", "1000")
