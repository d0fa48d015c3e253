"""Keep bans in views: what all members have agreed on, for ever.

Theory. Who lies is found out in rounds, and each member checks the evidence itself (peer/verify/).
Views keep the result: a view names the peers that are out, with the digests of the evidence, and no
view that follows it, or forks off it, forgets one. Like all of a view, that is decided by a quorum
with signed votes, and nobody votes for a ban that it does not believe. So, with fewer liars than
half, whoever goes from view to view may rely on the list; who has missed some believes it like the
rest of the view (signing.py). The file is for who wants to know why.

A coordinator proposes one view only, and one that is never accepted would stop the run. So it names
a ban when it is sure of the votes, whoever dies meanwhile. Evidence that *stands alone* convinces
whoever gets it and has met the culprit: against a member, a quorum has to have said that it
believes. Other evidence, and all of it against strangers, convinces by the word of a majority,
which one voter may never hear: all members have to have said it. Who is dead is voted out first.
Meanwhile the ban holds all the same, as each member keeps out whom it knows to be banned.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from atoll.peer.membership.view import BANNED_MAX, Banned, View, is_quorum, short


@dataclass(frozen=True, slots=True)
class BelievedBan:
    """Describe a ban that counts for this peer.

    ``believers`` are others that have said of themselves that they believe it.
    """

    peer: bytes
    evidence: bytes
    stands_alone: bool
    believers: frozenset[bytes] = frozenset()


@dataclass(frozen=True, slots=True)
class BansBelieved:
    """Tell the machine all bans that this peer believes, as of now.

    Nothing that was believed is ever taken back.
    """

    bans: tuple[BelievedBan, ...]


class BanBook:
    """Keep the bans that this peer believes: how it votes, and what it proposes as coordinator."""

    def __init__(self, me: bytes) -> None:
        self._me = me
        self._bans: dict[bytes, BelievedBan] = {}

    def set(self, bans: Sequence[BelievedBan]) -> None:
        self._bans = {ban.peer: ban for ban in bans}

    def due(self, view: View, alive: Collection[bytes]) -> tuple[Banned, ...]:
        """Return the bans that the next view is to name beside those that ``view`` names."""
        if not self._bans:
            return ()
        room = BANNED_MAX - len(view.banned)
        return tuple(
            Banned(ban.peer, ban.evidence)
            for ban in self._bans.values()
            if ban.peer != self._me and not view.is_banned(ban.peer)
            if self._is_sure(ban, view, alive)
        )[:room]

    def _is_sure(self, ban: BelievedBan, view: View, alive: Collection[bytes]) -> bool:
        voters = {*view.peers} - self._bans.keys()
        believers = voters & {self._me, *ban.believers}
        convinces = ban.stands_alone and view.member(ban.peer) is not None  # all have met it
        return is_quorum(view, believers & {*alive}) and (convinces or voters == believers)

    def unheard(self, before: View, after: View) -> str:
        """Return why this peer does not believe a ban of the view that is to follow.

        "" if it believes them all.
        """
        for ban in after.banned[len(before.banned) :]:
            if ban.peer not in self._bans:
                return f"{short(ban.peer)} is to be banned, and why is not known here (yet)"
        return ""


def forgets(before: View, after: View) -> str:
    """Return what is wrong with the bans of a view that is to follow; "" for nothing.

    This holds whatever this peer believes.
    """
    if after.banned[: len(before.banned)] != before.banned:
        return "it does not name all that were banned before it"
    return ""
