"""Know which members have a link to each other, and who can own the result of a round therefore.

Theory. A link is an open control connection; who dialled it does not matter, and data streams go
wherever there is one (streams/opener.py). Two members may have none: neither of two that can only
dial out can dial the other, and one that has IPv4 alone cannot dial one that has IPv6 alone. Such a
pair is *apart*, and that is no fault: nobody is to blame, and nobody has to go.

A pair counts as apart when the last heartbeats of both ends say so. One end alone proves nothing:
what a dead member has said last is that it has all its links. Each says so when a link that can be
made would be there (``Situation.unlinked``).

The *owners* of parts of a result exchange data with all participants, so an owner is linked to each
of them; all who are can own, and are linked to each other as well. Two that own nothing exchange
nothing. Where nobody is linked to all, the round is of the largest set in which somebody is.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from atoll.peer.membership.messages import Heartbeat
from atoll.peer.membership.view import View, short

PAIRS_SHOWN = 4  # in a line of the log


class LinkGraph:
    """Hold the pairs of members that are apart; all others have a link."""

    def __init__(self, pairs: Iterable[tuple[bytes, bytes]] = ()) -> None:
        self._apart: dict[bytes, set[bytes]] = {}
        for one, other in pairs:
            self._apart.setdefault(one, set()).add(other)
            self._apart.setdefault(other, set()).add(one)
        self._asked: tuple[Sequence[bytes], tuple[tuple[int, int], ...]] = ((), ())

    @property
    def is_complete(self) -> bool:
        """Return whether no pair is apart."""
        return not self._apart

    def are_linked(self, one: bytes, other: bytes) -> bool:
        return other not in self._apart.get(one, ())

    def unlinked(self, peer: bytes, among: Collection[bytes]) -> set[bytes]:
        """Return those ``among`` these to whom a peer has no link."""
        return self._apart.get(peer, set()).intersection(among)

    def reaches(self, peer: bytes, others: Collection[bytes]) -> bool:
        """Return whether a peer is linked to all these others."""
        return not self.unlinked(peer, others)

    def apart(self, among: Sequence[bytes]) -> tuple[tuple[int, int], ...]:
        """Return the pairs ``among`` these that are apart, as ascending positions there.

        The last answer is kept: there may be very many, and the same is asked again and again.
        """
        if among == self._asked[0]:
            return self._asked[1]
        position = {peer: n for n, peer in enumerate(among)}
        found = (
            (n, position[other])
            for peer, n in position.items()
            for other in self.unlinked(peer, position.keys())
        )
        pairs = tuple(sorted(pair for pair in found if pair[0] < pair[1]))
        self._asked = (among, pairs)
        return pairs

    def with_owner(
        self, chosen: Collection[bytes], able: Collection[bytes], first: bytes
    ) -> tuple[bytes, ...]:
        """Return the largest part of ``chosen`` in which somebody ``able`` is linked to all.

        Of several, that in which most are; then that of ``first``. All where nobody is able.
        """
        if self.is_complete or not able or any(self.reaches(peer, chosen) for peer in able):
            return tuple(chosen)
        around = {
            peer: tuple(p for p in chosen if self.are_linked(peer, p)) for peer in sorted(able)
        }

        def rank(peer: bytes) -> tuple[int, int, bool]:
            inside = around[peer]
            owners = sum(self.reaches(p, inside) for p in inside if p in able)
            return len(inside), owners, peer == first

        return around[max(around, key=rank)]


def shown_apart(links: LinkGraph, among: Collection[bytes]) -> str:
    """Say which of these are apart, for people: "a and b have no link to each other"."""
    peers = sorted(among)
    pairs = links.apart(peers)
    shown = ", ".join(f"{short(peers[n])} and {short(peers[m])}" for n, m in pairs[:PAIRS_SHOWN])
    more = f", nor have {len(pairs) - PAIRS_SHOWN} other pairs" if len(pairs) > PAIRS_SHOWN else ""
    return f"{shown} have no link to each other{more}"


def graph_of(view: View, heartbeats: Mapping[bytes, Heartbeat]) -> LinkGraph:
    """Return the pairs that are apart by what the members have said last.

    ``heartbeats``: of this view.
    """
    peers = view.peers
    lacking = {
        peer: {peers[n] for n in beat.unlinked if n < len(peers)}
        for peer, beat in heartbeats.items()
        if beat.unlinked
    }
    return LinkGraph(
        (peer, other)
        for peer, others in lacking.items()
        for other in others
        if peer in lacking.get(other, ())
    )
