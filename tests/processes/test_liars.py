"""Real peers, one of which sends wrong numbers: what the others end with, and whom they name."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch
from harness.callers import callers
from harness.processes import WAIT_S, Fleet, fleet, until
from torch import nn

from atoll.optim import DiLoCo
from atoll.peer.session import Session

NAMES = "abcd"
ROUNDS = 3


def honest(name: str) -> float:
    """How far its parameters go in each round: 1.0 to 1.3."""
    return 1.0 + NAMES.index(name) / 10


def train(
    session: Session, rule: str, moves: float, start: threading.Barrier, rounds: int = ROUNDS
) -> torch.Tensor:
    """Parameters that go by ``moves`` in each step; an outer step takes what the rule says."""
    outer, model, inner = method_of(session, rule)
    while not all_attached(session):
        time.sleep(0.05)
    start.wait(WAIT_S)
    for _ in range(rounds):
        step(model, inner, moves)
    return outer_weight(outer, model)


def method_of(session: Session, rule: str) -> tuple[DiLoCo, nn.Linear, torch.optim.SGD]:
    model = nn.Linear(50, 40, bias=False)
    with torch.no_grad():
        model.weight.zero_()
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    outer = DiLoCo(
        model, inner, 1, session, aggregate=rule, outer_lr=1.0, outer_momentum=0.0, codec="float32"
    )
    return outer, model, inner


def step(model: nn.Linear, inner: torch.optim.SGD, moves: float) -> None:
    model.weight.grad = torch.full_like(model.weight, -moves)
    inner.step()


def outer_weight(outer: DiLoCo, model: nn.Linear) -> torch.Tensor:
    with outer.outer_parameters():
        return model.weight.detach().clone()


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
        texts = "".join(run.peers[name].text for name in "abc")
    most = ROUNDS * honest("c")
    for name in "abc":
        assert torch.equal(found[name], found["a"])
        assert 0 < float(found[name].max()) <= most + 0.01
    assert named
    assert "times as long as the others'" in texts


def test_too_few_peers_for_the_rule_commit_nothing_until_there_are_enough(tmp_path: Path) -> None:
    def until_round(session: Session, name: str) -> torch.Tensor:
        outer, model, inner = method_of(session, "trimmed(f=1)")
        while session.round < 3:  # the first one gives the run its parameters
            step(model, inner, honest(name))
        return outer_weight(outer, model)

    with fleet(tmp_path) as run:
        run.form("ab")
        with callers(run, "ab") as trainers:
            sessions = trainers.sessions
            calls = {n: trainers.start(n, lambda n=n: until_round(sessions[n], n)) for n in "ab"}
            a = run.peers["a"]
            until(lambda: "needs at least 3 peers, and here are 2" in a.text, "it says so", a)
            time.sleep(2.0)
            assert a.status()["round"] == 1
            run.join("c")
            late = trainers.add("c")
            calls["c"] = trainers.start("c", lambda: until_round(late, "c"))
            found = {name: call.result(2 * WAIT_S) for name, call in calls.items()}
    assert all(float(weights.min()) > 0 for weights in found.values())
