"""The schedule alone, in every shape: streams without threads, in any order of events."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.collectives.errors import ConfigError
from atoll.collectives.schedule.plan import NOBODY, ReducePlan
from atoll.collectives.schedule.routes import ROOT, Routes, hierarchical, ring, star, tree
from atoll.collectives.schedule.schedule import (
    LEAD_BYTES_MAX,
    FrameAdmission,
    FrameKind,
    Idle,
    OutgoingFrame,
)
from atoll.collectives.schedule.tree import TreeSchedule, lead_chunks

SHAPES: dict[str, Callable[[int, random.Random], Routes]] = {
    "butterfly": lambda count, dice: star(count),
    "ring": lambda count, dice: ring(dice.sample(range(count), count)),
    "tree": lambda count, dice: tree(count, dice.randint(1, 4)),
    "hierarchical": lambda count, dice: hierarchical([dice.randrange(4) for _ in range(count)]),
}


def plan_of(weights: list[float], owners: list[int], shape: Routes | None = None) -> ReducePlan:
    ids = tuple(bytes([p]) for p in range(len(weights)))
    return ReducePlan(ids, tuple(weights), tuple(owners), shape)


class World:
    """All participants of one reduction, over streams that hold ``capacity`` frames; each pair has
    ``stripes`` of them.

    The value of participant p for chunk c is 100 ** p * (c + 1), so a sum shows who is in it.
    """

    def __init__(self, plan: ReducePlan, capacity: int, stripes: int = 1) -> None:
        self.plan, self.capacity, self.stripes = plan, capacity, stripes
        self.everyone = range(len(plan.participants))
        self.schedules = [TreeSchedule(plan, me) for me in self.everyone]
        self.lead = lead_chunks(plan, 1, 1)
        self.streams: dict[tuple[int, int, int], deque[tuple[OutgoingFrame, int]]] = {
            (src, dest, stripe): deque()
            for src in self.everyone
            for dest in self.schedules[src].destinations
            for stripe in range(stripes)
        }
        self.dead: set[int] = set()
        self.finished: set[tuple[int, int]] = set()
        self.here: list[dict[tuple[int, int], int]] = [{} for _ in self.everyone]
        self.sums: list[dict[int, int]] = [{} for _ in self.everyone]
        self.result: list[dict[int, int]] = [{} for _ in self.everyone]
        self.sent = 0
        for me in self.everyone:
            for chunk in self.schedules[me].local_chunks():
                self.fold(me, chunk)

    def value(self, participant: int, chunk: int) -> int:
        return int(100**participant * (chunk + 1))

    def expected(self, chunk: int) -> int:
        counted = (p for p in self.everyone if self.plan.weights[p] > 0)
        return sum(self.value(p, chunk) for p in counted)

    def offer(self, src: int, dest: int, stripe: int) -> bool:
        """Let the sender of a stream act; whether it did."""
        stream = self.streams[src, dest, stripe]
        if (src, dest) in self.finished or len(stream) >= self.capacity or src in self.dead:
            return False
        send = self.schedules[src].next_send(dest)
        if send is Idle.DONE:
            self.finished.add((src, dest))
        if not isinstance(send, OutgoingFrame):
            return send is Idle.DONE
        self.sent += 1
        if send.kind is FrameKind.RESULT:
            value = self.result[src][send.chunk]
        else:
            value = self.sums[src].pop(send.chunk, None) or self.value(src, send.chunk)
        stream.append((send, value))
        return True

    def take(self, src: int, dest: int, stripe: int) -> bool:
        """Let the receiver of a stream act; whether it did."""
        stream, schedule = self.streams[src, dest, stripe], self.schedules[dest]
        if not stream or dest in self.dead:
            return False
        (kind, chunk, _), value = stream[0]
        admission = schedule.admit(src, kind, chunk)
        if admission is FrameAdmission.HOLD:
            assert self.stripes > 1, "one stripe keeps the order"
            return False
        assert admission is FrameAdmission.ACCEPT
        stream.popleft()
        if kind is FrameKind.RESULT:
            self.result[dest][chunk] = value
            schedule.final(chunk)
        else:
            self.here[dest][src, chunk] = value
            schedule.arrived(src, chunk)
            root = self.plan.owners[chunk]
            of_root = [c for s, c in self.here[dest] if s == src and self.plan.owners[c] == root]
            assert len(of_root) <= 2 * self.lead
            self.fold(dest, chunk)
        return True

    def fold(self, me: int, chunk: int) -> None:
        schedule = self.schedules[me]
        while (src := schedule.next_fold(chunk)) is not None:
            assert schedule.next_fold(chunk) is None, "two threads would add to one sum"
            own = src == me
            value = self.value(me, chunk) if own else self.here[me].pop((src, chunk))
            self.sums[me][chunk] = self.sums[me].get(chunk, 0) + value
            if schedule.folded(chunk) and schedule.is_root(chunk):
                self.result[me][chunk] = self.sums[me].pop(chunk)
                schedule.final(chunk)


def run(world: World, dice: random.Random, until: int | None = None) -> None:
    """Random events until nobody can act, or so many frames have been sent."""
    idle: set[tuple[bool, int, int, int]] = set()
    events = [(act, *pair) for pair in world.streams for act in (True, False)]
    while len(idle) < len(events) and (until is None or world.sent < until):
        event = events[dice.randrange(len(events))]
        if event in idle:
            continue
        offering, src, dest, stripe = event
        acted = world.offer(src, dest, stripe) if offering else world.take(src, dest, stripe)
        idle = set() if acted else idle | {event}


@pytest.mark.parametrize("kind", SHAPES)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_every_order_of_events_ends_with_the_full_sum_everywhere(
    kind: str, data: st.DataObject
) -> None:
    count = data.draw(st.integers(1, 33) | st.integers(1, 5), label="participants")
    weight = st.sampled_from([0.0, 1.0, 3.0])
    weights = data.draw(st.lists(weight, min_size=count, max_size=count).filter(any))
    dice = random.Random(data.draw(st.integers(0, 2**32), label="seed"))
    some = dice.sample(range(count), dice.randint(1, count))
    owners = [dice.choice([*some, NOBODY]) for _ in range(dice.randint(1, 40))]
    shape = SHAPES[kind](count, dice)
    world = World(plan_of(weights, owners, shape), dice.randint(1, 3), dice.choice([1, 1, 3]))
    for schedule in world.schedules:
        for chunk, owner in enumerate(owners):
            if owner == NOBODY:
                schedule.final(chunk)
    run(world, dice)
    for me in world.everyone:
        schedule = world.schedules[me]
        assert schedule.done, f"deadlock: {me} misses {schedule.missing()}"
        assert not schedule.missing()
        reduced = {c: world.expected(c) for c, owner in enumerate(owners) if owner != NOBODY}
        assert world.result[me] == reduced
        assert not world.sums[me]
        assert not world.here[me]
    assert world.finished == {(src, dest) for src, dest, _ in world.streams}


@pytest.mark.parametrize("kind", SHAPES)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_a_death_at_any_step_leaves_chunks_that_the_next_attempt_completes(
    kind: str, data: st.DataObject
) -> None:
    """What some survivor holds final is kept; the rest is reduced again among the survivors. Shards
    are of any size, some peers own nothing, and some add nothing."""
    count = data.draw(st.integers(2, 33) | st.integers(2, 5), label="participants")
    dice = random.Random(data.draw(st.integers(0, 2**32), label="seed"))
    victim = dice.randrange(count)
    weights = [dice.choice([0.0, 1.0, 3.0]) for _ in range(count)]
    weights[(victim + 1) % count] = 2.0  # or nothing is left for a mean
    some = dice.sample(range(count), dice.randint(1, count))
    owners = [dice.choice(some) for _ in range(dice.randint(1, 40))]
    shape = SHAPES[kind](count, dice)
    world = World(plan_of(weights, owners, shape), dice.randint(1, 3), dice.choice([1, 1, 3]))
    run(world, dice, until=dice.randrange(2 * count * len(owners)))
    world.dead.add(victim)
    for me in world.everyone:
        world.schedules[me].broken(victim)
    run(world, dice)
    staying = [p for p in world.everyone if p != victim]
    kept = {c: v for p in staying for c, v in world.result[p].items()}
    assert all(value == world.expected(chunk) for chunk, value in kept.items())
    lacking = [chunk for chunk in range(len(owners)) if chunk not in kept]
    again = [NOBODY if c in kept else dice.randrange(len(staying)) for c in range(len(owners))]
    left = [weights[p] for p in staying]
    second = World(plan_of(left, again, SHAPES[kind](len(staying), dice)), dice.randint(1, 3))
    for schedule in second.schedules:
        for chunk in kept:
            schedule.final(chunk)
    run(second, dice)
    for me in second.everyone:
        assert second.schedules[me].done
        assert second.result[me] == {chunk: second.expected(chunk) for chunk in lacking}


@pytest.mark.parametrize("count", [1, 2, 3, 8, 33])
def test_shapes_send_what_theory_says(count: int) -> None:
    """Frames in all: every shape moves each chunk n - 1 times up and n - 1 times down."""
    for kind, shape in SHAPES.items():
        owners = [chunk * count // 66 for chunk in range(66)]
        world = World(plan_of([1.0] * count, owners, shape(count, random.Random(1))), 1)
        run(world, random.Random(2))
        assert world.sent == 66 * 2 * (count - 1), kind


def test_neighbours() -> None:
    assert ring([2, 0, 3, 1]).neighbours(0) == {3}
    assert star(4).neighbours(1) == {0, 2, 3}
    assert star(1).neighbours(0) == frozenset()
    sites = hierarchical([7, 7, 9, 9, 9])
    assert sites.up[0] == (ROOT, 0, 0, 2, 2)
    assert sites.up[1] == (1, ROOT, 3, 1, 3)
    assert sites.up[4] == (4, 0, 4, 4, ROOT)


@pytest.mark.parametrize("kind", SHAPES)
def test_what_crosses_a_pair(kind: str) -> None:
    """For all roots together just the neighbours; for some of them less."""
    for seed in range(5):
        routes = SHAPES[kind](7, random.Random(seed))
        for one in range(7):
            for other in range(one + 1, 7):
                near = other in routes.neighbours(one) or one in routes.neighbours(other)
                assert routes.crosses([(one, other)], range(7)) == near
    star_of_two = star(4)
    assert not star_of_two.crosses([(2, 3)], [0, 1])
    assert star_of_two.crosses([(1, 3), (2, 3)], [0, 1])
    assert not ring([0, 1, 2, 3]).crosses([(0, 2), (1, 3)], range(4))
    assert not routes.crosses([], range(7))


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: ring([0, 0, 1]),
        lambda: tree(3, 0),
        lambda: Routes("x", ((ROOT, 1), (1, ROOT)), ((ROOT, 0), (1, ROOT))),
        lambda: Routes("x", ((ROOT,),), ()),
        lambda: Routes("x", ((0,),), ((ROOT,),)),
        lambda: plan_of([1.0, 1.0], [0], star(3)),
    ],
)
def test_routes_that_lead_nowhere_are_refused(wrong: Callable[[], object]) -> None:
    with pytest.raises(ConfigError):
        wrong()


@given(st.integers(1, 64), st.integers(1, 2**20), st.integers(1, 500))
def test_the_lead_bounds_memory_and_never_closes(count: int, chunk_bytes: int, chunks: int) -> None:
    owners = [chunk * count // chunks for chunk in range(chunks)]
    for shape in (star(count), ring(range(count)), tree(count, 2)):
        plan = plan_of([1.0] * count, owners, shape)
        lead = lead_chunks(plan, chunk_bytes, 4 * chunk_bytes)
        assert lead >= 1
        children = shape.up_children
        roots = set(owners)
        for p in range(count):
            parts = sum(len(children[r][p]) + 4 for r in roots if children[r][p])
            assert lead == 1 or lead * parts * chunk_bytes <= LEAD_BYTES_MAX
