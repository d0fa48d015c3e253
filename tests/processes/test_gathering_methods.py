"""DeMo, ZerothOrder and Population over real daemons."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.callers import callers
from harness.processes import WAIT_S, fleet, peer_id
from torch import nn

from atoll.optim import DeMo, Population, Swarm, ZerothOrder
from atoll.peer.client.session import Session

STEPS = 8
Step = Callable[[], object]


def model(seed: int, hidden: int = 60) -> nn.Module:
    """Without the global generators: real trainers share a process here."""
    random = torch.Generator().manual_seed(seed)
    net = nn.Sequential(nn.Linear(40, hidden), nn.Tanh(), nn.Linear(hidden, 10))
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(torch.randn(p.shape, generator=random) / 8)
    return net


def loss_of(net: nn.Module, worker: int, step: int) -> torch.Tensor:
    x = torch.randn(8, 40, generator=torch.Generator().manual_seed(1000 * worker + step))
    return (net(x) - x[:, :10]).square().mean()


def demo(
    session: Any, net: nn.Module, worker: int, topk: int = 8, values: str = "bfloat16"
) -> tuple[DeMo, Step]:
    optimizer = DeMo(net, session, lr=1e-3, decay=0.9, topk=topk, values=values, weight_decay=0.1)

    def step() -> None:
        optimizer.zero_grad()
        loss_of(net, worker, optimizer.steps).backward()
        optimizer.step()

    return optimizer, step


def long_demo(session: Any, net: nn.Module, worker: int) -> tuple[DeMo, Step]:
    """Each step takes two gathers."""
    optimizer, step = demo(session, net, worker, 4096, "float32")
    assert 64 * 1024 < optimizer.message_bytes < 128 * 1024
    return optimizer, step


def zeroth_order(session: Any, net: nn.Module, worker: int) -> tuple[ZerothOrder, Step]:
    optimizer = ZerothOrder(net, session, 1e-3, samples=2)
    return optimizer, lambda: optimizer.step(lambda: loss_of(net, worker, optimizer.steps))


every_method = pytest.mark.parametrize("method", [demo, long_demo, zeroth_order])
HIDDEN = {long_demo: 400}


def flat(net: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in net.parameters()])


@every_method
def test_three_peers_and_a_swarm_of_three_agree_bit_for_bit(tmp_path: Path, method: Any) -> None:
    """With parameters that differ at first: all take the first one's."""

    def train(session: Any, worker: int) -> torch.Tensor:
        net = model(worker, HIDDEN.get(method, 60))
        optimizer, step = method(session, net, worker)
        while len(session.barrier()) < 3:
            """The others are still attaching."""
        while optimizer.steps < STEPS:
            step()
        return flat(net)

    with fleet(tmp_path) as run:
        run.form("abc")
        with callers(run, "abc") as trainers:
            found = trainers.each_own({n: lambda s, n=n: train(s, ord(n)) for n in "abc"})
        homes = {name: run.peers[name].home for name in "abc"}
    order = sorted("abc", key=lambda name: peer_id(homes[name]))
    swarm = Swarm(3).run(lambda session: train(session, ord(order[session.number])))
    for name, expected in zip(order, swarm, strict=True):
        assert torch.equal(found[name], expected)


@pytest.mark.parametrize(
    ("method", "seed"),
    [
        pytest.param(demo, 1, id="demo-begun-alike", marks=pytest.mark.slow),
        pytest.param(demo, 2, id="demo-begun-otherwise"),
        pytest.param(long_demo, 1, id="long_demo-begun-alike", marks=pytest.mark.slow),
        pytest.param(long_demo, 2, id="long_demo-begun-otherwise"),
        pytest.param(zeroth_order, 1, id="zeroth_order-begun-alike"),  # the two differ in what
        pytest.param(zeroth_order, 2, id="zeroth_order-begun-otherwise"),  # the joiner is given
    ],
)
def test_a_late_joiner_ends_with_the_same_parameters(
    tmp_path: Path, method: Any, seed: int
) -> None:
    """The others train until all three have been in five steps in a row."""

    def train(session: Session, worker: int, seed: int) -> tuple[torch.Tensor, int, int]:
        net = model(seed, HIDDEN.get(method, 60))
        optimizer, step = method(session, net, worker)
        together = 0
        while together < 5:
            missed = optimizer.metrics()["missed"]
            step()
            if len(optimizer.present) < 3 or optimizer.metrics()["missed"] > missed:
                together = 0
            together += len(optimizer.present) == 3
        begin = optimizer._log.begin if isinstance(optimizer, ZerothOrder) else -1
        return flat(net), optimizer.steps, begin

    with fleet(tmp_path) as run:
        run.form("ab")
        with callers(run, "ab") as trainers:
            going = [
                trainers.start(n, lambda n=n: train(trainers.sessions[n], ord(n), 1)) for n in "ab"
            ]
            run.join("c")
            run.sees("c", 3)
            late = trainers.add("c")
            going.append(trainers.start("c", lambda: train(late, ord("c"), seed)))
            found = [future.result(WAIT_S) for future in going]
    steps = {steps for _, steps, _ in found}
    assert len(steps) == 1
    assert steps.pop() > 5
    assert all(torch.equal(found[0][0], other) for other, _, _ in found[1:])
    if method is zeroth_order:  # by the log from the beginning, or with parameters as they are
        assert {begin == 0 for *_, begin in found} == {seed == 1}


def test_a_bad_member_of_a_population_goes_on_from_a_good_one(tmp_path: Path) -> None:
    rates = {"a": 0.05, "b": 1e-6, "c": 1e-6}

    def train(session: Session, name: str) -> tuple[torch.Tensor, torch.Tensor, float, int]:
        weight = nn.Parameter(torch.zeros(50, 30))
        inner = torch.optim.AdamW([weight], lr=rates[name], weight_decay=0.0)

        def score() -> float:  # b is a little worse than c
            return float((weight.detach() - 3).square().mean()) + (name == "b")

        bounds = {"lr": (1e-7, 1.0)}
        member = Population(nn.ParameterList([weight]), inner, session, score, 10, bounds)
        while len(session.barrier()) < 3:
            """The others are still attaching."""
        for _ in range(10):
            inner.zero_grad()
            (weight - 3).square().sum().backward()
            inner.step()
        moments = inner.state[weight]["exp_avg"]
        copied = member.metrics()["copied"]
        return weight.detach(), moments, float(inner.param_groups[0]["lr"]), int(copied)

    with fleet(tmp_path) as run:
        run.form("abc")
        with callers(run, "abc") as trainers:
            found = trainers.each_own({n: lambda s, n=n: train(s, n) for n in "abc"})
            assert run.agree("abc") >= 4
    good, bad, other = (found[name] for name in "abc")
    assert torch.equal(good[0], bad[0])
    assert torch.equal(good[1], bad[1])
    assert not torch.equal(good[0], other[0])
    assert bad[2] in (pytest.approx(0.04), pytest.approx(0.06))
    assert [good[3], bad[3], other[3]] == [0, 1, 0]
    assert (good[2], other[2]) == (0.05, 1e-6)
