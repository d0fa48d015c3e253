"""Every order of events for three peers, a few rounds and faults: a search, not a sample.

A state is the three machines (fingerprinted with times relative to now), what is under way on each
directed link (first in, first out, as TCP), the reductions, and the faults that are left. From a
state every enabled event is tried: the head of each link, each reduction or fetch that may end,
each fault that is left. Time is abstract: it passes only when nothing else can happen, from
deadline to deadline, for all machines at once, until something can; a fault during such a wait
would be one at its beginning, but for timers. A heartbeat that says what the one before it said on
the same link is delivered at once: it only proves life, which does not depend on the order.

Faults. A *crash* may come between any two events. Of what the victim has under way each other
peer gets a beginning, of any length, independently; the data of its reductions has left as a whole
or ends there. During a *silence* everything that one peer says is late: the others get it, in
order, at any time after the failure limit. Crashes are followed up to the last survivor, which
gets what is under way, and then some time. A *restart* is a crash of a peer that has a home: at any
time after it, a process with that home is back, after a power cut perhaps without what was not
synced.

What is checked in every state: one view per number, one history per round, commits survive, no
commit and no view without a quorum (but for forks that the policy allows, in their own lineage).
At the ends: whoever lives has got to the last round.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

from harness.cluster import Cluster, Host, peer_id

from atoll.peer.membership import events as ev
from atoll.peer.membership import messages as ms
from simulation.homes import Home
from simulation.moves import Moves, Point, describe, fingerprint, packed
from simulation.snapshots import clone, teach_copy

__all__ = ["Found", "Search", "Setting", "search"]

ALL_ROUNDS = 1_000_000  # between two checkpoints: there are none
QUIET_TICKS_MAX = 400  # deadlines in a row without an end: then a peer hangs
ALONE_TICKS = 12  # what the last survivor gets: long enough to stand, or to remove the dead
ALONE_TICK_S = 0.24  # below a heartbeat, so that no machine takes it for a pause of its own


@dataclass(frozen=True)
class Setting:
    rounds: int
    crashes: int
    states_max: int
    silent: str = ""  # of whom one may fall silent, once
    trainers: str = "abc"  # who takes part in rounds; the others only hold the state
    successor: str = ""  # to whom the coordinator is asked to hand over before all else
    restarts: str = ""  # of whom each may be started again, once; then all have homes


@dataclass
class Found:
    """What a search has seen."""

    states: int = 0
    events: int = 0
    ends: int = 0
    complete: bool = True  # false: the bound was reached first, or something failed
    failure: str = ""
    path: list[str] = field(default_factory=list)  # the events that lead to the failure


class Search:
    def __init__(self, setting: Setting) -> None:
        teach_copy()
        cluster = Cluster("")
        cluster.is_durable, cluster.save_every = bool(setting.restarts), ALL_ROUNDS
        for name in "abc":
            cluster.add(name)
        cluster.form("abc")
        self.setting = setting
        trainers = {peer_id(name) for name in setting.trainers}
        for host in cluster.living():
            host.trains = False
            if host.peer not in trainers:
                cluster.detach(host.name)
        cluster.run(0.5)  # all rounds over, everyone waits for submissions
        nodes = tuple((h.peer, h.node) for h in cluster.living())
        self.goal = cluster.committed + setting.rounds
        self.failure_s = cluster.host("a").node.timing.failure_s
        view = nodes[0][1].view
        assert view is not None
        facts = frozenset({("view", view.lineage, view.number, view)})
        self.start = Point(nodes, (), facts, setting.crashes, bool(setting.silent), cluster.now_s)
        self.moves = Moves(trainers, self.goal)
        if setting.restarts:
            homes = tuple((host.peer, _home_of(host)) for host in cluster.living())
            restarts = frozenset(map(peer_id, setting.restarts))
            self.start = replace(self.start, homes=homes, restarts=restarts)
            self.moves.first_event = cluster.first_event
            self.moves.digests = dict(cluster.host("a").digests)

    # ------------------------------------------------------------ the search

    def run(self) -> Found:
        first = self.start
        if self.setting.successor:
            leads = next(p for p, node in first.nodes if node.coordinator is not None)
            first = self.moves.handle(first, leads, ev.HandOver(peer_id(self.setting.successor)))
        for peer, _ in self.start.nodes:
            first = self.moves.submit(first, peer)
        found, seen, todo = Found(), {fingerprint(first)}, [first]
        while todo:
            point = todo.pop()
            found.states += 1
            if found.states >= self.setting.states_max:
                found.complete = False
                return found
            if self._is_end(point):
                found.ends += 1
                continue
            for step, *details in self._steps(point):
                found.events += 1
                path = ((step.__name__, *details), point.path)
                try:
                    following = replace(step(point, *details), path=path)
                except AssertionError as failure:
                    found.failure, found.complete, found.path = str(failure), False, _told(path)
                    return found
                mark = fingerprint(following)
                if mark not in seen:
                    seen.add(mark)
                    todo.append(following)
        return found

    def _is_end(self, point: Point) -> bool:
        if point.down:
            return False
        if len(point.nodes) == 1 and point.waited:
            return True
        members = [node for _, node in point.nodes if node.view is not None]
        return all(node.follower.round >= self.goal for node in members)

    def _steps(self, point: Point) -> Iterator[tuple[Any, ...]]:
        enabled = list(self._enabled(point))
        if not enabled and point.nodes and not (point.down and point.waited):
            yield (self._pass_time,)
        yield from enabled
        for peer in sorted(point.down):
            home = dict(point.homes)[peer]
            for lost in sorted({0, len(home.records) - home.synced}):
                yield self.moves.restart, peer, lost
        for peer in sorted(point.restarts & point.living.keys()):
            for _, *how in self._crashes(point, peer):
                yield self._go_down, *how
        if point.crashes and len(point.nodes) > 1:
            for peer, _ in point.nodes:
                yield from self._crashes(point, peer)
        if point.silence_left and len(point.nodes) > 1:  # of one that says nothing now: later
            speaking = {way[0] for way, _ in point.links} if enabled else point.living.keys()
            for peer in map(peer_id, self.setting.silent):
                if peer in speaking and peer in point.living:
                    yield self._fall_silent, peer
        if self._is_late(point):
            yield (self._speak_again,)

    def _enabled(self, point: Point) -> Iterator[tuple[Any, ...]]:
        living = point.living
        for way, queue in point.links:
            if queue and way[0] != point.silent:
                yield self.moves.deliver, way
        for begin, peer in sorted(point.joined - point.held, key=repr):
            if peer in living and self.moves.may_end(point, begin, peer):
                yield self.moves.reduced, begin, peer
        for begin, peer, holder in sorted(point.fetches, key=repr):
            if {peer, holder} <= living.keys() and (begin, holder) in point.held:
                yield self.moves.fetched, begin, peer, holder

    # ------------------------------------------------------------ events

    def _crashes(self, point: Point, victim: bytes) -> Iterator[tuple[Any, ...]]:
        """How much of what it has sent arrives where, and whether its data does."""
        others = [p for p, _ in point.nodes if p != victim]
        links = dict(point.links)
        arriving = product(*(range(len(links.get((victim, p), ())) + 1) for p in others))
        shared = {
            (begin, p)
            for begin, peer in point.joined
            for p in others
            if peer == victim and p in begin.participants and (begin, p) not in point.held
        }
        ending = frozenset(pair for pair in shared if self.moves.may_end(point, *pair))
        for counts, lost in product(arriving, (frozenset(), ending) if ending else (ending,)):
            yield (
                self._crash,
                victim,
                tuple(zip(others, counts, strict=True)),
                shared - ending | lost,
            )

    def _crash(
        self,
        point: Point,
        victim: bytes,
        arriving: tuple[tuple[bytes, int], ...],
        lost: set[tuple[ms.Begin, bytes]],
    ) -> Point:
        """What still arrives, then the others hear the end of their links."""
        links = {way: queue for way, queue in point.links if victim not in way}
        known = dict(point.links)
        for other, count in arriving:
            way = (victim, other)
            links[way] = (*known.get(way, ())[:count], ev.LinkDown(victim, "eof"))
        return replace(
            point,
            nodes=tuple((p, n) for p, n in point.nodes if p != victim),
            links=packed(links),
            said=tuple((way, beat) for way, beat in point.said if victim not in way),
            over=point.over | lost,
            crashes=point.crashes - 1,
            silent=b"" if point.silent == victim else point.silent,
            waited=False,
        )

    def _go_down(self, point: Point, victim: bytes, *how: Any) -> Point:
        """A crash of one that will be back."""
        after = self._crash(point, victim, *how)
        down, restarts = point.down | {victim}, point.restarts - {victim}
        return replace(after, crashes=point.crashes, down=down, restarts=restarts)

    def _fall_silent(self, point: Point, peer: bytes) -> Point:
        return replace(point, silent=peer, silent_s=point.now_s, silence_left=False, waited=False)

    def _is_late(self, point: Point) -> bool:
        return bool(point.silent) and point.now_s - point.silent_s >= self.failure_s

    def _speak_again(self, point: Point) -> Point:
        return replace(point, silent=b"", waited=False)

    def _pass_time(self, point: Point) -> Point:
        """Until something else can happen, or the last survivor has had its time."""
        point = replace(point, nodes=tuple((peer, clone(node)) for peer, node in point.nodes))
        self.moves.waiting = True
        try:
            return replace(self._wait(point), waited=True)
        finally:
            self.moves.waiting = False

    def _wait(self, point: Point) -> Point:
        alone = len(point.nodes) == 1 or bool(point.down)
        for _ in range(ALONE_TICKS if alone else QUIET_TICKS_MAX):
            deadlines = [node.next_deadline_s() for _, node in point.nodes]
            next_s = max(min(d for d in deadlines if d is not None), point.now_s + 1e-3)
            point = replace(point, now_s=point.now_s + ALONE_TICK_S if alone else next_s)
            for peer, _ in point.nodes:
                point = self.moves.handle(point, peer, ev.Tick())
            over = self._is_late(point) or self._is_end(point)
            if over or next(self._enabled(point), None):
                return point
        assert alone, f"nobody goes on: {describe(point)}"
        return point


def _home_of(host: Host) -> Home:
    """Return what a cluster's disk has, all of it synced."""
    disk = host.disk
    assert disk is not None
    records = tuple(record for _, record in disk.records)
    assert disk.position == len(records), "a compaction has renumbered them"
    return Home(host.node.me, host.life, records, len(records))


def search(setting: Setting) -> Found:
    return Search(setting).run()


def _told(path: tuple[Any, ...]) -> list[str]:
    """The events of a path, the first one first, for people."""
    told: list[str] = []
    while path:
        (name, *details), path = path
        told.append(f"{name.strip('_')} {' '.join(map(_brief, details))}".strip())
    return told[::-1]


def _brief(thing: object) -> str:
    if isinstance(thing, bytes):
        return thing[:1].decode()
    if isinstance(thing, ms.Begin):
        return f"round {thing.round}.{thing.attempt}"
    if isinstance(thing, tuple | set):
        return f"({', '.join(map(_brief, thing))})"
    return str(thing)
