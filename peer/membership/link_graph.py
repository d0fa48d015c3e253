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

A link may be there and carry nothing: behind a *bridge partition* two halves hear each other only
through one member, and say nothing on their links that would show it. Their rounds do: an attempt
stalls, and both ends of each broken path say that they wait for the other (:func:`broken_paths`).
Such a pair is apart for a while (:class:`BrokenPaths`), twice as long each time; by then its links
have ended, or the path works again. A small vector has one owner, so each stall finds the paths of
one peer, and the first are tried again before the last are found: from the second such stall on
the coordinator owns all. Whoever answers it can be reached by it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from atoll.peer.membership.messages import Heartbeat
from atoll.peer.membership.view import View, short

PAIRS_SHOWN = 4  # in a line of the log
# A path that has stalled an attempt is not used for so long: some of the stalls that it costs to
# try it again. Twice as long each time, and so long at most that trying costs a few per cent.
BROKEN_MIN_S = 5.0
BROKEN_MAX_S = 120.0

Pair = tuple[bytes, bytes]  # ascending


class LinkGraph:
    """Hold the pairs of members that are apart; all others have a link."""

    def __init__(self, pairs: Iterable[Pair] = ()) -> None:
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


def graph_of(
    view: View, heartbeats: Mapping[bytes, Heartbeat], broken: Iterable[Pair] = ()
) -> LinkGraph:
    """Return the pairs that are apart by what the members have said last, and the ``broken`` ones.

    ``heartbeats``: of this view.
    """
    peers = view.peers
    lacking = {
        peer: {peers[n] for n in beat.unlinked if n < len(peers)}
        for peer, beat in heartbeats.items()
        if beat.unlinked
    }
    said = (
        (peer, other)
        for peer, others in lacking.items()
        for other in others
        if peer in lacking.get(other, ())
    )
    return LinkGraph((*said, *broken))


# ---------------------------------------------------------------- links that carry nothing


def broken_paths(
    waits_for: Mapping[bytes, Collection[bytes]], able: Collection[bytes]
) -> set[Pair]:
    """Return the pairs that wait for each other, if somebody ``able`` to own is in none of them.

    ``waits_for``: what the participants of a stalled attempt say. Where everybody waits for
    somebody who waits for them, it may be that all are slow, and no path is to blame.
    """
    pairs = {
        (peer, other)
        for peer, others in waits_for.items()
        for other in others
        if peer < other and peer in waits_for.get(other, ())
    }
    at_an_end = {peer for pair in pairs for peer in pair}
    return pairs if {*able} - at_an_end else set()


@dataclass(slots=True)
class _Broken:
    until_s: float
    pause_s: float


class BrokenPaths:
    """Keep the pairs between whom data have not come through lately."""

    def __init__(self) -> None:
        self._found: dict[Pair, _Broken] = {}
        self.pairs: frozenset[Pair] = frozenset()  # that are apart therefore
        self.stalls = 0  # that have found those of one peer alone, since none was apart

    def note(self, pairs: Collection[Pair], now_s: float) -> float:
        """Count these pairs, one at least, as apart for a while; return for how long."""
        longest_s = 0.0
        for pair in pairs:
            before = self._found.get(pair)
            pause_s = min(BROKEN_MAX_S, 2 * before.pause_s) if before else BROKEN_MIN_S
            self._found[pair] = _Broken(now_s + pause_s, pause_s)
            longest_s = max(longest_s, pause_s)
        self.stalls += bool(set[bytes].intersection(*map(set, pairs)))
        self.step(now_s)
        return longest_s

    def step(self, now_s: float) -> bool:
        """Let pairs be tried again whose time is up; return whether other pairs are apart now.

        A pair is forgotten when it has been well for as long as it was apart.
        """
        if not self._found and not self.pairs:
            return False  # as nearly always
        self._found = {
            pair: broken
            for pair, broken in self._found.items()
            if now_s < broken.until_s + broken.pause_s
        }
        before = self.pairs
        self.pairs = frozenset(p for p, broken in self._found.items() if now_s < broken.until_s)
        self.stalls = self.stalls if self.pairs else 0
        return self.pairs != before

    def take_over(self, before: BrokenPaths, members: Collection[bytes]) -> None:
        """Go on with what this coordinator knew of these members in the view before."""
        self._found = {p: x for p, x in before._found.items() if {*p} <= {*members}}
        self.stalls = before.stalls if self._found else 0
