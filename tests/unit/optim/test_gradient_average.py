"""Data-parallel training through a run, and what all methods of every step have in common."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from atoll.collectives.errors import IncompatibleRunError
from atoll.optim import GradientAverage, Swarm

STEPS, WORKERS = 5, 3


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def loss_of(net: nn.Module, worker: int, step: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(1000 * worker + step)
    x = torch.randn(5, 6, generator=random)
    return (net(x) - x[:, :3].sin()).square().mean()


def flat(net: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in net.parameters()])


def train(session: Any, optimizer: type[torch.optim.Optimizer], **options: Any) -> torch.Tensor:
    torch.manual_seed(session.number)  # all but the first take over another's parameters
    net = model()
    inner = optimizer(net.parameters(), lr=0.05)
    with GradientAverage(net, inner, session, **options) as outer:
        for step in range(STEPS):
            inner.zero_grad()
            loss_of(net, session.number, step).backward()
            inner.step()
        assert outer.metrics() == {"steps": STEPS, "missed": 0}
    return flat(net)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_it_is_training_on_the_mean_gradient(optimizer: type[torch.optim.Optimizer]) -> None:
    """All begin with the parameters of the first, whose first gradient counts alone."""
    found = Swarm(WORKERS).run(lambda session: train(session, optimizer))
    assert all(torch.equal(found[0], other) for other in found[1:])
    torch.manual_seed(0)
    net = model()
    inner = optimizer(net.parameters(), lr=0.05)
    for step in range(STEPS):
        workers = range(WORKERS if step else 1)
        inner.zero_grad()
        (sum(loss_of(net, worker, step) for worker in workers) / len(workers)).backward()
        inner.step()
    torch.testing.assert_close(found[0], flat(net), rtol=1e-4, atol=1e-5)


def test_codecs_lose_what_they_lose_alike() -> None:
    exact = Swarm(WORKERS).run(lambda session: train(session, torch.optim.SGD))
    found = Swarm(WORKERS).run(lambda session: train(session, torch.optim.SGD, codec="int8"))
    assert all(torch.equal(found[0], other) for other in found[1:])
    assert 0 < (found[0] - exact[0]).norm() < 0.01 * exact[0].norm()


def test_other_numbers_or_another_model_are_refused() -> None:
    def other_codec(session: Any) -> None:
        train(session, torch.optim.SGD, codec=["float32", "int8"][session.number])

    with pytest.raises(IncompatibleRunError, match="codec"):
        Swarm(2).run(other_codec)

    def other_model(session: Any) -> None:
        net = nn.Linear(6, 2) if session.number else nn.Linear(13, 1)
        inner = torch.optim.SGD(net.parameters(), lr=0.1)
        GradientAverage(net, inner, session)
        inner.step()

    with pytest.raises(IncompatibleRunError, match="names, shapes"):
        Swarm(2).run(other_model)
