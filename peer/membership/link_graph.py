"""Know between which members data have a way, and who can own the result of a round therefore.

Theory. A link is an open control connection; who dialled it does not matter, and data streams go
wherever there is a direct one (streams/opener.py). Two members may have none: neither of two that
can only dial out can dial the other, and one that has IPv4 alone cannot dial one that has IPv6
alone. They may have one through a relay (peer/relay/), which carries control, and data only where
its operator lets it. A pair between which data have no way is *apart*, and that is no fault: nobody
is to blame, and nobody has to go. Elections, heartbeats and statements go over any link.

A pair has no direct link when the last heartbeats of both ends say so. One end alone proves
nothing: what a dead member has said last is that it has all its links. Each says so when a link
that can be made would be there (``Situation.unlinked``). Such a pair is *relayed*, and not apart,
where both say that a relay carries data: each end opens the streams on which it sends itself.

The *owners* of parts of a result exchange data with all participants, so an owner has a way to each
of them; all who have can own, and have one to each other as well. Two that own nothing exchange
nothing. Where nobody has a way to all, the round is of the largest set in which somebody has.

A link may be there and carry nothing: behind a *bridge partition* two halves hear each other only
through one member, and say nothing on their links that would show it. Their rounds do: an attempt
stalls, and both ends of each broken path say that they wait for the other (:func:`broken_paths`).
Such a pair is apart for a while (:class:`BrokenPaths`), twice as long each time; by then its links
have ended, or the path works again. A small vector has one owner, so each stall finds the paths of
one peer: from the second such stall on the coordinator owns all. Whoever answers it can be reached
by it, so of several pairs those with the coordinator are not to blame: who sends to several owns no
more than a little ahead of the slowest of them, and then waits for all.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
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
    """Hold the pairs of members that are apart, and those that are relayed; all others are linked.

    ``control_only``: those that are apart and have a control link all the same, through a relay.
    """

    def __init__(
        self,
        pairs: Iterable[Pair] = (),
        relayed: Iterable[Pair] = (),
        control_only: Iterable[Pair] = (),
    ) -> None:
        self._apart = _neighbours(pairs)
        self._relayed = _neighbours(relayed)
        self._control_only = _neighbours(control_only)
        self._asked: tuple[Sequence[bytes], tuple[tuple[int, int], ...]] = ((), ())

    @property
    def is_complete(self) -> bool:
        """Return whether no pair is apart."""
        return not self._apart

    @property
    def has_relayed(self) -> bool:
        return bool(self._relayed)

    def have_path(self, one: bytes, other: bytes) -> bool:
        """Return whether data have a way between two members."""
        return other not in self._apart.get(one, ())

    def are_relayed(self, one: bytes, other: bytes) -> bool:
        return other in self._relayed.get(one, ())

    def apart_from(self, peer: bytes, among: Collection[bytes]) -> set[bytes]:
        """Return those ``among`` these to whom data of a peer have no way."""
        return self._apart.get(peer, set()).intersection(among)

    def unheard_by(self, peer: bytes, among: Collection[bytes]) -> set[bytes]:
        """Return those ``among`` these to whom a peer has no link at all, not even for control."""
        return self.apart_from(peer, among) - self._control_only.get(peer, set())

    def reaches(self, peer: bytes, others: Collection[bytes], *, directly: bool = False) -> bool:
        """Return whether data of a peer have a way to all these others; ``directly``: no relay."""
        by_relay = self._relayed.get(peer, ()) if directly else ()
        return not self.apart_from(peer, others) and not {*by_relay}.intersection(others)

    def apart(self, among: Sequence[bytes]) -> tuple[tuple[int, int], ...]:
        """Return the pairs ``among`` these that are apart, as ascending positions there.

        The last answer is kept: there may be very many, and the same is asked again and again.
        """
        if among != self._asked[0]:
            self._asked = (among, _positions(self._apart, among))
        return self._asked[1]

    def relayed(self, among: Sequence[bytes]) -> tuple[tuple[int, int], ...]:
        """Return the pairs ``among`` these that are relayed, as ascending positions there."""
        return _positions(self._relayed, among) if self._relayed else ()

    def are_silent(self, one: bytes, other: bytes) -> bool:
        """Return whether two have no link at all."""
        return other in self.unheard_by(one, (other,))

    def with_owner(
        self, chosen: Collection[bytes], able: Collection[bytes], first: bytes
    ) -> tuple[bytes, ...]:
        """Return the largest part of ``chosen`` in which somebody ``able`` has a way to all.

        Of several, that in which most are; then that of ``first``. All where nobody is able.
        """
        if self.is_complete or not able or any(self.reaches(peer, chosen) for peer in able):
            return tuple(chosen)
        around = {
            peer: tuple(p for p in chosen if self.have_path(peer, p)) for peer in sorted(able)
        }

        def rank(peer: bytes) -> tuple[int, int, bool]:
            inside = around[peer]
            owners = sum(self.reaches(p, inside) for p in inside if p in able)
            return len(inside), owners, peer == first

        return around[max(around, key=rank)]


def _neighbours(pairs: Iterable[Pair]) -> dict[bytes, set[bytes]]:
    found: dict[bytes, set[bytes]] = {}
    for one, other in pairs:
        found.setdefault(one, set()).add(other)
        found.setdefault(other, set()).add(one)
    return found


def _positions(
    neighbours: Mapping[bytes, Collection[bytes]], among: Sequence[bytes]
) -> tuple[tuple[int, int], ...]:
    position = {peer: n for n, peer in enumerate(among)}
    found = (
        (n, position[other])
        for peer, n in position.items()
        for other in neighbours.get(peer, ())
        if other in position
    )
    return tuple(sorted(pair for pair in found if pair[0] < pair[1]))


def shown_apart(links: LinkGraph, among: Collection[bytes]) -> str:
    """Say which of these are apart, for people: "a and b have no link to each other"."""
    peers = sorted(among)
    pairs = links.apart(peers)
    more = f", nor have {len(pairs) - PAIRS_SHOWN} other pairs" if len(pairs) > PAIRS_SHOWN else ""
    silent = all(links.are_silent(peers[n], peers[m]) for n, m in pairs)
    what = "no link to each other" if silent else "no way for data to each other"
    return f"{_shown(pairs, peers)} have {what}{more}"


def shown_relayed(links: LinkGraph, among: Collection[bytes]) -> str:
    """Say which of these are relayed, for people."""
    peers = sorted(among)
    pairs = links.relayed(peers)
    more = f", and of {len(pairs) - PAIRS_SHOWN} other pairs" if len(pairs) > PAIRS_SHOWN else ""
    return f"data of {_shown(pairs, peers)} go through a relay{more}"


def _shown(pairs: Sequence[tuple[int, int]], peers: Sequence[bytes]) -> str:
    named = (f"{short(peers[n])} and {short(peers[m])}" for n, m in pairs[:PAIRS_SHOWN])
    return ", ".join(named)


def graph_of(
    view: View, heartbeats: Mapping[bytes, Heartbeat], broken: Collection[Pair] = ()
) -> LinkGraph:
    """Return the graph by what the members have said last; the ``broken`` pairs are apart, too.

    ``heartbeats``: of this view.
    """
    peers = view.peers
    saying = {peer: beat for peer, beat in heartbeats.items() if _paths(beat) != ((), (), ())}
    indirect = {peer: _named(peers, *_paths(beat)) for peer, beat in saying.items()}
    linked = {peer: _named(peers, *_paths(beat)[1:]) for peer, beat in saying.items()}
    carried = {peer: _named(peers, beat.relayed) for peer, beat in saying.items()}
    said = set(_mutual(indirect))
    relayed = said.intersection(_mutual(carried)).difference(broken)
    control_only = said.intersection(_mutual(linked)).difference(relayed)
    return LinkGraph((*(said - relayed), *broken), relayed, control_only)


def _paths(beat: Heartbeat) -> tuple[tuple[int, ...], ...]:
    return beat.unlinked, beat.control_only, beat.relayed


def same_paths(one: Heartbeat | None, other: Heartbeat) -> bool:
    """Return whether two heartbeats say the same of their sender's links; None says nothing."""
    return _paths(other) == (_paths(one) if one is not None else ((), (), ()))


