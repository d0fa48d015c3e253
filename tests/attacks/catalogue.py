"""The attacks by name. A name is in results that were measured: never change what it means."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

from attacks.base import Attack
from attacks.crude import Direction, FreeRider, Gaussian, NotFinite, Scaling, SignFlip, Spike
from attacks.hidden import ALittleIsEnough, Drift, InnerProduct, LabelFlip, Mimic, Stale
from attacks.search import best_alie, best_ipm

__all__ = ["ATTACKS"]

# Each makes a new one, for one run.
ATTACKS: Final[Mapping[str, Callable[[], Attack]]] = {
    "sign-flip-1": partial(SignFlip, 1.0),
    "sign-flip-10": partial(SignFlip, 10.0),
    "sign-flip-1000": partial(SignFlip, 1000.0),
    "scaling-100": partial(Scaling, 100.0),
    "gaussian-10": partial(Gaussian, 10.0),
    "direction-1000": Direction,
    "alie": ALittleIsEnough,
    "alie-1.5": partial(ALittleIsEnough, 1.5),
    "ipm-0.1": partial(InnerProduct, 0.1),
    "ipm-0.5": partial(InnerProduct, 0.5),
    "ipm-3": partial(InnerProduct, 3.0),  # turns the mean around where 3 of 10 attack
    "mimic": Mimic,
    "label-flip": LabelFlip,
    "stale-10": partial(Stale, 10),
    "free-rider": FreeRider,
    "nan": partial(NotFinite, math.nan),
    "infinity": partial(NotFinite, math.inf),
    "coordinate-spike": Spike,
    "shard-spike": partial(Spike, whole_shard=True),
    "drift-0.5": partial(Drift, 0.5),
    "opt-alie": best_alie,
    "opt-ipm": best_ipm,
}
