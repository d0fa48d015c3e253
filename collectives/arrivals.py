"""Frames that are arriving: where their bytes go, and what becomes of those that do not come.

A result is received where it belongs, unless another stream from the same source may bring it too:
then aside, because bytes that are final must not be written again by a stream that was slow. Parts
are always received aside. One that comes a second time is dropped when it is complete.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from atoll.collectives.buffers import BufferPool
from atoll.collectives.codecs import U8
from atoll.collectives.errors import LocalProtocolError
from atoll.collectives.result import RoundResult
from atoll.collectives.schedule import Kind

__all__ = ["Arrivals", "Arrived", "Frame"]


class Frame(NamedTuple):
    """``lane``: which of several streams from ``src`` brings it; 0 is the only one."""

    src: int
    kind: int
    chunk: int
    lane: int = 0


class Arrived(NamedTuple):
    data: U8  # may be longer than the frame
    in_place: bool


class Arrivals:
    """Calls never overlap: the engine holds its lock."""

    def __init__(self, result: RoundResult, buffers: BufferPool[np.uint8]) -> None:
        self._result, self._buffers = result, buffers
        self._places: dict[Frame, Arrived] = {}

    @property
    def writes_result(self) -> bool:
        """Whether somebody receives into the result."""
        return any(arrived.in_place for arrived in self._places.values())

    def __contains__(self, frame: Frame) -> bool:
        return frame in self._places

    def place(self, frame: Frame) -> U8:
        """Where to receive it."""
        in_place = frame.kind == Kind.RESULT and not frame.lane
        data = self._result.view(frame.chunk) if in_place else self._buffers.take()
        self._places[frame] = Arrived(data, in_place)
        return data

    def filled(self, frame: Frame) -> Arrived:
        """It is complete; a buffer aside is the caller's, who gives it back."""
        arrived = self._places.pop(frame, None)
        if arrived is None:
            raise LocalProtocolError(
                f"frame {frame.src}/{frame.kind}/{frame.chunk} was not reserved"
            )
        return arrived

    def ended(self, frame: Frame) -> None:
        """The rest of it will not come."""
        arrived = self._places.pop(frame, None)
        if arrived is not None and not arrived.in_place:
            self._buffers.give(arrived.data)
