"""Small, tested versions of what other systems do; nothing else here imports them.

Each says in its docstring when it helps, or how it lost on the convergence benchmark, where it was
measured there. ``CO2``, ``EF21`` and ``EControl`` were in ``atoll.optim`` before and have lost. All
may change or go in any version.
"""

from __future__ import annotations

from atoll.optim.experimental.co2 import CO2, GapAware
from atoll.optim.experimental.count_sketch import CountSketch
from atoll.optim.experimental.ef21 import EF21, EControl
from atoll.optim.experimental.evolution import EvolutionStrategy
from atoll.optim.experimental.gradient_coding import CodedGradients
from atoll.optim.experimental.hd_pissa import HDPiSSA
from atoll.optim.experimental.majority_lion import MajorityLion
from atoll.optim.experimental.masha import Masha
from atoll.optim.experimental.private import PrivateDiLoCo

__all__ = [
    "CO2",
    "EF21",
    "CodedGradients",
    "CountSketch",
    "EControl",
    "EvolutionStrategy",
    "GapAware",
    "HDPiSSA",
    "MajorityLion",
    "Masha",
    "PrivateDiLoCo",
]
