"""Train one PyTorch model on machines joined by ordinary internet links.

    import atoll

    outer = atoll.DiLoCo(model, optimizer, sync_every=100, peer=atoll.attach())

The rooms are ``atoll.peer`` (the daemon and its client), ``atoll.collectives`` (all-reduce and
codecs) and ``atoll.optim`` (methods, which also are here). Those need torch, so each is imported
when it is first asked for: ``import atoll`` does not load torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from atoll.collectives.errors import AtollError
from atoll.collectives.version import VERSION as __version__
from atoll.peer.client.session import Reduced, Session, connect
from atoll.peer.client.trainer_channel import Outcome

if TYPE_CHECKING:
    from atoll.optim import (
        CO2,
        AsyncDiLoCo,
        DeMo,
        DiLoCo,
        GradientAverage,
        LocalSGD,
        NoLoCo,
        Population,
        RankSession,
        SparseLoCo,
        StreamingDiLoCo,
        Swarm,
        ZerothOrder,
        attach,
    )

__all__ = [
    "CO2",
    "AsyncDiLoCo",
    "AtollError",
    "DeMo",
    "DiLoCo",
    "GradientAverage",
    "LocalSGD",
    "NoLoCo",
    "Outcome",
    "Population",
    "RankSession",
    "Reduced",
    "Session",
    "SparseLoCo",
    "StreamingDiLoCo",
    "Swarm",
    "ZerothOrder",
    "__version__",
    "attach",
    "connect",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module("atoll.optim"), name)
    globals()[name] = value  # so that the next access does not come here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
