"""Pairwise exchanges over threads: the same float32 means for both, each part encoded once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from atoll.collectives import Contribution, FrameKind, get_codec, pairwise_plan
from atoll.collectives.codecs import CODECS, F32
from atoll.collectives.engine.parts import ENCODERS_MAX
from atoll.collectives.errors import ConnectError, RemoteProtocolError, RoundTimeoutError
from atoll.collectives.schedule.pair import pair_lead
from atoll.collectives.schedule.schedule import Frame

CONTRIB, RESULT = FrameKind.CONTRIB, FrameKind.RESULT
INT8, FLOAT32 = get_codec("int8"), get_codec("float32")
CHUNKS = 20
TOTAL = 256 * CHUNKS - 100
WAIT_S = 30.0
MakePair = Callable[..., Any]
UNSAFE = [HealthCheck.function_scoped_fixture]


class Sink:
    """A stream that takes everything."""

    def send(self, kind: int, chunk: int, payload: memoryview, offset: int = 0) -> None:
        """It leads nowhere."""


@pytest.fixture
def make_pair(make_group: Callable[..., Any]) -> MakePair:
    def make(codec: Any, weights: list[float], **more: Any) -> Any:
        more = {"total": TOTAL, "result_codec": FLOAT32, "planned": pairwise_plan, **more}
        return make_group(codec, weights=weights, **more)

    return make


@pytest.mark.parametrize("streams", ["memory", "sockets"])
@pytest.mark.parametrize("codec", CODECS.values(), ids=lambda codec: codec.name)
@pytest.mark.parametrize(
    "weights", [[2.0], [1.0, 1.0], [0.3, 3.0], [0.0, 1.0], [1.0, 0.0]], ids=str
)
def test_both_end_with_the_bits_of_the_reference(
    make_pair: MakePair, codec: Any, weights: list[float], streams: str
) -> None:
    group = make_pair(codec, weights)
    group.start(streams)
    group.wait_done()
    group.check_results()
    for weight, called in zip(weights, group.sources_called, strict=True):
        assert called == [int(weight > 0)] * CHUNKS, "each own part is encoded once"


@settings(max_examples=25, deadline=None, suppress_health_check=UNSAFE)
@given(
    weights=st.lists(st.floats(0, 10), min_size=1, max_size=2).filter(sum),
    total=st.integers(1, 9000),
    blocks=st.integers(1, 4),
)
def test_any_size_and_weights(
    make_pair: MakePair, weights: list[float], total: int, blocks: int
) -> None:
    group = make_pair(INT8, weights, total=total, chunk_elements=256 * blocks)
    group.start()
    group.wait_done()
    group.check_results()


def test_the_mean_is_quantized_once_where_a_butterfly_does_it_twice(
    make_pair: MakePair, make_group: Callable[..., Any]
) -> None:
    codec = get_codec("int4")
    pair = make_pair(codec, [1.0, 1.0])
    other = make_group(codec, weights=[1.0, 1.0], total=TOTAL, vectors=pair.vectors)
    exact = np.mean(np.array(pair.vectors, np.float64), axis=0)
    errors = []
    for group in (pair, other):
        group.start()
        group.wait_done()
        values = np.empty(TOTAL, np.float32)
        for chunk in range(CHUNKS):
            lo, hi = group.grid.bounds(chunk)
            group.result_codec.decode(group.rounds[0].view(chunk), values[lo:hi])
        errors.append(float(np.square(values - exact).sum()))
    assert errors[0] < 0.6 * errors[1]


def test_the_result_may_have_the_codec_of_the_parts(make_pair: MakePair) -> None:
    group = make_pair(INT8, [1.0, 2.0], result_codec=INT8)
    group.start("sockets")
    group.wait_done()
    group.check_results()


@pytest.mark.parametrize("weights", [[1.0, 1.0, 0.5], [0.0, 2.0]], ids=str)
def test_so_may_parts_and_result_of_a_butterfly_differ(
    make_group: Callable[..., Any], weights: list[float]
) -> None:
    for part, result in (("int8", "float32"), ("float32", "int8"), ("bfloat16", "int4")):
        codecs = {"codec": get_codec(part), "result_codec": get_codec(result)}
        group = make_group(**codecs, weights=weights, total=TOTAL)
        group.start("sockets")
        group.wait_done()
        group.check_results()


def test_bytes_on_the_streams_are_those_of_a_butterfly(make_pair: MakePair) -> None:
    group = make_pair(INT8, [1.0, 1.0])
    group.start()
    group.wait_done()
    whole = CHUNKS * 4 + TOTAL  # a scale for each block
    for reduction in group.reductions:
        assert reduction.join(WAIT_S)
        assert reduction.progress_bytes == whole


def test_memory_stays_within_the_formula(make_pair: MakePair) -> None:
    group = make_pair(FLOAT32, [1.0, 1.0], total=256 * 200)
    group.start("sockets")
    group.wait_done()
    chunk = 4 * 256
    lead = pair_lead(200, chunk, chunk)
    for reduction in group.reductions:
        # One being sent; own parts; the other's; no sums, because they grow in the result.
        budget = (1 + lead + 2 * lead + ENCODERS_MAX) * chunk
        assert 0 < reduction.buffer_bytes <= budget < group.results[0].nbytes


def test_a_part_that_lies_somewhere_is_neither_copied_nor_asked_for(make_pair: MakePair) -> None:
    group = make_pair(FLOAT32, [1.0, 2.0])
    for me, reduction in enumerate(group.reductions):

        def own(chunk: int, me: int = me) -> F32:
            return group.vectors[me][slice(*group.grid.bounds(chunk))]

        reduction._parts.contribution = replace(reduction._parts.contribution, own=own)
    group.start("sockets")
    group.wait_done()
    group.check_results()
    assert group.sources_called == [[0] * CHUNKS] * 2
    alone = make_pair(FLOAT32, [1.0, 2.0], total=2 * 256).reductions[0]
    ones = np.ones(256, np.float32)
    alone._parts.contribution = replace(alone._parts.contribution, own=lambda chunk: ones)
    alone.start({1: Sink()})
    assert alone.join(WAIT_S), "two chunks may leave at once"
    assert alone.buffer_bytes == 4 * 256, "only the sender's, which it does not use"


def test_a_part_that_comes_before_the_own_one_is_sent_waits_for_it(make_pair: MakePair) -> None:
    """The sum of participant 1 has begun by then; what it sends is its own part all the same."""
    group = make_pair(INT8, [1.0, 1.0])
    assert group.deliver(0, 1, CONTRIB, 0, group.encoded(0, 0))
    lead = pair_lead(CHUNKS, 260, 1024)
    sent: list[tuple[int, int, bytes]] = []
    all_sent = threading.Event()

    class Noting:
        def send(self, kind: int, chunk: int, payload: memoryview, offset: int = 0) -> None:
            sent.append((kind, chunk, payload.tobytes()))
            if len(sent) > lead:
                all_sent.set()

    group.reductions[1].start({0: Noting()})
    assert all_sent.wait(WAIT_S)
    group.reductions[1].abort()
    assert group.reductions[1].join(WAIT_S)
    assert sent == [(CONTRIB, chunk, group.encoded(1, chunk)) for chunk in range(lead + 1)]
    finals = [bool(digest) for digest in group.rounds[1].digests]
    assert finals == [True] + [False] * (CHUNKS - 1)


def test_window_blocks_a_fast_peer_and_wakes_it(make_pair: MakePair) -> None:
    group = make_pair(INT8, [1.0, 1.0])
    reduction = group.reductions[0]
    ahead = 2 * pair_lead(CHUNKS, 260, 1024)
    for chunk in range(ahead):
        assert group.deliver(1, 0, CONTRIB, chunk, group.encoded(1, chunk))
    payload = group.encoded(1, ahead)
    with pytest.raises(RoundTimeoutError) as caught:
        reduction.reserve(Frame(1, CONTRIB, ahead), len(payload), timeout_s=0.0)
    assert group.plan.name(1) in caught.value.what
    taken = threading.Event()

    def deliver_ahead() -> None:
        assert group.deliver(1, 0, CONTRIB, ahead, payload)
        taken.set()

    threading.Thread(target=deliver_ahead, daemon=True).start()
    assert not taken.is_set()
    reduction.start({1: Sink()})
    assert taken.wait(WAIT_S)


# ---------------------------------------------------------------- what goes wrong


@pytest.mark.parametrize(
    ("kind", "chunk", "extra", "why"),
    [
        (CONTRIB, 0, 1, "261 bytes for chunk 0, which takes 260 in int8"),
        (RESULT, 0, 0, "adds up for itself"),
        (CONTRIB, CHUNKS, 0, f"chunk {CHUNKS}"),
    ],
)
def test_frames_that_are_not_allowed_are_refused_before_memory_is_taken(
    make_pair: MakePair, kind: int, chunk: int, extra: int, why: str
) -> None:
    group = make_pair(INT8, [1.0, 1.0])
    with pytest.raises(RemoteProtocolError, match=why):
        group.reductions[0].reserve(Frame(1, kind, chunk), 260 + extra, timeout_s=0.0)
    assert group.reductions[0].buffer_bytes == 0


@pytest.mark.parametrize("me", [0, 1])
def test_malformed_parts_blame_the_other_once(make_pair: MakePair, me: int) -> None:
    group = make_pair(INT8, [1.0, 1.0])
    other = 1 - me
    for chunk in range(2):
        assert group.deliver(other, me, CONTRIB, chunk, b"\xff" * 260)
    group.reductions[me].start({other: Sink()})
    assert group.any_failed.wait(WAIT_S)
    group.reductions[me].abort()
    assert group.reductions[me].join(WAIT_S)
    [(participant, why)] = group.failed[me]
    assert participant == other
    assert "contribution to chunk 0" in why
    assert not any(group.rounds[me].digests)


@pytest.mark.parametrize("codec", [INT8, FLOAT32], ids=lambda codec: codec.name)
@pytest.mark.parametrize("weights", [[1.0], [1.0, 1.0], [1.0, 0.0]], ids=str)
def test_an_own_part_that_cannot_be_encoded_blames_oneself(
    make_pair: MakePair, weights: list[float], codec: Any
) -> None:
    group = make_pair(codec, weights)
    group.vectors[0][:] = np.nan
    group.start()
    assert group.any_failed.wait(WAIT_S)
    assert group.reductions[0].join(WAIT_S)
    [(participant, why)] = group.failed[0]
    assert participant == 0
    assert "NaN" in why


def test_a_source_that_raises_is_reported(make_pair: MakePair) -> None:
    group = make_pair(INT8, [1.0, 1.0])

    def broken(chunk: int, out: F32) -> None:
        raise ValueError("region is gone")

    group.reductions[1]._parts.contribution = Contribution(broken)
    group.start()
    assert group.any_failed.wait(WAIT_S)
    assert group.reductions[1].join(WAIT_S)
    assert group.failed[1] == [(1, "sending chunk 0: ValueError: region is gone")]


def test_what_both_have_given_is_finished_though_it_could_not_be_sent(make_pair: MakePair) -> None:
    class Broken:
        def send(self, kind: int, chunk: int, payload: memoryview, offset: int = 0) -> None:
            raise ConnectError("gone")

    group = make_pair(INT8, [1.0, 1.0])
    assert group.deliver(1, 0, CONTRIB, 0, group.encoded(1, 0))
    group.reductions[0].start({1: Broken()})
    assert group.reductions[0].join(WAIT_S)
    assert group.failed[0] == [(1, "sending chunk 0: gone")]
    first = group.rounds[0].view(0).tobytes()
    assert first == group.reference()[: len(first)]
    assert group.rounds[0].digests[0]


class Death:
    """A gate that breaks all streams at the ``step``-th frame."""

    def __init__(self, step: int) -> None:
        self.step, self.frames = step, 0
        self.lock = threading.Lock()
        self.happened = threading.Event()

    def __call__(self, src: int, dest: int) -> None:
        with self.lock:
            self.frames += 1
            if self.frames >= self.step:
                self.happened.set()
        if self.happened.is_set():
            raise ConnectError(f"the stream from {src} to {dest} broke")


@pytest.mark.parametrize("streams", ["memory", "sockets"])
@settings(max_examples=20, deadline=None, suppress_health_check=UNSAFE)
@given(
    step=st.integers(1, 2 * CHUNKS),
    codec=st.sampled_from(["float32", "int8", "int4", "topk", "sign"]),
    weights=st.sampled_from([[1.0, 1.0], [0.3, 7.0]]),
    staying=st.sampled_from([[0], [1], [0, 1]]),
    keep=st.sets(st.integers(0, CHUNKS - 1)),
)
def test_after_a_death_the_next_attempt_keeps_what_is_final(
    make_pair: MakePair,
    streams: str,
    step: int,
    codec: str,
    weights: list[float],
    staying: list[int],
    keep: set[int],
) -> None:
    """Of the survivor alone; or of both again, if but their streams broke."""
    group = make_pair(get_codec(codec), weights)
    group.gate = death = Death(step)
    group.start(streams)
    assert death.happened.wait(WAIT_S)
    group.close()  # aborts, joins, and asserts that every thread has ended
    for me in (0, 1):
        assert {participant for participant, _ in group.failed[me]} <= {1 - me}
    rounds = [group.rounds[me] for me in staying]
    known = {c: digest for r in rounds for c, digest in enumerate(r.digests) if digest}
    for result in rounds:
        assert all(d in (b"", known[c]) for c, d in enumerate(result.digests) if d)
    kept = {chunk: digest for chunk, digest in known.items() if chunk in keep}
    before = group.reference()
    holders = [result.copy() for result in rounds]
    again = make_pair(
        get_codec(codec),
        [weights[me] for me in staying],
        vectors=[group.vectors[me] for me in staying],
        rounds=rounds,
        kept=kept,
    )
    for reduction in again.reductions:
        for chunk in reduction.lacking:
            holder = next(held for held in holders if held.digests[chunk])
            assert reduction.put_kept(chunk, holder.view(chunk).copy())
    again.start(streams)
    again.wait_done()
    after = again.reference()
    for result in again.rounds:
        for chunk in range(CHUNKS):
            want = before if chunk in kept else after
            assert result.view(chunk).tobytes() == want[slice(*result.layout.slice(chunk))], chunk


@pytest.mark.parametrize("step", [1, 7, 2 * CHUNKS])
def test_aborted_exchanges_leave_nothing(make_pair: MakePair, step: int) -> None:
    group = make_pair(INT8, [1.0, 1.0])
    group.gate = Death(step)
    group.start("sockets")
    assert group.gate.happened.wait(WAIT_S)
    group.close()
    assert not any(reduction.uses_result for reduction in group.reductions)
