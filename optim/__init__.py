"""Provide the outer optimizer of a run: arithmetic for the daemon, hooks for the training loop.

``outer_step``, ``manifest`` and ``run_spec`` are pure and are what a daemon imports. The names
below need torch, so each is imported when it is first asked for: ``import atoll.optim`` does not
load torch. Methods are in ``methods`` and ``every_step``; ``method`` is the base of all of them,
``options`` describes what they have in common. Those of the small model are the demo's.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from atoll.optim.compressors import (
        DGC,
        QSDP,
        ErrorFeedback,
        LayerBits,
        LGreCo,
        PowerSGD,
        TernGrad,
    )
    from atoll.optim.every_step.decoupled_momentum import DeMo
    from atoll.optim.every_step.gradient_average import GradientAverage
    from atoll.optim.every_step.zeroth_order import ZerothOrder
    from atoll.optim.methods.async_diloco import AsyncDiLoCo
    from atoll.optim.methods.diloco import DiLoCo
    from atoll.optim.methods.local_sgd import QSR, LocalSGD
    from atoll.optim.methods.noloco import NoLoCo
    from atoll.optim.methods.population import Population
    from atoll.optim.methods.sparse_loco import SparseLoCo
    from atoll.optim.methods.streaming import StreamingDiLoCo
    from atoll.optim.muon import muon_and_adamw
    from atoll.optim.ranks import RankSession, attach
    from atoll.optim.rda import rda, rda_all_reduce
    from atoll.optim.replay.recorder import Replay
    from atoll.optim.swarm import Swarm
    from atoll.peer.demo.byte_lm import ByteTransformer, TextBatches, heldout_loss

__all__ = [
    "DGC",
    "QSDP",
    "QSR",
    "AsyncDiLoCo",
    "ByteTransformer",
    "DeMo",
    "DiLoCo",
    "ErrorFeedback",
    "GradientAverage",
    "LGreCo",
    "LayerBits",
    "LocalSGD",
    "NoLoCo",
    "Population",
    "PowerSGD",
    "RankSession",
    "Replay",
    "SparseLoCo",
    "StreamingDiLoCo",
    "Swarm",
    "TernGrad",
    "TextBatches",
    "ZerothOrder",
    "attach",
    "heldout_loss",
    "muon_and_adamw",
    "rda",
    "rda_all_reduce",
]

_HOME = {
    "AsyncDiLoCo": "atoll.optim.methods.async_diloco",
    **dict.fromkeys(
        ("DGC", "QSDP", "ErrorFeedback", "LGreCo", "LayerBits", "PowerSGD", "TernGrad"),
        "atoll.optim.compressors",
    ),
    "QSR": "atoll.optim.methods.local_sgd",
    "ByteTransformer": "atoll.peer.demo.byte_lm",
    "GradientAverage": "atoll.optim.every_step.gradient_average",
    "LocalSGD": "atoll.optim.methods.local_sgd",
    "NoLoCo": "atoll.optim.methods.noloco",
    "DeMo": "atoll.optim.every_step.decoupled_momentum",
    "DiLoCo": "atoll.optim.methods.diloco",
    "RankSession": "atoll.optim.ranks",
    "attach": "atoll.optim.ranks",
    "Replay": "atoll.optim.replay.recorder",
    "StreamingDiLoCo": "atoll.optim.methods.streaming",
    "Population": "atoll.optim.methods.population",
    "SparseLoCo": "atoll.optim.methods.sparse_loco",
    "Swarm": "atoll.optim.swarm",
    "TextBatches": "atoll.peer.demo.byte_lm",
    "ZerothOrder": "atoll.optim.every_step.zeroth_order",
    "heldout_loss": "atoll.peer.demo.byte_lm",
    "muon_and_adamw": "atoll.optim.muon",
    "rda": "atoll.optim.rda",
    "rda_all_reduce": "atoll.optim.rda",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value  # so that the next access does not come here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
