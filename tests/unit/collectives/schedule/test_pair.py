"""The schedule of a pairwise exchange: its rules, and streams without threads in any order of
events."""

from __future__ import annotations

import random
from collections import deque

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.collectives.chunks import ChunkGrid
from atoll.collectives.codecs import CODECS, F32, U8, Codec
from atoll.collectives.errors import LocalProtocolError, RemoteProtocolError
from atoll.collectives.schedule.pair import PairSchedule, pair_lead
from atoll.collectives.schedule.plan import EVERYONE, NOBODY, ReducePlan, pairwise_plan
from atoll.collectives.schedule.schedule import (
    LEAD_BYTES_MAX,
    LEAD_CHUNKS_MIN,
    FrameAdmission,
    FrameKind,
    Idle,
    OutgoingFrame,
)

CODEC = st.sampled_from(sorted(CODECS)).map(CODECS.__getitem__)
WEIGHTS = st.lists(st.sampled_from([0.0, 0.3, 1.0, 7.0]), min_size=1, max_size=2).filter(any)


def mean_of(vectors: list[F32], weights: list[float], codec: Codec) -> F32:
    """The plain sum of decoded parts, in order."""
    total = np.zeros(vectors[0].size, np.float32)
    for vector, weight in zip(vectors, weights, strict=True):
        if weight > 0:
            data = np.empty(codec.encoded_bytes(vector.size), np.uint8)
            codec.encode(vector, data)
            codec.decode_add(data, float(np.float32(weight / sum(weights))), total)
    return total


