"""The outer optimizer of a run: pure arithmetic for the daemon, hooks for the training loop.

``outer``, ``manifest`` and ``spec`` are pure and are what a daemon imports. The names below need
torch, so each is imported when it is first asked for: ``import atoll.optim`` does not load torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from atoll.optim.byte_lm import ByteTransformer, TextBatches, heldout_loss
    from atoll.optim.compressors import (
        DGC,
        EF21,
        QSDP,
        EControl,
        LayerBits,
        LGreCo,
        PowerSGD,
        TernGrad,
    )
    from atoll.optim.diloco import DiLoCo
    from atoll.optim.gradient_average import GradientAverage
    from atoll.optim.local_sgd import QSR, LocalSGD
    from atoll.optim.swarm import Swarm

__all__ = [
    "DGC",
    "EF21",
    "QSDP",
    "QSR",
    "ByteTransformer",
    "DiLoCo",
    "EControl",
    "GradientAverage",
    "LGreCo",
    "LayerBits",
    "LocalSGD",
    "PowerSGD",
    "Swarm",
    "TernGrad",
    "TextBatches",
    "heldout_loss",
]

_HOME = {
    **dict.fromkeys(
        ("DGC", "EF21", "QSDP", "EControl", "LGreCo", "LayerBits", "PowerSGD", "TernGrad"),
        "atoll.optim.compressors",
    ),
    "QSR": "atoll.optim.local_sgd",
    "ByteTransformer": "atoll.optim.byte_lm",
    "GradientAverage": "atoll.optim.gradient_average",
    "LocalSGD": "atoll.optim.local_sgd",
    "DiLoCo": "atoll.optim.diloco",
    "Swarm": "atoll.optim.swarm",
    "TextBatches": "atoll.optim.byte_lm",
    "heldout_loss": "atoll.optim.byte_lm",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value  # so that the next access does not come here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
