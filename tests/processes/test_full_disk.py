"""Homes on full disks: the peers vote and train on, and write rounds once there is room."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

from harness.failing_disk import small_disk
from harness.processes import Fleet, Peer, fleet, until

from atoll.peer.checkpoint.reader import candidates

STATE_BYTES = 1_600_000  # of 2e5 parameters
LEDGERS_BYTES = 8 << 20
ENOUGH_BYTES = 48 << 20


@contextlib.contextmanager
def homes(folder: Path, names: str, nbytes: int) -> Iterator[None]:
    """Give these peers homes on file systems of this size."""
    with contextlib.ExitStack() as stack:
        for name in names:
            stack.enter_context(small_disk(folder / name, nbytes))
            (folder / name).chmod(0o700)
        yield


def fill(home: Path) -> Path:
    """Leave no byte free."""
    path = home / "ballast"
    with contextlib.suppress(OSError), path.open("wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass
    return path


def train(run: Fleet, names: str, rounds: int = 3) -> None:
    run.form(names)
    for name in names:
        run.train(name, inner_s=0.1)
    for name in names:
        run.peers[name].reaches(rounds)


def remembers(peer: Peer, what: str) -> None:
    until(
        lambda: str(peer.try_status().get("durable", "")).startswith(what),
        f"{peer.name} remembers {what}",
        peer,
    )


def comes_back(run: Fleet, name: str) -> Peer:
    """Kill a daemon and start it with its own line; it is the same member as before."""
    before = run.peers[name].status()
    port = run.peers[name].port
    run.peers[name].kill()
    run.peers[name].ends()
    peer = run.again(name, port)
    run.sees(name, len(run.peers))
    peer.reaches(before["round"] + 2)
    assert "back in view " in peer.text
    return peer


def test_full_disks_stop_no_run_and_cost_no_vote(tmp_path: Path) -> None:
    """All three fill up at once; one is started again while its disk is full."""
    with homes(tmp_path, "abc", ENOUGH_BYTES), fleet(tmp_path) as run:
        train(run, "abc")
        for name in "abc":
            remembers(run.peers[name], "votes and rounds; record ")
        ballast = [fill(run.peers[name].home) for name in "abc"]
        for name in "abc":
            remembers(run.peers[name], "votes only, because ")
        for name in "abc":
            run.peers[name].reaches(run.peers[name].status()["round"] + 10)
            assert run.peers[name].text.count("this peer remembers its votes only") == 1
        comes_back(run, "b")

        for path in ballast:
            path.unlink()
        for name in "abc":
            remembers(run.peers[name], "votes and rounds; record ")
            assert run.peers[name].text.count("has room again") == 1
        assert "downloading the state" not in comes_back(run, "b").text
        assert run.agree("abc") >= 1


def test_a_disk_of_two_checkpoints_keeps_votes_until_it_has_room_for_more(tmp_path: Path) -> None:
    small = 2 * STATE_BYTES + LEDGERS_BYTES
    with homes(tmp_path, "b", small), fleet(tmp_path) as run:
        train(run, "ab")
        peer = run.peers["b"]
        remembers(peer, "votes only, because the disk has ")
        assert "of room, and rounds that survive take 7." in peer.text
        peer.reaches(peer.status()["round"] + 10)
        assert not candidates(peer.home / "checkpoint")  # the disk is left to others
        peer = comes_back(run, "b")

        size = f"remount,size={ENOUGH_BYTES}"
        subprocess.run(["mount", "-o", size, str(peer.home)], check=True)
        remembers(peer, "votes and rounds; record ")
        assert "downloading the state" not in comes_back(run, "b").text
        assert run.agree("ab") >= 1


def test_the_older_of_two_checkpoints_goes_first_where_no_third_fits(tmp_path: Path) -> None:
    """Two of them fit with the rounds since the older one, and a third does not.

    Before the second one is there, a first one, the first parameters and 20 rounds are: 8.0 MB.
    """
    enough = int(5.3 * STATE_BYTES) + LEDGERS_BYTES
    with homes(tmp_path, "a", enough), fleet(tmp_path) as run:
        peer = run.up("a")
        run.train("a", inner_s=0.1)
        remembers(peer, "votes and rounds; record ")
        seen: set[str] = set()

        def several() -> bool:
            seen.update(path.name for path in candidates(peer.home / "checkpoint"))
            return len(seen) >= 5

        until(several, "one checkpoint after the other", peer)
        assert peer.status()["durable"].startswith("votes and rounds; record ")
        assert "this peer remembers its votes only" not in peer.text
