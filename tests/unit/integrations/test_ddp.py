"""DDP's communication hook: gradients of all peers, whatever buckets DDP makes of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import atoll
from atoll.collectives.errors import CollectiveMissedError, ConfigError
from atoll.integrations import ddp
from atoll.integrations.ddp import average_gradients

STEPS = 3
pytestmark = pytest.mark.usefixtures("alone")


def net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))


def batch(worker: int, step: int) -> Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * worker + step))


def gradients(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def test_every_pass_ends_with_the_mean_in_any_order_of_buckets() -> None:
    """Two workers with buckets of other sizes, which DDP makes anew after the first step."""
    seen: list[int] = []

    def work(session: Any) -> list[Tensor]:
        inside = net()
        model = DistributedDataParallel(inside, bucket_cap_mb=1e-4 if session.number else 25)
        average_gradients(model, session)
        found = []
        for step in range(STEPS):
            inside.zero_grad()
            with model.no_sync():  # accumulates, and exchanges nothing
                model(batch(session.number, step)).square().mean().backward()
            seen.append(session.round)
            model(batch(session.number, step + STEPS)).square().mean().backward()
            found.append(gradients(inside))
        return found

    first, second = atoll.Swarm(2).run(work)
    assert len(set(seen)) == STEPS
    for step in range(STEPS):
        alone = []
        for worker in range(2):
            model = net()
            for each in (step, step + STEPS):
                model(batch(worker, each)).square().mean().backward()
            alone.append(gradients(model))
        assert torch.equal(first[step], second[step])
        assert torch.allclose(first[step], torch.stack(alone).mean(0), atol=1e-7)


def test_an_error_comes_out_of_backward_and_ddp_made_anew_goes_on() -> None:
    class Fails:
        calls = 0

        def all_reduce(self, tensor: Tensor, op: str = "mean", *, codec: str = "float32") -> Any:
            self.calls += 1
            if self.calls == 1:
                raise CollectiveMissedError("too late")
            return type("Reduced", (), {"value": 2 * tensor})

    inside, session = net(), Fails()
    model = DistributedDataParallel(inside, bucket_cap_mb=1e-4)
    average_gradients(model, session)
    with pytest.raises(CollectiveMissedError):
        model(batch(0, 0)).square().mean().backward()
    inside.zero_grad()
    model = DistributedDataParallel(inside, bucket_cap_mb=1e-4)
    average_gradients(model, session)
    model(batch(0, 0)).square().mean().backward()
    expected = net()
    expected(batch(0, 0)).square().mean().backward()
    assert torch.equal(gradients(inside), 2 * gradients(expected))


def test_a_group_of_several_ranks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = DistributedDataParallel(net())
    monkeypatch.setattr(ddp.dist, "get_world_size", lambda group: 2)
    with pytest.raises(ConfigError, match="has 2 ranks"):
        average_gradients(model, None)  # type: ignore[arg-type]
