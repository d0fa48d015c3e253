"""Reduce vectors among peers: codecs, schedules, and the chunked engine that runs them.

This room needs numpy only. It knows nothing of sockets, membership or training.
"""

from __future__ import annotations

from atoll.collectives.chunks import ChunkGrid, EncodedLayout, encoded_layout, grid_for
from atoll.collectives.codecs import Codec, Contract, get_codec
from atoll.collectives.engine.parts import Contribution
from atoll.collectives.engine.reduction import Reduction
from atoll.collectives.engine.result import RoundResult
from atoll.collectives.engine.send import Outlet
from atoll.collectives.schedule.plan import ReducePlan, butterfly_plan, pairwise_plan, shared_plan
from atoll.collectives.schedule.schedule import Frame, FrameKind

__all__ = [
    "ChunkGrid",
    "Codec",
    "Contract",
    "Contribution",
    "EncodedLayout",
    "Frame",
    "FrameKind",
    "Outlet",
    "ReducePlan",
    "Reduction",
    "RoundResult",
    "butterfly_plan",
    "encoded_layout",
    "get_codec",
    "grid_for",
    "pairwise_plan",
    "shared_plan",
]
