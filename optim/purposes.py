"""Gathers that are for different things, and are not taken for each other.

Gathers have no shape that daemons could compare, so each says what it is for with its first byte:
who missed a round may gather scores while the others already hand over state. What most are
gathering for counts, as with calls of different kinds; of several the purpose of the first. The
others have missed that round.
"""

from __future__ import annotations

from collections import Counter

from atoll.collectives.errors import CollectiveMissedError, RemoteProtocolError
from atoll.optim.sessions import OperationsSession

__all__ = ["gather_for"]


def gather_for(purpose: bytes, peer: OperationsSession, data: bytes) -> list[tuple[str, bytes]]:
    """What those gave who gather for this purpose, one byte; CollectiveMissedError if most do for
    another."""
    given = peer.all_gather(purpose + data)
    for name, part in given:
        if not part:
            raise RemoteProtocolError(f"{name} gathers something else: its part is empty")
    counts = Counter(part[:1] for _, part in given)
    if max(counts, key=lambda p: counts[p]) != purpose:  # the first of several
        raise CollectiveMissedError("the other trainers were gathering something else")
    return [(name, part[1:]) for name, part in given if part[:1] == purpose]
