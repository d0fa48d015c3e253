"""The engine over threads: the same bytes for everyone, bounded memory, and what it refuses."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from atoll.collectives import ChunkGrid, Contribution, RoundResult
from atoll.collectives.chunks import encoded_layout
from atoll.collectives.codecs import CODECS, F32, get_codec, mean_codec
from atoll.collectives.engine.parts import ENCODERS_MAX
from atoll.collectives.errors import LocalProtocolError, RemoteProtocolError, RoundTimeoutError
from atoll.collectives.schedule.schedule import Frame, FrameKind
from atoll.collectives.schedule.tree import lead_chunks

CONTRIB, RESULT = FrameKind.CONTRIB, FrameKind.RESULT
INT8 = get_codec("int8")
WINDOW_CHUNKS = 4  # twice the lead, which is a quarter of eight to eleven chunks
WAIT_S = 30.0
MakeGroup = Callable[..., Any]


@pytest.mark.parametrize("streams", ["memory", "sockets"])
@pytest.mark.parametrize("codec", CODECS.values(), ids=lambda codec: codec.name)
@pytest.mark.parametrize(
    "weights",
    [[2.0], [1.0, 1.0], [1.0, 0.0, 3.0], [0.0, 0.0, 1.0, 0.0], [1.0] * 7],
    ids=lambda weights: f"{len(weights)}-peers",
)
def test_everyone_ends_with_the_bytes_of_the_reference(
    make_group: MakeGroup, codec: Any, weights: list[float], streams: str
) -> None:
    group = make_group(codec, weights=weights)
    group.start(streams)
    group.wait_done()
    group.check_results()


@pytest.mark.parametrize("streams", ["memory", "sockets"])
@pytest.mark.parametrize("parts", ["int2", "sign"])
def test_a_mean_may_have_more_bits_than_its_parts(
    make_group: MakeGroup, parts: str, streams: str
) -> None:
    codec = mean_codec(parts)
    group = make_group(codec, weights=[1.0, 0.0, 3.0])
    group.start(streams)
    group.wait_done()
    group.check_results()
    assert group.results[0].size == encoded_layout(group.grid, get_codec("int4")).total_bytes


@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    weights=st.lists(st.floats(0, 10), min_size=1, max_size=6).filter(sum),
    total=st.integers(1, 9000),
    blocks=st.integers(1, 4),
)
def test_any_size_and_weights(
    make_group: MakeGroup, weights: list[float], total: int, blocks: int
) -> None:
    group = make_group(INT8, weights=weights, total=total, chunk_elements=256 * blocks)
    group.start()
    group.wait_done()
    group.check_results()


def test_the_result_is_the_weighted_mean(make_group: MakeGroup) -> None:
    weights = [1.0, 0.0, 5.0, 2.0]
    for name, tolerance in (("float32", 1e-6), ("int8", 0.05)):
        codec = get_codec(name)
        group = make_group(codec, weights=weights)
        group.start()
        group.wait_done()
        mean = np.average(np.array(group.vectors, np.float64), axis=0, weights=weights)
        for chunk in range(group.grid.count):
            lo, hi = group.grid.bounds(chunk)
            byte_lo, byte_hi = group.reductions[0]._layout.slice(chunk)
            values = np.empty(hi - lo, np.float32)
            codec.decode(group.results[1][byte_lo:byte_hi], values)
            assert np.abs(values - mean[lo:hi]).max() < tolerance


def test_bytes_on_the_streams_are_what_theory_says(make_group: MakeGroup) -> None:
    group = make_group(INT8, weights=[1.0] * 4, total=256 * 40)
    group.start()
    group.wait_done()
    for reduction in group.reductions:
        assert reduction.join(WAIT_S)  # all sends are counted when the senders have ended
        whole = group.results[0].size
        # 3/4 of a vector as contributions, and 3 times 1/4 as results.
        assert reduction.progress_bytes == 3 * whole // 4 + 3 * whole // 4


def test_memory_stays_within_the_formula(make_group: MakeGroup) -> None:
    peers = 5
    group = make_group(get_codec("float32"), weights=[1.0] * peers, total=256 * 200)
    group.start()
    group.wait_done()
    chunk = 4 * 256
    lead = lead_chunks(group.plan, chunk, chunk)
    streams = peers * chunk + (lead + 1) * peers * chunk
    sums = lead * 2 * chunk + ENCODERS_MAX * chunk
    for reduction in group.reductions:
        assert 0 < reduction.buffer_bytes <= streams + sums < group.results[0].nbytes


def test_window_blocks_the_fast_source_and_wakes_it(make_group: MakeGroup) -> None:
    group = make_group(INT8, weights=[1.0, 1.0, 1.0], total=256 * 30)
    reduction = group.reductions[0]  # owns chunks 0 to 9
    reduction.start({})
    for chunk in range(WINDOW_CHUNKS):
        assert group.deliver(1, 0, CONTRIB, chunk, group.encoded(1, chunk))
    ahead = group.encoded(1, WINDOW_CHUNKS)
    with pytest.raises(RoundTimeoutError) as caught:
        reduction.reserve(Frame(1, CONTRIB, WINDOW_CHUNKS), len(ahead), timeout_s=0.0)
    assert caught.value.phase == "reduce"
    assert group.plan.name(2) in caught.value.what

    taken = threading.Event()

    def deliver_ahead() -> None:
        assert group.deliver(1, 0, CONTRIB, WINDOW_CHUNKS, ahead)
        taken.set()

    threading.Thread(target=deliver_ahead, daemon=True).start()
    assert not taken.is_set()
    assert group.deliver(2, 0, CONTRIB, 0, group.encoded(2, 0))
    assert taken.wait(WAIT_S)


def test_missing_names_the_late_source(make_group: MakeGroup) -> None:
    group = make_group(INT8, weights=[1.0, 1.0, 1.0], total=256 * 3)
    reduction = group.reductions[0]
    assert group.deliver(1, 0, CONTRIB, 0, group.encoded(1, 0))
    assert reduction.missing() == {2}


@pytest.mark.parametrize(
    ("src", "kind", "chunk", "extra", "why"),
    [
        (1, CONTRIB, 0, 1, "261 bytes for chunk 0, which takes 260 in int8"),
        (1, CONTRIB, 0, -1, "259 bytes"),
        (1, CONTRIB, 2, 0, "none of for this peer"),
        (1, RESULT, 0, 0, "others hand on"),
        (1, 7, 0, 0, "unknown kind"),
        (1, CONTRIB, 99, 0, "chunk 99"),
        (1, CONTRIB, -1, 0, "chunk -1"),
        (9, CONTRIB, 0, 0, "no part"),
        (0, CONTRIB, 0, 0, "no part"),
    ],
)
def test_frames_that_are_not_allowed_are_refused_before_memory_is_taken(
    make_group: MakeGroup, src: int, kind: int, chunk: int, extra: int, why: str
) -> None:
    group = make_group(INT8, weights=[1.0, 1.0], total=256 * 4)
    with pytest.raises(RemoteProtocolError, match=why):
        group.reductions[0].reserve(Frame(src, kind, chunk), 260 + extra, timeout_s=0.0)
    assert group.reductions[0].buffer_bytes == 0


def test_repeated_frames_are_dropped_and_counted_once(make_group: MakeGroup) -> None:
    group = make_group(INT8, weights=[1.0, 1.0])
    group.start()
    group.wait_done()
    group.check_results()
    for chunk, owner in enumerate(group.plan.owners):
        kind = RESULT if owner == 1 else CONTRIB
        assert not group.deliver(1, 0, kind, chunk, group.encoded(1, chunk))
    group.check_results()


def test_received_without_reserve_is_a_local_error(make_group: MakeGroup) -> None:
    with pytest.raises(LocalProtocolError, match="not reserved"):
        make_group(INT8, weights=[1.0, 1.0]).reductions[0].received(Frame(1, CONTRIB, 0))


def test_malformed_contribution_blames_its_sender_once(make_group: MakeGroup) -> None:
    group = make_group(INT8, weights=[0.0, 1.0, 1.0], total=256 * 3)
    bad = b"\xff" * 260
    assert group.deliver(2, 0, CONTRIB, 0, bad)  # waits for its turn
    assert group.failed[0] == []
    assert group.deliver(1, 0, CONTRIB, 0, group.encoded(1, 0))
    [(participant, why)] = group.failed[0]
    assert participant == 2
    assert "contribution to chunk 0" in why
    assert group.deliver(2, 0, RESULT, 2, bad)
    assert len(group.failed[0]) == 1


def test_malformed_result_blames_the_owner_and_is_not_final(make_group: MakeGroup) -> None:
    group = make_group(INT8, weights=[1.0, 1.0], total=256 * 2)
    assert group.deliver(1, 0, RESULT, 1, b"\xff" * 260)
    [(participant, why)] = group.failed[0]
    assert participant == 1
    assert "result of chunk 1" in why
    assert group.rounds[0].digests[1] == b""


def test_nan_in_the_own_source_blames_oneself_once(make_group: MakeGroup) -> None:
    group = make_group(INT8, weights=[1.0, 1.0, 1.0])
    group.vectors[1][:] = np.nan
    group.start()
    assert group.any_failed.wait(WAIT_S)
    assert group.reductions[1].join(WAIT_S)
    [(participant, why)] = group.failed[1]
    assert participant == 1
    assert "NaN" in why


def test_a_source_that_raises_is_reported(make_group: MakeGroup) -> None:
    group = make_group(INT8, weights=[1.0])

    def broken(chunk: int, out: F32) -> None:
        raise ValueError("region is gone")

    group.reductions[0]._parts.contribution = Contribution(broken)
    group.start()
    assert group.any_failed.wait(WAIT_S)
    assert group.failed[0] == [(0, "its contribution to chunk 0: ValueError: region is gone")]
    assert group.reductions[0].join(WAIT_S)


def test_nobody_sends_to_himself(make_group: MakeGroup) -> None:
    group = make_group(INT8, weights=[1.0, 1.0])
    group.start()
    with pytest.raises(LocalProtocolError, match="oneself"):
        group.reductions[0].start({0: None})
    group.wait_done()


def test_arguments_that_do_not_fit_are_refused(make_group: MakeGroup) -> None:
    group = make_group(INT8, weights=[1.0, 1.0])
    good = group.reductions[0]
    arguments = {
        "plan": group.plan,
        "me": 0,
        "contribution": good._parts.contribution,
        "result": group.rounds[0],
        "on_done": group.done[0].append,
        "on_failed": lambda participant, why: None,
    }
    type(good)(**arguments)
    other_grid = RoundResult(INT8, ChunkGrid(300, 256))
    for change in ({"me": 2}, {"me": -1}, {"result": other_grid}, {"kept": {0: b"d" * 32}}):
        with pytest.raises(LocalProtocolError):
            type(good)(**{**arguments, **change})


def test_a_reduction_that_is_over_needs_no_collection_of_cycles(make_group: MakeGroup) -> None:
    """Its buffers are tens of MiB, and the next collection may be many rounds away."""
    group = make_group(INT8, weights=[1.0] * 3)
    gc.disable()
    try:
        group.start()
        group.wait_done()
        group.close()
        held = [weakref.ref(reduction) for reduction in group.reductions]
        group.reductions.clear()
        assert [reduction() for reduction in held] == [None] * 3
    finally:
        gc.enable()
