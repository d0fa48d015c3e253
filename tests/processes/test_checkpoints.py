"""The run after everybody has died: from checkpoints, with real daemons."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from harness.failing_disk import small_disk
from harness.processes import Fleet, fleet, until

from atoll.collectives.errors import CheckpointError
from atoll.peer.checkpoint.reader import (
    MANIFEST_FILE,
    STATE_FILE,
    candidates,
    open_checkpoint,
    read_manifest,
)

EVERY = 4
ELEMENTS = 2e5
STATE_BYTES = 1_600_000  # of so many, and a header


def keeps(folder: Path, name: str) -> tuple[str, ...]:
    """The options that make this peer write checkpoints, and remember nothing else."""
    kept_in = str(folder / f"kept-{name}")
    return ("--checkpoint", kept_in, "--every", str(EVERY), "--durable", "off")


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


def test_homes_that_remember_nothing_wait_for_one_that_resumes(tmp_path: Path) -> None:
    """Each is started with its own line; a person says on one machine what to go on from."""
    with fleet(tmp_path) as run:
        train_until_all_have_checkpoints(run, tmp_path, "abc", "--on-lost", "rollback")
        ports = run.power_cut("abc")
        best = {n: read_manifest(kept(tmp_path, n)[0]) for n in "abc"}
        again = ("up", "--run", "demo", "--durable", "off")

        alone = run.start("b", *again, *keeps(tmp_path, "b"), port=ports["b"])
        until(lambda: "--resume PATH" in alone.text, "b says how to go on", alone)
        run.start("c", *again, port=ports["c"])  # it has lost its disk
        resumed = run.start(
            "a",
            *again,
            "--resume",
            str(tmp_path / "kept-a"),
            *keeps(tmp_path, "a"),
            port=ports["a"],
        )
        assert resumed.reaches(best["a"].round)["chain"] == best["a"].chain.hex()
        for name in "abc":
            status = run.sees(name, 3)
            assert status["lineage"] != best["a"].lineage.hex()[:16]  # others may live somewhere
        for name in "abc":
            run.train(name, inner_s=0.1)
        for name in "abc":
            run.peers[name].reaches(best["a"].round + EVERY + 1)
        assert run.agree("abc") >= 1
        # What is written from now on knows where it came from.
        until(
            lambda: kept(tmp_path, "b")[0].name.split("-")[1] > f"{best['b'].round:012d}",
            "b keeps another",
            run.peers["b"],
        )
        manifest = read_manifest(kept(tmp_path, "b")[0])
        assert best["a"].lineage in manifest.ancestors
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


# ---------------------------------------------------------------- small disks


def whole(folder: Path) -> list[int]:
    """The rounds of the checkpoints there that are whole now."""
    found = []
    for path in candidates(folder):
        try:
            with open_checkpoint(path) as checkpoint:
                checkpoint.check_chunks()
                found.append(checkpoint.manifest.round)
        except CheckpointError:
            assert not (path / MANIFEST_FILE).exists(), f"{path} is damaged"  # else: removed
    return found


def test_where_there_is_no_room_for_three_checkpoints_the_older_goes_first(tmp_path: Path) -> None:
    """Two fit and a third does not. One that is whole is there at any time, and newer ones come."""
    with small_disk(tmp_path / "disk", int(2.6 * STATE_BYTES)) as disk, fleet(tmp_path) as run:
        peer = run.up("a", "--checkpoint", str(disk), "--every", str(EVERY))
        run.train("a", elements=ELEMENTS, inner_s=0.1)
        seen: set[int] = set()

        def several() -> bool:
            now = whole(disk) or whole(disk)  # those that were listed may have been followed
            assert now or not seen, "there was a checkpoint, and now there is none"
            seen.update(now)
            return len(seen) >= 4

        until(several, "a keeps one after the other", peer)
        assert max(seen) >= 4 * EVERY
        assert "has no room for 3 checkpoints: one takes 1.6 MB" in peer.text

        # Nobody but the older checkpoint gives way: with other files there is room for one.
        ballast = disk / "mine"
        peer.kill()
        peer.ends()
        for path in candidates(disk)[1:]:
            for file in path.iterdir():
                file.unlink()
            path.rmdir()
        ballast.write_bytes(bytes(int(0.9 * STATE_BYTES)))
        (kept,) = whole(disk)
        peer = run.up("b", "--resume", str(disk), "--checkpoint", str(disk), "--every", "2")
        run.train("b", elements=ELEMENTS, inner_s=0.05)
        until(lambda: f"it takes 1.6 MB, and {disk} has" in peer.text, "b has no room", peer)
        assert "room for one checkpoint, and for no next" in peer.text
        assert whole(disk) == [kept]
        ballast.unlink()
        until(lambda: max(whole(disk)) > kept, "b writes one where there is room again", peer)


def test_a_disk_that_is_too_small_for_a_checkpoint_is_named_at_the_start(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", STATE_BYTES // 2) as disk, fleet(tmp_path) as run:
        peer = run.up("a", "--checkpoint", str(disk), "--every", "1000")
        run.train("a", elements=ELEMENTS, rounds=2)
        until(lambda: "is too small for a checkpoint" in peer.text, "a says so", peer)
        takes = "one takes 1.6 MB, and there are "
        assert f"the disk of {disk} is too small for a checkpoint: {takes}" in peer.text
        assert "--checkpoint" in peer.status()["last_error"]


# ---------------------------------------------------------------- who may read them


def modes(folder: Path) -> dict[str, int]:
    """The permissions of all there is in a folder, and of itself."""
    found = {".": folder.stat().st_mode & 0o777}
    for path in folder.rglob("*"):
        try:
            found[str(path.relative_to(folder))] = path.lstat().st_mode & 0o777
        except FileNotFoundError:  # a file of the moment
            continue
    return found


def test_checkpoints_and_homes_are_private_whatever_the_umask(tmp_path: Path) -> None:
    old_umask = os.umask(0)  # which daemons inherit
    try:
        with fleet(tmp_path) as run:
            (tmp_path / "kept-b").mkdir(0o755)  # a folder of its user: spoken of, not changed
            run.up("a", *keeps(tmp_path, "a"))
            run.start("b", "join", run.invite, *keeps(tmp_path, "b"))
            for name in "ab":
                run.sees(name, 2)
            for name in "ab":
                run.train(name, elements=600)
            for name in "ab":
                until(lambda n=name: kept(tmp_path, n), f"{name} keeps one", run.peers[name])
            for name in ("a", "b", "kept-a", "kept-b"):
                found = modes(tmp_path / name)
                if name == "kept-b":
                    assert found.pop(".") == 0o755
                assert not {path: oct(m) for path, m in found.items() if m & 0o077}, name
            said = f"other users may enter {tmp_path / 'kept-b'} (mode 0755)"
            assert said in run.peers["b"].text
            assert "may enter" not in run.peers["a"].text

            # What an earlier version left open is closed by the next start.
            run.peers["a"].kill()
            run.peers["a"].ends()
            path = kept(tmp_path, "a")[0]
            path.chmod(0o755)
            for file in path.iterdir():
                file.chmod(0o644)
            run.start("a", "up", "--run", "demo", *keeps(tmp_path, "a"))
            run.sees("a", 2)
            assert not [m for m in modes(path).values() if m & 0o077]
    finally:
        os.umask(old_umask)
