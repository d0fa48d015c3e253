"""A real process whose machine loses power: what it said was on the disk is there."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from harness.ledger_process import HALF_BYTES
from harness.power_cut import NotFollowed, PoweredFleet, PowerSupply
from harness.processes import until

from atoll.peer.checkpoint.reader import candidates, open_checkpoint
from atoll.peer.durable.disk import RealDisk
from atoll.peer.durable.ledger import open_ledger
from atoll.peer.durable.round_files import RoundFiles, RoundName

TESTS = Path(__file__).parents[1]
CUTS = 4


def said_before_it_died(supply: PowerSupply, seed: int, *arguments: str) -> list[list[str]]:
    """What the process said until it was killed, after some lines."""
    command = [sys.executable, "-m", "harness.ledger_process", str(supply.home), str(seed)]
    environment = os.environ | supply.environment
    with subprocess.Popen(
        [*command, *arguments], cwd=TESTS, env=environment, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        lines = []
        for _ in range(random.Random(seed).randint(2, 20)):
            lines.append(process.stdout.readline().split())
        process.kill()
        lines += [line.split() for line in process.stdout if line.endswith("\n")]
    return lines


def lost(home: Path, lines: list[list[str]]) -> str:
    """What of these lines does not hold any more; empty if all does."""
    opened = open_ledger(RealDisk(), home / "votes", half_bytes=HALF_BYTES)
    opened.ledger.close()
    synced = max(int(line[2] if line[0] == "opened" else line[1]) for line in lines)
    if opened.verdict.forgot or opened.position < synced:
        return f"{synced} records were synced: {opened.text}"
    files = RoundFiles(RealDisk(), home / "rounds")
    for line in lines:
        if line[0] == "ready":
            name = RoundName.parse(line[2])
            if name not in files.names() or name is None:
                return f"{line[2]} is gone"
            reader = files.open(name)
            whole = reader.read(0, 1 << 20).hex() == line[3]
            reader.close()
            if not whole:
                return f"{line[2]} has other bytes"
    return ""


def test_nothing_that_was_synced_is_lost(tmp_path: Path) -> None:
    supply = PowerSupply(tmp_path / "home", tmp_path / "aside")
    for seed in range(CUTS):
        lines = said_before_it_died(supply, seed)
        supply.cut(seed)
        assert lost(supply.home, lines) == ""
        supply = PowerSupply(tmp_path / "home", tmp_path / f"aside-{seed}")


def test_without_syncs_something_is_lost(tmp_path: Path) -> None:
    """Else the cut would cut nothing."""
    for seed in range(CUTS):
        supply = PowerSupply(tmp_path / f"home-{seed}", tmp_path / f"aside-{seed}")
        lines = said_before_it_died(supply, seed, "no-sync")
        supply.cut(seed)
        if lost(supply.home, lines):
            return
    pytest.fail(f"{CUTS} cuts have taken nothing")


def test_what_cannot_be_followed_is_said(tmp_path: Path) -> None:
    supply = PowerSupply(tmp_path / "home", tmp_path / "aside")
    code = (
        "import mmap; f = open('x', 'w+b'); f.write(bytes(4096)); f.flush();"
        "mmap.mmap(f.fileno(), 4096)[:1] = b'y'"
    )
    environment = os.environ | supply.environment
    subprocess.run([sys.executable, "-c", code], cwd=supply.home, env=environment, check=True)
    with pytest.raises(NotFollowed, match="mmap"):
        supply.cut(1)


def test_daemons_come_back_with_their_identities_and_whole_checkpoints(tmp_path: Path) -> None:
    """All that they do in their homes can be followed, and what they had synced is there."""
    peers, written = PoweredFleet(tmp_path), 0
    peers.options = lambda name: (
        *("--checkpoint", str(tmp_path / name / "checkpoints")),
        *("--every", "2"),
    )
    try:
        peers.form("ab")
        ids = {name: peers.peers[name].status()["peer"] for name in "ab"}
        peers.train("a", 1e5)
        until(lambda: peers.peers["a"].said("checkpoint"), "a checkpoint", peers.peers["a"])
        ports = peers.cut("ab", 0)
        for path in candidates(tmp_path / "a" / "checkpoints", "demo"):
            with open_checkpoint(path) as checkpoint:
                checkpoint.check_chunks()
                written += 1
        for name, port in ports.items():
            peers.start(name, "up", "--run", "demo", port=port)
        for name in "ab":
            status = until(peers.peers[name].try_status, f"{name} is up", peers.peers[name])
            assert status["peer"] == ids[name]
    finally:
        peers.close()
    assert written
