"""DDP's communication hook: gradients of all peers, whatever buckets DDP makes of them."""

from __future__ import annotations

import subprocess
import sys
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


STATIC = """
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from atoll.integrations.ddp import average_gradients

class Twice:
    def all_reduce(self, tensor, op="mean", *, codec="float32"):
        return type("Reduced", (), {"value": 2 * tensor})

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fine, self.coarse = nn.Linear(3, 4), nn.Linear(3, 4).bfloat16()

    def forward(self, x):
        return self.fine(x) + self.coarse(x.bfloat16()).float()

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
inside = Net()
inside.coarse.weight.requires_grad_(False)  # which DDP leaves out
model = DistributedDataParallel(inside, static_graph=True)
average_gradients(model, Twice())
for _ in range(3):
    inside.zero_grad()
    model(torch.ones(2, 3)).sum().backward()
    print([int(p.grad.sum()) for p in (inside.fine.bias, inside.coarse.bias)], flush=True)
"""


def test_a_static_graph_of_two_dtypes_goes_on() -> None:
    """Show that it ends: none of the buckets of its first pass is the last one."""
    ended = subprocess.run(
        [sys.executable, "-c", STATIC], capture_output=True, text=True, timeout=100, check=True
    )
    assert ended.stdout.splitlines() == 3 * ["[16, 16]"]


def test_a_model_that_skips_what_is_unused_is_refused() -> None:
    model = DistributedDataParallel(net())
    model.skip_all_reduce_unused_params = True
    with pytest.raises(ConfigError, match="skips parameters without a gradient"):
        average_gradients(model, None)  # type: ignore[arg-type]


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
