"""Hold routes as arrays, for what the cost model and the choice ask about a collective's trees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from atoll.collectives.planning.network_model import F64
from atoll.collectives.schedule.routes import ROOT, Routes

I64 = NDArray[np.int64]


@dataclass(frozen=True)
class TreeArrays:
    """Hold one tree for each root, as int64[root, participant].

    ``parents``: ROOT for the root itself. ``depth``: steps to the root. ``order[r]``: the
    participants by depth in r's tree, r first.
    """

    parents: I64
    depth: I64
    order: I64

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]]) -> TreeArrays:
        parents = np.array(rows, dtype=np.int64)
        n = len(parents)
        hops = np.where(parents == ROOT, np.arange(n)[:, None], parents)
        depth = (parents != ROOT).astype(np.int64)
        # Each turn doubles how far up ``hops`` points; ``depth`` counts the steps to there.
        for _ in range(max(1, n - 1).bit_length()):
            depth = depth + np.take_along_axis(depth, hops, axis=1)
            hops = np.take_along_axis(hops, hops, axis=1)
        return cls(parents, depth, np.argsort(depth, axis=1, kind="stable"))

    @cached_property
    def heights(self) -> I64:
        """Return the steps from the farthest participant below p, int64[root, p]."""
        found = np.zeros_like(self.parents)
        roots = np.arange(len(found))
        for place in range(len(found) - 1, 0, -1):
            here = self.order[:, place]
            above = self.parents[roots, here]
            found[roots, above] = np.maximum(found[roots, above], found[roots, here] + 1)
        return found


class Shape:
    """Hold the two trees of each owner."""

    def __init__(self, routes: Routes) -> None:
        self.kind = routes.kind
        self.count = len(routes.up)
        self.up = TreeArrays.of(routes.up)
        self.down = self.up if routes.down is routes.up else TreeArrays.of(routes.down)

    @property
    def depth(self) -> int:
        """Return the steps that a part takes to its owner, at most."""
        return int(self.up.depth.max())

    @property
    def noise(self) -> float:
        """Return by how much the error of the mean exceeds that of one quantization, as a factor.

        For independent vectors. Each sum that is sent is quantized once, so a sum of s vectors adds
        ``s / n``, and the sizes of all sums add up to the depths of all participants; the result
        adds 1. The worst over all owners: (n+1)/2 for a ring, 2 - 1/n for a butterfly.
        """
        return float(self.up.depth.sum(axis=1).max()) / self.count + 1

    def flows(self, shards: Sequence[int]) -> F64:
        """Return the chunks that cross between two participants, float64[from, to].

        Root r owns ``shards[r]`` chunks; parts and results are counted.
        """
        found = np.zeros((self.count, self.count))
        chunks = np.asarray(shards, dtype=np.float64)
        for trees, climbing in ((self.up, True), (self.down, False)):
            roots, peers = np.nonzero(trees.parents != ROOT)
            above = trees.parents[roots, peers]
            np.add.at(found, (peers, above) if climbing else (above, peers), chunks[roots])
        return found
