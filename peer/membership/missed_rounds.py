"""Keep rounds that began without our trainer although it was known, and whether it was told."""

from __future__ import annotations

from atoll.peer.membership.events import Submitted
from atoll.peer.membership.messages import Begin

_STEP = "a step of the optimizer"


class MissedRounds:
    """Remember which round without it our trainer has yet to hear of.

    It is a part of the follower. A trainer hears once that a round goes on without it: at once if
    something of it waits, else when it calls its next operation.
    """

    def __init__(self, me: bytes) -> None:
        self._me = me
        self._untold = 0  # the round of which it does not know yet
        self._told = 0  # the last one of which it knows

    def clear(self) -> None:
        """Forget these rounds: they were of another view, or another trainer."""
        self._untold = self._told = 0

    def told(self, round_number: int) -> None:
        self._told = round_number

    def owed(self, submission: Submitted) -> int:
        """Return the round that this submission comes too late for, 0 for none.

        A step is for the next round, whichever that is.
        """
        owed, self._untold = self._untold, 0
        if not owed or submission.operation is None:
            return 0
        self._told = owed
        return owed

    def verdict(self, begin: Begin, waiting: Submitted | None) -> tuple[str, str]:
        """Return what to tell the trainer, and why; "" for nothing.

        ``waiting`` is over if it is told.
        """
        if self._me not in begin.without or begin.round <= self._told:
            return "", ""
        if waiting is None:
            self._untold = begin.round
            return "", ""
        mine, theirs = waiting.operation, begin.operation
        if mine == theirs:
            if mine is None:
                return "", ""  # a late step hears of it with the commit
            self._told = begin.round
            return "missed", ""
        self._told = begin.round
        called, others = mine or _STEP, theirs or _STEP
        why = f"this trainer called {called}, and the others {others} (round {begin.round})"
        return "missed" if mine is None else "mismatch", why
