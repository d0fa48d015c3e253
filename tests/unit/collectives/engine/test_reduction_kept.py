"""Retries of a round that keep what broken attempts have finished: nothing lost, nothing twice."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from atoll.collectives import FrameKind, ReducePlan, RoundResult
from atoll.collectives.codecs import F32, get_codec
from atoll.collectives.digests import strong_digest
from atoll.collectives.errors import ConnectError, RemoteProtocolError
from atoll.collectives.schedule.plan import NOBODY
from atoll.collectives.schedule.routes import Routes, hierarchical, ring, tree
from atoll.collectives.schedule.schedule import Frame

INT8, FLOAT32 = get_codec("int8"), get_codec("float32")
WAIT_S = 30.0
CHUNKS = 20
TOTAL = 256 * CHUNKS - 100
MakeGroup = Callable[..., Any]


class Killed:
    """A gate that breaks all streams of ``victim`` at the ``step``-th frame of the group."""

    def __init__(self, victim: int, step: int) -> None:
        self.victim, self.step, self.frames = victim, step, 0
        self.lock = threading.Lock()
        self.dead = threading.Event()

    def __call__(self, src: int, dest: int) -> None:
        with self.lock:
            self.frames += 1
            if self.frames >= self.step:
                self.dead.set()
        if self.dead.is_set() and self.victim in (src, dest):
            raise ConnectError(f"peer {self.victim} is gone")


def mean_of(group: Any, chunk: int) -> bytes:
    """The encoded weighted mean of a chunk over the group's participants, by hand."""
    lo, hi = group.grid.bounds(chunk)
    weights = np.array(group.plan.weights)
    total = np.zeros(hi - lo, np.float32)
    data = np.empty(INT8.encoded_bytes(hi - lo), np.uint8)
    for vector, weight in zip(group.vectors, weights, strict=True):
        if weight > 0:
            INT8.encode(vector[lo:hi], data)
            INT8.decode_add(data, float(np.float32(weight / sum(group.plan.weights))), total)
    INT8.encode(total, data)
    return data.tobytes()


def put_lacking(group: Any, holders: list[RoundResult]) -> None:
    """Every participant gets the kept chunks that it lacks from somebody who has them."""
    for me in group.everyone:
        for chunk in group.reductions[me].lacking:
            holder = next(h for h in holders if h.digests[chunk] == group.kept[chunk])
            assert group.reductions[me].put_kept(chunk, holder.view(chunk).copy())


@dataclass(frozen=True)
class Deaths:
    """``who``: who dies, and after which part of an attempt's frames. The coordinator asks to keep
    only chunks in ``keep``; a ``forgetful`` survivor loses all that it held."""

    who: list[tuple[int, float]]
    keep: set[int]
    forgetful: bool


DEATHS = st.builds(
    Deaths,
    st.lists(st.tuples(st.integers(0, 5), st.floats(0, 1)), max_size=5),
    st.sets(st.integers(0, CHUNKS - 1)),
    st.booleans(),
)
WEIGHTS = st.lists(st.sampled_from([1.0, 2.5]), min_size=3, max_size=6)


def after(
    deaths: Deaths,
    first: Any,
    streams: str,
    begin: Callable[..., Any],
    mean: Callable[[Any, int], Any],
) -> tuple[Any, dict[int, Any]]:
    """(the group of the last attempt, which has ended; what each kept chunk must be).

    ``first``: the group of the first attempt; ``begin`` makes those of the others; ``mean(group,
    chunk)``: over its participants.
    """
    group, expected = first, {}
    for who, part in deaths.who[: len(first.vectors) - 1]:
        victim = who % len(group.vectors)
        frames = 2 * (CHUNKS - len(group.kept)) * (len(group.vectors) - 1)
        if frames == 0:
            break
        step = 1 + int(part * (frames - 1))
        group.gate = killed = Killed(victim, step)
        group.start(streams)
        assert killed.dead.wait(WAIT_S)
        group.close()
        survivors = [me for me in group.everyone if me != victim]
        rounds = [group.rounds[me] for me in survivors]
        kept = {c: digest for r in rounds for c, digest in enumerate(r.digests) if digest}
        kept = {chunk: digest for chunk, digest in kept.items() if chunk in deaths.keep}
        expected = {c: expected[c] if c in expected else mean(group, c) for c in kept}
        for result in rounds:  # no two survivors disagree about a final chunk
            assert all(d in (b"", kept.get(c, d)) for c, d in enumerate(result.digests))
        holders = [result.copy() for result in rounds]
        if deaths.forgetful:
            rounds[0] = RoundResult(group.codec, group.grid)
        group = begin(
            weights=[group.plan.weights[me] for me in survivors],
            vectors=[group.vectors[me] for me in survivors],
            rounds=rounds,
            kept=kept,
        )
        put_lacking(group, holders)
    group.start(streams)
    group.wait_done()
    assert all(len(calls) == 1 for calls in group.done)
    return group, expected


