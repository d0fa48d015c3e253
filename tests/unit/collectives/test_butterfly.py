"""The butterfly schedule alone: streams without threads, in any order of events."""

from __future__ import annotations

import random
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.collectives.butterfly import (
    LEAD_CHUNKS_MIN,
    LEAD_PART,
    SPREAD_CHUNKS,
    WINDOW_BYTES_MAX,
    WINDOW_CHUNKS,
    Butterfly,
    window_chunks,
)
from atoll.collectives.errors import LocalProtocolError, RemoteProtocolError
from atoll.collectives.plan import ReducePlan
from atoll.collectives.schedule import Admission, Idle, Kind, Send


def plan_of(weights: list[float], owners: list[int]) -> ReducePlan:
    return ReducePlan(tuple(bytes([p]) for p in range(len(weights))), tuple(weights), tuple(owners))


class World:
    """All participants of one reduction, over streams that hold ``capacity`` frames.

    The value of participant p for chunk c is 100 ** p * (c + 1), so a sum shows who is in it.
    """

    def __init__(self, plan: ReducePlan, window: int, capacity: int) -> None:
        self.plan, self.window, self.capacity = plan, window, capacity
        self.everyone = range(len(plan.participants))
        self.schedules = [Butterfly(plan, me, window) for me in self.everyone]
        self.streams: dict[tuple[int, int], deque[tuple[Send, int]]] = {
            (src, dest): deque() for src in self.everyone for dest in self.everyone
        }
        self.finished: set[tuple[int, int]] = set()
        self.here: list[dict[tuple[int, int], int]] = [{} for _ in self.everyone]
        self.order: list[dict[int, list[int]]] = [{} for _ in self.everyone]
        self.result: list[dict[int, int]] = [{} for _ in self.everyone]

    def value(self, participant: int, chunk: int) -> int:
        return int(100**participant * (chunk + 1))

    def expected(self, chunk: int) -> int:
        counted = (p for p in self.everyone if self.plan.weights[p] > 0)
        return sum(self.value(p, chunk) for p in counted)

    def offer(self, src: int, dest: int) -> bool:
        """Let the sender of a stream act; whether it did."""
        stream = self.streams[src, dest]
        if (src, dest) in self.finished or len(stream) >= max(1, self.capacity):
            return False
        send = self.schedules[src].next_send(dest)
        if send is Idle.DONE:
            self.finished.add((src, dest))
        if not isinstance(send, Send):
            return send is Idle.DONE
        result = send.kind is Kind.RESULT
        stream.append(
            (send, self.result[src][send.chunk] if result else self.value(src, send.chunk))
        )
        return True

    def take(self, src: int, dest: int) -> bool:
        """Let the receiver of a stream act; whether it did."""
        stream, schedule = self.streams[src, dest], self.schedules[dest]
        if not stream:
            return False
        (kind, chunk), value = stream[0]
        admission = schedule.admit(src, kind, chunk)
        if admission is Admission.HOLD:
            return False
        assert admission is Admission.ACCEPT
        stream.popleft()
        if kind is Kind.RESULT:
            self.result[dest][chunk] = value
            schedule.final(chunk)
        else:
            self.here[dest][src, chunk] = value
            schedule.arrived(src, chunk)
            held = sum(1 for source, _ in self.here[dest] if source == src)
            assert held <= self.window
            self.fold(dest, chunk)
        return True

    def fold(self, me: int, chunk: int) -> None:
        schedule = self.schedules[me]
        while (src := schedule.next_fold(chunk)) is not None:
            assert schedule.next_fold(chunk) is None, "two threads would add to one sum"
            value = self.here[me].pop((src, chunk))
            self.order[me].setdefault(chunk, []).append(src)
            self.result[me][chunk] = self.result[me].get(chunk, 0) + value
            if schedule.folded(chunk):
                schedule.final(chunk)


