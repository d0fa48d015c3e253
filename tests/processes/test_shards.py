"""Samples that are dealt by real daemons: one trainer is killed, one comes late."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import pytest
from harness.processes import Fleet, Process, fleet, until

TRAINER = Path(__file__).parents[1] / "harness" / "shards_trainer.py"
SAMPLES = 3_000


def start(run: Fleet, name: str, samples: int = SAMPLES, step_s: float = 0.02) -> Process:
    arguments = [sys.executable, str(TRAINER), str(run.peers[name].home), str(samples), str(step_s)]
    trainer = run.trainers[name] = Process(arguments, run.folder / f"{name}.trainer.log")
    return trainer


def rounds(trainer: Process) -> int:
    return sum("committed" in line for line in trainer.lines)


def used(trainer: Process, steps: int | None = None) -> list[int]:
    """Indices of its first steps, or of all."""
    batches = [line["step"] for line in trainer.lines if "step" in line]
    return [index for batch in batches[:steps] for index in batch]


@pytest.mark.timeout(300)
@pytest.mark.slow
def test_one_is_killed_and_one_comes_late(tmp_path: Path) -> None:
    with fleet(tmp_path) as run:
        run.form("abc")
        first, dying = start(run, "a"), start(run, "b")
        until(lambda: rounds(dying) >= 4, "four rounds of b", first, dying)
        dying.kill()
        dying.ends()
        late = start(run, "c")
        for trainer in (first, late):
            assert trainer.ends() == 0, trainer.text
            assert trainer.lines[-1]["over"], trainer.text
        committed = [line["committed"] for line in dying.lines if "committed" in line]
        of_dead = used(dying, committed[-1])
        found = Counter([*used(first), *used(late), *of_dead])
        assert set(found) == set(range(SAMPLES))
        twice = {index for index, times in found.items() if times > 1}
        # What it used in its last round, if it died before it had said so.
        assert twice <= {*used(dying, committed[-1])[len(used(dying, committed[-2])) :]}
        assert len(used(late)) > SAMPLES // 10
        assert "E5" not in first.text
