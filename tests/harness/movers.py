"""Trainers whose parameters all go by a number in each round, so that what counted can be read off.

Not for the coverage of a method: one local step, no momentum, an outer rate of 1, exact codecs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from atoll.optim import DiLoCo
from atoll.peer.client.session import Session

__all__ = ["Mover", "honest"]


def honest(name: str) -> float:
    """How far the parameters of a, b, c, ... go in each round: 1.0, 1.1, 1.2, ..."""
    return 1.0 + (ord(name) - ord("a")) / 10


class Mover:
    """On ``elements`` parameters, which begin at zero. ``terms`` are arguments of DiLoCo."""

    def __init__(self, session: Session, elements: int = 2000, **terms: Any) -> None:
        self.session = session
        self._model = nn.Linear(elements // 40, 40, bias=False)
        with torch.no_grad():
            self._model.weight.zero_()
        self._inner = torch.optim.SGD(self._model.parameters(), lr=1.0)
        exact = {"outer_lr": 1.0, "outer_momentum": 0.0, "codec": "float32"}
        self._outer = DiLoCo(self._model, self._inner, 1, session, **(exact | terms))

    def move(self, by: float) -> None:
        """One local step, and the round that it ends with."""
        self._model.weight.grad = torch.full_like(self._model.weight, -by)
        self._inner.step()

    @property
    def run(self) -> torch.Tensor:
        """The run's parameters."""
        with self._outer.outer_parameters():
            return self._model.weight.detach().clone()
