"""Decide what of the measurements is worth a line in the log. No clock."""

from __future__ import annotations

from collections.abc import Collection

from atoll.collectives.units import duration, rate
from atoll.peer.links.estimates import LinkEstimate
from atoll.peer.membership.view import short

# A link that is so many times faster, slower or longer than was known is another one.
FACTOR = 2.0
# Round trips within a machine or a building differ by more than that, and nobody minds.
RTT_MIN_S = 0.005
# Time between two lines about one pair. In its first so long a pair is only getting known.
PAUSE_S = 60.0


class News:
    def __init__(self) -> None:
        self._first_s: dict[bytes, float] = {}  # when a pair was first known
        self._known: dict[bytes, tuple[LinkEstimate, float]] = {}  # as said last, and when

    def keep(self, peers: Collection[bytes]) -> None:
        for peer in self._first_s.keys() - set(peers):
            del self._first_s[peer], self._known[peer]

    def about(self, peer: bytes, link: LinkEstimate, now_s: float) -> str:
        """Return a line if the link to ``peer`` has changed much since the last one, or ""."""
        if not link.complete:
            return ""
        if now_s - self._first_s.setdefault(peer, now_s) < PAUSE_S:
            self._known[peer] = (link, float("-inf"))
            return ""
        before, at_s = self._known[peer]
        changes = []
        if _factor(before.out, link.out) > FACTOR:
            changes.append(f"rate from {rate(before.out)} to {rate(link.out)}")
        if _factor(before.rtt_s, link.rtt_s) > FACTOR and max(before.rtt_s, link.rtt_s) > RTT_MIN_S:
            trips = f"{duration(before.rtt_s)} to {duration(link.rtt_s)}"
            changes.append(f"round trip from {trips}")
        if not changes or now_s - at_s < PAUSE_S:
            return ""
        self._known[peer] = (link, now_s)
        return f"the link to {short(peer)} has changed: {', '.join(changes)}"


def _factor(before: float, after: float) -> float:
    return max(before, after) / min(before, after)