class World:
    """Everybody in one exchange, with real parts, over streams that hold ``capacity`` frames; the
    pair has ``stripes`` of them each way. ``kept`` are chunks of an earlier attempt."""

    def __init__(
        self,
        vectors: list[F32],
        weights: list[float],
        codec: Codec,
        grid: ChunkGrid,
        kept: dict[int, bytes],
        dice: random.Random,
    ) -> None:
        self.vectors, self.weights, self.codec, self.grid = vectors, weights, codec, grid
        self.everyone = range(len(vectors))
        ids = [bytes([p]) for p in self.everyone]
        self.plan = pairwise_plan(ids, weights, grid, kept)
        self.schedules = [PairSchedule(self.plan, me) for me in self.everyone]
        self.lead = pair_lead(grid.count - len(kept), 1, 1)
        self.capacity, self.stripes = dice.randint(1, 3), dice.choice([1, 1, 3])
        self.streams: dict[tuple[int, int, int], deque[tuple[int, U8]]] = {
            (src, dest, stripe): deque()
            for src in self.everyone
            for dest in self.schedules[src].destinations
            for stripe in range(self.stripes)
        }
        self.dead: set[int] = set()
        self.here: list[dict[tuple[int, int], U8]] = [{} for _ in self.everyone]
        self.sums: list[dict[int, F32]] = [{} for _ in self.everyone]
        self.result: list[dict[int, bytes]] = [dict(kept) for _ in self.everyone]
        self.steps = 0
        for schedule in self.schedules:
            for chunk in kept:
                schedule.final(chunk)

    def expected(self, chunk: int) -> bytes:
        bounds = slice(*self.grid.bounds(chunk))
        return mean_of([v[bounds] for v in self.vectors], self.weights, self.codec).tobytes()

    def encoded(self, me: int, chunk: int) -> U8:
        lo, hi = self.grid.bounds(chunk)
        data = np.empty(self.codec.encoded_bytes(hi - lo), np.uint8)
        self.codec.encode(self.vectors[me][lo:hi], data)
        return data

    def offer(self, src: int, dest: int, stripe: int) -> bool:
        """Let the sender of a stream act; whether it did."""
        stream = self.streams[src, dest, stripe]
        if len(stream) >= self.capacity or src in self.dead:
            return False
        send = self.schedules[src].next_send(dest)
        if not isinstance(send, OutgoingFrame):
            return False
        assert send == OutgoingFrame(FrameKind.CONTRIB, send.chunk, added_here=True)
        data = self.here[src][src, send.chunk] = self.encoded(src, send.chunk)
        assert sum(p == src for p, _ in self.here[src]) <= self.lead
        self.schedules[src].arrived(src, send.chunk)
        stream.append((send.chunk, data))
        return True

    def take(self, src: int, dest: int, stripe: int) -> bool:
        """Let the receiver of a stream act; whether it did."""
        stream, schedule = self.streams[src, dest, stripe], self.schedules[dest]
        if not stream or dest in self.dead:
            return False
        chunk, data = stream[0]
        admission = schedule.admit(src, FrameKind.CONTRIB, chunk)
        if admission is FrameAdmission.HOLD:
            assert not self.weights[dest], "whoever waits for our parts is not so far ahead"
            return False
        assert admission is FrameAdmission.ACCEPT
        stream.popleft()
        self.here[dest][src, chunk] = data
        assert sum(p == src for p, _ in self.here[dest]) <= 2 * self.lead
        schedule.arrived(src, chunk)
        return True

    def fold(self, me: int, chunk: int) -> bool:
        """Add one part; whether there was one."""
        schedule = self.schedules[me]
        if me in self.dead or (src := schedule.next_fold(chunk)) is None:
            return False
        assert schedule.next_fold(chunk) is None, "two threads would add to one sum"
        data = self.here[me].pop((src, chunk), None)
        if data is None:
            assert schedule.local_chunks(), "only who is alone adds what nobody has encoded"
            data = self.encoded(me, chunk)
        total = self.sums[me].setdefault(chunk, np.zeros(self.grid.size(chunk), np.float32))
        self.codec.decode_add(data, self.plan.factors()[src], total)
        if schedule.folded(chunk):
            assert schedule.is_root(chunk)
            self.result[me][chunk] = self.sums[me].pop(chunk).tobytes()
            schedule.final(chunk)
        return True

    def run(self, dice: random.Random, until: int | None = None) -> None:
        """Random events until nobody can act, or so many have happened."""
        idle: set[tuple[object, ...]] = set()
        events = [(act, *way) for way in self.streams for act in (self.offer, self.take)]
        folds = [(self.fold, me, chunk) for me in self.everyone for chunk in range(self.grid.count)]
        events += [fold for fold in folds if self.plan.owners[fold[2]] != NOBODY]
        while len(idle) < len(events) and (until is None or self.steps < until):
            event = dice.choice([event for event in events if event not in idle])
            act, *arguments = event
            acted = act(*arguments)
            self.steps += acted
            idle = set() if acted else idle | {event}

    def kill(self, victim: int, dice: random.Random) -> None:
        """Its last frames are lost with it."""
        self.dead.add(victim)
        for (src, _, _), stream in self.streams.items():
            while src == victim and stream and dice.random() < 0.5:
                stream.pop()
        for schedule in self.schedules:
            schedule.broken(victim)

    def check(self, kept: dict[int, bytes]) -> None:
        """All is done, and everyone has the same bits."""
        whole = {chunk: self.expected(chunk) for chunk in range(self.grid.count)} | kept
        for me in self.everyone:
            schedule = self.schedules[me]
            assert schedule.done, f"deadlock: {me} misses {schedule.missing()}"
            assert not schedule.missing()
            assert self.result[me] == whole
            assert not self.sums[me]
            assert not self.here[me]
            for dest in schedule.destinations:
                assert schedule.next_send(dest) is Idle.DONE


def drawn(data: st.DataObject, count: int) -> tuple[list[F32], Codec, ChunkGrid, random.Random]:
    codec = data.draw(CODEC, label="codec")
    grid = ChunkGrid(data.draw(st.integers(1, 256 * 24), label="elements"), 256)
    seed = data.draw(st.integers(0, 2**32), label="seed")
    rng = np.random.default_rng(seed)
    vectors = [rng.standard_normal(grid.total).astype(np.float32) for _ in range(count)]
    return vectors, codec, grid, random.Random(seed)


@settings(max_examples=150, deadline=None)
@given(weights=WEIGHTS, data=st.data())
def test_every_order_of_events_ends_with_the_same_bits(
    weights: list[float], data: st.DataObject
) -> None:
    vectors, codec, grid, dice = drawn(data, len(weights))
    kept = {chunk: b"kept" for chunk in range(grid.count) if dice.random() < 0.2}
    world = World(vectors, weights, codec, grid, kept, dice)
    world.run(dice)
    world.check(kept)