def run(world: World, rng: random.Random) -> None:
    """Random events until nobody can act."""
    idle: set[tuple[bool, int, int]] = set()
    events = [(act, *pair) for pair in world.streams for act in (True, False)]
    while len(idle) < len(events):
        event = events[rng.randrange(len(events))]
        if event in idle:
            continue
        offering, src, dest = event
        acted = world.offer(src, dest) if offering else world.take(src, dest)
        idle = set() if acted else idle | {event}


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_every_order_of_events_ends_with_the_full_sum_everywhere(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 17), label="participants")
    weights = data.draw(
        st.lists(st.sampled_from([0.0, 1.0, 3.0]), min_size=count, max_size=count).filter(any)
    )
    owners = data.draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=60))
    window = data.draw(st.integers(1, WINDOW_CHUNKS), label="window")
    world = World(plan_of(weights, owners), window, data.draw(st.integers(1, 3), label="capacity"))
    run(world, random.Random(data.draw(st.integers(0, 2**32), label="seed")))
    contributors = [p for p in world.everyone if weights[p] > 0]
    for me in world.everyone:
        schedule = world.schedules[me]
        assert schedule.done, f"deadlock: {me} misses {schedule.missing()}"
        assert not schedule.missing()
        assert world.result[me] == {c: world.expected(c) for c in range(len(owners))}
        assert all(order == contributors for order in world.order[me].values())
    assert world.finished == set(world.streams)


def admit_all(schedule: Butterfly, src: int, chunks: range) -> None:
    for chunk in chunks:
        assert schedule.admit(src, Kind.CONTRIB, chunk) is Admission.ACCEPT
        schedule.arrived(src, chunk)


def finish(schedule: Butterfly, chunk: int) -> None:
    while schedule.next_fold(chunk) is not None:
        if schedule.folded(chunk):
            schedule.final(chunk)


def test_window_holds_the_fast_source_until_the_base_is_final() -> None:
    schedule = Butterfly(plan_of([1, 1], [0] * 10), 0)
    admit_all(schedule, 1, range(WINDOW_CHUNKS))
    assert schedule.admit(1, Kind.CONTRIB, WINDOW_CHUNKS) is Admission.HOLD
    assert schedule.next_fold(0) is None  # it is the turn of participant 0
    admit_all(schedule, 0, range(1))
    assert schedule.admit(1, Kind.CONTRIB, WINDOW_CHUNKS) is Admission.HOLD
    finish(schedule, 0)
    assert schedule.admit(1, Kind.CONTRIB, WINDOW_CHUNKS) is Admission.ACCEPT


def test_results_go_before_contributions_and_only_to_others() -> None:
    schedule = Butterfly(plan_of([1, 1], [0, 1]), 0)
    assert schedule.next_send(0) == Send(Kind.CONTRIB, 0)
    assert schedule.next_send(0) is Idle.DONE
    for src in (0, 1):
        admit_all(schedule, src, range(1))
    finish(schedule, 0)
    assert schedule.next_send(1) == Send(Kind.RESULT, 0)
    assert schedule.next_send(1) == Send(Kind.CONTRIB, 1)
    assert schedule.next_send(1) is Idle.DONE


def test_sender_waits_only_for_its_own_chunks() -> None:
    schedule = Butterfly(plan_of([1, 1], [0, 1]), 0)
    assert schedule.next_send(1) == Send(Kind.CONTRIB, 1)
    assert schedule.next_send(1) is Idle.WAIT
    without_chunks = Butterfly(plan_of([1, 1], [0, 0]), 1)
    for chunk in (0, 1):
        assert without_chunks.next_send(0) == Send(Kind.CONTRIB, chunk)
    assert without_chunks.next_send(0) is Idle.DONE


def test_contributions_leave_for_all_owners_at_the_same_pace() -> None:
    schedule = Butterfly(plan_of([1, 1, 1, 1], [0] + [1] * 5 + [2] * 5 + [3]), 0)
    for chunk in range(1, 6):
        schedule.final(chunk)  # so that only the pace is in the way
    for _ in range(SPREAD_CHUNKS):
        assert isinstance(schedule.next_send(1), Send)
    assert schedule.next_send(1) is Idle.PACED  # 2 and 3 have none yet
    assert schedule.next_send(2) == Send(Kind.CONTRIB, 6)
    assert schedule.next_send(1) is Idle.PACED
    assert schedule.next_send(3) == Send(Kind.CONTRIB, 11)  # that was all for 3
    assert schedule.next_send(1) == Send(Kind.CONTRIB, 1 + SPREAD_CHUNKS)
    assert schedule.next_send(1) is Idle.PACED
    schedule.broken(2)
    assert schedule.next_send(1) == Send(Kind.CONTRIB, 2 + SPREAD_CHUNKS)


def test_contributions_stay_near_the_results_of_their_owner() -> None:
    schedule = Butterfly(plan_of([1, 1], [0] + [1] * 8), 0)
    for chunk in range(1, 1 + LEAD_CHUNKS_MIN):
        assert schedule.next_send(1) == Send(Kind.CONTRIB, chunk)
    assert schedule.next_send(1) is Idle.WAIT
    schedule.final(1)
    assert schedule.next_send(1) == Send(Kind.CONTRIB, 1 + LEAD_CHUNKS_MIN)
    assert schedule.next_send(1) is Idle.WAIT


