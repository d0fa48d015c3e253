"""A machine that fails where a shipped one would never come back from an event."""

from __future__ import annotations

from atoll.peer.membership.node import Node

__all__ = ["BoundedNode"]

TOLD_MAX = 10_000  # at one moment; a few are usual


class BoundedNode(Node):
    """Count how often the machine acts on what it has told itself, at one moment of its clock."""

    _told = (0.0, 0)  # when, and how often

    def _deliver_to_self(self) -> None:
        moment, count = self._told
        self._told = (self.now_s, count + 1 if moment == self.now_s else 1)
        assert self._told[1] < TOLD_MAX, "it tells itself things without end"
        super()._deliver_to_self()