@pytest.mark.parametrize("streams", ["memory", "sockets"])
@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(weights=WEIGHTS, deaths=DEATHS)
def test_each_chunk_is_the_mean_of_its_origin_after_any_deaths(
    make_group: MakeGroup, streams: str, weights: list[float], deaths: Deaths
) -> None:
    def begin(**attempt: Any) -> Any:
        return make_group(INT8, total=TOTAL, **attempt)

    group, expected = after(deaths, begin(weights=weights), streams, begin, mean_of)
    for chunk in range(CHUNKS):
        want = expected.get(chunk) or mean_of(group, chunk)
        for result in group.rounds:
            assert result.view(chunk).tobytes() == want, f"chunk {chunk}"


SHAPES: dict[str, Callable[[int], Routes]] = {
    "ring": lambda count: ring(range(count)),
    "tree": lambda count: tree(count, 2),
    "sites": lambda count: hierarchical([peer % 2 for peer in range(count)]),
}


def exact_mean(group: Any, chunk: int) -> F32:
    lo, hi = group.grid.bounds(chunk)
    parts = np.array([vector[lo:hi] for vector in group.vectors], np.float64)
    mean = np.average(parts, axis=0, weights=group.plan.weights)
    return np.asarray(mean, np.float32)


@pytest.mark.parametrize("shape", SHAPES)
@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(weights=WEIGHTS, deaths=DEATHS)
def test_in_every_shape_chunks_are_kept_and_reduced_again(
    make_group: MakeGroup, shape: str, weights: list[float], deaths: Deaths
) -> None:
    """Sums of sums differ from the mean by what float32 rounds, and from that over others by far
    more; everyone has the same bytes."""

    def begin(**attempt: Any) -> Any:
        routes = SHAPES[shape](len(attempt["weights"]))
        return make_group(FLOAT32, total=TOTAL, shape=routes, **attempt)

    group, expected = after(deaths, begin(weights=weights), "memory", begin, exact_mean)
    assert len({result.array.tobytes() for result in group.rounds}) == 1
    for chunk in range(CHUNKS):
        want = expected[chunk] if chunk in expected else exact_mean(group, chunk)
        got = group.rounds[0].view(chunk).view(np.float32)
        np.testing.assert_allclose(got, want, atol=1e-5, err_msg=f"chunk {chunk}")


def finished(make_group: MakeGroup) -> Any:
    group = make_group(INT8, weights=[1.0, 1.0], total=TOTAL)
    group.start()
    group.wait_done()
    group.close()
    return group


def retry(make_group: MakeGroup, group: Any, kept: dict[int, bytes]) -> Any:
    vectors: list[F32] = [vector + np.float32(1) for vector in group.vectors]
    return make_group(
        INT8, weights=[1.0, 1.0], total=TOTAL, vectors=vectors, rounds=group.rounds, kept=kept
    )


