"""Run out of a machine's disk, descriptors and processors, and let its wall clock jump."""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.starved import sliced
from harness.health import assert_healthy, usage
from harness.processes import Fleet, fleet, until
from harness.wrong_clock import WrongClock

HOUR_S = 3600.0
DAY_S = 24 * HOUR_S
YEAR_S = 365 * DAY_S
SLICED_ROUNDS = 4


@contextlib.contextmanager
def tiny_disk(folder: Path) -> Iterator[Path]:
    """A file system of 12 MiB, of which a ledger takes 8; needs root, as namespaces do."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=12m,mode=700", "tmpfs", str(folder)]
    subprocess.run(mount, check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder: Path) -> Path:
    """Write until nothing more can be written."""
    ballast = folder / "ballast"
    with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    assert os.statvfs(folder).f_bavail == 0
    return ballast


def test_a_full_disk(tmp_path: Path) -> None:
    """It is an event, no end: rounds go on, views change, and a daemon is started there again."""
    with tiny_disk(tmp_path / "b"), fleet(tmp_path) as run:
        run.form("abc")
        for name in "abc":
            run.train(name)
        assert_healthy(run)
        peer = run.peers["b"]
        ballast = fill(peer.home)
        run.join("d")
        run.train("d")
        assert_healthy(run)  # a view that b cannot write down
        until(lambda: peer.said("disk"), "b says what it cannot store", peer)
        peer.kill()
        peer.ends()
        run.restart("b")
        assert_healthy(run)
        ballast.unlink()
        assert_healthy(run)


def test_no_descriptor_is_left(four: Fleet) -> None:
    """b cannot open or accept anything: what it has still works. A peer that comes back meanwhile
    finds no way to it, until there are descriptors again."""
    peer, leader = four.peers["b"], four.coordinator
    victim = next(name for name in "acd" if name != leader)
    soft, hard = resource.prlimit(peer.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(peer.pid, resource.RLIMIT_NOFILE, (usage(peer.pid).descriptors // 2, hard))
    four.peers[victim].kill()
    rest = [name for name in "acd" if name != victim]
    number = max(four.peers[name].status()["round"] for name in rest)
    for name in rest:
        four.peers[name].reaches(number + 2)
    four.trainers[victim].ends()
    four.restart(victim)
    for name in rest:
        four.peers[name].reaches(number + 4)
    resource.prlimit(peer.pid, resource.RLIMIT_NOFILE, (soft, hard))
    assert_healthy(four)
    assert four.peers["b"] is peer


def test_wall_clocks_jump(tmp_path: Path) -> None:
    """Every daemon's clock lies, each differently, backwards as well: nothing depends on it."""
    with contextlib.ExitStack() as stack:
        run = stack.enter_context(fleet(tmp_path))
        clocks = {name: WrongClock(tmp_path / f"clock-{name}") for name in "abcd"}
        for name, clock in clocks.items():
            stack.callback(clock.close)
            run.environment = clock.environment
            if run.invite:
                run.join(name)
            else:
                run.up(name)
        for name in clocks:
            run.sees(name, 4)
            run.train(name)
        assert_healthy(run)
        view = run.peers["a"].status()["view"]
        for jump_s in (HOUR_S, -HOUR_S, 0.0, 30 * YEAR_S, -30 * YEAR_S):
            for factor, clock in enumerate(clocks.values()):
                clock.jump(jump_s * factor / 3)
            assert_healthy(run)
            committed_s = run.peers["d"].status()["last_commit_unix_s"] - time.time()
            assert abs(committed_s - jump_s) < HOUR_S / 2  # else this test tests nothing
        assert run.peers["a"].status()["view"] == view  # nobody was taken for dead
        # A new life that began decades before its last: certificates and incarnations must do.
        run.peers["d"].kill()
        run.trainers["d"].ends()
        run.environment = clocks["d"].environment
        run.restart("d")
        assert_healthy(run)


def test_daemons_that_get_a_processor_in_slices_only_are_slow_and_not_dead(tmp_path: Path) -> None:
    """Two of four run for 0.15 s in every 1.65 s, the coordinator among them; `make bench-time`."""
    with fleet(tmp_path) as run:
        run.form("abcd")
        for name in "abcd":
            run.train(name, 1e5, inner_s=0.5)
        for peer in run.peers.values():
            peer.reaches(1)
        before = {name: peer.status()["view"] for name, peer in run.peers.items()}
        last = max(peer.status()["round"] for peer in run.peers.values())
        assert run.coordinator == "a"
        with sliced(run, "ad"):
            for peer in run.peers.values():
                peer.reaches(last + SLICED_ROUNDS)
        for name, peer in run.peers.items():
            assert peer.status()["view"] == before[name]
            assert not peer.said("retry") + peer.said("dead") + peer.said("excluded"), peer.text
