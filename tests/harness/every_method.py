"""Each method of training with the least that it takes, for what must hold for all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import atoll
from atoll.optim.experimental import CO2

__all__ = ["EVERY_METHOD", "WITH_OPTIMIZER"]

SYNC_EVERY = 2


def with_rounds(kind: Any, **numbers: Any) -> Callable[..., Any]:
    def make(model: Any, inner: Any, peer: Any, **options: Any) -> Any:
        return kind(model, inner, SYNC_EVERY, peer, **numbers, **options)

    return make


def population(model: Any, inner: Any, peer: Any, **options: Any) -> Any:
    bounds = {"lr": (1e-6, 1.0)}
    return atoll.Population(model, inner, peer, lambda: 0.0, SYNC_EVERY, bounds, **options)


def decoupled(model: Any, _inner: Any, peer: Any, **options: Any) -> Any:
    return atoll.DeMo(model, peer, **options)


def zeroth_order(model: Any, _inner: Any, peer: Any, **options: Any) -> Any:
    return atoll.ZerothOrder(model, peer, lr=0.1, samples=1, **options)


# Called with a model, its optimizer, a session and options.
WITH_OPTIMIZER: dict[str, Callable[..., Any]] = {
    "DiLoCo": with_rounds(atoll.DiLoCo),
    "LocalSGD": with_rounds(atoll.LocalSGD),
    "CO2": with_rounds(CO2),
    "StreamingDiLoCo": with_rounds(atoll.StreamingDiLoCo),
    "SparseLoCo": with_rounds(atoll.SparseLoCo),
    "AsyncDiLoCo": with_rounds(atoll.AsyncDiLoCo, outer_delay=1),
    "NoLoCo": with_rounds(atoll.NoLoCo),
    "GradientAverage": atoll.GradientAverage,
    "Population": population,
}
EVERY_METHOD = WITH_OPTIMIZER | {"DeMo": decoupled, "ZerothOrder": zeroth_order}
