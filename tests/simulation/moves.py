"""One state of three peers as a value, and what single events make of it.

The shells' part is played here: effects are carried out at once, but messages, reductions and
fetches, which are separate events. After Abort nothing more is said about an attempt. Each of a
dead peer's unfinished reductions has ended for the others, unless all its data was under way.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from harness.plane import root_of
from harness.values import Mean

from atoll.peer.membership import events as ev
from atoll.peer.membership import messages as ms
from atoll.peer.membership.durable_records import ReadyRecord
from atoll.peer.membership.kept_chunks import Kept, parse_kept
from atoll.peer.membership.timing import Timing
from simulation.facts import Facts, check_commit, view_of, with_commit, with_view
from simulation.homes import Home
from simulation.snapshots import clone, machine_mark

__all__ = ["Links", "Moves", "Point", "Way", "describe", "fingerprint", "packed"]

CHUNK = 0
LATE_MAX_S = 2.0  # a silence that is longer is no other one
ANSWERS_MAX = 10_000  # transitions of single machines that are remembered

Way = tuple[bytes, bytes]  # from whom to whom
Links = tuple[tuple[Way, tuple[object, ...]], ...]


@dataclass(frozen=True)
class Point:
    """One state of the search. Machines are shared between states and never changed in place."""

    nodes: tuple[tuple[bytes, Any], ...]  # the living
    links: Links
    facts: Facts
    crashes: int
    silence_left: bool
    now_s: float
    joined: frozenset[tuple[ms.Begin, bytes]] = frozenset()  # who has taken part in which reduction
    held: frozenset[tuple[ms.Begin, bytes]] = frozenset()  # whose result is complete
    over: frozenset[tuple[ms.Begin, bytes]] = frozenset()  # for whom a reduction cannot end
    fetches: frozenset[tuple[ms.Begin, bytes, bytes]] = frozenset()
    said: tuple[tuple[Way, object], ...] = ()  # last heartbeat per link
    silent: bytes = b""  # whose messages are late ...
    silent_s: float = 0.0  # ... and since when
    homes: tuple[tuple[bytes, Home], ...] = ()  # where peers may be started again
    down: frozenset[bytes] = frozenset()  # who will be ...
    restarts: frozenset[bytes] = frozenset()  # ... and who may yet have to
    waited: bool = False  # the last event was time
    path: tuple[Any, ...] = ()  # how we got here, the last event first; no part of the state

    @property
    def living(self) -> dict[bytes, Any]:
        return dict(self.nodes)


class Moves:
    def __init__(self, trainers: set[bytes], goal: int) -> None:
        self.trainers = trainers
        self.goal = goal  # nobody submits for later rounds
        self.waiting = False  # time passes
        self.first_event: ev.Event = ev.Tick()  # of a process that finds a home
        self.digests: dict[int, bytes] = {}  # of the states at the beginning
        self._answers: dict[tuple[int, float, object], tuple[Any, list[Any]]] = {}

    # ------------------------------------------------------------ events

    def deliver(self, point: Point, way: Way) -> Point:
        links = dict(point.links)
        event, *links[way] = links[way]  # type: ignore[assignment]
        links[way] = tuple(links[way])
        return self.handle(replace(point, links=packed(links)), way[1], event)

    def may_end(self, point: Point, begin: ms.Begin, peer: bytes) -> bool:
        return self._all_in(point, begin) and (begin, peer) not in point.over

    def _all_in(self, point: Point, begin: ms.Begin) -> bool:
        return {p for b, p in point.joined if b == begin} >= set(begin.participants)

    def reduced(self, point: Point, begin: ms.Begin, peer: bytes) -> Point:
        finals = {CHUNK: self._mean(point, begin)}
        root = root_of(begin, finals, self._kept(point, begin))
        point = replace(point, held=point.held | {(begin, peer)})
        return self.handle(point, peer, ev.AttemptReduced(begin.round, begin.attempt, root))

    def fetched(self, point: Point, begin: ms.Begin, peer: bytes, holder: bytes) -> Point:
        less = replace(point, fetches=point.fetches - {(begin, peer, holder)})
        return self.reduced(less, begin, peer)

    def _mean(self, point: Point, begin: ms.Begin) -> Mean:
        kept = {item.chunk: item for item in self._kept(point, begin)}
        origin = begin.origins[kept[CHUNK].origin] if kept else begin.origins[0]
        parts = tuple((p, 1, begin.round) for p in origin.participants)
        return Mean(parts, origin.weights, CHUNK)

    def _kept(self, point: Point, begin: ms.Begin) -> tuple[Kept, ...]:
        view = view_of(point.facts, begin.lineage, begin.view)
        assert view is not None
        members = len(view.members)
        return parse_kept(begin.kept, members, len(begin.origins)) if begin.kept else ()

    def submit(self, point: Point, peer: bytes) -> Point:
        own = point.living[peer].follower
        if own.round >= self.goal or own.submissions or peer not in self.trainers:
            return point
        return self.handle(point, peer, ev.Submitted(own.round, own.epoch, 1.0))

    def restart(self, point: Point, peer: bytes, lost: int) -> Point:
        """A process is back, with its home but for the last records, and has links to the living.

        What it had reduced is there if it has said READY for it.
        """
        homes = dict(point.homes)
        home = homes[peer] = homes[peer].after_cut(lost)
        node = home.process(Timing())
        places = {record.place for record in home.records if isinstance(record, ReadyRecord)}
        mine = {(begin, p) for begin, p in point.joined if p == peer}
        held = {(b, p) for b, p in point.held if p != peer or _place(b) in places}
        links = dict(point.links)
        for other, _ in point.nodes:
            links[peer, other] = (*links.get((peer, other), ()), ev.LinkUp(peer))
        point = replace(
            point,
            nodes=tuple(sorted((*point.nodes, (peer, node)), key=lambda pair: pair[0])),
            links=packed(links),
            homes=tuple(homes.items()),
            down=point.down - {peer},
            held=frozenset(held),
            over=point.over | (mine - held),
            fetches=frozenset(each for each in point.fetches if each[1] != peer),
            waited=False,
        )
        round_number, chain = home.found.state
        digest = self.digests.get(round_number, chain)
        point = self.handle(point, peer, self.first_event)
        point = self.handle(point, peer, ev.HomeRead(round_number, chain, digest))
        if peer in self.trainers:
            point = self.handle(point, peer, ev.Attached())
        for other in point.living:
            if other != peer:
                point = self.handle(point, peer, ev.LinkUp(other))
        return self.submit(point, peer)

    # ------------------------------------------------------------ a machine takes an event

    def handle(self, point: Point, peer: bytes, event: Any) -> Point:
        nodes = point.living
        nodes[peer], effects = self._answer(nodes[peer], event, point.now_s)
        point = replace(point, nodes=tuple(nodes.items()), waited=False)
        for effect in effects:
            point = self._carry(point, peer, effect)
        return point

    def _answer(self, node: Any, event: Any, now_s: float) -> tuple[Any, list[Any]]:
        """The machine after the event. Most have met it before, in another order of what happens
        elsewhere. While time passes the machines are this state's own: nobody sees them change."""
        if self.waiting:
            return node, node.handle(event, now_s)
        key = (machine_mark(node, now_s), now_s, event)
        known = self._answers.get(key)
        if known is None:
            node = clone(node)
            known = self._answers[key] = (node, node.handle(event, now_s))
            if len(self._answers) > ANSWERS_MAX:
                del self._answers[next(iter(self._answers))]
        return known

    def _carry(self, point: Point, peer: bytes, effect: object) -> Point:
        if isinstance(effect, ev.Send):
            return self._send(point, peer, effect)
        if isinstance(effect, ev.Persist):
            return self._persist(point, peer, effect)
        if isinstance(effect, ev.Reduce):
            return replace(point, joined=point.joined | {(effect.begin, peer)})
        if isinstance(effect, ev.Abort):
            return self._abort(point, peer, effect)
        if isinstance(effect, ev.Fetch):
            return replace(point, fetches=point.fetches | {(effect.begin, peer, effect.holder)})
        if isinstance(effect, ev.ProbePeer):
            answer = "up" if effect.peer in point.living else "refused"
            return self.handle(point, peer, ev.Probed(effect.peer, answer))
        if isinstance(effect, ev.Apply):
            assert (effect.begin, peer) in point.held, "invariant 2: applied without its result"
            within = point.living[peer].view
            facts = with_commit(point.facts, within, effect.begin, effect.chain)
            point = replace(point, facts=facts)
            return self.handle(point, peer, ev.Applied(effect.begin.round, effect.chain))
        if isinstance(effect, ev.TellTrainer):
            return self.submit(point, peer)
        if isinstance(effect, ev.ListFinal):
            return self._list_final(point, peer, effect)
        if isinstance(effect, ev.StartSync):
            return self._catch_up(point, peer, effect.goal)
        if isinstance(effect, ev.Undo):
            return self.handle(point, peer, ev.CaughtUp(effect.round, effect.chain, effect.chain))
        if isinstance(effect, ev.Installed):
            proof = point.living[peer].proof
            return replace(point, facts=with_view(point.facts, effect.view, proof))
        return point

    def _persist(self, point: Point, peer: bytes, effect: ev.Persist) -> Point:
        """Write a record; what is to be synced is."""
        homes = dict(point.homes)
        homes[peer] = homes[peer].written(effect.record, synced=effect.synced)
        point = replace(point, homes=tuple(homes.items()))
        return self.handle(point, peer, ev.Durable(effect.position)) if effect.synced else point

    def _abort(self, point: Point, peer: bytes, effect: ev.Abort) -> Point:
        """The shell says nothing more about this attempt, and sends nothing more of it: without
        its part, nobody's result is complete."""
        place = (effect.round, effect.attempt)
        gone: set[tuple[ms.Begin, bytes]] = set()
        for begin, p in point.joined - point.held:
            if p == peer and (begin.round, begin.attempt) == place:
                gone |= {(begin, peer)}
                if not self._all_in(point, begin):
                    gone |= {(begin, other) for other in begin.participants}
        fetches = frozenset(
            (begin, p, holder)
            for begin, p, holder in point.fetches
            if p != peer or (begin.round, begin.attempt) != place
        )
        return replace(point, over=point.over | gone, fetches=fetches)

    def _list_final(self, point: Point, peer: bytes, effect: ev.ListFinal) -> Point:
        """The one chunk is final where the whole result is."""
        digests = bytes(32)
        for begin, holder in point.held:
            if holder == peer and (begin.round, begin.attempt) == (effect.round, effect.attempt):
                digests = self._mean(point, begin).digest
        event = ev.FinalChunks(effect.round, effect.attempt, digests)
        return self.handle(point, peer, event)

    def _holders(self, point: Point, commit: ms.Commit) -> set[bytes]:
        place = (commit.lineage, commit.view, commit.round, commit.attempt)
        return {p for b, p in point.held if (b.lineage, b.view, b.round, b.attempt) == place}

    def _catch_up(self, point: Point, peer: bytes, goal: ev.Goal) -> Point:
        """At once, if a living donor has got so far; else it fails and is asked for again."""
        living = point.living
        for member in goal.donors:
            donor = living.get(member.peer)
            if donor is not None and donor.follower.round >= goal.round:
                event = ev.CaughtUp(goal.round, goal.chain, goal.chain)
                return self.handle(point, peer, event)
        return self.handle(point, peer, ev.CatchUpFailed("no donor"))

    def _send(self, point: Point, peer: bytes, effect: ev.Send) -> Point:
        way, message = (peer, effect.peer), effect.message
        if isinstance(message, ms.Commit):
            check_commit(point.facts, message, self._holders(point, message))
        if effect.peer not in point.living:
            return point
        event = ev.Received(peer, message)
        links, said = dict(point.links), dict(point.said)
        queue = links.get(way, ())
        if isinstance(message, ms.Heartbeat | ms.CoordinatorBeat):
            same = said.get(way) == _changes(message)
            said[way] = _changes(message)
            point = replace(point, said=tuple(sorted(said.items(), key=lambda x: x[0])))
            if same and peer == point.silent:
                return point  # what is late is told once
            if same and not queue:
                return self.handle(point, effect.peer, event)
        if queue and queue[-1] == event:
            return point  # twice the same, one behind the other
        links[way] = (*queue, event)
        return replace(point, links=packed(links))


