"""Equal rounds must mean equal bytes (invariant 3): the coordinator compares state digests.

Every heartbeat carries the digest of the state after the last commit. A replica in the minority is
told to take the state again (RESYNC) and says so; without a majority the run halts with the values
shown, because nobody can say which one is right. A majority of everyone who has a say, so that the
first reports do not pass for all.
"""

from __future__ import annotations

from collections.abc import Callable

from atoll.peer.group.events import Effect, Note, Send
from atoll.peer.group.follower import Follower
from atoll.peer.group.messages import Resync
from atoll.peer.group.roster import Roster
from atoll.peer.group.views import View, short

__all__ = ["compare_digests"]


def compare_digests(
    view: View,
    me: bytes,
    own: Follower,
    roster: Roster,
    alive: set[bytes],
    emit: Callable[[Effect], None],
) -> str:
    """Send RESYNC to a minority; why the run has to halt, or an empty string."""
    digests = roster.digests(own.round)
    doubted = own.unsynced or roster.is_doubted(me, own.digest)
    if own.digest_round == own.round and own.holds and not doubted:
        digests[me] = own.digest
    groups: dict[bytes, list[bytes]] = {}
    for peer, digest in digests.items():
        groups.setdefault(digest, []).append(peer)
    if len(groups) < 2:
        return ""
    shown = "; ".join(
        f"{digest.hex()[:16]} on {', '.join(short(p) for p in peers)}"
        for digest, peers in sorted(groups.items())
    )
    majority = max(groups, key=lambda digest: len(groups[digest]))
    silent = roster.undigested(alive, own.round) - {me}
    if 2 * len(groups[majority]) <= len(digests) + len(silent):
        undecided = f"state after round {own.round} differs without a majority: {shown}"
        return "" if silent else undecided
    for peer, digest in digests.items():
        if digest != majority:
            text = f"state after round {own.round} differs: {shown}; minority resyncs"
            emit(Note("diverged", text, peer))
            roster.doubt(peer, digest)
            emit(Send(peer, Resync(view.lineage, view.number, own.round, majority)))
    return ""
