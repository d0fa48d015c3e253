"""Small models under DiLoCo, for tests of the torch side."""

from __future__ import annotations

import torch
from torch import nn

from atoll.optim import DiLoCo


def linear(**kwargs) -> nn.Linear:
    return nn.Linear(3, 2, **kwargs)


def wrap(model, run, index=0, *, inner=None, sync_every=2, **kwargs) -> DiLoCo:
    inner = inner if inner is not None else torch.optim.SGD(model.parameters(), lr=0.1)
    return DiLoCo(model, inner, sync_every, run.sessions[index], codec="float32", **kwargs)


def step(model, inner, scale=1.0):
    inner.zero_grad()
    (scale * model(torch.ones(4, 3)).square().mean()).backward()
    inner.step()


def flat(model) -> torch.Tensor:
    """The model's parameters as its run lays them out, when names are in registration order."""
    named = sorted(model.named_parameters())
    return torch.cat([p.detach().float().flatten() for _, p in named if p.requires_grad])


def theta(run) -> torch.Tensor:
    return torch.from_numpy(run.theta.copy())
