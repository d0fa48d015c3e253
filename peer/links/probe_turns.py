"""Decide who probes whom: a peer sends or receives one probe at a time. Without a clock.

Two probes that meet in one peer disturb each other, whatever their directions. Two that arrive
share its downlink. One that leaves while another arrives gets its acknowledgements from behind the
other's queue: a round trip of 20 ms becomes one of 80, and TCP, whose window is made for 20, sends
half of what the link can carry, and goes on so. So a peer gives its turn to one other at a time and
to nobody while it sends a probe itself.
"""

from __future__ import annotations

from atoll.peer.links.probe_schedule import PROBE_S_MAX

# Who has not said by then that its probe is over is gone, or does not know better.
TURN_S = PROBE_S_MAX + 2.0
# The others get their turn before the same peer gets another ...
AGAIN_S = 5.0
# ... but not where a turn has ended so soon: it was given back unused.
UNUSED_S = 0.5


class ProbeTurns:
    """Keep the turns of the peer ``me``.

    Call ``asks`` before the question to another one, ``begins`` when that has said yes, and
    ``ends`` in any case; and ``ask`` and ``over`` for what others say.
    """

    def __init__(self, me: bytes) -> None:
        self._me = me
        self._asking = self._sending = False  # this peer itself
        self._peer = b""  # to whom the turn was given ...
        self._until_s = float("-inf")  # ... and how long it lasts
        self._last: dict[bytes, float] = {}  # when the last turn of each began, of the last AGAIN_S

    def given(self, now_s: float) -> bool:
        """Return whether somebody else has the turn."""
        return now_s < self._until_s

    def asks(self) -> None:
        self._asking = True

    def begins(self, now_s: float) -> bool:
        """Note that the other side agrees to a probe.

        Returns False if this peer has given its turn away meanwhile.
        """
        self._asking, self._sending = False, not self.given(now_s)
        return self._sending

    def ends(self) -> None:
        self._asking = self._sending = False

    def ask(self, peer: bytes, now_s: float, *, busy: bool) -> bool:
        """Return whether ``peer`` may begin a probe now; if so it has the turn.

        ``busy``: a reduction, or other data on the way from here or to here.
        """
        self._last = {p: at_s for p, at_s in self._last.items() if now_s - at_s < AGAIN_S}
        taken = self._peer != peer and self.given(now_s)
        # Of those that ask each other, in a pair or in a circle, one must give in, and not all.
        ahead = self._sending or (self._asking and self._me < peer)
        if busy or taken or ahead or peer in self._last:
            return False
        self._peer, self._until_s = peer, now_s + TURN_S
        self._last[peer] = now_s
        return True

    def over(self, peer: bytes, now_s: float) -> None:
        """Note that ``peer`` has ended its probe, or gives its turn back."""
        if peer != self._peer:
            return
        self._until_s = float("-inf")
        if now_s - self._last.get(peer, float("-inf")) < UNUSED_S:
            del self._last[peer]