@settings(max_examples=150, deadline=None)
@given(weights=WEIGHTS.filter(lambda weights: len(weights) == 2), data=st.data())
def test_a_death_at_any_step_leaves_chunks_that_the_next_attempt_completes(
    weights: list[float], data: st.DataObject
) -> None:
    """The next one is of the survivor alone; or of both, if but a stream broke. Some of what is
    final is kept."""
    vectors, codec, grid, dice = drawn(data, 2)
    world = World(vectors, weights, codec, grid, {}, dice)
    world.run(dice, until=dice.randrange(6 * grid.count + 1))
    victim = dice.randrange(2)
    world.kill(victim, dice)
    world.run(dice)
    for result in world.result:
        assert all(bits == world.expected(chunk) for chunk, bits in result.items())
    back = dice.random() < 0.5 or weights[1 - victim] == 0
    staying = [0, 1] if back else [1 - victim]
    known = {chunk: bits for p in staying for chunk, bits in world.result[p].items()}
    kept = {chunk: bits for chunk, bits in known.items() if dice.random() < 0.8}
    second = World(
        [vectors[p] for p in staying], [weights[p] for p in staying], codec, grid, kept, dice
    )
    second.run(dice)
    second.check(kept)


# ---------------------------------------------------------------- the rules, one by one


def schedule_of(weights: list[float], owners: list[int], me: int = 0) -> PairSchedule:
    ids = tuple(bytes([p]) for p in range(len(weights)))
    return PairSchedule(ReducePlan(ids, tuple(weights), tuple(owners)), me)


def send(schedule: PairSchedule, *chunks: int) -> None:
    for chunk in chunks:
        assert schedule.next_send(1) == OutgoingFrame(FrameKind.CONTRIB, chunk, added_here=True)
        schedule.arrived(0, chunk)


def arrive(schedule: PairSchedule, *chunks: int) -> None:
    for chunk in chunks:
        assert schedule.admit(1, FrameKind.CONTRIB, chunk) is FrameAdmission.ACCEPT
        schedule.arrived(1, chunk)


def finish(schedule: PairSchedule, chunk: int) -> list[int]:
    added = []
    while (src := schedule.next_fold(chunk)) is not None:
        added.append(src)
        if schedule.folded(chunk):
            schedule.final(chunk)
    return added


def test_own_parts_stay_near_the_base() -> None:
    schedule = schedule_of([1, 1], [EVERYONE] * 8)
    send(schedule, *range(LEAD_CHUNKS_MIN))
    assert schedule.next_send(1) is Idle.WAIT
    arrive(schedule, 0)
    finish(schedule, 0)
    send(schedule, LEAD_CHUNKS_MIN)
    assert schedule.next_send(1) is Idle.WAIT


def test_the_base_moves_over_all_that_became_final_in_another_order() -> None:
    schedule = schedule_of([1, 1], [EVERYONE] * 8)
    send(schedule, *range(LEAD_CHUNKS_MIN))
    arrive(schedule, *range(LEAD_CHUNKS_MIN))
    for chunk in reversed(range(LEAD_CHUNKS_MIN)):
        assert schedule.next_send(1) is Idle.WAIT
        finish(schedule, chunk)
    send(schedule, *range(LEAD_CHUNKS_MIN, 2 * LEAD_CHUNKS_MIN))


def test_a_part_far_ahead_is_held_until_the_base_moves_on() -> None:
    schedule = schedule_of([1, 1], [NOBODY] + [EVERYONE] * 8)
    far = 1 + 2 * LEAD_CHUNKS_MIN  # the first one does not count
    arrive(schedule, *range(1, far))
    assert schedule.admit(1, FrameKind.CONTRIB, far) is FrameAdmission.HOLD
    send(schedule, 1)
    finish(schedule, 1)
    assert schedule.admit(1, FrameKind.CONTRIB, far) is FrameAdmission.ACCEPT


@pytest.mark.parametrize("own_first", [True, False])
def test_parts_are_added_in_the_order_of_participants_whichever_comes_first(
    own_first: bool,
) -> None:
    schedule = schedule_of([1, 1], [EVERYONE])
    if own_first:
        send(schedule, 0)
        assert finish(schedule, 0) == [0]
        arrive(schedule, 0)
        assert finish(schedule, 0) == [1]
    else:
        arrive(schedule, 0)
        assert finish(schedule, 0) == []
        send(schedule, 0)
        assert finish(schedule, 0) == [0, 1]
    assert schedule.done