def _named(peers: Sequence[bytes], *positions: Iterable[int]) -> set[bytes]:
    return {peers[n] for named in positions for n in named if n < len(peers)}


def _mutual(named: Mapping[bytes, Collection[bytes]]) -> Iterator[Pair]:
    """Yield the pairs of which each names the other."""
    for peer, others in named.items():
        for other in others:
            if peer < other and peer in named.get(other, ()):
                yield peer, other


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

    def note(self, pairs: Collection[Pair], now_s: float, *, is_stall: bool = True) -> float:
        """Count these pairs, one at least, as apart for a while; return for how long.

        Those found before that are not forgotten yet are apart anew: one fault is found piece by
        piece, and to try the first pieces again before the last is found costs a stall each time.
        ``is_stall``: an attempt has stalled on them; else somebody has said that they are broken.
        """
        longest_s = 0.0
        for pair in pairs:
            before = self._found.get(pair)
            pause_s = min(BROKEN_MAX_S, 2 * before.pause_s) if before else BROKEN_MIN_S
            self._found[pair] = _Broken(now_s + pause_s, pause_s)
            longest_s = max(longest_s, pause_s)
        for broken in self._found.values():
            broken.until_s = max(broken.until_s, now_s + broken.pause_s)
        self.stalls += is_stall and bool(set[bytes].intersection(*map(set, pairs)))
        self.step(now_s)
        return longest_s

    def step(self, now_s: float) -> bool:
        """Let pairs be tried again whose time is up; return whether other pairs are apart now.

        A pair is forgotten when it has been well for as long as it was apart.
        """
        if not self._found:
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
