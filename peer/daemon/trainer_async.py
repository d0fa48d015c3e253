"""Keep what a trainer submits in an asynchronous run (``RunSpec.is_asynchronous``).

Theory. A round opens when all trainers that it waits for have arrived (class ``Barrier``), and
is committed a moment later than it could be if somebody with such a trainer is just fetching its
result. Here rounds wait for a trainer while it waits for a round, and while one is open, but not
while it computes and nothing is open: so a round is of all that wait when it opens, nobody is
waited for who is still computing, and nobody falls behind for want of that moment.

A submission is a pseudo-gradient, which holds against any state of the run, so it is never too
late: what a round goes on without is submitted again for the next one, whatever the reason was. It
came in the middle of a round, or crossed its BEGIN; a retry was without this peer; the daemon has
caught up with the others, or their view has gone back.

What was submitted before to a process of this daemon that has ended may have counted already: that
is asked before each try (``was_counted``).

That cannot count anything twice. A submission is given to the machine again only when the machine
has let go of it and said so, and it lets go of what is in a committed round by "committed".
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from atoll.peer.membership import events as ev
from atoll.peer.membership.member import MemberState

LOOK_S = 0.02  # between two looks whether a round is open: a round takes longer


def _never() -> bool | None:
    return False


class AsyncSubmissions:
    """Submit for one trainer, one at a time, until a round has committed it or none can use it.

    ``taken`` is called whenever the machine has taken the submission: from then on the next round
    may read it. It looks by itself until it is closed.
    """

    def __init__(
        self, own: MemberState, feed: Callable[[ev.Event], None], taken: Callable[[], None]
    ) -> None:
        self._own, self._feed, self._taken = own, feed, taken
        self._was_counted: Callable[[], bool | None] = _never
        self._weight: float | None = None  # of what waits for its outcome
        self._given: ev.Submitted | None = None  # as the machine has it
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(LOOK_S, self._look)

    def submit(self, weight: float, was_counted: Callable[[], bool | None] = _never) -> None:
        """Submit; ``was_counted`` says, and tells the trainer, if that has happened already.

        Where it says None that is not known yet, and is asked again a moment later.
        """
        self._weight, self._given, self._was_counted = weight, None, was_counted
        self._act()

    def is_over(self, effect: ev.TellTrainer, *, is_logged: bool = False) -> bool:
        """Return whether the trainer is to hear of it: it was committed, or no round can use it.

        ``is_logged``: what the effect says is from the log, and it must not be submitted again.
        """
        over = is_logged or effect.kind == "committed" or bool(effect.text)
        if over:
            self._weight = self._given = None
        elif self._own.submissions.get(0) is not self._given:  # else it was told of an older one
            self._given = None
        self._act()
        return over

    def close(self) -> None:
        """Stop looking: the trainer has ended."""
        self._timer.cancel()

    def _look(self) -> None:
        self._timer = self._loop.call_later(LOOK_S, self._look)
        self._act()

    def _act(self) -> None:
        own = self._own
        is_open, waits = bool(own.begins.keys() - own.closed), self._weight is not None
        if own.attached != (is_open or waits):
            self._feed(ev.Attached(waits=not own.attached))
        if self._weight is None or self._given is not None or is_open:
            return  # an open round would only refuse it
        was_counted = self._was_counted()
        if was_counted is None:
            return
        if was_counted:
            self._weight = None
            return
        self._given = ev.Submitted(own.round, own.epoch, self._weight)
        self._feed(self._given)
        if own.submissions.get(0) is self._given:
            self._taken()
