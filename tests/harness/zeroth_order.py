"""Small models under ZerothOrder."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from atoll.optim import ZerothOrder

__all__ = ["OPTIONS", "WORKERS", "all_equal", "flat", "loss_of", "model", "train"]

WORKERS = 3
OPTIONS: dict[str, Any] = {"samples": 2, "epsilon": 1e-2, "seed": 5}


def model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 2))


def loss_of(net: nn.Module, worker: int, step: int) -> Callable[[], torch.Tensor]:
    x = torch.randn(16, 5, generator=torch.Generator().manual_seed(1000 * worker + step))
    return lambda: (net(x) - x[:, :2].sin()).square().mean()


def flat(net: nn.Module) -> torch.Tensor:
    """In the order of the run: by name."""
    return torch.cat([p.detach().flatten() for _, p in sorted(net.named_parameters())])


def train(
    session: Any, steps: int = 6, seed: int = 0, **options: Any
) -> tuple[torch.Tensor, ZerothOrder]:
    net = model(seed)
    with ZerothOrder(net, session, 0.02, **{**OPTIONS, **options}) as optimizer:
        while optimizer.steps < steps:
            optimizer.step(loss_of(net, session.number, optimizer.steps))
    return flat(net), optimizer


def all_equal(found: list[tuple[torch.Tensor, ZerothOrder]]) -> bool:
    chains = {optimizer._log.chain for _, optimizer in found}
    return len(chains) == 1 and all(torch.equal(found[0][0], other) for other, _ in found[1:])
