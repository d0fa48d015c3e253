"""Remember who outside the view asks this member, in vain, to come in.

A joiner asks everybody to whom it has a link, and is sent to the coordinator. One that has no link
there goes on asking; the members that it asks say so in their heartbeats, and then the view is
handed over to one of them (succession.py).
"""

from __future__ import annotations

from atoll.peer.membership.messages import CALLERS_MAX
from atoll.peer.membership.situation import Situation


class Callers:
    """Keep since when each of a few has been asking, and when it did so last."""

    def __init__(self, here: Situation) -> None:
        self._here = here
        self._asked_s: dict[bytes, tuple[float, float]] = {}  # first and last

    def asks(self, peer: bytes) -> None:
        """Note that somebody who is not in the view asks to come in."""
        now_s = self._here.now_s
        self._forget()
        if peer in self._asked_s or len(self._asked_s) < CALLERS_MAX:
            first_s, _ = self._asked_s.get(peer, (now_s, now_s))
            self._asked_s[peer] = (first_s, now_s)

    def lasting(self) -> tuple[bytes, ...]:
        """Return who has been asking for so long that the coordinator is out of its reach."""
        if not self._asked_s:
            return ()
        self._forget()
        here = self._here
        limit_s = here.now_s - here.timing.cut_off_s
        return tuple(sorted(p for p, (first_s, _) in self._asked_s.items() if first_s <= limit_s))

    def _forget(self) -> None:
        """Drop those who are in by now, and those who have stopped asking."""
        here, view = self._here, self._here.view
        recent_s = here.now_s - 4 * here.timing.join_retry_s
        members = view.peers if view is not None else ()
        self._asked_s = {
            peer: times
            for peer, times in self._asked_s.items()
            if times[1] >= recent_s and peer not in members
        }
