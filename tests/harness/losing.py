"""A swarm's session that loses answers: a round went on without its trainer."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from atoll.collectives.errors import CollectiveMissedError
from atoll.optim.swarm import SwarmSession

__all__ = ["Losing"]


class Losing:
    """``lost``: the numbers of the calls, from 0 on, whose answer does not come. The others have
    it, with this trainer's part in it."""

    def __init__(self, session: SwarmSession, lost: Collection[int]) -> None:
        self._session, self._lost, self.calls = session, lost, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def all_gather(self, data: bytes) -> list[tuple[str, bytes]]:
        return self._unless_lost(self._session.all_gather(data))

    def all_reduce(self, tensor: Any, op: str = "mean", *, codec: str = "float32") -> Any:
        return self._unless_lost(self._session.all_reduce(tensor, op, codec=codec))

    def _unless_lost(self, answer: Any) -> Any:
        self.calls += 1
        if self.calls - 1 in self._lost:
            raise CollectiveMissedError("the round went on without this trainer")
        return answer
