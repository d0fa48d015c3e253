"""Deal the samples of a data set to the trainers of a run (needs torch).

shards = atoll.data.Shards(len(dataset), outer, epochs=3)
"""

from __future__ import annotations

from atoll.optim.shards import Shards

__all__ = ["Shards"]
