"""Real peers, one of which sends wrong numbers: what the others end with, and whom they name."""

from __future__ import annotations

import math
import threading
import time
from pathlib import Path

import pytest
import torch
from harness.callers import callers
from harness.movers import Mover, honest
from harness.processes import WAIT_S, Fleet, fleet, until

from atoll.collectives.errors import RoundError
from atoll.peer.client.session import Session

NAMES = "abcd"
ROUNDS = 3
LIAR_S = WAIT_S / 2


def train(session: Session, rule: str, moves: float, start: threading.Barrier) -> torch.Tensor:
    """Move parameters by ``moves`` in each step; an outer step takes what the rule says.

    Whoever lies may be left out, see several rounds go by in one call, and then call when all
    others have ended: it waits for them no longer than LIAR_S.
    """
    mover = Mover(session, aggregate=rule)
    while not all_attached(session):
        time.sleep(0.05)
    start.wait(WAIT_S)
    is_lying = moves not in [honest(name) for name in NAMES]
    with session.channel.hurry(LIAR_S if is_lying else math.inf):
        try:
            for _ in range(ROUNDS):
                mover.move(moves)
        except RoundError:
            if not is_lying:
                raise
    return mover.run


def all_attached(session: Session) -> bool:
    """As far as is known here: only the coordinator knows of the others."""
    return all(member.get("attached", True) for member in session.status()["members"])


def together(run: Fleet, rule: str, lie: float) -> dict[str, torch.Tensor]:
    """d lies."""
    start = threading.Barrier(len(NAMES))
    moves = {name: honest(name) for name in NAMES} | {"d": lie}
    with callers(run, NAMES) as trainers:
        return trainers.each_own({n: lambda s, n=n: train(s, rule, moves[n], start) for n in NAMES})


@pytest.mark.parametrize(
    "rule", ["trimmed(f=1)", "nnm+trimmed(f=1)", pytest.param("gm(f=1)", marks=pytest.mark.slow)]
)
def test_a_lie_moves_nobody_beyond_what_honest_peers_do(tmp_path: Path, rule: str) -> None:
    with fleet(tmp_path) as run:
        run.form(NAMES)
        found = together(run, rule, -500.0)
    least, most = ROUNDS * honest("a"), ROUNDS * honest("c")
    for name in NAMES:
        assert torch.equal(found[name], found["a"])
        assert least - 0.01 <= float(found[name].min()) <= float(found[name].max()) <= most + 0.01


def test_the_same_lie_ruins_the_mean(tmp_path: Path) -> None:
    """Or the test before would show nothing."""
    with fleet(tmp_path) as run:
        run.form(NAMES)
        found = together(run, "mean", -500.0)
    assert float(found["a"].max()) < -100


def test_an_absurd_lie_is_left_out_and_its_sender_named(tmp_path: Path) -> None:
    with fleet(tmp_path) as run:
        run.form(NAMES)
        found = together(run, "nnm+trimmed(f=1)", 1e12)
        named = [name for name in "abc" if run.peers[name].said("retry")]
        texts = "".join(run.peers[name].text for name in NAMES)  # its own may be the first to see
    most = ROUNDS * honest("c")
    for name in "abc":
        assert torch.equal(found[name], found["a"])
        assert 0 < float(found[name].max()) <= most + 0.01
    assert named
    assert "times as long as the others'" in texts


def test_a_round_of_too_few_peers_for_the_rule_is_held(tmp_path: Path) -> None:
    def until_round(session: Session, name: str) -> torch.Tensor:
        mover = Mover(session, aggregate="trimmed(f=1)")
        while session.round < 3:  # the first one gives the run its parameters
            mover.move(honest(name))
        return mover.run

    with fleet(tmp_path) as run:
        run.form("ab")
        with callers(run, "ab") as trainers:
            sessions = trainers.sessions
            calls = {n: trainers.start(n, lambda n=n: until_round(sessions[n], n)) for n in "ab"}
            a = run.peers["a"]
            text = "round 2 is held: trimmed(f=1) needs 3 peers that count, 2 are here"
            until(lambda: a.said("held"), "it is held", a)
            until(lambda: run.peers["b"].status()["waiting"] == text, "all say so", a)
            time.sleep(2.0)
            assert a.status()["round"] == 1
            assert text in a.text
            assert not a.said("miss")
            run.join("c")
            late = trainers.add("c")
            calls["c"] = trainers.start("c", lambda: until_round(late, "c"))
            found = {name: call.result(2 * WAIT_S) for name, call in calls.items()}
    assert all(float(weights.min()) > 0 for weights in found.values())