def test_repetitions_are_dropped() -> None:
    schedule = schedule_of([1, 1], [EVERYONE])
    arrive(schedule, 0)
    assert schedule.admit(1, FrameKind.CONTRIB, 0) is FrameAdmission.DROP
    send(schedule, 0)
    finish(schedule, 0)
    assert schedule.admit(1, FrameKind.CONTRIB, 0) is FrameAdmission.DROP
    assert schedule.next_fold(0) is None


@pytest.mark.parametrize(
    ("src", "kind", "chunk", "why"),
    [
        (1, 3, 0, "unknown kind 3"),
        (1, FrameKind.RESULT, 0, "adds up for itself"),
        (1, FrameKind.CONTRIB, -1, "chunk -1 of 2"),
        (1, FrameKind.CONTRIB, 2, "chunk 2 of 2"),
        (0, FrameKind.CONTRIB, 0, "no part"),
        (2, FrameKind.CONTRIB, 0, "no part"),
        (1, FrameKind.CONTRIB, 1, "kept"),
    ],
)
def test_frames_outside_the_schedule_are_refused(src: int, kind: int, chunk: int, why: str) -> None:
    schedule = schedule_of([1, 1], [EVERYONE, NOBODY])
    with pytest.raises(RemoteProtocolError, match=why):
        schedule.admit(src, kind, chunk)


def test_who_has_no_weight_sends_nothing_and_is_refused_if_it_does() -> None:
    with pytest.raises(RemoteProtocolError, match="its weight is 0"):
        schedule_of([1, 0], [EVERYONE]).admit(1, FrameKind.CONTRIB, 0)
    silent = schedule_of([0, 1], [EVERYONE])
    assert silent.destinations == frozenset()
    assert silent.next_send(1) is Idle.DONE
    assert silent.missing() == {1}
    arrive(silent, 0)
    assert finish(silent, 0) == [1]


def test_what_is_sent_is_added_when_it_is_encoded_even_if_nobody_adds_anything() -> None:
    schedule = schedule_of([1, 0], [EVERYONE])
    assert schedule.local_chunks() == ()
    assert schedule.next_fold(0) is None
    send(schedule, 0)
    assert finish(schedule, 0) == [0]


def test_who_is_alone_has_all_chunks_to_itself() -> None:
    schedule = schedule_of([2.0], [EVERYONE, NOBODY, EVERYONE])
    assert schedule.destinations == frozenset()
    assert schedule.local_chunks() == (0, 2)
    assert finish(schedule, 2) == [0]


def test_a_part_is_judged_again_when_it_is_complete() -> None:
    schedule = schedule_of([1, 1], [EVERYONE])
    for _ in range(2):  # two streams may bring it
        assert schedule.admit(1, FrameKind.CONTRIB, 0) is FrameAdmission.ACCEPT
    schedule.arrived(1, 0)
    assert schedule.admit(1, FrameKind.CONTRIB, 0) is FrameAdmission.DROP


def test_missing_names_the_other_while_anything_is_owed_either_way() -> None:
    schedule = schedule_of([1, 1], [EVERYONE] * 2)
    arrive(schedule, 0, 1)
    assert schedule.missing() == {1}, "it does not take our part"
    send(schedule, 0, 1)
    assert schedule.missing() == frozenset(), "there is only something to add"
    finish(schedule, 0)
    finish(schedule, 1)
    assert schedule.missing() == frozenset()
    waiting = schedule_of([1, 1], [EVERYONE])
    send(waiting, 0)
    assert waiting.missing() == {1}


def test_misuse_by_the_engine_is_a_local_error() -> None:
    schedule = schedule_of([1, 1], [EVERYONE])
    schedule.arrived(1, 0)
    for src in (0, 1):
        with pytest.raises(LocalProtocolError, match="not admitted or handed out"):
            schedule.arrived(src, 0)
    schedule.final(0)
    with pytest.raises(LocalProtocolError, match="twice"):
        schedule.final(0)


@given(st.integers(0, 10_000), st.integers(1, 2**21), st.integers(1, 2**21))
def test_the_lead_bounds_memory_and_never_closes(chunks: int, part: int, total: int) -> None:
    lead = pair_lead(chunks, part, total)
    assert lead >= 1
    assert lead == 1 or lead * (2 * part + total) <= LEAD_BYTES_MAX
