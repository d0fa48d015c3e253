"""Make the gradients of all trainers one in ``GradientAverage``, other than in full.

Each compressor is a small class with pure arithmetic on numpy vectors; base.py says what they have
in common.
"""

from __future__ import annotations

from atoll.optim.compressors.base import Compressor, Dense
from atoll.optim.compressors.dgc import DGC
from atoll.optim.compressors.error_feedback import ErrorFeedback
from atoll.optim.compressors.l_greco import LGreCo
from atoll.optim.compressors.layer_bits import LayerBits
from atoll.optim.compressors.power_sgd import PowerSGD
from atoll.optim.compressors.unbiased import QSDP, TernGrad

__all__ = [
    "DGC",
    "QSDP",
    "Compressor",
    "Dense",
    "ErrorFeedback",
    "LGreCo",
    "LayerBits",
    "PowerSGD",
    "TernGrad",
]
