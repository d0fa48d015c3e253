"""Who may send a probe to this peer: one at a time, and not while others send. Without a clock.

Two probes at a time would share the downlink, and both would find half of it.
"""

from __future__ import annotations

from atoll.peer.measuring.survey import PROBE_S_MAX

__all__ = ["ProbeTurns"]

# Who has not said by then that its probe is over is gone, or does not know better.
TURN_S = PROBE_S_MAX + 2.0
# The others get their turn before the same peer gets another.
AGAIN_S = 5.0


class ProbeTurns:
    def __init__(self) -> None:
        self._peer = b""  # whose turn it is
        self._until_s = float("-inf")
        self._last: dict[bytes, float] = {}  # when the last turn of each began, of the last AGAIN_S

    def ask(self, peer: bytes, now_s: float, *, busy: bool) -> bool:
        """Whether ``peer`` may begin a probe now; ``busy``: a reduction, or others send here."""
        self._last = {p: at_s for p, at_s in self._last.items() if now_s - at_s < AGAIN_S}
        taken = self._peer != peer and now_s < self._until_s
        if busy or taken or peer in self._last:
            return False
        self._peer, self._until_s = peer, now_s + TURN_S
        self._last[peer] = now_s
        return True

    def over(self, peer: bytes) -> None:
        """It has ended its probe, or its link has ended."""
        if peer == self._peer:
            self._until_s = float("-inf")
