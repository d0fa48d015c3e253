"""Homes that are torn, flipped, truncated, lost, copied or put back: found, said, never a vote."""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from harness.grids import rest_is_slow
from harness.processes import Fleet, Peer, fleet, until

from atoll.peer.checkpoint.reader import STATE_FILE, candidates, read_manifest
from atoll.peer.durable import LEDGER
from atoll.peer.durable.ledger import HALF_BYTES, SPARE
from atoll.peer.durable.ledger_format import BLOCK_BYTES

HALVES = (0, HALF_BYTES)
FORGOT = "this peer does not know what it has promised"


class Damage(NamedTuple):
    """Say what is done to a home whose daemon is dead, and what the next one says of it."""

    do: Callable[[Path], None]
    says: str


def used(ledger: Path) -> int:
    """Return where the records of the first half end."""
    return len(ledger.read_bytes()[:HALF_BYTES].rstrip(b"\0"))


def middle(ledger: Path) -> int:
    """Return a byte of a synced record half-way: each sync begins a block, the rest is zeros."""
    return used(ledger) // 2 // BLOCK_BYTES * BLOCK_BYTES


def write_at(path: Path, data: bytes, *offsets: int) -> None:
    """In place: the file stays the same one."""
    with path.open("r+b") as file:
        for offset in offsets:
            file.seek(offset)
            file.write(data)


def flip(path: Path, *offsets: int) -> None:
    data = path.read_bytes()
    for offset in offsets:
        write_at(path, bytes([data[offset] ^ 1]), offset)


def truncate(path: Path, nbytes: int) -> None:
    with path.open("r+b") as file:
        file.truncate(nbytes)


