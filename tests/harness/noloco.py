"""Replicas of a small model under NoLoCo, for tests in swarms."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from atoll.optim import NoLoCo

__all__ = ["STEPS", "H", "flat", "fresh", "local_step", "train"]

H, STEPS = 3, 6  # local steps in an outer step, and of those


def fresh(worker: int = 0, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Any]:
    torch.manual_seed(worker)
    net = nn.Sequential(nn.Linear(5, 60), nn.Tanh(), nn.Linear(60, 2)).to(dtype)
    return net, torch.optim.AdamW(net.parameters(), lr=0.01)


def local_step(net: nn.Module, inner: torch.optim.Optimizer, worker: int, step: int) -> None:
    random = torch.Generator().manual_seed(1000 * worker + step)
    x = torch.randn(8, 5, generator=random).to(next(net.parameters()).dtype)
    inner.zero_grad()
    (net(x) - x[:, :2].sin()).square().mean().backward()
    inner.step()


def flat(net: nn.Module) -> torch.Tensor:
    """In the order of the manifest: that of names."""
    return torch.cat([p.detach().float().flatten() for _, p in sorted(net.named_parameters())])


def train(session: Any, steps: int = STEPS * H, **options: Any) -> torch.Tensor:
    """The parameters of this replica, φ."""
    net, inner = fresh(session.number)
    with NoLoCo(net, inner, H, session, **{"codec": "float32"} | options) as outer:
        session.barrier()  # all have begun
        for step in range(steps):
            local_step(net, inner, session.number, step)
        with outer.outer_parameters():
            return flat(net)
