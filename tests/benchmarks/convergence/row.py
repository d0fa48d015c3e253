"""A line of the table and a row of it, and their names, which are stable: results are kept by them.

``0.8M/warm-1200/4x/diloco/H30/lr0.004/seed0`` is a model of 0.8 million parameters, 1,200 steps of
which the first quarter is the warm start, four workers, the method, the local steps of a round, the
peak of the inner learning rate, and the seed. A line is the same without the last two.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = ["SCRATCH", "WARM", "WARM_SHARE", "Line", "Row"]

SCRATCH, WARM = "scratch", "warm"
WARM_SHARE = 4  # of the steps one in so many is the warm start, as in the papers
NAME = re.compile(
    r"(?P<size>[^/]+)/(?P<start>scratch|warm)-(?P<steps>\d+)/(?P<workers>\d+)x/(?P<method>[^/]+)"
    r"/H(?P<sync_every>\d+)/lr(?P<lr>[^/]+)/seed(?P<seed>\d+)"
)


@dataclass(frozen=True)
class Line:
    """What rows of all seeds and learning rates have in common."""

    size: str
    start: str
    steps: int  # of each worker, with those of the warm start
    workers: int
    method: str
    sync_every: int  # 1 where something is exchanged at every step, or nothing at all

    @property
    def first_step(self) -> int:
        """Steps of the warm start, which are not the method's."""
        return self.steps // WARM_SHARE if self.start == WARM else 0

    @property
    def name(self) -> str:
        start = f"{self.start}-{self.steps}"
        return f"{self.size}/{start}/{self.workers}x/{self.method}/H{self.sync_every}"


@dataclass(frozen=True)
class Row:
    line: Line
    lr: float
    seed: int

    @property
    def name(self) -> str:
        return f"{self.line.name}/lr{self.lr:g}/seed{self.seed}"

    @classmethod
    def of(cls, name: str) -> Row:
        """Inverse of ``name``. ValueError."""
        found = NAME.fullmatch(name)
        if found is None:
            raise ValueError(f"not the name of a row: {name[:80]!r}")
        line = Line(
            found["size"],
            found["start"],
            int(found["steps"]),
            int(found["workers"]),
            found["method"],
            int(found["sync_every"]),
        )
        return cls(line, float(found["lr"]), int(found["seed"]))
