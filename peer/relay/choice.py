"""Choose through which relay to reach a peer. Pure, but for what is remembered of bad ones.

Both ends of a pair rank the relays alike, by a hash of the three, so that they meet at one, and so
that the pairs of a run are spread over its relays. A relay through which something came that was
not what the other end had sent, or through which nothing came, comes last for FAULT_S: it, or its
machine, changes or loses what it carries. What another peer says of a relay counts for the way to
that peer alone: it may lie.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from hashlib import sha256
from typing import Final, TypeAlias

# A relay that damages bytes may be mended, or it was a single bit on its way.
FAULT_S: Final = 600.0
FAULTS_MAX: Final = 256  # of which it is remembered, of those seen here and of those heard of
# What one peer says of more relays is not remembered, nor written down: a pair has few.
FAULTS_PER_PEER_MAX: Final = 8

# Until when a relay is to be avoided, by relay and the peer whose word it is: b"" if seen here.
_Faults: TypeAlias = OrderedDict[tuple[bytes, bytes], float]


class RelayChoice:
    """Rank relays, and remember which have failed."""

    def __init__(self, me: bytes) -> None:
        self._me = me
        self._seen_until_s: _Faults = OrderedDict()  # here, on the way to anybody
        self._heard_until_s: _Faults = OrderedDict()

    def blame(self, relay: bytes, now_s: float, said_by: bytes = b"") -> bool:
        """Note that a relay does not carry what it was given; return whether that is news.

        ``said_by``: whose word it is, b"" if it was seen here.
        """
        is_news = not self.is_faulty(relay, said_by, now_s)
        faults = self._heard_until_s if said_by else self._seen_until_s
        if said_by and is_news and self._said(said_by, now_s) >= FAULTS_PER_PEER_MAX:
            return False
        faults[relay, said_by] = now_s + FAULT_S
        faults.move_to_end((relay, said_by))
        if len(faults) > FAULTS_MAX:
            faults.popitem(last=False)
        return is_news

    def _said(self, peer: bytes, now_s: float) -> int:
        """Return of how many relays a peer's word counts."""
        return sum(by == peer and now_s < s for (_, by), s in self._heard_until_s.items())

    def is_faulty(self, relay: bytes, peer: bytes, now_s: float) -> bool:
        """Return whether a relay is to be avoided on the way to ``peer``."""
        seen_s = self._seen_until_s.get((relay, b""), float("-inf"))
        return now_s < max(seen_s, self._heard_until_s.get((relay, peer), float("-inf")))

    def rank(self, peer: bytes, relays: Iterable[bytes], now_s: float) -> list[bytes]:
        """Return the relays to ``peer``, the best first; those that are faulty come last."""

        def order(relay: bytes) -> tuple[bool, bytes]:
            faulty = self.is_faulty(relay, peer, now_s)
            return faulty, meeting_order(self._me, peer, relay)

        return sorted((one for one in relays if one not in (self._me, peer)), key=order)


def meeting_order(one: bytes, other: bytes, relay: bytes) -> bytes:
    """Return the place of a relay among those at which two peers may meet: the smallest is it."""
    return sha256(b"".join(sorted((one, other))) + relay).digest()
