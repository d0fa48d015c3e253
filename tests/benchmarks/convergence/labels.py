"""Where the labels of a scatter plot go: near their points, and none on another. All in pixels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = ["Box", "Label", "Leader", "place"]

Floats: TypeAlias = NDArray[np.float64]
GRID_PX, REACH_PX = 6.0, 240.0  # of the places that are tried around a point
TRIES_MAX = 1200  # of these that are free: farther ones are as much in the way
LEADER_PX = 16.0  # a label that is farther from its point than this gets a line to it
LEFT_COSTS_PX = 2.0  # right of a point is a little better than left of it


class Box(NamedTuple):
    left: float
    top: float
    right: float
    bottom: float

    def meets(self, other: Box) -> bool:
        return (
            self.left < other.right
            and other.left < self.right
            and self.top < other.bottom
            and other.top < self.bottom
        )

    def holds(self, other: Box) -> bool:
        return (
            self.left <= other.left
            and other.right <= self.right
            and self.top <= other.top
            and other.bottom <= self.bottom
        )


class Leader(NamedTuple):
    """A line from a point to its label."""

    x: float
    y: float
    end_x: float
    end_y: float

    def crosses(self, box: Box) -> bool:
        """Whether a part of the line is in the box (Liang and Barsky)."""
        enters, leaves = 0.0, 1.0
        for start, along, low, high in (
            (self.x, self.end_x - self.x, box.left, box.right),
            (self.y, self.end_y - self.y, box.top, box.bottom),
        ):
            if along == 0:
                if not low < start < high:
                    return False
                continue
            first, last = sorted(((low - start) / along, (high - start) / along))
            enters, leaves = max(enters, first), min(leaves, last)
        return enters < leaves


class Label(NamedTuple):
    box: Box
    leader: Leader | None


def place(
    points: Sequence[tuple[float, float]],
    sizes: Sequence[tuple[float, float]],
    inside: Box,
    radius: float,
    taken: Sequence[Box] = (),
) -> list[Label]:
    """A label of each size (width, height) for each point, as near to it as there is room: on no
    point, on no other label, on no line to one, and on nothing that is ``taken``.

    Where that cannot be, lines may cross lines and points, then labels too; and where there is no
    room at all, the label lies on others beside its point.
    """
    marks = [Box(x - radius, y - radius, x + radius, y + radius) for x, y in points]
    found: list[Label] = []
    for (x, y), size, own in zip(points, sizes, marks, strict=True):
        labels = [each.box for each in found]
        others = [box for box in (*taken, *marks) if box != own]
        free = _places(x, y, size, inside, radius, [*taken, *marks, *labels])
        found.append(
            _first(x, y, free, found, uncrossed=[*labels, *others])
            or _first(x, y, free, found, uncrossed=labels)
            or _first(x, y, free, [], uncrossed=[])
            or Label(Box(x, y, x + size[0], y + size[1]), None)
        )
    return found


def _first(
    x: float, y: float, free: Sequence[Box], apart_from: Sequence[Label], uncrossed: Sequence[Box]
) -> Label | None:
    """The first that no line to these labels crosses, and whose own line crosses no such box."""
    for box in free:
        leader = _leader(x, y, box)
        if any(each.leader and each.leader.crosses(box) for each in apart_from):
            continue
        if leader is None or not any(map(leader.crosses, uncrossed)):
            return Label(box, leader)
    return None


def _places(
    x: float,
    y: float,
    size: tuple[float, float],
    inside: Box,
    radius: float,
    taken: Sequence[Box],
) -> list[Box]:
    """Where there is room, the nearest first, at most TRIES_MAX."""
    width, height = size
    down, along, is_left = _offsets()
    beside = radius + 2
    top = y + down - height / 2
    left = np.where(is_left, x - beside - along - width, x + beside + along)
    right, bottom = left + width, top + height
    free = (left >= inside.left) & (right <= inside.right)
    free &= (top >= inside.top) & (bottom <= inside.bottom)
    for box in taken:
        beyond = (left >= box.right) | (right <= box.left)
        free &= beyond | (top >= box.bottom) | (bottom <= box.top)
    return [
        Box(*map(float, sides))
        for sides in np.stack([left, top, right, bottom], 1)[free][:TRIES_MAX]
    ]


@cache
def _offsets() -> tuple[Floats, Floats, Floats]:
    """Of a label from its point: down, to the side, and 1 where that is the left."""
    steps = np.arange(-REACH_PX, REACH_PX + 1, GRID_PX)
    grid = np.meshgrid(steps, steps[steps >= 0], np.array([0.0, 1.0]))
    down, along, is_left = (each.ravel() for each in grid)
    order = np.argsort(np.hypot(down, along) + LEFT_COSTS_PX * is_left, kind="stable")
    return down[order], along[order], is_left[order]


def _leader(x: float, y: float, box: Box) -> Leader | None:
    """To the nearer end of the label, if that is not beside the point."""
    end_x = min(max(x, box.left - 2), box.right + 2)
    end_y = (box.top + box.bottom) / 2
    far = math.hypot(end_x - x, end_y - y) > LEADER_PX
    return Leader(x, y, end_x, end_y) if far else None
