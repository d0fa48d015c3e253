"""Read what a GradScaler says of a step, for methods that exchange gradients before it.

A GradScaler skips the step of a trainer whose gradients have overflowed, and then the others would
wait for it. Optimizers that handle scales themselves, as fused ones do, are always stepped: they
find ``grad_scale`` and ``found_inf`` on themselves (torch/amp/grad_scaler.py). So here all inner
optimizers are marked as such, and both values are taken from them before they look.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch.optim import Optimizer

from atoll.collectives.codecs import F32

_FLAG = "_step_supports_amp_scaling"


@dataclass(frozen=True, slots=True)
class Scale:
    """Hold what a GradScaler says of one step.

    ``scaled``: whether there is a scaler. ``scale``: 1 if there is none, or if it has divided the
    gradients already (``scaler.unscale_``). ``overflowed``: whether it has found Inf or NaN.
    """

    scaled: bool = False
    scale: float = 1.0
    overflowed: bool = False

    @property
    def factor(self) -> float:
        """Return 1 / ``scale``, by which gradients are multiplied.

        As in the scaler it is the reciprocal in float64, rounded to float32.
        """
        return float(np.float32(1 / self.scale))

    def undo(self, gradient: F32) -> bool:
        """Divide float32[n] by the scale, in place; return whether the result can be used."""
        if not self.scaled:
            return True  # without a scaler nobody expects an overflow: an exchange refuses it
        np.multiply(gradient, np.float32(self.factor), out=gradient)
        return not self.overflowed and bool(np.isfinite(gradient).all())


class GradScaling:
    """Take what a GradScaler leaves on ``inners``, before they see it, until ``close``."""

    def __init__(self, inners: Sequence[Optimizer]) -> None:
        self._before = [(inner, getattr(inner, _FLAG, None)) for inner in inners]
        for inner in inners:
            setattr(inner, _FLAG, True)

    def take(self, inner: Optimizer) -> Scale:
        """Return what the scaler says of the step that begins, and take it from the optimizer.

        Call it at the beginning of a step of ``inner``, which then is an ordinary one.
        """
        found_inf, scale = (getattr(inner, name, None) for name in ("found_inf", "grad_scale"))
        if found_inf is None:
            return Scale()
        # The scaler deletes both afterwards, so they have to stay.
        inner.found_inf = inner.grad_scale = None  # type: ignore[attr-defined]
        return Scale(True, 1.0 if scale is None else float(scale), float(found_inf) > 0)

    def close(self) -> None:
        for inner, before in self._before:
            if before is None:
                delattr(inner, _FLAG)
            else:
                setattr(inner, _FLAG, before)
        self._before = []
