"""Find the loss that was measured for a method, and say what it rests on: a table, no opinion.

The table is losses.json: ``make bench-convergence`` writes it with the one in docs/choosing.md.
Losses alone cannot be weighed against speed, so they are turned into samples. One worker sees a
quarter of what four see, and its loss is so much higher; taken as a power law between these two
points, that is how much loss each sample is worth, and a method whose loss is higher is as good as
data-parallel training with fewer samples::

    loss ~ samples ** -e,   e = log(1 + one worker's loss above) / log(workers)
    worth of a sample = (1 + the method's loss above) ** (-1 / e)

With that a method that is no better than one worker is worth 1 / workers, whatever its speed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from atoll.collectives.errors import ConfigError

ONE_WORKER: Final = "one-worker"
WARM: Final = "warm"  # after a warm start: as docs/choosing.md says to begin


@dataclass(frozen=True, slots=True)
class DocumentedLoss:
    """Hold a row: the loss ``above`` data-parallel, a fraction, and its ``error`` over seeds."""

    method: str
    label: str
    sync_every: int
    start: str
    steps: int
    above: float
    error: float | None  # None of one seed
    seeds: int
    limits: str


@dataclass(frozen=True, slots=True)
class LossTable:
    """Hold all rows of one model, with so many workers."""

    size: str
    workers: int
    rows: tuple[DocumentedLoss, ...]

    def nearest(self, method: str, sync_every: int) -> DocumentedLoss | None:
        """Return the row of a method whose number of local steps is nearest, by their ratio.

        Those after a warm start, and None for a method that was not measured.
        """
        found = [row for row in self.rows if (row.method, row.start) == (method, WARM)]
        return min(found, key=lambda row: abs(math.log(row.sync_every / sync_every)), default=None)

    @property
    def exponent(self) -> float:
        """Return by which power of the samples the loss falls. Raises ConfigError if unknown."""
        alone = self.nearest(ONE_WORKER, 1)
        if alone is None or alone.above <= 0:
            raise ConfigError("the table of losses has no row of one worker to compare with")
        return math.log1p(alone.above) / math.log(self.workers)

    def worth(self, above: float) -> float:
        """Return what a sample of a method is worth beside one of data-parallel training."""
        return math.exp(-math.log1p(max(0.0, above)) / self.exponent)


def parse_losses(text: str) -> LossTable:
    """Read the table. Raises ConfigError for one that is damaged."""
    try:
        found = json.loads(text)
        return LossTable(found["size"], found["workers"], tuple(_rows(found["rows"])))
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"losses.json is damaged: {error}", fix="install atoll again") from error


def _rows(found: Iterable[dict[str, Any]]) -> Iterable[DocumentedLoss]:
    for row in found:
        error = row["error_percent"]
        yield DocumentedLoss(
            method=row["method"],
            label=row["label"],
            sync_every=row["sync_every"],
            start=row["start"],
            steps=row["steps"],
            above=row["above_percent"] / 100,
            error=None if error is None else error / 100,
            seeds=row["seeds"],
            limits=row["limits"],
        )
