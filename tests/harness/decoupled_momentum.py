"""Small models under DeMo."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from atoll.optim import DeMo

__all__ = ["WORKERS", "backward", "batch", "flat", "model", "train"]

WORKERS = 3


def model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(12, 64), nn.Tanh(), nn.Linear(64, 3))


def batch(worker: int, step: int) -> torch.Tensor:
    return torch.randn(16, 12, generator=torch.Generator().manual_seed(1000 * worker + step))


def backward(net: nn.Module, worker: int, step: int) -> float:
    x = batch(worker, step)
    loss = (net(x) - x[:, :3].sin()).square().mean()
    loss.backward()
    return float(loss.detach())


def flat(net: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in net.parameters()])


def train(session: Any, steps: int = 8, seed: int | None = None, **options: Any) -> torch.Tensor:
    net = model(session.number if seed is None else seed)
    with DeMo(net, session, **{"lr": 1e-3, "decay": 0.9, **options}) as optimizer:
        while optimizer.steps < steps:
            optimizer.zero_grad()
            backward(net, session.number, optimizer.steps)
            optimizer.step()
    return flat(net)
