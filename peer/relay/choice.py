"""Choose through which relay to reach a peer. Pure, but for what is remembered of bad ones.

Both ends of a pair rank the relays alike, by a hash of the three, so that they meet at one, and so
that the pairs of a run are spread over its relays. A relay through which something came that was
not what the other end had sent, or through which nothing came, comes last for FAULT_S: it, or its
machine, changes or loses what it carries. But that other end may have done so, or may lie when it
says so of us. So it counts for the way to that peer alone, until WITNESSES_MIN peers agree.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from hashlib import sha256
from typing import Final, TypeAlias

# A relay that damages bytes may be mended, or it was a single bit on its way.
FAULT_S: Final = 600.0
FAULTS_MAX: Final = 256  # that are remembered, the newest
# What one peer says of more relays is not remembered, nor written down: a pair has few.
FAULTS_PER_PEER_MAX: Final = 8
# On the ways to so many peers a relay has to fail before it is avoided on the way to everybody.
WITNESSES_MIN: Final = 2

# Until when a relay is to be avoided, by relay and the peer on the way to which.
_Faults: TypeAlias = OrderedDict[tuple[bytes, bytes], float]


class RelayChoice:
    """Rank relays, and remember which have failed."""

    def __init__(self, me: bytes) -> None:
        self._me = me
        self._faulty_until_s: _Faults = OrderedDict()

    def blame(self, relay: bytes, now_s: float, peer: bytes) -> bool:
        """Note that a relay does not carry what it was given; return whether that is news.

        ``peer``: on the way to whom, who has seen it or may have done it.
        """
        is_news, faults = not self.is_faulty(relay, peer, now_s), self._faulty_until_s
        is_new = now_s >= faults.get((relay, peer), float("-inf"))
        if is_new and self._count(peer, now_s) >= FAULTS_PER_PEER_MAX:
            return False
        faults[relay, peer] = now_s + FAULT_S
        faults.move_to_end((relay, peer))
        if len(faults) > FAULTS_MAX:
            faults.popitem(last=False)
        return is_news

    def _count(self, peer: bytes, now_s: float) -> int:
        """Return how many relays have failed on the way to a peer."""
        return sum(to == peer and now_s < s for (_, to), s in self._faulty_until_s.items())

    def is_faulty(self, relay: bytes, peer: bytes, now_s: float) -> bool:
        """Return whether a relay is to be avoided on the way to ``peer``."""
        ways = {to for (one, to), s in self._faulty_until_s.items() if one == relay and now_s < s}
        return peer in ways or len(ways) >= WITNESSES_MIN

    def rank(self, peer: bytes, relays: Iterable[bytes], now_s: float) -> list[bytes]:
        """Return the relays to ``peer``, the best first; those that are faulty come last."""

        def order(relay: bytes) -> tuple[bool, bytes]:
            faulty = self.is_faulty(relay, peer, now_s)
            return faulty, meeting_order(self._me, peer, relay)

        return sorted((one for one in relays if one not in (self._me, peer)), key=order)


def meeting_order(one: bytes, other: bytes, relay: bytes) -> bytes:
    """Return the place of a relay among those at which two peers may meet: the smallest is it."""
    return sha256(b"".join(sorted((one, other))) + relay).digest()