def tear(home: Path) -> None:
    """A write was under way, in a block behind all that was synced."""
    ledger = home / LEDGER
    behind = -(-used(ledger) // BLOCK_BYTES) * BLOCK_BYTES
    junk = random.Random(1).randbytes(300)
    write_at(ledger, junk, *(half + behind for half in HALVES))


def newest(home: Path) -> Path:
    return candidates(home / "checkpoint")[0]


def first_round(home: Path) -> Path:
    """Return the first of the rounds that lead on from the newest checkpoint.

    That may be so new that no round follows it: then it goes, and the one before is the newest.
    """
    while True:
        number = read_manifest(newest(home)).round + 1
        found = sorted((home / "rounds").glob(f"{number}-*"))
        if found:
            return found[-1]
        shutil.rmtree(newest(home))


def copy(home: Path) -> None:
    """Every file is another one afterwards, with the same contents."""
    aside = home.with_suffix(".aside")
    home.rename(aside)
    shutil.copytree(aside, home, ignore=shutil.ignore_patterns("run"))
    shutil.rmtree(aside)


def lose(*names: str) -> Callable[[Path], None]:
    def remove(home: Path) -> None:
        for name in names:
            path = home / name
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    return remove


VOTES_KEPT = {
    "a torn write": Damage(tear, "ends in a write that was cut short"),
    "a flipped bit in one copy": Damage(
        lambda home: flip(home / LEDGER, middle(home / LEDGER)),
        "has lost one of two copies in 1 place",
    ),
    "no second half": Damage(
        lambda home: truncate(home / LEDGER, HALF_BYTES), "nothing is lost, but its disk is failing"
    ),
    "no number of its life": Damage(lose("incarnation"), "back in view"),
}
STATE_KEPT = {
    "a flipped bit in a round": Damage(
        lambda home: flip(first_round(home), 50_000), "is damaged: it is not what was written there"
    ),
    "a round that is cut": Damage(
        lambda home: truncate(first_round(home), 1000), "cannot be read: it ends after 1,000 bytes"
    ),
    "no rounds": Damage(lose("rounds"), "back in view"),
    "a flipped bit in a checkpoint": Damage(
        lambda home: flip(newest(home) / STATE_FILE, 800_000), "is damaged: chunk"
    ),
    "no checkpoints": Damage(lose("checkpoint"), "back in view"),
}
LOST = {
    "a flipped bit in both copies": Damage(
        lambda home: flip(home / LEDGER, *(half + middle(home / LEDGER) for half in HALVES)),
        "are bad in both copies",
    ),
    "a ledger that is cut": Damage(
        lambda home: truncate(home / LEDGER, 3 * BLOCK_BYTES), "the file ends after"
    ),
    "no header": Damage(
        lambda home: write_at(home / LEDGER, bytes(BLOCK_BYTES), *HALVES),
        "has no header that can be read",
    ),
    "no ledger": Damage(lose(LEDGER), "is gone, its spare is there"),
    "neither ledger nor spare": Damage(lose(LEDGER, SPARE), ""),
    "a copied home": Damage(copy, "is a copy, or was restored"),
}


def restarted(run: Fleet, name: str, damage: Damage) -> Peer:
    """Kill a daemon, damage its home, start it with its own line, and wait until it takes part."""
    port, before = run.peers[name].port, run.peers["a"].status()["round"]
    for process in (run.peers[name], run.trainers[name]):
        process.kill()
        process.ends()
    damage.do(run.peers[name].home)
    peer = run.again(name, port)
    run.sees("a", 3)
    run.sees(name, 3)
    run.tend("abc")
    peer.reaches(before + 2)
    assert damage.says in peer.text
    assert run.agree("abc") >= 1
    return peer


def begin(run: Fleet) -> None:
    """Train until b has a checkpoint, and rounds after it."""
    run.form("abc")
    for name in "abc":
        run.train(name, inner_s=0.2, method="restless")
    has_rounds(run)


def has_rounds(run: Fleet, name: str = "b") -> None:
    """Wait until b has a checkpoint, and some rounds after it: a newcomer has one soon too."""
    peer = run.peers[name]

    def has() -> bool:
        time.sleep(0.05)
        status = peer.status()
        if not status["durable"].startswith("votes and rounds; record "):
            return False
        found = candidates(peer.home / "checkpoint")
        return bool(found) and 2 <= status["round"] - read_manifest(found[0]).round <= 6

    until(has, f"{name} remembers its rounds", peer)


@pytest.mark.parametrize(
    "damages", rest_is_slow([VOTES_KEPT, STATE_KEPT], 1), ids=("ledger", "state")
)
def test_damages_that_cost_no_vote(damages: dict[str, Damage], tmp_path: Path) -> None:
    with fleet(tmp_path) as run:
        begin(run)
        for name, damage in damages.items():
            peer = restarted(run, "b", damage)
            assert "back in view" in peer.text, name
            assert FORGOT not in peer.text, name
            has_rounds(run)


def test_the_checkpoint_before_a_damaged_one_counts_after_a_restart_too(tmp_path: Path) -> None:
    """Nobody else has the state. The first compaction after a restart forgets no checkpoint."""
    with fleet(tmp_path) as run:
        run.form("a")
        run.train("a", inner_s=0.1, method="restless")
        peer, port = run.peers["a"], run.peers["a"].port
        first = peer.home / "rounds" / "1-1-1"
        until(first.exists, "a keeps its first round", peer)
        until(lambda: not first.exists(), "a checkpoint stands for it", peer)
        has_rounds(run, "a")
        for damage in (lambda home: None, lambda home: flip(newest(home) / STATE_FILE, 1000)):
            before = peer.status()["round"]
            for process in (peer, run.trainers["a"]):
                process.kill()
                process.ends()
            damage(peer.home)
            peer = run.again("a", port)
            run.tend("a")
            peer.reaches(before + 2)
        assert "is damaged: chunk" in peer.text
        assert "back in view" in peer.text


def test_damages_that_cost_the_memory(tmp_path: Path) -> None:
    with fleet(tmp_path) as run:
        begin(run)
        for name, damage in LOST.items():
            before = run.peers["b"].status()["incarnation"]
            peer = restarted(run, "b", damage)
            assert "back in view" not in peer.text, name
            assert (FORGOT in peer.text) == bool(damage.says), name
            assert peer.status()["incarnation"] > before, name
            has_rounds(run)


def test_a_ledger_that_was_put_back_is_found_out_by_others(tmp_path: Path) -> None:
    """An image of the machine's disk: the file is the same one, with what it had before."""
    image, had = tmp_path / "image", tmp_path / "had"

    def keep(home: Path) -> None:
        image.hardlink_to(home / LEDGER)  # each compaction makes another file the ledger
        had.write_bytes(image.read_bytes())

    def put_back(home: Path) -> None:
        with image.open("r+b") as file:
            file.write(had.read_bytes())
        (home / SPARE).unlink()  # which may be the same file by now
        image.replace(home / LEDGER)

    with fleet(tmp_path) as run:
        begin(run)
        restarted(run, "b", Damage(keep, "back in view"))
        has_rounds(run)  # it has said READY since: the others remember that
        before = run.peers["b"].status()["incarnation"]
        peer = restarted(run, "b", Damage(put_back, "back in view"))
        told = "others have heard more of this peer than its ledger remembers"
        # On a busy machine it may have been voted out before it was there again.
        out = "is without this peer"
        until(lambda: told in peer.text or out in peer.text, "b hears that it forgets", peer)
        until(lambda: peer.status()["incarnation"] > before, "b is another voter", peer)
        run.sees("a", 3)
        assert run.agree("abc") >= 1


def test_a_number_that_is_none_ends_the_daemon_with_advice(tmp_path: Path) -> None:
    with fleet(tmp_path) as run:
        run.form("ab")
        port = run.peers["b"].port
        run.peers["b"].kill()
        run.peers["b"].ends()
        (run.peers["b"].home / "incarnation").write_text("seven\n")
        peer = run.again("b", port)
        assert peer.ends() == 2
        assert "does not hold a number" in peer.text
        assert "remove it: rm " in peer.text
