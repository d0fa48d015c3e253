"""A machine that fails where a shipped one would never come back from an event."""

from __future__ import annotations

from atoll.peer.membership import events as ev
from atoll.peer.membership.node import Node

__all__ = ["BoundedNode"]

STEPS_MAX = 10_000  # in one event; a few are usual


class BoundedNode(Node):
    _steps = 0

    def handle(self, event: ev.Event, now_s: float) -> list[ev.Effect]:
        self._steps = 0
        return super().handle(event, now_s)

    def _step(self) -> None:
        self._steps += 1
        assert self._steps < STEPS_MAX, "it tells itself things without end"
        super()._step()
