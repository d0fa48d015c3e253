"""Wrong labels: a hook into the attackers' training, and no function of what peers send."""

from __future__ import annotations

from torch import Tensor

__all__ = ["flipped"]


def flipped(labels: Tensor, classes: int) -> Tensor:
    """``y -> classes - 1 - y``."""
    return classes - 1 - labels
