"""Suspect members that have fallen silent: where a view's silence becomes a failure.

Theory. A process that has ended and one that is slow look alike from afar, so a failure detector
can only suspect (Chandra and Toueg, 1996); the protocol is safe whatever it says, and goes on as
soon as it is right about a quorum. This one suspects whoever has been silent for the failure limit
(``Timing.failure_s``: four heartbeats and two round trips). The coordinator has one for its members
(roster.py: it hears heartbeats) and every member one for its coordinator (election.py: it hears
whatever the coordinator says in the view). Another rule, an adaptive limit for example, is another
class with these methods. Who is in no view is given up by joining.py and admission.py, after the
same limit.

What is certain is not decided here: an address that refuses connections, and a newer incarnation
that has called (``Situation.refused``, ``Roster.refused``).
"""

from __future__ import annotations

from collections.abc import Iterable


class FailureDetector:
    """Know when each peer was heard last, within one view: that gives everyone a fresh start."""

    def __init__(self, failure_s: float, peers: Iterable[bytes], now_s: float) -> None:
        self._failure_s = failure_s
        self._heard_s = dict.fromkeys(peers, now_s)

    def heard(self, peer: bytes, now_s: float) -> None:
        self._heard_s[peer] = now_s

    def silent_since(self, peer: bytes, since_s: float) -> None:
        """Count a peer as silent from before this view on."""
        self._heard_s[peer] = min(self._heard_s[peer], since_s)

    def last_heard_s(self, peer: bytes) -> float:
        return self._heard_s[peer]

    def silent_s(self, peer: bytes, now_s: float) -> float:
        """Return for how long nothing has been heard of a peer."""
        return now_s - self._heard_s[peer]

    def suspects(self, peer: bytes, now_s: float) -> bool:
        """Return whether a peer has been silent for so long that it counts as dead."""
        return self.silent_s(peer, now_s) > self._failure_s

    def trusts(self, peer: bytes, now_s: float) -> bool:
        """Return whether a peer was heard so lately that nobody else's suspicion counts."""
        return self.silent_s(peer, now_s) < self._failure_s / 2

    def discount_pause(self, pause_s: float) -> None:
        """Discount a pause in which we were stopped ourselves: nobody was silent meanwhile."""
        for peer in self._heard_s:
            self._heard_s[peer] += pause_s
