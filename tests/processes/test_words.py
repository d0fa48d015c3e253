"""What real daemons say to people: for whom they wait, why, and what to do; nothing twice."""

from __future__ import annotations

import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

from harness.processes import DAEMON, Fleet, Peer, fleet, until

from atoll.peer.daemon.status import render

NOWHERE = "127.0.0.1:1"  # no process may listen there, and none does
LINE = re.compile(r"^\d\d:\d\d:\d\d (\S+) +(.*)$", re.MULTILINE)
# Exponents, what the code calls things, and a duration or a rate without a unit that people read.
UNREADABLE = re.compile(r"\de[+-]\d|unsynced:|base round|predicted|turned away|ended early")


def said(peer: Peer, text: str) -> None:
    until(lambda: re.search(text, peer.text, re.MULTILINE), f"{peer.name} says {text}", peer)


def waits(peer: Peer, text: str) -> None:
    until(
        lambda: re.search(text, peer.try_status().get("waiting", "")),
        f"{peer.name} waits: {text}",
        peer,
    )


def short_id(peer: Peer) -> str:
    return str(peer.status()["peer"])


def assert_readable(run: Fleet) -> None:
    for peer in run.peers.values():
        lines = LINE.findall(peer.text)
        for kind, text in lines:
            assert not text.startswith(f"{kind} "), f"{peer.name} says {kind} twice: {text}"
            assert not UNREADABLE.search(text), f"{peer.name}: {text}"
        for (_, before), (_, after) in pairwise(lines):
            assert before != after, f"{peer.name} says twice: {after}"


def test_who_waits_says_for_whom_and_what_to_do(tmp_path: Path) -> None:
    with fleet(tmp_path) as run:
        run.form("ab")
        a, b = run.peers["a"], run.peers["b"]
        names = {name: short_id(run.peers[name]) for name in "ab"}
        for peer in (a, b):
            waits(peer, r"^no training script is attached yet: start one \(python train\.py\)$")
        run.train("a")
        a.reaches(3)
        run.trainers["a"].kill()
        run.trainers["a"].ends()
        waits(a, r"^no training script is attached: start one \(python train\.py\)$")

        # A member that is killed, and the connection to it.
        b.kill()
        said(a, rf"connection to {names['b']} ended: ")
        said(a, rf"{names['b']} is gone: nothing listens at its address any more")

        # A peer that nobody can dial is told so and what to do, and gets the state all the same.
        c = run.start("c", "join", run.invite, "--advertise", NOWHERE)
        joiner = until(lambda: c.try_status().get("peer"), "c answers", c)
        nowhere = re.escape(NOWHERE)
        said(
            c,
            rf"this peer is outbound: others cannot dial it at {nowhere}: {names['a']} .* refusal",
        )
        said(c, r"To be dialled too: let TCP port \d+ pass the firewall, forward it")
        said(a, rf"{joiner} dials for the data streams to it: it cannot be dialled from outside$")
        c.reaches(3)
        assert_readable(run)


def test_another_secret_is_not_taken_for_silence(tmp_path: Path) -> None:
    with fleet(tmp_path) as run:
        a = run.up("a")
        secret = tmp_path / "secret"
        secret.write_bytes(subprocess.check_output([sys.executable, *DAEMON, "secret"]))
        there = f"127.0.0.1:{a.port}"
        founding = ("--expect", "2", "--peers", f"{there},{NOWHERE}", "--secret-file", str(secret))
        b = run.start("b", "up", "--run", "demo", *founding, "--advertise", NOWHERE)
        waits(b, rf"^1 of 2 founders are here; {there} has another secret$")
        said(a, r" rejected 127\.0\.0\.1:\d+: it has another run's secret$")
        assert_readable(run)


def test_the_status_is_aligned_and_has_units(tmp_path: Path) -> None:
    with fleet(tmp_path) as run:
        run.form("abc")
        run.train("a")
        run.peers["a"].reaches(2)
        status = run.peers["a"].status()
        shown = render(status)
        rows = [line for line in shown.splitlines() if line.startswith("  ")]
        assert len(rows) == 3
        for member, row in zip(status["members"], rows, strict=True):
            assert row.startswith(f"  {member['peer']}  {member['address']}")
        assert len({row.index("round ") for row in rows}) == 1
        assert len({len(re.match(r"\S+ +", line)[0]) for line in shown.splitlines()[:3]}) == 1  # type: ignore[index]
        assert not UNREADABLE.search(shown)
        amount = r"[\d.]+ [kMG]?B"
        each = f"rounds {amount}, state {amount}, probes {amount}, control {amount}"
        assert re.search(rf"^sent +{amount}: {each}$", shown, re.MULTILINE)
        assert re.search(r", up [\d.]+ (m?s|min)$", shown, re.MULTILINE)
