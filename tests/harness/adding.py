"""The simplest method whose peers gather bytes at every step."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from atoll.optim.every_step.every_step import EveryStepGather
from atoll.optim.model_io import ModelVector
from atoll.optim.run_spec import RunSpec

__all__ = ["Adding", "names"]


class Adding(EveryStepGather):
    """Adds up the numbers that peers give."""

    def __init__(self, session: Any, check_every: int = 100, size: int = 3) -> None:
        self.weight = nn.Parameter(torch.full((size,), float(session.number)))
        spec = RunSpec(method="demo", sync_every=1, codec="float32")
        vector, frozen = ModelVector(nn.ParameterList([self.weight])), "refuse"
        super().__init__(
            vector, (), session, spec, check_every=check_every, buffers=True, frozen=frozen
        )
        self.forgotten = 0

    def step(self) -> list[str]:
        """Who counted."""
        given = self._gather_step(bytes([self.steps]))
        assert all(data == bytes([self.steps]) for _, data in given)
        with torch.no_grad():
            self.weight += sum(1 + data[0] for _, data in given)
        self.steps += 1
        return [name for name, _ in given]

    def _forget(self) -> None:
        self.forgotten += 1


def names(*numbers: int) -> list[str]:
    return [f"worker-{number}" for number in numbers]