def test_a_lead_beyond_the_window_is_none() -> None:
    chunks = LEAD_PART * (WINDOW_CHUNKS + 1)
    schedule = Butterfly(plan_of([1, 1], [0] + [1] * chunks), 0)
    sent = [schedule.next_send(1) for _ in range(chunks)]
    assert sent == [Send(Kind.CONTRIB, chunk) for chunk in range(1, 1 + chunks)]


def test_repetitions_are_dropped() -> None:
    schedule = Butterfly(plan_of([1, 1], [0, 1]), 0)
    admit_all(schedule, 1, range(1))
    assert schedule.admit(1, Kind.CONTRIB, 0) is Admission.DROP
    assert schedule.admit(1, Kind.RESULT, 1) is Admission.ACCEPT
    schedule.final(1)
    assert schedule.admit(1, Kind.RESULT, 1) is Admission.DROP


@pytest.mark.parametrize(
    ("src", "kind", "chunk", "why"),
    [
        (1, 3, 0, "unknown kind 3"),
        (1, 0, 0, "unknown kind 0"),
        (1, Kind.CONTRIB, -1, "chunk -1 of 4"),
        (1, Kind.RESULT, 4, "chunk 4 of 4"),
        (3, Kind.CONTRIB, 0, "no part"),
        (-1, Kind.CONTRIB, 0, "no part"),
        (1, Kind.CONTRIB, 2, "not owned here"),
        (2, Kind.CONTRIB, 0, "weight is 0"),
        (1, Kind.CONTRIB, 1, "chunk 1 before chunk 0"),
        (1, Kind.RESULT, 0, "does not own"),
        (2, Kind.RESULT, 2, "does not own"),
        (0, Kind.RESULT, 0, "does not own"),
    ],
)
def test_frames_outside_the_schedule_are_refused(src: int, kind: int, chunk: int, why: str) -> None:
    schedule = Butterfly(plan_of([1, 1, 0], [0, 0, 1, 2]), 0)
    with pytest.raises(RemoteProtocolError, match=why):
        schedule.admit(src, kind, chunk)


def test_a_source_sends_one_frame_at_a_time() -> None:
    schedule = Butterfly(plan_of([1, 1], [0, 1]), 0)
    assert schedule.admit(1, Kind.CONTRIB, 0) is Admission.ACCEPT
    for kind, chunk in ((Kind.CONTRIB, 0), (Kind.RESULT, 1)):
        with pytest.raises(RemoteProtocolError, match="while another frame"):
            schedule.admit(1, kind, chunk)


def test_missing_names_who_is_late_and_not_who_waits_for_it() -> None:
    schedule = Butterfly(plan_of([1, 1, 1], [0, 1, 2]), 0)
    assert schedule.missing() == {1, 2}
    admit_all(schedule, 0, range(1))
    admit_all(schedule, 1, range(1))
    assert schedule.missing() == {2}
    admit_all(schedule, 2, range(1))
    finish(schedule, 0)
    assert schedule.missing() == {1, 2}  # now the owners of the results
    assert schedule.admit(1, Kind.RESULT, 1) is Admission.ACCEPT
    schedule.final(1)
    assert schedule.missing() == {2}


def test_missing_names_owners_while_only_the_own_part_is_late() -> None:
    schedule = Butterfly(plan_of([1, 1], [0, 1]), 0)
    admit_all(schedule, 1, range(1))
    assert schedule.missing() == {1}


def test_misuse_by_the_engine_is_a_local_error() -> None:
    schedule = Butterfly(plan_of([1, 1], [0, 1]), 0)
    with pytest.raises(LocalProtocolError, match="not admitted"):
        schedule.arrived(1, 0)
    schedule.final(1)
    with pytest.raises(LocalProtocolError, match="twice"):
        schedule.final(1)


@given(sources=st.integers(1, 500), chunk_bytes=st.integers(1, 2**20))
def test_window_bounds_memory_and_never_closes(sources: int, chunk_bytes: int) -> None:
    window = window_chunks(sources, chunk_bytes)
    assert 1 <= window <= WINDOW_CHUNKS
    assert window == 1 or window * sources * chunk_bytes <= WINDOW_BYTES_MAX
