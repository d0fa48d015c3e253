"""Data-parallel training: the mean of all peers' gradients at every step."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from atoll.collectives.codecs import F32
from atoll.optim.every_step import EveryStep
from atoll.optim.method import Inner
from atoll.optim.sessions import OperationsSession
from atoll.optim.spec import RunSpec

__all__ = ["GradientAverage"]


class GradientAverage(EveryStep):
    """Before each step of ``inner`` the gradients become the mean over all peers.

    The baseline, and a method for fast networks: bytes and waiting are those of every step. All
    peers hold the same parameters and the same inner state after each step.
    """

    def __init__(
        self,
        model: nn.Module,
        inner: Inner,
        peer: OperationsSession,
        *,
        codec: str = "float32",
        round_deadline_s: float = 600.0,
    ) -> None:
        inners = (inner,) if isinstance(inner, Optimizer) else tuple(inner)
        spec = RunSpec(
            method="gradient_average",
            sync_every=1,
            codec=codec,
            round_deadline_s=round_deadline_s,
        )
        super().__init__(model, inners, peer, spec)
        self._flat: F32 = np.empty(self.manifest.elements, np.float32)
        hook = torch.compiler.disable(self._before_step)  # type: ignore[no-untyped-call]
        self._hook = inners[0].register_step_pre_hook(hook)

    def _before_step(self, _optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        self._vector.write_gradients(self._flat)
        found = self._exchange(self._flat, self.spec.codec)
        np.divide(found.total, np.float32(found.count), out=found.total)
        self._vector.read_gradients(found.total)
        self.steps += 1

    def _forget(self) -> None:
        """Nothing is kept from one step to the next."""

    def close(self) -> None:
        self._hook.remove()
        super().close()
