"""What rows gave, one line of JSON each, in a file that is only appended to.

A process may be killed at any moment: a last line that is not whole is dropped when the next one is
written, and does not count until then.
"""

from __future__ import annotations

import fcntl
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.convergence.row import Row

__all__ = ["Point", "Result", "Results"]


class Point(NamedTuple):
    step: int
    loss: float  # held-out, nats per byte
    sent_bytes: float  # by each peer, encoded, since the method began


@dataclass(frozen=True)
class Result:
    """``points``: the first before the method's first step, the last at the end of the row; fewer
    where it diverged, or none.

    ``made_with``: what should be the same in all rows that are compared.
    """

    row: Row
    points: tuple[Point, ...]
    elements: int  # parameters of the model
    wall_s: float
    cpu_s: float
    made_with: str
    failed: str = ""  # why there is no end: it diverged

    @property
    def loss(self) -> float:
        """At the end; infinite where it diverged."""
        return float("inf") if self.failed else self.points[-1].loss

    @property
    def sent_bytes(self) -> float:
        return self.points[-1].sent_bytes if self.points else 0.0

    def to_json(self) -> str:
        values = {"name": self.row.name} | {k: v for k, v in vars(self).items() if k != "row"}
        return json.dumps(values, allow_nan=False)

    @classmethod
    def from_json(cls, line: str) -> Result:
        """Inverse of ``to_json``. ValueError, TypeError or KeyError."""
        values: dict[str, Any] = json.loads(line)
        row = Row.of(values.pop("name"))
        points = tuple(Point(*point) for point in values.pop("points"))
        return cls(row=row, points=points, **values)


class Results:
    """Those in the file at ``path``, by the rows' names; the first of two of one name counts."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._by_name: dict[str, Result] = {}
        whole, _, _ = (path.read_bytes() if path.exists() else b"").rpartition(b"\n")
        for number, line in enumerate(whole.decode().splitlines(), 1):
            try:
                result = Result.from_json(line)
            except (ValueError, TypeError, KeyError) as error:
                raise ValueError(f"{path}, line {number} is no result: {error}") from error
            self._by_name.setdefault(result.row.name, result)

    def get(self, row: Row) -> Result | None:
        return self._by_name.get(row.name)

    def all(self) -> list[Result]:
        return list(self._by_name.values())

    def add(self, result: Result) -> None:
        """On disk when this returns. Two processes may add to one file."""
        self._by_name.setdefault(result.row.name, result)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)
            file.write(result.to_json().encode() + b"\n")  # at the end, as the mode says
            file.flush()
            os.fsync(file.fileno())