def describe(point: Point) -> str:
    return "; ".join(
        f"{peer[:1].decode()} {node.phase.value} round {node.follower.round}"
        for peer, node in point.nodes
    )


def _changes(beat: object) -> object:
    """What a heartbeat says, but for durations."""
    if isinstance(beat, ms.CoordinatorBeat):
        return replace(beat, waiting=(), waiting_s=0.0, remembered=())
    return replace(beat, position=0) if isinstance(beat, ms.Heartbeat) else beat


def _place(begin: ms.Begin) -> tuple[bytes, int, int, int]:
    return begin.lineage, begin.view, begin.round, begin.attempt


def packed(links: dict[Way, tuple[object, ...]]) -> Links:
    return tuple(sorted((way, queue) for way, queue in links.items() if queue))


def fingerprint(point: Point) -> int:
    """Of all that decides what may happen next. 64 bits: a collision would hide a state."""
    machines = tuple((peer, machine_mark(node, point.now_s)) for peer, node in point.nodes)
    late_s = min(round(point.now_s - point.silent_s, 3), LATE_MAX_S) if point.silent else 0.0
    faults = (point.crashes, point.silence_left, point.silent, late_s)
    reductions = (point.joined, point.held, point.over, point.fetches)
    homes = tuple((peer, home.mark, home.synced, home.life) for peer, home in point.homes)
    gone = (homes, point.down, point.restarts)
    state = (machines, point.links, point.said, point.facts, faults, reductions, gone)
    return hash((state, point.waited))
