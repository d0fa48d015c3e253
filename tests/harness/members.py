"""Members of small populations."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from atoll.optim import Population

__all__ = ["BOUNDS", "Trainer", "same"]

BOUNDS = {"lr": (1e-3, 1.0)}


class Trainer:
    """One member: its weight is w, its loss (w - 3)^2, its score whatever ``scores`` says."""

    def __init__(self, session: Any, lr: float = 0.1, *, interval: int = 1, **options: Any) -> None:
        self.session = session
        self.weight = nn.Parameter(torch.full((2, 3), float(session.number)))
        self.inner = torch.optim.AdamW([self.weight], lr=lr, weight_decay=0.0)
        self.score: float | torch.Tensor = float(session.number)
        options = {"bounds": BOUNDS, **options}
        self.member = Population(
            nn.ParameterList([self.weight]),
            self.inner,
            session,
            lambda: self.score,
            interval,
            **options,
        )

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            self.inner.zero_grad()
            (self.weight - 3).square().sum().backward()
            self.inner.step()

    @property
    def lr(self) -> float:
        return float(self.inner.param_groups[0]["lr"])

    def state(self) -> dict[str, torch.Tensor]:
        return {"weight": self.weight.detach().clone()} | {
            name: value.clone() for name, value in self.inner.state[self.weight].items()
        }


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[k], second[k]) for k in first)
