"""Real daemons in audited rounds, one of which lies: who is banned, what the others end with."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.callers import callers
from harness.processes import WAIT_S, Fleet, Peer, fleet, until
from torch import nn

from atoll.optim import DiLoCo
from atoll.peer.client.session import Session

NAMES = "abcd"
ROUNDS = 3


def train(session: Session, moves: float, start: threading.Barrier, rule: str) -> torch.Tensor:
    """Parameters that go by ``moves`` in each step; whoever is banned goes on alone."""
    model = nn.Linear(200, 400, bias=False)
    with torch.no_grad():
        model.weight.zero_()
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    outer = DiLoCo(
        model, inner, 1, session, aggregate=rule, audit=True, outer_lr=1.0, outer_momentum=0.0
    )
    while not all(member.get("attached", True) for member in session.status()["members"]):
        time.sleep(0.05)
    start.wait(WAIT_S)
    while session.round < 1 + ROUNDS:
        noise = torch.randn(model.weight.shape, generator=torch.Generator().manual_seed(7))
        model.weight.grad = -(moves + 0.1 * noise)
        inner.step()
    with outer.outer_parameters():
        return model.weight.detach().clone()


def together(run: Fleet, honest: str, rule: str = "mean") -> dict[str, torch.Tensor]:
    """What the honest ones end with; the trainer of a liar loses its daemon."""
    names = "".join(run.peers)
    start = threading.Barrier(len(names))
    with callers(run, names) as trainers:
        sessions = trainers.sessions
        moves = {name: 1.0 + NAMES.index(name) / 10 for name in names}
        calls = {
            n: trainers.start(n, lambda n=n: train(sessions[n], moves[n], start, rule))
            for n in names
        }
        return {name: calls[name].result(WAIT_S) for name in honest}


@pytest.mark.parametrize(
    "rule",
    [
        "mean",
        pytest.param("gm(f=1)", marks=pytest.mark.slow),
        pytest.param("nnm+trimmed(f=1)", marks=pytest.mark.slow),
    ],
)
def test_honest_peers_pass_and_agree(tmp_path: Path, rule: str) -> None:
    with fleet(tmp_path) as run:
        run.form(NAMES)
        found = together(run, NAMES, rule)
        assert not run.peers["a"].status()["admission"]["banned"]
        assert run.agree(NAMES) >= ROUNDS
    for name in NAMES:
        assert torch.equal(found[name], found["a"])
    assert 3.0 < float(found["a"].mean()) < 4.2


LIES = {"result": "result", "numbers": "sketch", "two": "equivocation", "withholds": "withheld"}


@pytest.mark.parametrize(
    "lie",
    ["result", *(pytest.param(o, marks=pytest.mark.slow) for o in ("numbers", "two", "withholds"))],
)
def test_a_liar_is_banned_and_the_others_go_on(tmp_path: Path, lie: str) -> None:
    with fleet(tmp_path) as run:
        run.odd["d"] = f"audit:{lie}"
        run.form(NAMES)
        liar = run.peers["d"].status()["peer"]
        found = together(run, "abc")
        assert run.peers["d"].ends(WAIT_S) == 11
        assert "ATOLL-E34" in run.peers["d"].text
        for name in "abc":
            rows = bans(run.peers[name])
            assert [(row["peer"], row["kind"]) for row in rows] == [(liar, LIES[lie])]
        for name in "abc":
            until(partial(agreed, run.peers[name]), "a view names it", run.peers[name])
        late = run.join("e")
        run.sees("e", 4)
        everyone = [run.peers[name] for name in "abce"]
        until(lambda: same_file(everyone), "all have the file that the view names", late)
        (file,) = (run.peers["a"].home / "evidence").iterdir()
        assert verified(file)["kind"] == LIES[lie]
        run.odd.clear()
        again = run.start("d", "up", "--run", "demo")
        until(lambda: "this peer is banned" in again.text, "it is told why it stays outside", again)
    for name in "abc":
        assert torch.equal(found[name], found["a"])
        assert 3.0 < float(found[name].mean()) < 4.0  # what the liar promised does not count


def bans(peer: Peer) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = peer.status()["admission"]["banned"]
    return rows


def agreed(peer: Peer) -> bool:
    return all(row["agreed"] for row in bans(peer))


def files(peer: Peer) -> list[str]:
    folder = peer.home / "evidence"
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def same_file(peers: list[Peer]) -> bool:
    """Each has one, and it is the same."""
    kept = {tuple(files(peer)) for peer in peers}
    return len(kept) == 1 and len(next(iter(kept))) == 1


@pytest.mark.slow
def test_of_two_that_contradict_each_other_both_go(tmp_path: Path) -> None:
    with fleet(tmp_path) as run:
        run.odd["d"] = "audit:part"
        run.form("abcde")
        liar = run.peers["d"].status()["peer"]
        start = threading.Barrier(5)
        with callers(run, "abcde") as trainers:
            for name, session in trainers.sessions.items():
                trainers.start(name, lambda s=session: train(s, 1.0, start, "mean"))
            assert run.peers["d"].ends(WAIT_S) == 11

            def gone() -> list[str]:
                return [n for n in "abce" if run.peers[n].popen.poll() is not None]

            (other,) = until(gone, "the other one of the pair ends")
            left = [name for name in "abce" if name != other]
            for name in left:
                run.sees(name, 3)
                run.peers[name].reaches(1 + ROUNDS)
            rows = run.peers[left[0]].status()["admission"]["banned"]
        assert {row["kind"] for row in rows} == {"pair"}
        assert len(rows) == 2
        assert liar in {row["peer"] for row in rows}
        assert run.agree("".join(left)) >= ROUNDS


def verified(path: Path) -> dict[str, object]:
    command = [sys.executable, "-m", "atoll.peer.cli", "verify", str(path), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=True)
    found = json.loads(done.stdout)
    assert isinstance(found, dict)
    return found
