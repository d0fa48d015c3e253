"""What a trainer submits in an asynchronous run (``RunSpec.is_asynchronous``).

Theory. A round opens when all attached trainers have arrived (group/barrier.py). Here a trainer is
attached while it waits for a round, and detached while it computes: so a round is of all that wait
when it opens, and of nobody else. A submission is a pseudo-gradient, which holds against any state
of the run, so it is never too late: what a round goes on without is submitted again for the next
one, whatever the reason was. It came in the middle of a round, or crossed its BEGIN; a retry was
without this peer; the daemon has caught up with the others, or their view has gone back.

That cannot count anything twice. A submission is given to the machine again only when the machine
has let go of it and said so, and it lets go of what is in a committed round by "committed".
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from atoll.peer.group import events as ev
from atoll.peer.group.follower import Follower

__all__ = ["AsyncSubmissions"]

AGAIN_S = 0.02  # between two looks whether a round of the others is over: they take longer


class AsyncSubmissions:
    """Of one trainer; one at a time. ``taken`` is called whenever the machine has taken it: from
    then on the next round may read it."""

    def __init__(
        self, own: Follower, feed: Callable[[ev.Event], None], taken: Callable[[], None]
    ) -> None:
        self._own, self._feed, self._taken = own, feed, taken
        self._weight: float | None = None  # of what waits for its outcome
        self._given: ev.Submitted | None = None  # as the machine got it last
        self._timer: asyncio.TimerHandle | None = None

    def submit(self, weight: float) -> None:
        self._weight, self._given = weight, None
        self._feed(ev.Attached())
        self._give()

    def is_over(self, effect: ev.TellTrainer) -> bool:
        """Whether the trainer is to hear of it: it was committed, or no round can use it."""
        if effect.kind != "committed" and not effect.text:
            self._give()
            return False
        self.close()
        self._feed(ev.Detached())
        return True

    def close(self) -> None:
        """The trainer waits for nothing any more."""
        self._weight = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _give(self) -> None:
        """To the machine, once no round is open: that would only refuse it."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        own = self._own
        if self._weight is None or (self._given and own.submissions.get(0) is self._given):
            return  # what was told is older than that
        if own.begins.keys() - own.closed:
            self._timer = asyncio.get_running_loop().call_later(AGAIN_S, self._give)
            return
        self._given = ev.Submitted(own.round, own.epoch, self._weight)
        self._feed(self._given)
        if own.submissions.get(0) is self._given:
            self._taken()
