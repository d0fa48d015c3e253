"""Training loops of every kind, whose steps are kept and taken again."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from harness.replaying import Loop, adamw, text_model

__all__ = ["LOOPS", "SIZES", "Make", "noisy", "plain", "skipping"]

SIZES = {"width": 16, "depth": 1, "heads": 2}
Make = Callable[[], Loop]


def plain() -> Loop:
    model = text_model(**SIZES)
    return Loop(model, adamw(model))


def accumulated() -> Loop:
    loop = plain()
    loop.accumulate = 3
    return loop


def scheduled() -> Loop:
    loop = plain()
    loop.scheduler = torch.optim.lr_scheduler.LambdaLR(loop.inner, lambda n: 1 / (1 + n / 5))
    return loop


def skipping() -> Loop:
    """Scales that begin too large and grow again, so that steps are skipped all the time."""
    loop = plain()
    loop.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**126, growth_interval=2)
    return loop


def skipping_accumulated() -> Loop:
    loop = skipping()
    loop.accumulate = 2
    return loop


def normalized() -> Loop:
    """With buffers that every forward pass changes."""

    class Normalized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside = text_model(**SIZES)
            self.norm = nn.BatchNorm1d(256)

        def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            logits = self.norm(self.inside(x).flatten(0, 1))
            return nn.functional.cross_entropy(logits, y.flatten())

    model = Normalized()
    return Loop(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inside = text_model(**SIZES)

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        logits = nn.functional.dropout(self.inside(x), 0.3)
        return nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())


def noisy() -> Loop:
    model = Noisy()
    return Loop(model, adamw(model))


LOOPS: dict[str, Make] = {
    "plain": plain,
    "accumulated": accumulated,
    "scheduled": scheduled,
    "skipping": skipping,
    "skipping and accumulated": skipping_accumulated,
    "normalized": normalized,
}
