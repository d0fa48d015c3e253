"""Every order of events for three peers, a few rounds and crashes: a search, not a sample.

A state is the three machines (fingerprinted with times relative to now), what is under way on each
directed link (first in, first out, as TCP), the reductions, and the crashes that are left. From a
state every enabled event is tried: the head of each link, each reduction or fetch that may end,
each crash that is left. Time is abstract: it passes only when nothing else can happen, to the next
deadline, for all machines at once. A heartbeat that says what the one before it said on the same
link is delivered at once: it only proves life, which does not depend on the order.

What is checked in every state: one view per number, one history per round, commits survive. At
the ends: whoever lives has got to the last round.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from harness.cluster import Cluster
from harness.plane import root_of
from harness.values import Mean

from atoll.peer.group import events as ev
from atoll.peer.group import messages as ms
from atoll.peer.group import views
from atoll.peer.group.kept import Kept, parse_kept
from simulation.snapshots import clone, machine_mark, teach_copy

__all__ = ["Found", "search"]

CHUNK = 0
QUIET_TICKS_MAX = 400  # deadlines in a row without an end: then a peer hangs


@dataclass(frozen=True)
class Point:
    """One state of the search. Machines are shared between states and never changed in place."""

    nodes: tuple[tuple[bytes, Any], ...]  # the living
    links: tuple[tuple[tuple[bytes, bytes], tuple[object, ...]], ...]
    joined: frozenset[tuple[ms.Begin, bytes]]  # who has taken part in which reduction
    held: frozenset[tuple[ms.Begin, bytes]]  # whose result is complete
    fetches: frozenset[tuple[ms.Begin, bytes, bytes]]
    said: tuple[tuple[tuple[bytes, bytes], object], ...]  # last heartbeat per link
    facts: frozenset[tuple[object, ...]]
    crashes: int
    now_s: float
    quiet: int = 0


@dataclass
class Found:
    """What a search has seen."""

    states: int = 0
    events: int = 0
    ends: int = 0
    complete: bool = True  # false: the bound was reached first


class Search:
    def __init__(self, rounds: int, crashes: int, states_max: int) -> None:
        teach_copy()
        cluster = Cluster("abc")
        cluster.form("abc")
        for host in cluster.living():
            host.trains = False
        cluster.run(0.5)  # all rounds over, everyone waits for submissions
        nodes = tuple((h.peer, h.node) for h in cluster.living())
        self.goal = cluster.committed + rounds
        self.states_max = states_max
        view = nodes[0][1].view
        assert view is not None
        facts = frozenset({("view", view.lineage, view.number, view)})
        self.start = Point(
            nodes, (), frozenset(), frozenset(), frozenset(), (), facts, crashes, cluster.now_s
        )

    # ------------------------------------------------------------ the search

    def run(self) -> Found:
        found = Found()
        first = self.start
        for peer, _ in self.start.nodes:
            first = self._submit(first, peer)
        seen = {fingerprint(first)}
        todo = deque([first])
        while todo:
            point = todo.pop()
            found.states += 1
            if found.states >= self.states_max:
                found.complete = False
                break
            if self._is_end(point):
                found.ends += 1
                continue
            for following in self._following(point):
                found.events += 1
                mark = fingerprint(following)
                if mark not in seen:
                    seen.add(mark)
                    todo.append(following)
        return found

    def _is_end(self, point: Point) -> bool:
        if len(point.nodes) < 2:
            return True  # two of three are gone: no promise
        return all(node.follower.round >= self.goal for _, node in point.nodes)

    def _following(self, point: Point) -> Iterator[Point]:
        any_enabled = False
        living = dict(point.nodes)
        for way, queue in point.links:
            if way[1] in living and queue:
                any_enabled = True
                yield self._deliver(point, way, queue)
        for begin, peer in sorted(point.joined - point.held, key=repr):
            if peer in living and self._may_end(point, begin, peer):
                any_enabled = True
                yield self._reduced(point, begin, peer)
        for begin, peer, holder in sorted(point.fetches, key=repr):
            if peer in living and holder in living and (begin, holder) in point.held:
                any_enabled = True
                less = replace(point, fetches=point.fetches - {(begin, peer, holder)})
                yield self._reduced(less, begin, peer)
        if point.crashes:
            for peer in living:
                yield self._crash(point, peer)
        if not any_enabled:
            assert point.quiet < QUIET_TICKS_MAX, f"nobody goes on: {describe(point)}"
            yield self._pass_time(point)

    # ------------------------------------------------------------ events

    def _deliver(self, point: Point, way: tuple[bytes, bytes], queue: tuple[object, ...]) -> Point:
        links = dict(point.links)
        links[way] = queue[1:]
        less = replace(point, links=_packed(links), quiet=0)
        return self._handle(less, way[1], queue[0])

    def _may_end(self, point: Point, begin: ms.Begin, peer: bytes) -> bool:
        """All have taken part; and the dead may have sent their means before they died."""
        return {p for b, p in point.joined if b == begin} >= set(begin.participants)

    def _reduced(self, point: Point, begin: ms.Begin, peer: bytes) -> Point:
        kept = {item.chunk: item for item in self._kept(point, begin)}
        origin = begin.origins[kept[CHUNK].origin] if kept else begin.origins[0]
        parts = tuple((p, 1, begin.round) for p in origin.participants)
        finals = {CHUNK: Mean(parts, origin.weights, CHUNK)}
        root = root_of(begin, finals, tuple(kept.values()))
        point = replace(point, held=point.held | {(begin, peer)}, quiet=0)
        return self._handle(point, peer, ev.Reduced(begin.round, begin.attempt, root))

    def _kept(self, point: Point, begin: ms.Begin) -> tuple[Kept, ...]:
        view = next(
            fact[3] for fact in point.facts if fact[:3] == ("view", begin.lineage, begin.view)
        )
        members = len(view.members)  # type: ignore[attr-defined]
        return parse_kept(begin.kept, members, len(begin.origins)) if begin.kept else ()

    def _crash(self, point: Point, peer: bytes) -> Point:
        """What it has sent still arrives, then the others hear the end of their links."""
        links = {way: queue for way, queue in point.links if way[1] != peer}
        nodes = tuple((p, n) for p, n in point.nodes if p != peer)
        for other, _ in nodes:
            way = (peer, other)
            links[way] = (*links.get(way, ()), ev.LinkDown(peer, "eof"))
        return replace(point, nodes=nodes, links=_packed(links), crashes=point.crashes - 1, quiet=0)

    def _pass_time(self, point: Point) -> Point:
        deadlines = [node.next_deadline_s() for _, node in point.nodes]
        now_s = max(min(d for d in deadlines if d is not None), point.now_s + 1e-3)
        point = replace(point, now_s=now_s, quiet=point.quiet + 1)
        for peer, _ in point.nodes:
            point = self._handle(point, peer, ev.Tick())
        return point

    def _submit(self, point: Point, peer: bytes) -> Point:
        own = dict(point.nodes)[peer].follower
        if own.round >= self.goal or own.submissions:
            return point
        return self._handle(point, peer, ev.Submitted(own.round, own.epoch, 1.0))

    # ------------------------------------------------------------ a machine takes an event

    def _handle(self, point: Point, peer: bytes, event: Any) -> Point:
        nodes = dict(point.nodes)
        node = nodes[peer] = clone(nodes[peer])
        effects = node.handle(event, point.now_s)
        point = replace(point, nodes=tuple(nodes.items()))
        for effect in effects:
            point = self._carry(point, peer, effect)
        return point

    def _carry(self, point: Point, peer: bytes, effect: object) -> Point:
        if isinstance(effect, ev.Send):
            return self._send(point, peer, effect)
        if isinstance(effect, ev.Reduce):
            return replace(point, joined=point.joined | {(effect.begin, peer)})
        if isinstance(effect, ev.Fetch):
            return replace(point, fetches=point.fetches | {(effect.begin, peer, effect.holder)})
        if isinstance(effect, ev.Probe):
            answer = "up" if effect.peer in dict(point.nodes) else "refused"
            return self._handle(point, peer, ev.Probed(effect.peer, answer))
        if isinstance(effect, ev.Apply):
            assert (effect.begin, peer) in point.held, "invariant 2: applied without its result"
            point = self._fact(point, "commit", effect.begin, effect.chain)
            digest = effect.chain
            return self._handle(point, peer, ev.Applied(effect.begin.round, digest))
        if isinstance(effect, ev.TellTrainer):
            return self._submit(point, peer)
        if isinstance(effect, ev.ListFinal):
            return self._list_final(point, peer, effect)
        if isinstance(effect, ev.CatchUp):
            return self._catch_up(point, peer, effect.goal)
        if isinstance(effect, ev.Installed):
            return self._view(point, effect.view)
        return point

    def _list_final(self, point: Point, peer: bytes, effect: ev.ListFinal) -> Point:
        """The one chunk is final where the whole result is."""
        digests = bytes(32)
        for begin, holder in point.held:
            if holder == peer and (begin.round, begin.attempt) == (effect.round, effect.attempt):
                kept = self._kept(point, begin)
                origin = begin.origins[kept[0].origin] if kept else begin.origins[0]
                parts = tuple((p, 1, begin.round) for p in origin.participants)
                digests = Mean(parts, origin.weights, CHUNK).digest
        event = ev.FinalChunks(effect.round, effect.attempt, digests)
        return self._handle(point, peer, event)

    def _catch_up(self, point: Point, peer: bytes, goal: ev.Goal) -> Point:
        """At once, if a living donor has got so far; else it fails and is asked for again."""
        living = dict(point.nodes)
        for member in goal.donors:
            donor = living.get(member.peer)
            if donor is not None and donor.follower.round >= goal.round:
                event = ev.CaughtUp(goal.round, goal.chain, goal.chain)
                return self._handle(point, peer, event)
        return self._handle(point, peer, ev.CatchUpFailed("no donor"))

    def _send(self, point: Point, peer: bytes, effect: ev.Send) -> Point:
        way = (peer, effect.peer)
        if effect.peer not in dict(point.nodes):
            return point
        event = ev.Received(peer, effect.message)
        links, said = dict(point.links), dict(point.said)
        if isinstance(effect.message, ms.Heartbeat | ms.CoordinatorBeat):
            same = said.get(way) == _news(effect.message)
            said[way] = _news(effect.message)
            point = replace(point, said=tuple(sorted(said.items(), key=lambda x: x[0])))
            if same and not links.get(way):
                return self._handle(point, effect.peer, event)
        queue = links.get(way, ())
        if queue and queue[-1] == event:
            return point  # twice the same, one behind the other
        links[way] = (*queue, event)
        return replace(point, links=_packed(links))

    # ------------------------------------------------------------ invariants

    def _fact(self, point: Point, kind: str, begin: ms.Begin, chain: bytes) -> Point:
        fact = (kind, begin.lineage, begin.round, begin.view, chain)
        for known in point.facts:
            if known[:3] == fact[:3]:
                assert known == fact, f"invariant 2: two histories of round {begin.round}"
            if known[:2] == ("view", begin.lineage) and known[2] > begin.view:  # type: ignore[operator]
                _survives(known[3], begin.round, chain)
        return replace(point, facts=point.facts | {fact})

    def _view(self, point: Point, view: views.View) -> Point:
        fact = ("view", view.lineage, view.number, view)
        for known in point.facts:
            if known[:3] == fact[:3]:
                assert known == fact, f"invariant 1: two views {view.number}"
            if known[:2] == ("commit", view.lineage) and known[3] < view.number:  # type: ignore[operator]
                _survives(view, known[2], known[4])
        return replace(point, facts=point.facts | {fact})


def _survives(view: Any, number: Any, chain: Any) -> None:
    assert view.base_round >= number, f"invariant 5: view {view.number} forgets round {number}"
    if view.base_round == number:
        assert view.base_chain == chain, f"invariant 5: view {view.number} rewrites {number}"


def search(rounds: int, crashes: int, states_max: int) -> Found:
    return Search(rounds, crashes, states_max).run()


def describe(point: Point) -> str:
    return "; ".join(
        f"{peer[:1].decode()} {node.phase.value} round {node.follower.round}"
        for peer, node in point.nodes
    )


def _news(beat: object) -> object:
    """What a heartbeat says, but for durations."""
    if isinstance(beat, ms.CoordinatorBeat):
        return replace(beat, waiting=(), waiting_s=0.0)
    return beat


def _packed(
    links: dict[tuple[bytes, bytes], tuple[object, ...]],
) -> tuple[tuple[tuple[bytes, bytes], tuple[object, ...]], ...]:
    return tuple(sorted((way, queue) for way, queue in links.items() if queue))  # type: ignore[type-var]


def fingerprint(point: Point) -> int:
    """Of all that decides what may happen next. 64 bits: a collision would hide a state."""
    machines = tuple((peer, machine_mark(node, point.now_s)) for peer, node in point.nodes)
    return hash(
        (machines, point.links, point.joined, point.held, point.fetches, point.facts, point.crashes)
    )
