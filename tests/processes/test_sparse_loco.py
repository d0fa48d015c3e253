"""SparseLoCo with real daemons: a death, a late joiner, a power cut; and everybody agrees."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness.processes import Fleet, Process, fleet, until

from atoll.peer.checkpoint.reader import candidates, read_manifest

ELEMENTS = 4e6  # parts of 110 kB
EVERY = 4  # rounds between two checkpoints


def train(run: Fleet, name: str) -> Process:
    return run.train(name, ELEMENTS, inner_s=0.05, codec="topk", method="sparse_loco")


def contributes(trainer: Process, rounds: int) -> None:
    until(
        lambda: sum(line.get("kind") == "committed" for line in trainer.lines) >= rounds,
        f"it contributes to {rounds} rounds",
        trainer,
    )


@pytest.mark.slow
def test_peers_agree_through_a_death_a_joiner_and_a_power_cut(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    with fleet(tmp_path) as run:
        run.up("a", "--checkpoint", str(kept), "--every", str(EVERY))
        for name in "bc":
            run.join(name)
        for name in "abc":
            run.sees(name, 3)
        for name in "abc":
            train(run, name)
        for name in "abc":
            contributes(run.trainers[name], 3)
        assert run.agree("abc") >= 3

        def reducing() -> int | None:
            status = run.peers["c"].try_status()
            return status["round"] + 1 if status.get("attempt") else None

        number = until(reducing, "c is in a reduce", run.peers["c"])
        run.peers["c"].kill()
        for name in "ab":
            run.peers[name].reaches(number + 2)
        assert run.agree("ab") >= 3

        run.join("d")
        run.peers["d"].reaches(number)
        contributes(train(run, "d"), 3)
        assert run.agree("abd") >= 3
        assert "error feedback forgets" not in run.peers["a"].text

        until(lambda: len(candidates(kept)) == 2, "a keeps two checkpoints", run.peers["a"])
        run.power_cut("abd")
        newest = candidates(kept)[0]
        manifest = read_manifest(newest)
        run.up("n", "--resume", str(newest))
        run.join("o")
        status = run.peers["n"].reaches(manifest.round)
        assert (status["round"], status["chain"]) == (manifest.round, manifest.chain.hex())
        for name in "no":
            run.sees(name, 2)
        for name in "no":
            contributes(train(run, name), 2)
        assert run.agree("no") >= 2
