"""A swarm whose rounds go on without somebody, or of which somebody calls another collective, as
rounds of daemons do."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from atoll.collectives.errors import CollectiveMismatchError, CollectiveMissedError
from atoll.optim.swarm import GatherCall, Look, Swarm, SwarmCall, SwarmSession
from atoll.peer.client.trainer_channel import Outcome

__all__ = ["TroubledSession", "TroubledSwarm"]

AWAY = "away"


class TroubledSwarm(Swarm):
    """``missed``: (worker, round) pairs: that round goes on without that worker, who hears of it
    (one without everybody cannot be). The call of most workers is made, of several such that of
    the smallest number; the others hear that theirs was another one."""

    def __init__(self, workers: int, missed: Collection[tuple[int, int]] = ()) -> None:
        super().__init__(workers)
        self.missed = set(missed)
        self.sessions = [TroubledSession(self, number) for number in range(workers)]

    def _meet(self) -> None:
        waiting = [s for s in self.sessions if s.call is not None]
        if any(isinstance(s.call, Look) for s in waiting):
            super()._meet()  # of these alone
            return
        present = [s for s in waiting if s.call is not None and s.call.alike != AWAY]
        assert present, "all are away for ever"
        arrived = [s for s in present if (s.number, self.round + 1) not in self.missed] or present
        alike = [s.call.alike for s in arrived if s.call is not None]
        usual = max(alike, key=alike.count)
        for session in waiting:
            call, session.answer = session.call, None
            if session not in arrived:
                session.call = None
                if session in present:
                    session.answer = CollectiveMissedError("the round went on")
            elif call is not None and call.alike != usual:
                session.call = None
                session.answer = CollectiveMismatchError(f"{call.alike}; it is {usual}")
        super()._meet()


class TroubledSession(SwarmSession):
    """``away`` is for the loops of tests."""

    _swarm: TroubledSwarm

    def away(self, until: int) -> None:
        """Until after that round; nobody tells this worker what has happened."""
        known, operations = self.round, self.operations
        while self._swarm.round < until:
            super()._meet(GatherCall(b"", AWAY))
        self.round, self.operations = known, operations

    def wait(self, fragment: int = 0) -> Outcome:
        try:
            return super().wait(fragment)
        except CollectiveMissedError:
            return Outcome("missed", self._swarm.round, waited_s=0.0)

    def _meet(self, call: SwarmCall) -> Any:
        answer = super()._meet(call)
        if isinstance(answer, Exception):
            raise answer
        return answer
