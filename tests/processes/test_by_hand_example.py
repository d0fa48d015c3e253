"""The example of a loop of one's own, with real peers: one comes late, one is killed."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from harness.processes import Fleet, Process, fleet, until

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_by_hand.py"
STEPS = 150


def start(run: Fleet, name: str, seed: int, peers: int, folder: Path) -> Process:
    arguments = [sys.executable, str(EXAMPLE), "--home", str(run.peers[name].home)]
    arguments += ["--data", str(folder / "text"), "--steps", str(STEPS)]
    arguments += ["--seed", str(seed), "--peers", str(peers)]
    trainer = run.trainers[name] = Process(arguments, folder / f"{name}.trainer.log")
    return trainer


@pytest.mark.timeout(300)
@pytest.mark.slow
def test_gradients_are_averaged_while_one_comes_and_one_dies(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    text = "all work and no play makes jack a dull boy\n" * 500
    (tmp_path / "text" / "text.txt").write_text(text)
    with fleet(tmp_path) as run:
        run.form("abc")
        first = start(run, "a", 0, 2, tmp_path)
        dying = start(run, "b", 1, 2, tmp_path)
        until(lambda: "step" in first.text, "two have taken steps", first, dying, timeout_s=90)
        late = start(run, "c", 2, 1, tmp_path)
        until(
            lambda: "3 peers" in first.text, "the third one takes part", first, late, timeout_s=90
        )
        dying.kill()
        for trainer in (first, late):
            assert trainer.ends(120) == 0, trainer.text
        marks = [re.findall(r"parameters (\w+)", t.text) for t in (first, late)]
        assert marks[0] == marks[1] != []
        assert "E5" not in first.text
        losses = [float(found) for found in re.findall(r"loss ([\d.]+)", first.text)]
        assert losses[-1] < losses[0] - 0.5
        assert re.findall(r"# \((\d)\)", EXAMPLE.read_text()) == ["1", "2", "3"]
