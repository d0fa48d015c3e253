"""Grids: their first points are in `make test`, the rest in `make nightly`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def rest_is_slow(points: Iterable[Any], first: int) -> list[Any]:
    """The points as parameters, of which all but the ``first`` ones are slow."""
    several = [point if isinstance(point, tuple) else (point,) for point in points]
    return [
        pytest.param(*point, marks=[pytest.mark.slow] if place >= first else [])
        for place, point in enumerate(several)
    ]