def test_a_final_chunk_that_is_not_kept_is_reduced_again(make_group: MakeGroup) -> None:
    group = finished(make_group)
    digests = list(group.rounds[0].digests)
    kept = {chunk: digests[chunk] for chunk in range(0, CHUNKS, 2)}
    again = retry(make_group, group, kept)
    assert not again.reductions[0].lacking
    again.start()
    again.wait_done()
    for chunk in range(CHUNKS):
        of = group if chunk in kept else again
        assert again.rounds[1].view(chunk).tobytes() == mean_of(of, chunk)


def test_a_round_of_which_all_is_kept_is_done_at_the_start(make_group: MakeGroup) -> None:
    group = finished(make_group)
    again = retry(make_group, group, dict(enumerate(group.rounds[0].digests)))
    again.gate = lambda src, dest: pytest.fail("there is nothing to send")
    again.start()
    again.wait_done()
    assert again.done == group.done


def test_bytes_that_are_not_what_was_kept_are_refused(make_group: MakeGroup) -> None:
    group = finished(make_group)
    right = group.rounds[0].view(3).copy()
    kept = {3: group.rounds[0].digests[3], 4: b"?" * 32}
    group.rounds[1].digests[3] = b""
    again = retry(make_group, group, kept)
    assert again.reductions[1].lacking == {3, 4}
    for wrong in (right[1:], right ^ np.uint8(1), group.rounds[0].view(4)):
        assert not again.reductions[1].put_kept(3, wrong)
    assert again.rounds[1].digests[3] == b""
    assert again.reductions[1].put_kept(3, right)
    assert again.reductions[1].put_kept(3, right)  # of a second holder, too late
    assert again.rounds[1].digests[3] == kept[3]


def test_a_kept_chunk_that_does_not_decode_is_refused(make_group: MakeGroup) -> None:
    """Whoever vouched for its digest is not believed further than that."""
    bad = np.full(INT8.encoded_bytes(256), 0xFF, np.uint8)
    group = make_group(INT8, weights=[1.0, 1.0], total=TOTAL, kept={0: strong_digest(bad)})
    assert not group.reductions[0].put_kept(0, bad)


def test_no_frame_carries_a_kept_chunk(make_group: MakeGroup) -> None:
    group = finished(make_group)
    again = retry(make_group, group, {3: group.rounds[0].digests[3]})
    assert again.plan.owners[3] == NOBODY
    for kind in (FrameKind.CONTRIB, FrameKind.RESULT):
        with pytest.raises(RemoteProtocolError, match="kept"):
            again.reductions[0].reserve(Frame(1, kind, 3), 260, timeout_s=0.0)


def test_a_sender_that_the_abort_leaves_behind_is_known_to_read(make_group: MakeGroup) -> None:
    """Else the next attempt would write to what it sends."""
    group = make_group(INT8, weights=[1.0, 1.0], total=TOTAL)
    entered, released = threading.Event(), threading.Event()

    class Stuck:
        def send(self, kind: int, chunk: int, payload: memoryview, offset: int = 0) -> None:
            if kind == FrameKind.RESULT:
                entered.set()
                assert released.wait(WAIT_S)

    first = group.reductions[0]
    first.start({1: Stuck()})
    assert not first.uses_result
    for chunk in range(CHUNKS // 2):
        group.deliver(1, 0, FrameKind.CONTRIB, chunk, group.encoded(1, chunk))
    assert entered.wait(WAIT_S)
    first.abort()
    assert first.uses_result
    released.set()
    assert first.join(WAIT_S)
    assert not first.uses_result


def test_what_waits_only_for_kept_chunks_blames_no_participant(make_group: MakeGroup) -> None:
    group = finished(make_group)
    kept = dict(enumerate(group.rounds[0].digests))
    group.rounds[1].digests[5] = b""
    again = retry(make_group, group, kept)
    assert again.reductions[1].missing() == frozenset()
    again.start()
    assert again.done_events[0].wait(WAIT_S)
    assert again.done[1] == []
    assert again.reductions[1].put_kept(5, again.rounds[0].view(5))
    again.wait_done()


def test_a_plan_may_leave_chunks_to_nobody() -> None:
    plan = ReducePlan((b"a",), (1.0,), (NOBODY, 0))
    assert plan.owners == (NOBODY, 0)
