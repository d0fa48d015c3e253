"""Models that the benchmark trains, and what of the training is the same in every row."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import _muon

from atoll.optim import ByteTransformer, muon_and_adamw

__all__ = [
    "BETAS",
    "LAST_RATE",
    "SIZES",
    "WARMUP_SHARE",
    "WEIGHT_DECAY",
    "Size",
    "Together",
    "adamw",
    "default_size",
    "muon",
    "rate_at",
    "set_rate",
    "warmup_steps",
]

BETAS, WEIGHT_DECAY = (0.9, 0.95), 0.1  # of AdamW, as in OpenDiLoCo (arXiv 2407.07852)
WARMUP_SHARE = 24  # one step in so many: 50 of 1,200
LAST_RATE = 0.05  # of the peak, where the cosine ends (scaling laws of DiLoCo, arXiv 2503.09799)


@dataclass(frozen=True)
class Size:
    """A model, each worker's batch, the grid of its inner learning rate (AdamW)."""

    name: str
    width: int
    depth: int
    heads: int
    context: int
    batch: int  # windows per worker and step
    rates: tuple[float, ...]
    final_windows: int = 0  # of the held-out text at the end of a row; 0: all of it
    clip: float = 0.0  # the norm of a step's gradients at most; 0: as it is
    text: str = "library"  # see texts.py

    def model(self, seed: int) -> ByteTransformer:
        """The same parameters for the same seed, whatever was drawn before."""
        before = torch.get_rng_state()
        torch.manual_seed(seed)
        made = ByteTransformer(
            width=self.width, depth=self.depth, heads=self.heads, context=self.context
        )
        torch.set_rng_state(before)
        return made.to(device())


# A worker's step takes 33 ms of CPU with 0.8M on a core whose neighbour is busy, 68 ms with
# 0.8M-128: hence 64 bytes of context, with which the whole table takes two hours on two cores.
SIZES = {
    size.name: size
    for size in (
        Size("0.8M", 128, 4, 4, 64, 8, (2e-3, 4e-3, 8e-3)),
        Size("0.8M-128", 128, 4, 4, 128, 8, (2e-3, 4e-3, 8e-3)),
        Size("0.1M", 64, 2, 4, 64, 8, (4e-3, 8e-3, 1.6e-2), clip=1.0),  # of grids
        Size("0.1M-few", 64, 2, 4, 64, 2, (4e-3, 8e-3, 1.6e-2), clip=1.0),  # of many workers
        Size("0.1M-manual", 64, 2, 4, 64, 8, (4e-3, 8e-3, 1.6e-2), clip=1.0, text="manual"),
        Size("0.8M-clip", 128, 4, 4, 64, 8, (2e-3, 4e-3, 8e-3), clip=1.0),
        Size("0.8M-manual", 128, 4, 4, 64, 8, (2e-3, 4e-3, 8e-3), clip=1.0, text="manual"),
        Size("3M", 256, 4, 4, 64, 8, (1e-3, 2e-3, 4e-3), clip=1.0),
        Size("quick", 128, 4, 4, 64, 8, (2e-3, 4e-3, 8e-3), final_windows=512),
        Size("tiny", 16, 1, 2, 16, 2, (4e-3, 8e-3), final_windows=64),  # of the tests
        Size("68k", 64, 1, 2, 32, 8, (8e-3, 1.6e-2, 3.2e-2), final_windows=2048),  # of robust rules
        Size("30M", 512, 10, 8, 256, 16, (5e-4, 1e-3, 2e-3)),
        Size("100M", 768, 14, 12, 512, 16, (2.5e-4, 5e-4, 1e-3)),
    )
}


def default_size() -> str:
    return "30M" if torch.cuda.is_available() else "0.8M"


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def adamw(model: nn.Module, lr: float) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr, betas=BETAS, weight_decay=WEIGHT_DECAY)


class Together(list[torch.optim.Optimizer]):
    """Optimizers that share a model: stepped as one, each at its own share of the first's rate."""

    def __init__(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        super().__init__(optimizers)
        rates = [each.param_groups[0]["lr"] for each in self]
        self.shares = [rate / rates[0] for rate in rates]

    def step(self) -> None:
        for each in self:
            each.step()

    def zero_grad(self) -> None:
        for each in self:
            each.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        return {str(number): each.state_dict() for number, each in enumerate(self)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for number, each in enumerate(self):
            each.load_state_dict(state[str(number)])


def _orthogonalized(
    grad: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float
) -> Tensor:
    """Do what torch's Muon does with a gradient, in float32: many processors multiply bfloat16 ten
    times as slowly, and the loss is the same (docs/log.md)."""
    a, b, c = coefficients
    wide = grad.T if grad.size(0) > grad.size(1) else grad
    wide = wide.float() / wide.float().norm().clamp(min=eps)
    for _ in range(steps):
        gram = wide @ wide.T
        wide = torch.addmm(wide, torch.addmm(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
    return wide.T if grad.size(0) > grad.size(1) else wide


def muon(model: nn.Module, lr: float) -> Together:
    if next(model.parameters()).device.type == "cpu":
        _muon._zeropower_via_newtonschulz = _orthogonalized
    return Together(muon_and_adamw(model, lr=lr, betas=BETAS, weight_decay=WEIGHT_DECAY))


def warmup_steps(steps: int) -> int:
    return max(1, steps // WARMUP_SHARE)


def rate_at(step: int, steps: int, peak: float) -> float:
    """The learning rate of step ``step``, which counts from 0: a linear rise, then a cosine."""
    rise = warmup_steps(steps)
    if step < rise:
        return peak * (step + 1) / rise
    done = (step - rise) / max(1, steps - rise)
    return peak * (LAST_RATE + (1 - LAST_RATE) * 0.5 * (1 + math.cos(math.pi * done)))


def set_rate(stepped: Any, rate: float) -> None:
    """Of one or several optimizers of torch, or of a method that has one ``lr``."""
    if isinstance(stepped, Together):
        for each, share in zip(stepped, stepped.shares, strict=True):
            set_rate(each, share * rate)
    elif isinstance(stepped, torch.optim.Optimizer):
        for group in stepped.param_groups:
            group["lr"] = rate
    else:
        stepped.lr = rate
