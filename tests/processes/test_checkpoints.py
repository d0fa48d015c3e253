"""The run after everybody has died: from checkpoints, with real daemons."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from harness.processes import Fleet, fleet, until

from atoll.peer.checkpoints.checkpoint import MANIFEST_FILE, STATE_FILE, candidates, read_manifest

EVERY = 4


def keeps(folder: Path, name: str) -> tuple[str, ...]:
    """The options that make this peer write checkpoints."""
    return ("--checkpoint", str(folder / f"kept-{name}"), "--every", str(EVERY))


def kept(folder: Path, name: str) -> list[Path]:
    return candidates(folder / f"kept-{name}")


def train_until_all_have_checkpoints(run: Fleet, folder: Path, names: str, *options: str) -> None:
    run.up(names[0], *keeps(folder, names[0]), *options)
    for name in names[1:]:
        run.start(name, "join", run.invite, *keeps(folder, name))
    for name in names:
        run.sees(name, len(names))
    for name in names:
        run.train(name, inner_s=0.1)
    for name in names:
        until(lambda n=name: len(kept(folder, n)) == 2, f"{name} keeps two", run.peers[name])


def waits(run: Fleet, name: str) -> dict[str, Any]:
    """Its status, once it says that it waits for the others."""
    peer = run.peers[name]

    def there() -> dict[str, Any] | None:
        status = peer.try_status()
        return status if "missing: " in status.get("waiting", "") else None

    return until(there, f"{name} waits for others", peer)


def test_after_a_power_cut_a_majority_goes_on_from_its_best_checkpoint(tmp_path: Path) -> None:
    with fleet(tmp_path) as run:
        train_until_all_have_checkpoints(run, tmp_path, "abc", "--on-lost", "rollback")
        ports = run.power_cut("abc")
        best = {n: read_manifest(kept(tmp_path, n)[0]) for n in "abc"}
        again = ("up", "--run", "demo")

        run.start("b", *again, *keeps(tmp_path, "b"), port=ports["b"])
        alone = waits(run, "b")["waiting"]
        assert "1 of the 3 members" in alone
        assert "2 are needed" in alone
        assert f"127.0.0.1:{ports['c']}" in alone
        assert "--resume" in alone

        # The second has lost its disk: it votes, and gets the state from the first.
        run.start("c", *again, port=ports["c"])
        for name in "bc":
            run.sees(name, 2)
            status = run.peers[name].reaches(best["b"].round)
            assert status["round"] == best["b"].round
            assert status["chain"] == best["b"].chain.hex()
            assert status["lineage"] != best["b"].lineage.hex()[:16]  # others may live somewhere
        for name in "bc":
            run.train(name, inner_s=0.1)
        run.peers["c"].reaches(best["b"].round + 1)

        # The last finds the run as it is now, and comes in.
        run.start("a", *again, *keeps(tmp_path, "a"), port=ports["a"])
        for name in "abc":
            run.sees(name, 3)
        run.peers["a"].reaches(run.peers["b"].status()["round"] + 2)
        assert run.agree("abc") >= 1
        # What is written from now on knows where it came from.
        until(
            lambda: kept(tmp_path, "b")[0].name.split("-")[1] > f"{best['b'].round:012d}",
            "b keeps another",
            run.peers["b"],
        )
        manifest = read_manifest(kept(tmp_path, "b")[0])
        assert best["b"].lineage in manifest.ancestors
        assert manifest.on_lost == "rollback"


@pytest.mark.slow
def test_a_checkpoint_is_enough_to_go_on_elsewhere(tmp_path: Path) -> None:
    with fleet(tmp_path) as run:
        train_until_all_have_checkpoints(run, tmp_path, "ab", "--policy", "majority")
        run.power_cut("ab")
        newest, older = kept(tmp_path, "a")
        folder = str(newest.parent)

        foreign = run.start("x", "up", "--run", "other", "--resume", folder)
        assert foreign.ends() == 26
        assert "belongs to run demo, not other" in foreign.text
        overlooked = run.start("y", "up", "--run", "demo", "--checkpoint", folder)
        assert overlooked.ends() == 2
        assert f"--resume {folder}" in overlooked.text

        state = bytearray((newest / STATE_FILE).read_bytes())
        state[len(state) // 2] ^= 1
        (newest / STATE_FILE).write_bytes(state)
        damaged = run.start("z", "up", "--run", "demo", "--resume", str(newest))
        assert damaged.ends() == 26
        assert "is damaged: chunk" in damaged.text

        # Of the folder it takes the one before. Another machine, and more of them than there were.
        manifest = read_manifest(older)
        resumed = run.up("n", "--resume", folder)
        assert f"passed over: {newest.name} is damaged" in resumed.text
        status = resumed.reaches(manifest.round)
        assert (status["round"], status["chain"]) == (manifest.round, manifest.chain.hex())
        assert status["policy"].startswith("majority")  # as it was founded
        for name in "opq":
            run.join(name)
        for name in "nopq":
            run.sees(name, 4)
            run.train(name, inner_s=0.1)
        for name in "nopq":
            run.peers[name].reaches(manifest.round + 5)
        assert run.agree("nopq") >= 1
        assert (older / MANIFEST_FILE).exists()
