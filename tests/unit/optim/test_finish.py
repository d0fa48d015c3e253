"""The end of training: what no round has yet is handed in, and the run's parameters are taken."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness.every_method import EVERY_METHOD, SYNC_EVERY
from torch import nn

import atoll
from atoll.collectives.errors import ConfigError

ROUNDS = ("AsyncDiLoCo", "CO2", "DiLoCo", "LocalSGD", "SparseLoCo", "StreamingDiLoCo")


@pytest.mark.parametrize("left", [0, 1])
@pytest.mark.parametrize("method", ROUNDS)
def test_the_model_has_the_runs_parameters(
    method: str, left: int, capsys: pytest.CaptureFixture[str]
) -> None:
    swarm = atoll.Swarm(1 if method == "AsyncDiLoCo" else 2)

    def work(session: Any) -> tuple[torch.Tensor, float]:
        torch.manual_seed(4)
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        outer = EVERY_METHOD[method](model, inner, session)
        for step in range(2 * SYNC_EVERY + left):
            model(torch.full((2, 3), 1.0 + session.number + step)).square().mean().backward()
            inner.step()
            inner.zero_grad()
        outer.finish()
        names = sorted(dict(model.named_parameters()))
        flat = torch.cat([model.get_parameter(name).detach().flatten() for name in names])
        return flat, outer.metrics()["rounds"]

    found = swarm.run(work)
    theta = torch.from_numpy(swarm.state.theta)
    assert all(torch.equal(flat, theta) for flat, _ in found)
    if method in ("DiLoCo", "LocalSGD", "SparseLoCo", "AsyncDiLoCo"):
        assert all(rounds == 2 + left for _, rounds in found)
    assert "the end of training: " in capsys.readouterr().err


@pytest.mark.parametrize("method", sorted(EVERY_METHOD.keys() - set(ROUNDS)))
def test_others_end_as_well(method: str) -> None:
    def work(session: Any) -> None:
        model = nn.Linear(3, 2)
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        outer = EVERY_METHOD[method](model, inner, session)
        if method not in ("DeMo", "ZerothOrder"):
            model(torch.ones(2, 3)).square().mean().backward()
            inner.step()
        before = model.weight.detach().clone()
        outer.finish()
        assert torch.equal(model.weight, before)

    atoll.Swarm(1).run(work)


def test_it_is_no_call_for_the_middle_of_anything() -> None:
    def work(session: Any) -> None:
        model = nn.Linear(3, 2)
        outer = atoll.DiLoCo(model, torch.optim.SGD(model.parameters(), lr=0.1), 2, session)
        with outer.outer_parameters(), pytest.raises(ConfigError, match=r"finish\(\) inside"):
            outer.finish()

    atoll.Swarm(1).run(work)
